"""task=predict: what a checkpoint finds in pictures, drawn and as COCO results, CSV, VOC or YOLO. Needs both alone."""

from __future__ import annotations

import contextlib
import csv
import itertools
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from weldtrain.config import Config
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.index import AnnotationIndex, write_index
from weldtrain.data.indexing import build
from weldtrain.data.loader import evaluation_loader
from weldtrain.engine.device import choose_device
from weldtrain.engine.evaluator import Seen, pictures, seen
from weldtrain.engine.trained import Trained
from weldtrain.errors import DataError, PictureError, TrainingError
from weldtrain.formats import written
from weldtrain.formats.pictures import OR_SKIP
from weldtrain.formats.record import ERROR, NOTE, Finding
from weldtrain.formats.sources import SPLIT, Pictures
from weldtrain.formats.written import Found
from weldtrain.interruption import deferred
from weldtrain.telemetry.console import followed, table
from weldtrain.telemetry.drawing import draw_all
from weldtrain.telemetry.machine import usable_cores
from weldtrain.telemetry.provenance import version
from weldtrain.telemetry.record import RunRecord

log = logging.getLogger(__name__)

UNREAD = "unread.csv"
_LOWEST = 0.01  # of a score that the detector tells: tiles are joined before thresholds apply
_UNKNOWN = 0.5  # the threshold where the checkpoint holds none
_JPEG_QUALITY, _JPEG_MOST_PX = 92, 65500


def run(cfg: Config, record: RunRecord) -> None:
    """Raises DataError at the end, when all others are done, for pictures that could not be read."""
    device = choose_device(cfg.device, cfg.trainer.cpu_threads)
    trained = Trained.load(cfg.checkpoint, device)
    thresholds = _thresholds(cfg, trained)
    index_file = record.dir / "pictures.idx"
    try:
        reader = Pictures(cfg.predict.source, cfg.dataset.max_megapixels)
        write_index(index_file, *build(reader))
        index = AnnotationIndex(index_file)
        unread = [f._replace(fix=f.fix.removesuffix(OR_SKIP)) for f in index.findings if f.level == ERROR and f.file]
        for f in reader.findings:
            if f.level == NOTE:
                log.info("%s", f.text)
        counts: Counter[str] = Counter()
        done, ended = 0, None
        if len(index):
            looked_at = contextlib.closing(_found(cfg, trained, index, thresholds, device, unread))
            with _outputs(cfg, record.dir, trained, index, thresholds) as write, looked_at as all_found:
                try:
                    for found in all_found:
                        with deferred():
                            write(found)
                            counts.update(trained.classes[label - 1] for label in found.labels.tolist())
                            done += 1
                except BaseException as e:  # what is done is kept, and then it is raised
                    ended = e
    finally:
        index_file.unlink(missing_ok=True)
    record.summary |= {"pictures": done, "found": dict(counts), "unread": len(unread), "thresholds": thresholds,
                       "checkpoint": cfg.checkpoint, "source": cfg.predict.source, "classes": trained.classes}
    table(f"{done} pictures of {reader.folder.root}", ("class", "threshold", "found"),
          [(name, f"{thresholds[name]:.3f}", counts[name]) for name in trained.classes])
    log.info("results: %s", record.dir)
    if unread:
        with _written_to(record.dir):
            _list(unread, record.dir)
    if ended is not None:
        log.warning("%d of %d pictures are done, and all results are of these", done, len(index))
        raise ended
    if unread:
        first = ", ".join(f"{f.file} {f.text}" for f in unread[:3]) + " …" * (len(unread) > 3)
        raise DataError(f"{len(unread)} of {done + len(unread)} pictures could not be inspected: {first}",
                        os.path.join(record.dir, UNREAD), "all others are done; mend these and predict them")


def _thresholds(cfg: Config, trained: Trained) -> dict[str, float]:
    """By class, and says where they come from."""
    if cfg.predict.threshold is not None:
        return dict.fromkeys(trained.classes, cfg.predict.threshold)
    if not trained.thresholds:
        log.warning("the checkpoint holds no thresholds: %g for all; task=evaluate chooses better ones", _UNKNOWN)
        return dict.fromkeys(trained.classes, _UNKNOWN)
    log.info("thresholds of the checkpoint, chosen on its split %s", trained.points["split"])
    if cfg.predict.max_detections < trained.points.get("seen_in", {}).get("max_detections", 0):
        log.warning("predict.max_detections=%d: the thresholds were chosen with %d, and what they promise does not hold for less",
                    cfg.predict.max_detections, trained.points["seen_in"]["max_detections"])
    for name, point in trained.points["points"].items():
        if point["why"]:
            log.info("%s: %s", name, point["why"])
    return trained.thresholds


