"""What a detector found in a tree of pictures, written as COCO results, CSV, Pascal VOC or YOLO.

One picture is written at a time and none is kept; a file appears whole or not at all. The readers of this room read CSV,
VOC and YOLO back, a picture without findings as one without defects.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from lxml import etree

from weldtrain.atomic import whole
from weldtrain.formats.files import folded

RESULTS, PICTURES = "predictions.json", "images.json"
CLASSES, DATA = "classes.txt", "data.yaml"
TABLE = ("image", "class", "score", "x1", "y1", "x2", "y2", "width_px", "height_px")
_SUFFIX = re.compile(r"(?<=[^/])\.[^./]*$")
# Bytes of a name that are no UTF-8, and what XML cannot hold or would break a line of a table.
_UNWRITABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_NO_UTF8 = re.compile("[\ud800-\udfff]")


class Found(NamedTuple):
    """The findings in one picture: its path below the source with `/`, its size in px as a viewer shows it, boxes
    float64 [n,4] x1,y1,x2,y2 in px, labels int [n] from 1, scores float [n]."""

    picture: str
    width: int
    height: int
    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray

    def rows(self) -> Iterator[tuple[list[float], int, float]]:
        """Corners to 0.001 px, label and score of each finding, as Python's numbers."""
        boxes = np.asarray(self.boxes, np.float64).reshape(-1, 4).round(3).tolist()
        scores = np.asarray(self.scores, np.float64).round(6).tolist()
        return zip(boxes, np.asarray(self.labels).astype(int).tolist(), scores)


def names(pictures: Iterable[str], suffix: str, taken: Iterable[str] = ()) -> dict[str, str]:
    """Picture -> the path of its output, in the same tree; no two are equal in any file system's eyes.

    `b/w1.jpg` becomes `b/w1.xml`, since tools look for that; where another picture of the folder has the stem or the name
    is `taken` in every folder, `b/w1.jpg.xml`; and where that is another's, `b/w1.jpg.2.xml`.
    """
    pictures, reserved = sorted(pictures), {folded(name) for name in taken}
    stems = {p: f"{_SUFFIX.sub('', p)}{suffix}" for p in pictures}
    shared = Counter(map(folded, stems.values()))
    named = {p: stem for p, stem in stems.items()
             if shared[folded(stem)] == 1 and folded(stem.rpartition("/")[2]) not in reserved}
    used = {*map(folded, named.values())}
    for picture in pictures:
        if picture not in named:
            numbered = (f"{picture}.{n}{suffix}" for n in itertools.count(2))
            named[picture] = next(n for n in itertools.chain([f"{picture}{suffix}"], numbered)
                                  if folded(n) not in used and folded(n.rpartition("/")[2]) not in reserved)
            used.add(folded(named[picture]))
    return named


@contextlib.contextmanager
def coco_results(folder: Path, classes: Sequence[str], info: Mapping[str, object]) -> Iterator[Callable[[Found], None]]:
    """Yields what writes a picture's findings into predictions.json, a list of COCO results with the picture's path.

    image_id counts the pictures from 1. images.json beside it has every picture and the categories, and `info`: thresholds
    and all that made the results, for which their list has no room. It has no list of annotations, as COCO's own
    descriptions of its test pictures have none: it opens with pycocotools, but as no data set of perfect welds.
    """
    head = {"info": info, "categories": [{"id": i, "name": name} for i, name in enumerate(classes, 1)]}
    between_results, between_pictures = (itertools.chain(("\n",), itertools.repeat(",\n")) for _ in range(2))
    image_ids = itertools.count(1)
    with whole(folder / RESULTS) as results, whole(folder / PICTURES) as pictures:
        def write(found: Found) -> None:
            image_id = next(image_ids)
            pictures.write(next(between_pictures) + _json(
                {"id": image_id, "file_name": found.picture, "width": found.width, "height": found.height}))
            for (x1, y1, x2, y2), label, score in found.rows():
                results.write(next(between_results) + _json({
                    "image_id": image_id, "category_id": label, "bbox": [x1, y1, round(x2 - x1, 3), round(y2 - y1, 3)],
                    "score": score, "file_name": found.picture}))

        results.write("[")
        pictures.write(f'{_json(head)[:-1]}, "images": [')
        yield write
        results.write("\n]\n")
        pictures.write("\n]}\n")


