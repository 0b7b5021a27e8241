"""What a detector found, whichever it was, from a file of COCO results: judged as a checkpoint is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weldtrain.config import EvaluateConfig
from weldtrain.data.images import Window
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.predictions import Detections, predictions_of
from weldtrain.engine.evaluator import Judged, Seen, judge
from weldtrain.errors import DataError


@dataclass
class Results:
    """`found` by row of an index. Chooses its thresholds like a checkpoint that holds none."""

    path: Path
    classes: list[str]
    found: dict[int, Detections]
    info: dict[str, Any]
    points: None = None
    epoch: None = None
    step: int = 0
    window: Window = Window()

    @classmethod
    def read(cls, path: str, index: AnnotationIndex) -> Results:
        """Raises DataError as `predictions_of` does."""
        return cls(Path(path), *predictions_of(Path(path), index))

    def judged(self, index: AnnotationIndex, split: str, cfg: EvaluateConfig) -> Judged:
        """Raises DataError where a picture of the split was not looked at."""
        rows = index.rows(split)
        missing = [index.path(row) for row in rows if row not in self.found]
        if missing:
            raise DataError(f"holds nothing of {missing[0]}" + f" and {len(missing) - 1} other pictures" * (len(missing) > 1)
                            + f" of split {split}", self.path,
                            "predict the whole split (unread.csv names what could not be read); or name splits that it holds in "
                            "evaluate.split and evaluate.choose_on")
        return judge(self._of(rows), index, rows, self.classes, cfg)

    def cut_at(self) -> float:
        """The highest of the thresholds below which nothing was kept; 0 where the file names none."""
        named = self.info.get("thresholds")
        scores = named.values() if isinstance(named, dict) else ()
        return max((float(score) for score in scores if isinstance(score, (int, float))), default=0.0)

    def overlap(self, name: str, shown: np.ndarray) -> None:
        """What made the results is not known, nor what that was trained on."""
        return None

    def made_of(self) -> dict[str, str]:
        """What it is, for a reader."""
        return {"predictions": str(self.path), "its SHA-256": hashlib.sha256(self.path.read_bytes()).hexdigest()} | {
            name: str(self.info[name]) for name in ("checkpoint", "thresholds", "version") if name in self.info}

    def _of(self, rows: np.ndarray) -> Iterator[Seen]:
        return (Seen(int(row), self.found[row]) for row in rows.tolist())
