"""The one record that every format is read into, the findings made on the way, and what all readers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError, one_line
from weldtrain.formats.files import Folder
from weldtrain.formats.pictures import IMAGE_SUFFIXES, Header, picture_header

DIFFICULT = 1
CROWD = 2
# An edge that is less than this many pixels long is no box: zero after rounding or resizing.
MIN_SIDE_PX = 0.5
# Tools that draw write a box a little over the edge; beyond this a number is no share of the picture.
LARGEST_SHARE = 2.0

# Levels of a finding. What is DROPPED is refused under dataset.strict.
ERROR = "error"
DROPPED = "dropped"
NOTE = "note"
# Kinds that tell a decision rather than an oddity: said in their own words.
DECISIONS = ("recognised", "split-made")
ONE_SPLIT = "a picture belongs to one split, else the detector is judged on what it has seen"  # a remedy


class Finding(NamedTuple):
    """Something about the data that its owner should know. `kind` is a word to filter by; `file` is below the root."""

    level: str
    kind: str
    file: str
    line: int
    text: str
    fix: str = ""

    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


def by_kind(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Findings of each kind, in the order in which they first occur."""
    kinds: dict[str, list[Finding]] = {}
    for f in findings:
        kinds.setdefault(f.kind, []).append(f)
    return kinds


def summary(findings: Iterable[Finding]) -> list[str]:
    """One line for each kind of finding: how many, in how many files, and the first of them."""
    lines = []
    for kind, some in by_kind(findings).items():
        count = f"{len(some)} in {len({f.file for f in some})} files, first " if len(some) > 1 else ""
        first = some[0]
        text = f"{first.where()}: {first.text}".removeprefix(": ")
        lines.append(one_line(f"{kind}: {count}{text}" + f"; {first.fix}" * bool(first.fix)))
    return lines


def dropped_boxes(findings: Iterable[Finding]) -> list[Finding]:
    """Those that tell of a box which was dropped."""
    return [f for f in findings if f.level == DROPPED and f.kind.startswith("box-")]


class Box(NamedTuple):
    """One annotated defect as a reader found it: corners in pixels, before any check."""

    corners: tuple[float, float, float, float]
    name: str
    line: int
    flags: int = 0
    called: str = ""  # what its file calls it, where a line number says too little


class Size(NamedTuple):
    """What an annotation claims of its picture's size. The picture itself decides; a difference is a finding."""

    width: float
    height: float
    line: int


@dataclass
class Record:
    """What is known of one picture. Boxes are float32 [n,4] x1,y1,x2,y2 in pixels of the upright decoded image."""

    image: str
    header: Header
    boxes: np.ndarray
    names: list[str]
    flags: np.ndarray
    lines: np.ndarray
    findings: list[Finding] = field(default_factory=list)


