"""open_index: the index of a data set as it is on disk now, built in parallel by reading every annotation and header.

Kept in `cache_dir`, and rebuilt whenever any file it was built from has changed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import multiprocessing
import pickle
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

import weldtrain.formats
from weldtrain.config import DatasetConfig, SyntheticConfig
from weldtrain.data import synthetic
from weldtrain.data.images import read_image
from weldtrain.data.index import AnnotationIndex, write_index
from weldtrain.errors import DataError, PictureError, TrainingError
from weldtrain.formats import open_reader, stamp
from weldtrain.formats.pictures import OR_SKIP
from weldtrain.formats.record import DROPPED, ERROR, Finding, Reader, Record, dropped_boxes
from weldtrain.formats.splits import settle_splits
from weldtrain.interruption import end_with_main_process, starting_processes
from weldtrain.telemetry.console import followed
from weldtrain.telemetry.machine import usable_cores

log = logging.getLogger(__name__)

_PARALLEL_FROM = 4000  # below that, starting processes costs more than it saves
_PARALLEL_DECODING_FROM = 200
_CHUNK = 500
# Settings that decide nothing about what an index holds.
_NOT_READ = ("classes", "synthetic", "strict", "rescan", "leak", "mm_per_pixel", "picture_csv")
MAX_CLASSES, MAX_SPLITS = 1000, 100  # more are another column of a table


def open_index(dataset: DatasetConfig, cache_dir: str | Path, *, refuse: bool = True) -> AnnotationIndex:
    """The index of a data set as it is on disk now: from `cache_dir` if that is current, else built.

    Raises DataError for whatever is wrong with the data, with file and line; without `refuse` only where nothing can
    be read at all, and the rest are findings.
    """
    if dataset.format == "synthetic":
        dataset = replace(dataset, root=str(synthetic_root(dataset.synthetic, cache_dir)))
    current = stamp(dataset)
    settings = {k: v for k, v in asdict(dataset).items() if k not in _NOT_READ}
    settings["readers"] = _readers_digest()
    if dataset.format in ("yolo", "auto"):
        settings["classes"] = dataset.classes  # these may stand for the names that a data.yaml lacks
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=12).hexdigest()
    file = Path(cache_dir) / "index" / f"{key}.idx"
    index = None
    try:
        index = AnnotationIndex(file)
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, OSError) as e:
        log.warning("index %s is damaged (%s): built anew", file, e)
    if index is None or index.stamp != current or dataset.rescan:
        write_index(file, *build(open_reader(dataset), current))
        index = AnnotationIndex(file)
    if refuse:
        _refuse(index, dataset.strict)
    return index


@functools.cache
def _readers_digest() -> str:
    """Of the code that makes an index, so that another release never takes over what an older one read."""
    digest = hashlib.blake2b(digest_size=8)
    beside = (Path(__file__).with_name(name) for name in ("index.py", "indexing.py", "images.py"))
    for file in sorted([*Path(weldtrain.formats.__file__).parent.glob("*.py"), *beside]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _refuse(index: AnnotationIndex, strict: bool) -> None:
    """Raises DataError for the first kind of error, naming the first of its places."""
    refused = [f for f in index.findings if f.level == ERROR or (strict and f.level == DROPPED)]
    if not refused:
        return
    first = refused[0]
    same = [f for f in refused if f.kind == first.kind]
    where = ", ".join(f.where() for f in same[1:8]) + " …" * (len(same) > 8)
    more = f" (and {where}: {len(same)} of this kind)" if same[1:] else ""
    others = f"; {len(refused) - len(same)} findings of other kinds" if len(refused) > len(same) else ""
    strictly = "dataset.strict: " if first.level == DROPPED else ""
    raise DataError(f"{strictly}{first.text}{more}{others}", index.root / first.where() if first.file else index.root,
                    f"{first.fix}; task=check lists every finding" if first.fix else "task=check lists every finding")


def synthetic_root(cfg: SyntheticConfig, cache_dir: str | Path) -> Path:
    """The folder of the drawn data set for these settings, written first where it is not there yet."""
    counts = {"train": cfg.train, "val": cfg.val, "test": cfg.test}
    name = "-".join(str(v) for v in (*counts.values(), f"{cfg.size_px}px", f"seed{cfg.seed}", f"v{synthetic.VERSION}"))
    folder = Path(cache_dir) / "synthetic" / name
    if not folder.is_dir():
        log.info("drawing %d weld radiographs into %s", sum(counts.values()), folder)
        try:
            synthetic.write_dataset(folder, counts=counts, size_px=cfg.size_px, seed=cfg.seed)
        except OSError as e:
            what = f"the drawn pictures cannot be written ({e.strerror})"
            raise DataError(what, folder, "set cache_dir to a folder with room") from e
    return folder


def build(reader: Reader, stamp_before: str = "") -> tuple[dict, dict[str, np.ndarray]]:
    """Reads every annotation and picture header; returns the header and the arrays of an index.

    With dataset.bad_images=skip every picture is also decoded once, and those that fail are left out: deciding it
    here keeps the number of batches, and every rank's share, the same whatever is broken.
    """
    dataset, n = reader.dataset, len(reader.images)
    decode = dataset.bad_images == "skip"
    if n >= (_PARALLEL_DECODING_FROM if decode else _PARALLEL_FROM) and usable_cores() > 1:
        parts = _flatten_in_parallel(reader, "reading every picture" if decode else "reading annotations")
    else:
        parts = [_flatten(reader, range(n))]

    kept = np.concatenate([p["kept"] for p in parts]) if n else np.zeros(0, bool)
    images = [image for image, keep in zip(reader.images, kept) if keep]
    given = [split for split, keep in zip(reader.splits, kept) if keep]
    names = sorted({name for part in parts for name in part["names"]})
    findings = [*reader.findings, *(f for p in parts for f in p["findings"])]
    if len(names) > MAX_CLASSES:
        raise DataError(f"{len(names)} different class names, such as {', '.join(names[:3])}", reader.folder.root,
                        "is that the class, or the name of each object?")
    where = {name: i for i, name in enumerate(names)}
    name_ids = np.array([where[name] for p in parts for name in p["names"]], np.int32)
    boxes_per_picture = np.concatenate([p["counts"] for p in parts])
    has_class = np.zeros((len(images), len(names)), bool)
    has_class[np.repeat(np.arange(len(images)), boxes_per_picture), name_ids] = True
    assigned, more = settle_splits(images, given, has_class, dataset.split)
    lost = len(dropped_boxes(findings))
    if not images:
        more.append(Finding(ERROR, "nothing-left", "", 0, "no picture is left that can be used", "see the other findings"))
    elif lost and not len(name_ids):
        more.append(Finding(ERROR, "nothing-left", "", 0, f"all {lost} boxes were dropped",
                            "are they in pixels of these pictures?"))
    splits = sorted(set(assigned))
    if len(splits) > MAX_SPLITS:
        raise DataError(f"{len(splits)} different splits, such as {', '.join(splits[:3])}", reader.folder.root,
                        "expected names such as train, val and test")
    encoded = [image.encode("utf-8", "surrogateescape") for image in images]
    arrays = {
        "path_bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "path_offsets": _offsets(np.array([len(e) for e in encoded], np.int64)),
        "sizes": np.concatenate([p["sizes"] for p in parts]),
        "grey": np.concatenate([p["grey"] for p in parts]),
        "split_ids": np.array([splits.index(s) for s in assigned], np.uint8),
        "box_offsets": _offsets(boxes_per_picture),
        "boxes": np.concatenate([p["boxes"] for p in parts]),
        "name_ids": name_ids,
        "flags": np.concatenate([p["flags"] for p in parts]),
        "lines": np.concatenate([p["lines"] for p in parts]),
    }
    header = {"root": str(dataset.root), "stamp": stamp_before, "format": dataset.format, "names": names,
              "splits": splits, "classes": reader.classes, "findings": findings + more}
    return header, arrays


def _flatten_in_parallel(reader: Reader, what: str) -> list[dict]:
    n, workers = len(reader.images), usable_cores()
    chunk = max(1, min(_CHUNK, n // (4 * workers)))
    chunks = [range(i, min(i + chunk, n)) for i in range(0, n, chunk)]
    # Handed over in a file: a process that dies before it has read a large argument leaves its parent waiting for ever.
    with tempfile.NamedTemporaryFile(prefix="weldtrain-") as file:
        pickle.dump(reader, file, pickle.HIGHEST_PROTOCOL)
        file.flush()
        # Spawned, since a fork of a process that may hold threads and CUDA is not safe; this package's readers
        # import no torch, so a process starts in half a second.
        try:
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _keep, (file.name,)) as pool:
                with starting_processes("spawn"):
                    parts = pool.map(_flatten_kept, chunks)
                return list(followed(parts, len(chunks), what))
        except OSError as e:
            log.warning("no processes can be started (%s): reading in this one", e.strerror)
            return [_flatten(reader, range(n))]
        except BrokenProcessPool as e:
            raise TrainingError("a process that was reading annotations and pictures died", reader.folder.root,
                                "most often for lack of memory: is one picture very large? Lower dataset.max_megapixels") from e


_kept: Reader  # each process reads it once, not with every chunk


def _keep(file: str) -> None:
    global _kept
    end_with_main_process()
    with open(file, "rb") as f:
        _kept = pickle.load(f)


def _flatten_kept(rows: range) -> dict:
    return _flatten(_kept, rows)


def _flatten(reader: Reader, rows: range) -> dict:
    """The records of some pictures as arrays, without the pictures that cannot be read: those are findings."""
    records: list[Record] = []
    kept = np.ones(len(rows), bool)
    findings: list[Finding] = []
    skip = reader.dataset.bad_images == "skip"
    for k, i in enumerate(rows):
        try:
            record = reader.read(i)
            if skip:
                read_image(reader.folder.path(record.image), record.header[:2], record.header.grey)
        except PictureError as error:
            kept[k] = False
            what, _, fix = error.args
            findings.append(Finding(DROPPED if skip else ERROR, "picture-bad", reader.images[i], 0,
                                    what + ": left out" * skip, fix.removesuffix(OR_SKIP) if skip else fix))
            continue
        findings += record.findings
        lost = len(dropped_boxes(record.findings))
        kept[k] = bool(record.names) or not lost
        if kept[k]:
            records.append(record)
        else:  # not free of defects: nobody knows where they are
            findings.append(Finding(DROPPED, "picture-emptied", record.image, 0, f"has no sound box of {lost}: left out",
                                    "correct its annotation"))
    return {
        "kept": kept,
        "sizes": np.array([r.header[:2] for r in records], np.int32).reshape(-1, 2),
        "grey": np.array([r.header.grey for r in records], bool),
        "counts": np.array([len(r.names) for r in records], np.int64),
        "boxes": np.concatenate([np.zeros((0, 4), np.float32), *(r.boxes for r in records)]),
        "flags": np.concatenate([np.zeros(0, np.uint8), *(r.flags for r in records)]),
        "lines": np.concatenate([np.zeros(0, np.int32), *(r.lines for r in records)]),
        "names": [name for r in records for name in r.names],
        "findings": findings,
    }


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
