"""Pascal VOC XML, and the article's layout: images/, annotations/*.xml, train_val_test_split.csv."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lxml import etree

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.record import DIFFICULT, IMAGE_SUFFIXES, Box, Finding, Record, list_files, make_record, stamp_files
from weldtrain.formats.splits import read_split_csv

MAX_XML_BYTES = 32 * 2**20
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class WeldingV2:
    """The article's layout. A picture and its XML share their stem; the split file decides what is read."""

    def __init__(self, dataset: DatasetConfig) -> None:
        self.root = Path(dataset.root)
        self.images: list[str] = []
        self.annotations: list[str | None] = []
        self.splits: list[str] = []
        split_csv = self.root / dataset.split_csv
        splits, self.findings = read_split_csv(split_csv)
        pictures = _by_stem(_folder(self.root, dataset, "images"), IMAGE_SUFFIXES)
        xml = _by_stem(_folder(self.root, dataset, "annotations"), (".xml",))

        chosen: dict[str, tuple[str, str, str | None]] = {}
        lost: list[str] = []
        bare: list[str] = []
        for image_id, (split, line) in splits.items():
            stem, found = _find(image_id, pictures)
            if not found:
                lost.append(f"'{image_id}' (line {line})")
                continue
            if len(found) > 1:
                raise DataError(f"'{image_id}' may mean {' or '.join(found)}", f"{split_csv}:{line}",
                                "write the file name with its extension, or remove one of the two")
            annotation = next(iter(_find(stem, xml)[1]), None)
            if annotation is None:
                bare.append(found[0])
                if dataset.missing == "skip":
                    continue
            earlier = chosen.setdefault(found[0], (image_id, split, annotation))
            if earlier[1] != split:
                raise DataError(f"'{image_id}' and '{earlier[0]}' are the same picture, in {split} and {earlier[1]}",
                                f"{split_csv}:{line}", "a picture belongs to one split")
        if lost:
            raise DataError(f"no picture for {_some(lost)} of {len(splits)} ids", split_csv,
                            f"looked in {self.root / dataset.images} for {' '.join(IMAGE_SUFFIXES)}, in any case")
        if not chosen and not bare:
            raise DataError("lists no picture", split_csv, "expected lines such as 001,train")
        if bare and (dataset.missing == "error" or len(bare) == len(splits)):
            raise DataError(f"no annotation file for {_some(bare)} of {len(splits)} pictures", self.root / dataset.annotations,
                            "a picture without defects has an XML without objects; or set dataset.missing=negative or skip")
        # Sorted, so that neither the split file's order nor the file system's changes a run.
        for image in sorted(chosen):
            _, split, annotation = chosen[image]
            self.images.append(f"{dataset.images}/{image}")
            self.splits.append(split)
            self.annotations.append(annotation and f"{dataset.annotations}/{annotation}")
        self._note(dataset, split_csv, bare, pictures)

    def _note(self, dataset: DatasetConfig, split_csv: Path, bare: list[str], pictures: dict[str, list[str]]) -> None:
        if bare:
            fate = "used as defect-free" if dataset.missing == "negative" else "left out"
            self.findings.append(Finding(dataset.annotations, 0, f"{len(bare)} pictures have no annotation file: {fate}"))
        unlisted = sum(map(len, pictures.values())) - len(self.images) - (len(bare) if dataset.missing == "skip" else 0)
        if unlisted > 0:
            self.findings.append(Finding(split_csv.name, 0, f"{unlisted} pictures are in no split: not used"))

    @staticmethod
    def stamp(dataset: DatasetConfig) -> str:
        root = Path(dataset.root)
        return stamp_files([root / dataset.split_csv, root / dataset.images, root / dataset.annotations])

    def read(self, i: int) -> Record:
        annotation = self.annotations[i]
        boxes = read_voc(self.root / annotation) if annotation else ()
        return make_record(self.root, self.images[i], self.splits[i], annotation or "", boxes)