class Reader(ABC):
    """A folder in one format: which pictures, each with its annotation file and split. Pickles, to read in many processes.

    images, sources and splits run side by side, sorted by picture; a source is "" where there is no annotation, a
    split "" where the data assigns none. `classes` are the names that the format declares, in its order.
    """

    def __init__(self, folder: Folder, dataset: DatasetConfig) -> None:
        self.folder, self.dataset = folder, dataset
        self.images: list[str] = []
        self.sources: list[str] = []
        self.splits: list[str] = []
        self.findings: list[Finding] = []
        self.classes: list[str] = []

    @abstractmethod
    def annotations(self, i: int, header: Header) -> Iterator[Box | Size | Finding]:
        """What the annotation of `images[i]`, of that size, says. Never raises for what a file holds: that is a finding."""

    def read(self, i: int) -> Record:
        """The record of `images[i]`. Raises PictureError for a picture that cannot be read."""
        header = picture_header(self.folder.path(self.images[i]), self.dataset.max_megapixels)
        return make_record(self.images[i], header, self.sources[i], self.annotations(i, header), self.dataset)

    def match(self, pictures: Iterable[str], annotations: Sequence[str], where: str) -> dict[str, str]:
        """Picture -> its annotation file, by name and place; what stays unclear or unused becomes a finding.

        `where` is the folder that holds all `annotations`, "" for the root. Raises DataError if there are pictures and
        none has an annotation.
        """
        pictures = list(pictures)
        pairs, unclear = self.folder.pair(pictures, annotations)
        if pictures and not pairs:
            raise DataError(f"no annotation for any of {len(pictures)} pictures", self.folder.root,
                            f"for {pictures[0]} a file of the same name was looked for everywhere below "
                            f"{self.folder.path(where)}; found are {annotations[0] if annotations else 'none'}"
                            f"{f' and {len(annotations) - 1} others' * (len(annotations) > 1)}")
        self.findings += [Finding(ERROR, "pair-unclear", name, 0, f"may belong to {' or '.join(others)}",
                                  "rename or remove all but one") for name, others in unclear]
        stray = sorted(set(annotations) - set(pairs.values()) - {name for _, others in unclear for name in others})
        if stray:
            self.findings.append(Finding(NOTE, "annotation-unused", stray[0], 0,
                                         f"{len(stray)} annotation files belong to no picture that is used"))
        return pairs

    def settle(self, chosen: dict[str, tuple[str, str]], where: str) -> None:
        """Takes `picture -> (annotation or "", split or "")` and applies dataset.missing to those without annotation.

        `where` is the place in which annotations were looked for.
        """
        bare = [image for image in sorted(chosen) if not chosen[image][0]]
        missing = self.dataset.missing
        if bare and len(bare) == len(chosen):
            missing = "error"  # the wrong place, rather than a data set of perfect welds
        if bare and missing == "error":
            self.findings += [
                Finding(ERROR, "annotation-missing", image, 0, f"no annotation in {where or 'the folder'}",
                        "a picture without defects has an empty one; or set dataset.missing=negative or skip")
                for image in bare]
        elif bare:
            fate = "used as defect-free" if missing == "negative" else "left out"
            self.findings += [Finding(NOTE if missing == "negative" else DROPPED, "annotation-missing", image, 0,
                                      f"no annotation: {fate}") for image in bare]
        # Sorted, so that no file's or file system's order changes a run.
        for image in sorted(chosen):
            source, split = chosen[image]
            if source or missing != "skip":
                self.images.append(image)
                self.sources.append(source)
                self.splits.append(split)
        if strange := self.folder.strange:
            kinds = ", ".join(f"{count} {suffix}" for suffix, count in strange.most_common())
            self.findings.append(Finding(NOTE, "suffix-unknown", "", 0, f"files of kinds that are not read: {kinds}",
                                         f"convert them to one of {' '.join(IMAGE_SUFFIXES)}"))
        if loose := self.folder.loose:
            self.findings.append(Finding(NOTE, "name-loose", loose[0][1], 0, f"{len(loose)} names were found by their last part "
                                         f"alone, such as '{loose[0][0]}'"))

    def no_picture(self, found: Sequence[str]) -> tuple[str, str]:
        """The kind of finding and the words for a name that means no picture, or several."""
        if found:
            return "picture-unclear", f"may mean {' or '.join(found)}"
        return "picture-missing", "is nowhere below the root"

    def unlisted(self, listed: Iterable[str], by: str) -> None:
        """Counts the pictures that the data's own list does not name: they are not used."""
        rest = sorted(set(self.folder.pictures) - set(listed))
        if rest:
            self.findings.append(Finding(NOTE, "picture-unlisted", rest[0], 0, f"{len(rest)} pictures are not in {by}: not used"))


def are_shares(coordinates: np.ndarray) -> bool:
    """Whether the coordinates of a whole file are shares of the picture, where pixels were expected."""
    finite = np.abs(coordinates[np.isfinite(coordinates)])
    return bool(finite.any()) and finite.max() <= LARGEST_SHARE


