"""Readers of annotation formats. Each turns a folder into the same records and never writes to it. What is found is `written`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats import coco, table, voc, yolo
from weldtrain.formats.files import Folder, read_text, stamp_files
from weldtrain.formats.record import NOTE, Finding, Reader
from weldtrain.formats.splits import names_splits

# welding_v2 and the synthetic set are VOC in the article's layout: their configs name its folders and its CSV.
_READERS: dict[str, type[Reader]] = {
    "welding_v2": voc.Voc, "synthetic": voc.Voc, "voc": voc.Voc, "yolo": yolo.Yolo, "coco": coco.Coco, "csv": table.Table,
}
_ARTICLE = {"images": "images", "annotations": "annotations", "split_csv": "train_val_test_split.csv"}


def open_reader(dataset: DatasetConfig) -> Reader:
    """The reader for `dataset.format`; `auto` is recognised first. Raises DataError if `dataset.root` holds no such data."""
    root = _root(dataset)
    folder = Folder(root, dataset.images)
    if not folder.pictures:
        found = Counter(Path(n).suffix.lower() for n in folder.names) + folder.strange
        raise DataError("no pictures", root / (dataset.images or ""), "found there: " + (
            ", ".join(f"{n} {suffix}" for suffix, n in found.most_common(6)) or "no file of data at all"))
    notes = []
    if dataset.format == "auto":
        dataset, why = recognise(folder, dataset)
        notes.append(Finding(NOTE, "recognised", "", 0, why))
    try:
        reader = _READERS[dataset.format](folder, dataset)
    except DataError as error:
        raise _hinted(error, folder, dataset) from None
    unused = split_csv_of(folder)
    if unused and dataset.split_csv is None:
        notes.append(Finding(NOTE, "split-unused", unused, 0, "is not used", f"if it should be, set dataset.split_csv={unused}"))
    reader.findings[:0] = notes
    return reader


def recognise(folder: Folder, dataset: DatasetConfig) -> tuple[DatasetConfig, str]:
    """The settings with the format that the folder is in, and why it was taken for that. Raises DataError if for none."""
    found = _formats(folder, dataset)
    if not found:
        kinds = Counter(Path(n).suffix.lower() for n in folder.names)
        tables = folder.ending((".csv",))
        if len(tables) == 1:  # what is wrong with it helps more
            raise table.fault(folder, tables[0])
        raise DataError("holds no annotations of a known format", folder.root,
                        f"found {', '.join(f'{n} {suffix}' for suffix, n in kinds.most_common(6))}; known are Pascal VOC (.xml) "
                        "and YOLO (.txt), each file named as its picture, COCO (.json), and .csv with image,x1,y1,x2,y2,class")
    name, reason = next(iter(found.items()))
    others = [f"{other} ({what}): dataset={other}" for other, what in found.items() if other != name
              and (name, other) != ("welding_v2", "voc")]
    given = {"split_csv": dataset.split_csv or split_csv_of(folder) or None}
    folders = {k: getattr(dataset, k) or folder.has_folder(_ARTICLE[k]) for k in ("images", "annotations")}
    if name == "welding_v2" and all(folders.values()):
        given |= folders
    why = f"dataset=auto: read as {name}, because of {reason}"
    if given["split_csv"] and name != "welding_v2":
        why += f", with the splits of {given['split_csv']}"
    return replace(dataset, format=name, **given), why + (f"; there is also {'; '.join(others)}" if others else "")


def _formats(folder: Folder, dataset: DatasetConfig) -> dict[str, str]:
    """Every format that a folder may be in, the likeliest first, and what speaks for it."""
    found: dict[str, str] = {}
    xml, split_csv = _named_as_pictures(folder, ".xml"), split_csv_of(folder)
    if xml and split_csv:
        found["welding_v2"] = f"{len(xml)} .xml files and {split_csv}"
    described, content = yolo.find_yaml(folder, dataset.annotations)
    if described and any(content.get(k) for k in ("train", "val", "test", "path")):
        found["yolo"] = described
    if xml:
        found["voc"] = f"{len(xml)} .xml files, such as {xml[0]}"
    if tables := [n for n in folder.ending((".json",)) if coco.is_coco(folder, n)]:
        found["coco"] = " and ".join(tables[:3])
    if labels := _labels(folder):
        found.setdefault("yolo", f"rows of numbers in {labels}")
    if tables := [n for n in folder.ending((".csv",)) if not table.fault(folder, n)]:
        found["csv"] = " and ".join(tables[:3])
    return found


def _hinted(error: DataError, folder: Folder, dataset: DatasetConfig) -> DataError:
    """An error of a reader, and the format to choose if the folder is not in that reader's."""
    try:
        found = _formats(folder, dataset)
    except DataError:
        return error
    if not found or dataset.format in found:
        return error
    name, reason = next(iter(found.items()))
    what, where, _ = error.args
    return type(error)(what, where, f"{reason} look like {name}: set dataset={name}, or auto")


def stamp(dataset: DatasetConfig) -> str:
    """A digest of the state of every file that the reader might read. Parses nothing."""
    root = _root(dataset)
    return stamp_files([root, root / dataset.split_csv] if dataset.split_csv else [root])


def _named_as_pictures(folder: Folder, suffix: str) -> list[str]:
    """The files of a suffix that have a picture's stem."""
    stems = {p.rpartition("/")[2].rpartition(".")[0].casefold() for p in folder.pictures}
    return [n for n in folder.ending((suffix,)) if n.rpartition("/")[2][: -len(suffix)].casefold() in stems]


def _labels(folder: Folder) -> str:
    """The first text that has a picture's stem and the look of a YOLO label."""
    for name in _named_as_pictures(folder, ".txt"):
        try:
            # Many may be empty: pictures without defects.
            if folder.path(name).stat().st_size and yolo.looks_like_labels(read_text(folder.path(name))):
                return name
        except (DataError, OSError):
            continue
    return ""


def split_csv_of(folder: Folder) -> str:
    """The file of splits: of the article's name, or the only CSV of the root with the columns image_id and split and no boxes."""
    places = folder.places(_ARTICLE["split_csv"])
    if named := next((n for n in folder.names if n.lower() in map(str.lower, places)), ""):
        return named
    tables = [n for n in folder.ending((".csv",)) if n.rpartition("/")[0] in folder.places("") and names_splits(folder.path(n))]
    return tables[0] if len(tables) == 1 and table.fault(folder, tables[0]) else ""


def _root(dataset: DatasetConfig) -> Path:
    root = Path(dataset.root or "")
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "no such folder"
        raise DataError(what, f"dataset.root={root}", "give the folder that holds your pictures and annotations")
    return root