def read_voc(path: Path) -> list[Box]:
    """The objects of one Pascal VOC file: name, bndbox (floats allowed), difficult, line number.

    Tags are found by name, in any order, and only as direct children. Any declared encoding is read; files that
    declare entities are refused. Raises DataError with file and line.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror})", path, "restore the file or its permissions") from None
    if len(data) > MAX_XML_BYTES:
        raise DataError(f"is larger than {MAX_XML_BYTES >> 20} MB", path, "this is no annotation of one picture")
    try:
        root = etree.fromstring(data, _parser())
    except (etree.XMLSyntaxError, ValueError, LookupError) as e:
        raise _broken_xml(path, data, e) from None
    dtd = root.getroottree().docinfo.internalDTD
    if dtd is not None and next(dtd.iterentities(), None) is not None:
        raise DataError("declares XML entities, which are refused", path, "an annotation needs none; export it anew")
    return list(_objects(root, path))


def _objects(root: etree._Element, path: Path) -> Iterator[Box]:
    for number, element in enumerate(root.findall("object"), 1):
        where = f"{path}:{element.sourceline}"
        name = (element.findtext("name") or "").strip()
        if not name:
            raise DataError(f"object {number} has no <name>", where, "give it a class")
        bndbox = element.find("bndbox")
        if bndbox is None:
            raise DataError(f"object {number} ({name}) has no <bndbox>", where, "only boxes can be trained on")
        corners = tuple(_number(bndbox, tag, path) for tag in _CORNERS)
        flags = DIFFICULT if (element.findtext("difficult") or "").strip().lower() in ("1", "true") else 0
        yield Box(corners, name, element.sourceline, flags)


def _number(bndbox: etree._Element, tag: str, path: Path) -> float:
    child = bndbox.find(tag)
    if child is None:
        raise DataError(f"<bndbox> has no <{tag}>", f"{path}:{bndbox.sourceline}", "a box needs xmin, ymin, xmax, ymax")
    text = (child.text or "").strip()
    try:
        value = float(text) if "_" not in text else math.nan  # float() takes 1_0 for 10
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"<{tag}> holds '{text}'", f"{path}:{child.sourceline}", "it must be a finite number of pixels")
    return value


def _parser() -> etree.XMLParser:
    return etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False,
                           remove_comments=True, remove_pis=True)


def _broken_xml(path: Path, data: bytes, error: Exception) -> DataError:
    text = str(getattr(error, "msg", error))
    line = getattr(error, "lineno", None) or 1
    if not data.strip():
        return DataError("is empty", path, "delete it, or save an annotation without objects for a defect-free picture")
    if "ncoding" in text or "not proper" in text or isinstance(error, LookupError):
        return DataError(f"does not hold the encoding it declares ({text})", f"{path}:{line}", "save it as UTF-8")
    return DataError(f"is not well-formed XML ({text})", f"{path}:{line}", "export it anew or mend that line")


def _folder(root: Path, dataset: DatasetConfig, which: str) -> Path:
    folder = root / getattr(dataset, which)
    if not folder.is_dir():
        near = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())) or "no folder at all"
        raise DataError("no such folder", folder, f"set dataset.{which}; {root} holds {near}")
    return folder


def _by_stem(folder: Path, suffixes: tuple[str, ...]) -> dict[str, list[str]]:
    """Case-folded path without extension -> the files of that name, extensions compared in any case."""
    files: dict[str, list[str]] = {}
    for name in list_files(folder):
        stem, dot, suffix = name.rpartition(".")
        if dot and f".{suffix.lower()}" in suffixes:
            files.setdefault(stem.casefold(), []).append(name)
    return files


def _find(image_id: str, pictures: dict[str, list[str]]) -> tuple[str, list[str]]:
    """The stem and the pictures that an id names: `001`, `001.jpg`, `sub/001`, `./001.JPG`, dots in the stem.

    On a file system that tells `A.jpg` from `a.jpg` the same spelling comes first.
    """
    name = PurePosixPath(image_id.replace("\\", "/")).as_posix()
    found = pictures.get(name.casefold(), [])
    if found:
        return name, [p for p in found if p.rpartition(".")[0] == name] or found
    stem = name.rpartition(".")[0]
    found = [p for p in pictures.get(stem.casefold(), []) if p.casefold() == name.casefold()]
    return stem, [p for p in found if p == name] or found


def _some(names: list[str], at_most: int = 8) -> str:
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return f"{', '.join(names[:at_most])}{more}: {len(names)}"
