"""Pascal VOC XML: trees with Annotations, JPEGImages and ImageSets, the article's layout, or XML anywhere beside pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lxml import etree

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder, as_number
from weldtrain.formats.pictures import Header
from weldtrain.formats.record import DIFFICULT, ERROR, Box, Finding, Reader, Size
from weldtrain.formats.splits import own_splits

MAX_XML_BYTES = 32 * 2**20
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class Voc(Reader):
    """A picture and its XML share their stem; nothing that the XML says of file names is used."""

    def __init__(self, folder: Folder, dataset: DatasetConfig) -> None:
        super().__init__(folder, dataset)
        where = folder.folder(dataset.annotations, "annotations") if dataset.annotations else folder.has_folder("Annotations")
        xml = folder.ending((".xml",), where)
        if not xml:
            raise DataError("no .xml file", folder.path(where), "set dataset.annotations, or choose dataset=auto")
        if not folder.images:  # beside JPEGImages a VOC tree holds masks, which are pictures too
            folder.narrow(folder.has_folder("JPEGImages"))
        splits, by, found = own_splits(folder, dataset.split_csv)
        self.findings += found
        pictures = sorted(splits) if splits is not None else folder.pictures
        if splits is not None:
            self.unlisted(splits, by)
        pairs = self.match(pictures, xml, where)
        self.settle({p: (pairs.get(p, ""), splits[p] if splits is not None else "") for p in pictures}, where)

    def annotations(self, i: int, header: Header) -> Iterator[Box | Size | Finding]:
        return read_voc(self.folder.path(self.sources[i]), self.sources[i]) if self.sources[i] else iter(())


def read_voc(path: Path, source: str) -> Iterator[Box | Size | Finding]:
    """What a Pascal VOC file says: size, and each object's name, bndbox (floats allowed), difficult and line number.

    Tags are found by name, in any order, and only as direct children. Any declared encoding is read. What is wrong is
    a finding in `source`; files that declare entities are refused.
    """
    def wrong(kind: str, line: int, text: str, fix: str) -> Finding:
        return Finding(ERROR, kind, source, line, text, fix)

    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_XML_BYTES else None
    except OSError as e:
        yield wrong("xml-unreadable", 0, f"cannot be read ({e.strerror})", "restore the file or its permissions")
        return
    if data is None:
        yield wrong("xml-unreadable", 0, f"is larger than {MAX_XML_BYTES >> 20} MB", "this is no annotation of one picture")
        return
    try:
        root = etree.fromstring(data, _parser())
    except (etree.XMLSyntaxError, ValueError, LookupError) as e:
        yield wrong(*_broken_xml(data, e))
        return
    dtd = root.getroottree().docinfo.internalDTD
    if dtd is not None and next(dtd.iterentities(), None) is not None:
        yield wrong("xml-entities", 0, "declares XML entities, which are refused", "an annotation needs none; export it anew")
        return
    if root.tag != "annotation" and not any(root.find(tag) is not None for tag in ("object", "size", "filename")):
        yield wrong("xml-not-voc", 0, f"is no Pascal VOC annotation: its root is <{root.tag}>", "export it as Pascal VOC")
        return
    if (size := root.find("size")) is not None:
        numbers = [as_number(size.findtext(side) or "") for side in ("width", "height")]
        if all(n is not None and 0 < n < 1e9 for n in numbers):
            yield Size(*numbers, size.sourceline)
    for number, element in enumerate(root.findall("object"), 1):
        yield from _object(element, number, wrong)


def _object(element: etree._Element, number: int, wrong) -> Iterator[Box | Finding]:
    line = element.sourceline
    name = (element.findtext("name") or "").strip()
    bndbox = element.find("bndbox")
    if not name:
        yield wrong("class-missing", line, f"object {number} has no <name>", "give it a class")
        return
    if bndbox is None:
        yield wrong("box-missing", line, f"object {number} ({name}) has no <bndbox>", "only boxes can be trained on")
        return
    corners = []
    for tag in _CORNERS:
        child = bndbox.find(tag)
        value = as_number(child.text or "") if child is not None else None
        if child is None:
            yield wrong("box-missing", bndbox.sourceline, f"<bndbox> of object {number} ({name}) has no <{tag}>",
                        "a box needs xmin, ymin, xmax, ymax")
        elif value is None:
            yield wrong("box-not-a-number", child.sourceline, f"<{tag}> holds '{(child.text or '').strip()}'",
                        "it must be a number of pixels")
        else:
            corners.append(value)
    if len(corners) == len(_CORNERS):
        flags = DIFFICULT if (element.findtext("difficult") or "").strip().lower() in ("1", "true") else 0
        yield Box(tuple(corners), name, line, flags, f"object {number}")


def _parser() -> etree.XMLParser:
    return etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False,
                           remove_comments=True, remove_pis=True)


def _broken_xml(data: bytes, error: Exception) -> tuple[str, int, str, str]:
    text = str(getattr(error, "msg", error))
    line = getattr(error, "lineno", None) or 1
    if not data.strip():
        return "xml-empty", 0, "is empty", "delete it, or save an annotation without objects for a defect-free picture"
    if "ncoding" in text or "not proper" in text or isinstance(error, LookupError):
        return "xml-encoding", line, f"does not hold the encoding it declares ({text})", "save it as UTF-8"
    return "xml-broken", line, f"is not well-formed XML ({text})", "export it anew or mend that line"
