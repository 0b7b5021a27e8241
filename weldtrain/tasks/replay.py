"""task=replay: loads the samples that a failed run came to grief on once more, step by step, in this process."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from weldtrain.config import Config, section
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.images import read_image
from weldtrain.data.indexing import open_index
from weldtrain.data.sampler import Key
from weldtrain.data.tiles import tiled
from weldtrain.errors import DataError
from weldtrain.telemetry import crash
from weldtrain.telemetry.record import RunRecord

log = logging.getLogger(__name__)


def run(cfg: Config, record: RunRecord) -> None:
    """Raises DataError where the run left no samples to replay, and what a sample raises."""
    left = _left(Path(cfg.run))
    saved = left["config"]
    log.info("that run said: %s", left["error"])
    try:
        index = open_index(section(saved, "dataset"), cfg.cache_dir)
    except DataError as e:  # of one of these pictures, most often
        log.warning("as a whole the data cannot be read any more: %s", e)
        for sample in left["samples"]:
            log.info("%s", sample["picture"])
            shape = read_image(Path(saved["dataset"]["root"]) / sample["picture"]).shape
            log.info("  decodes: %s", "x".join(map(str, shape)))
        raise
    index = tiled(index, section(saved, "model"))
    rows = {index.path(row): row for row in reversed(range(len(index)))}
    for sample in left["samples"]:
        if sample["picture"] not in rows:
            raise DataError("is not in the data any more", sample["picture"], f"see {index.root}")
        first = rows[sample["picture"]]
        row = sample["row"] if sample["row"] in index.siblings(first) else first
        split = index.splits[index.split_ids[row]]
        dataset = DetectionDataset(
            index, split, index.class_names(saved["dataset"]["classes"]), section(saved, "model"),
            augment=section(saved, "augment") if split == "train" else None, seed=saved["seed"])
        _step_by_step(dataset, (sample["epoch"], row, sample["repeat"]))
    record.summary |= {"run": cfg.run, "samples": left["samples"]}
    log.info("loaded without an error: %d of %d", len(left["samples"]), len(left["samples"]))


def _left(run_dir: Path) -> dict[str, Any]:
    """What a run left in crash.json. Raises DataError where it left none, or no samples."""
    # Of several ranks it is the one that failed which has more to tell.
    file = next(iter(sorted(run_dir.glob(crash.OF_RANKS))), run_dir / crash.FILE)
    try:
        left = json.loads(file.read_text("utf-8"))
        samples, _ = left["samples"], left["config"]["dataset"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataError("is not there or cannot be read", file, "give the directory of a run that failed: run=outputs/…") from e
    if not samples:
        raise DataError("names no sample that was being loaded", file, f"it says: {left['error']}")
    return left


def _step_by_step(dataset: DetectionDataset, key: Key) -> None:
    epoch, row, repeat = key
    index, start = dataset.index, time.perf_counter()

    def told(what: str, *details: object) -> None:
        log.info(f"  %6.1f ms  {what}", 1e3 * (time.perf_counter() - start), *details)

    log.info("%s, epoch %d, repeat %d", index.path(row), epoch + 1, repeat)
    told("in the index: %s px, %d boxes", "x".join(map(str, index.sizes[row])), len(index.boxes[index.box_rows(row)]))
    draft = dataset.draft([key])
    told("drafted: %s px with %d boxes, of %s", "x".join(map(str, draft.recipes[0].size)), len(draft.batch.boxes),
         ", ".join(index.path(layer.row) for layer in draft.recipes[0].layers))
    for at in dict.fromkeys(layer.row for layer in draft.recipes[0].layers):
        picture = dataset.decoded(at, lambda stage, at=at: told("%s: %s", index.path(at), stage))
        told("%s: %s, values %d to %d", index.path(at), "x".join(map(str, picture.shape)), picture.min(), picture.max())
    dataset.fill(draft, 0)
    image = draft.batch.images
    told("augmented: %s, values %d to %d", "x".join(map(str, image.shape[1:])), image.min(), image.max())
    for box, label in zip(draft.batch.boxes.tolist(), draft.batch.labels.tolist()):
        told("box %s, label %d", ", ".join(f"{side:.1f}" for side in box), label)