def make_record(
    image: str, header: Header, source: str, items: Iterable[Box | Size | Finding], dataset: DatasetConfig
) -> Record:
    """Clips the boxes to the picture and drops with a finding those that enclose nothing.

    With `dataset.one_based` the first pixel of the file's coordinates is 1 and a box includes its last pixel: 1 is
    taken from the upper left corner alone.
    """
    findings: list[Finding] = [] if header.pages == 1 else [
        Finding(NOTE, "picture-pages", image, 0, f"holds {header.pages} pages: the first is used")]
    kept: list[Box] = []
    seen: dict[tuple, Box] = {}
    for number, item in enumerate((i for i in items if not _noted(i, image, source, header, findings)), 1):
        box = item._replace(called=f"{item.called or f'object {number}'} ({item.name})")
        if dataset.difficult == "use":
            box = box._replace(flags=box.flags & ~DIFFICULT)
        if dataset.one_based:
            x1, y1, x2, y2 = box.corners
            box = box._replace(corners=(x1 - 1, y1 - 1, x2, y2))
        clipped, fault = _clip(box.corners, header)
        if fault:
            findings.append(Finding(DROPPED, fault[0], source, box.line, f"{box.called} {_text(box.corners)} {fault[1]}: dropped",
                                    "correct or delete it"))
            continue
        kept.append(box._replace(corners=clipped))
        twin = seen.setdefault(clipped, box)
        if twin is not box:
            kind = "box-twice" if twin.name == box.name else "box-two-classes"
            findings.append(Finding(NOTE, kind, source, box.line, f"{box.called} has the corners of {twin.called}: both kept",
                                    "delete one of them"))
    return Record(
        image=image, header=header,
        boxes=np.array([b.corners for b in kept], np.float32).reshape(-1, 4),
        names=[b.name for b in kept],
        flags=np.array([b.flags for b in kept], np.uint8),
        lines=np.array([b.line for b in kept], np.int32),
        findings=findings,
    )


def _noted(item: Box | Size | Finding, image: str, source: str, header: Header, findings: list[Finding]) -> bool:
    """True for what is no box; a claimed size that is not the picture's becomes a finding."""
    if isinstance(item, Finding):
        findings.append(item)
    elif isinstance(item, Size):
        claimed, true = (item.width, item.height), (header.width, header.height)
        if min(claimed) > 0 and claimed != true:  # zero is what tools write that never opened the picture
            turned = claimed == true[::-1]
            findings.append(Finding(
                NOTE, "size-transposed" if turned else "size-differs", source, item.line,
                f"says {claimed[0]:g}x{claimed[1]:g}, {image} is {true[0]}x{true[1]}" + " as a viewer shows it" * turned,
                "were the boxes drawn on the picture as it lies in the file?" if turned else
                "was the picture resized after its boxes were drawn?"))
    return not isinstance(item, Box)


def _clip(corners: Sequence[float], header: Header) -> tuple[tuple[float, ...], tuple[str, str] | None]:
    # Before any clamp: max(0, nan) is 0, and a broken box would become a large one.
    if not all(-np.inf < c < np.inf for c in corners):
        return (), ("box-not-finite", "is no finite number")
    x1, y1, x2, y2 = corners
    if x2 - x1 < MIN_SIDE_PX or y2 - y1 < MIN_SIDE_PX:
        return (), ("box-empty", "encloses nothing")
    clipped = (max(x1, 0.0), max(y1, 0.0), min(x2, float(header.width)), min(y2, float(header.height)))
    if clipped[2] - clipped[0] < MIN_SIDE_PX or clipped[3] - clipped[1] < MIN_SIDE_PX:
        return (), ("box-outside", f"lies outside the picture of {header.width}x{header.height}")
    return clipped, None


def _text(corners: Iterable[float]) -> str:
    return "[" + ", ".join(f"{c:g}" for c in corners) + "]"