@contextlib.contextmanager
def csv_table(path: Path, classes: Sequence[str]) -> Iterator[Callable[[Found], None]]:
    """Yields what writes a picture's findings into a CSV with a line for each; a picture without any has one line with
    no class, score and corners."""
    with whole(path) as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(TABLE)

        def write(found: Found) -> None:
            cells = [(_shown(classes[label - 1]), score, *corners) for corners, label, score in found.rows()]
            for row in cells or [("",) * 6]:
                table.writerow((_shown(found.picture), *row, found.width, found.height))

        yield write


def write_voc(folder: Path, name: str, found: Found, classes: Sequence[str]) -> None:
    """Pascal VOC at `folder/name`: corners in px from 0 with fractions, `<score>` beside them, which readers pass over.

    `<depth>` is 3, the channels that the detector was shown.
    """
    place, _, file = found.picture.rpartition("/")
    root = etree.Element("annotation")
    _children(root, folder=place, filename=file)
    _children(etree.SubElement(root, "source"), database="weldtrain")
    _children(etree.SubElement(root, "size"), width=found.width, height=found.height, depth=3)
    _children(root, segmented=0)
    for corners, label, score in found.rows():
        item = etree.SubElement(root, "object")
        _children(item, name=classes[label - 1], pose="Unspecified", truncated=0, difficult=0, score=score)
        _children(etree.SubElement(item, "bndbox"), **dict(zip(("xmin", "ymin", "xmax", "ymax"), corners)))
    with whole(folder / name) as out:
        out.write(etree.tostring(root, encoding="unicode", pretty_print=True))


def write_yolo(folder: Path, name: str, found: Found) -> None:
    """YOLO at `folder/name`: `class cx cy w h` from class 0 and in shares of the picture. No scores: labelling tools and
    trainers refuse a sixth column."""
    size = np.array([found.width, found.height] * 2)
    with whole(folder / name) as out:
        for corners, label, _ in found.rows():
            x1, y1, x2, y2 = corners / size
            out.write(f"{label - 1} {(x1 + x2) / 2:.7f} {(y1 + y2) / 2:.7f} {x2 - x1:.7f} {y2 - y1:.7f}\n")


def write_yolo_classes(folder: Path, labels: Iterable[str], classes: Sequence[str]) -> None:
    """data.yaml with the names of the class numbers, and for labelImg a classes.txt in every folder of `labels`."""
    with whole(folder / DATA) as out:
        yaml.safe_dump({"nc": len(classes), "names": dict(enumerate(map(_shown, classes)))}, out, allow_unicode=True,
                       sort_keys=False)
    for place in sorted({"", *(name.rpartition("/")[0] for name in labels)}):
        with whole(folder / place / CLASSES) as out:
            out.writelines(f"{_shown(name)}\n" for name in classes)


def _children(parent: etree._Element, **texts: object) -> None:
    for tag, text in texts.items():
        etree.SubElement(parent, tag).text = _shown(str(text))


def _shown(text: str) -> str:
    """The text with what cannot be written as an escape that can be seen."""
    return _UNWRITABLE.sub(lambda c: c[0].encode("unicode_escape").decode(), text)


def _json(value: object) -> str:
    """One line of JSON. It has escapes of its own, but one for half a character is refused by strict readers."""
    return _NO_UTF8.sub(lambda c: rf"\\u{ord(c[0]):04x}", json.dumps(value, ensure_ascii=False))