def _found(
    cfg: Config, trained: Trained, index: AnnotationIndex, thresholds: Mapping[str, float], device: Any, unread: list[Finding]
) -> Iterator[Found]:
    """Of each picture that can be read, in path order; the others become `unread`."""
    samples, model_cfg = trained.samples(index, cfg.predict.tiles)
    dataset = DetectionDataset(samples, SPLIT, trained.classes, model_cfg, spare=True)
    if len(dataset) > len(index):
        log.info("predict.tiles=%s: %d tiles of %d pictures", cfg.predict.tiles, len(dataset), len(index))
    if cfg.predict.threshold is None and trained.points and "seen_in" in trained.points:
        chosen, here = (f"tiles of {px} px" if px else "whole pictures"
                        for px in (trained.points["seen_in"]["tile_px"], dataset.index.tile_px))
        if chosen != here:
            log.warning("the thresholds were chosen in %s, and here %s are looked at: what they promise does not hold for these; "
                        "choose others with task=evaluate evaluate.tiles=%s", chosen, here, cfg.predict.tiles)
    loader = evaluation_loader(dataset, cfg.loader, cfg.predict.batch_size, device)
    trained.model.limit_detections(min(_LOWEST, *thresholds.values()), cfg.predict.max_detections)
    least = np.array([thresholds[name] for name in trained.classes])
    batches = seen(trained.model, loader, device, trained.dtype, "predict.batch_size", "predicting")
    with contextlib.closing(batches):
        of_pictures = pictures(itertools.chain.from_iterable(batches), dataset, trained.model)
        for picture in followed(of_pictures, len(index), "predicting"):
            if picture.found is None:
                unread.append(_problem(index, picture))
                continue
            sure = picture.found.scores >= least[picture.found.labels - 1]
            yield Found(index.path(picture.row), *index.sizes[picture.row].tolist(), *(part[sure] for part in picture.found))


def _problem(index: AnnotationIndex, picture: Seen) -> Finding:
    """What is wrong with a picture that a worker could not read."""
    try:
        index.picture(picture.row)
        what, fix = "could not be read", "try again"  # by now it can
    except PictureError as error:
        what, _, fix = error.args
    return Finding(ERROR, "picture-bad", index.path(picture.row), 0, what, fix.removesuffix(OR_SKIP))


@contextlib.contextmanager
def _outputs(
    cfg: Config, folder: Path, trained: Trained, index: AnnotationIndex, thresholds: Mapping[str, float]
) -> Iterator[Callable[[Found], None]]:
    """Yields what writes a picture's findings in every form that predict.save names."""
    names = [index.path(row) for row in range(len(index))]
    rows = {name: row for row, name in enumerate(names)}
    info = {"description": "what weldtrain found", "version": version(), "checkpoint": cfg.checkpoint,
            "thresholds": dict(thresholds), "source": cfg.predict.source}
    classes, save = trained.classes, cfg.predict.save
    with _written_to(folder), contextlib.ExitStack() as stack:
        writers: list[Callable[[Found], None]] = []
        if "pictures" in save:  # first, so that a drawing that fails at the end finds all other files closed
            drawings = _named(names, ".jpg")

            def draw(found: Found) -> None:
                try:
                    image = index.picture(rows[found.picture], trained.window)
                except PictureError as error:  # it was there a moment ago
                    log.warning("not drawn: %s", error)
                else:
                    _draw(folder / "pictures" / drawings[found.picture], image, found, classes)

            writers.append(stack.enter_context(_beside(draw)))
        if "json" in save:
            writers.append(stack.enter_context(written.coco_results(folder, classes, info)))
        if "csv" in save:
            writers.append(stack.enter_context(written.csv_table(folder / "predictions.csv", classes)))
        if "voc" in save:
            xml = _named(names, ".xml")
            writers.append(lambda found: written.write_voc(folder / "voc", xml[found.picture], found, classes))
        if "yolo" in save:
            txt = _named(names, ".txt", (written.CLASSES,))
            written.write_yolo_classes(folder / "yolo", txt.values(), classes)
            writers.append(lambda found: written.write_yolo(folder / "yolo", txt[found.picture], found))

        def write(found: Found) -> None:
            with _written_to(folder):
                for writer in writers:
                    writer(found)

        yield write  # nothing is raised here


def _named(pictures: list[str], suffix: str, taken: tuple[str, ...] = ()) -> dict[str, str]:
    """The output of each picture; where two would have the same one, says which name it has instead."""
    names = written.names(pictures, suffix, taken)
    odd = [(picture, name) for picture, name in names.items() if Path(name).with_suffix("") != Path(picture).with_suffix("")]
    if odd:
        log.info("%d pictures share their name but for the suffix: %s becomes %s", len(odd), *odd[0])
    return names


@contextlib.contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    """What the system refuses here is to write. Raises TrainingError."""
    try:
        yield
    except OSError as e:
        raise TrainingError(f"cannot be written ({e.strerror})", e.filename or folder,
                            "free some disk space, or set output_dir") from e


@contextlib.contextmanager
def _beside(work: Callable[[Found], None]) -> Iterator[Callable[[Found], None]]:
    """Does the work in threads while the model goes on; what it raises is raised by a later call, or at the end."""
    threads = max(1, usable_cores() // 2)
    begun: deque[Future[None]] = deque()
    with ThreadPoolExecutor(threads, "weldtrain-drawing") as pool:
        def start(found: Found) -> None:
            while len(begun) >= 2 * threads:  # no more pictures in memory than these
                begun.popleft().result()
            begun.append(pool.submit(work, found))

        yield start
        while begun:
            begun.popleft().result()


def _draw(file: Path, image: np.ndarray, found: Found, classes: list[str]) -> None:
    """A JPEG of the picture with its findings, or a PNG where it is too large for that."""
    drawn = cv2.cvtColor(draw_all(image, found.boxes, found.labels, found.scores, classes), cv2.COLOR_RGB2BGR)
    if max(drawn.shape) > _JPEG_MOST_PX:
        file = file.with_name(f"{file.name}.png")
    _, data = cv2.imencode(file.suffix, drawn, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    file.parent.mkdir(parents=True, exist_ok=True)
    data.tofile(file)


def _list(unread: list[Finding], folder: Path) -> None:
    with open(folder / UNREAD, "w", encoding="utf-8", errors="backslashreplace", newline="") as out:
        lines = csv.writer(out)
        lines.writerow(("image", "what", "fix"))
        lines.writerows((f.file, f.text, f.fix) for f in sorted(unread))
