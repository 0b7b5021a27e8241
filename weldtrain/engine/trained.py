"""A trained detector from its checkpoint alone: its model, classes, scale, precision, tiles and thresholds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weldtrain.config import AUTO, ModelConfig, section
from weldtrain.data.images import Window, target_sizes
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.tiles import TiledIndex
from weldtrain.engine import checkpoint
from weldtrain.engine.device import autocast_dtype
from weldtrain.models.detector import Detector, build_detector

_TO_GO_ON = ("optimizer", "scaler", "random", "clock", "sums", "ranking")  # of a checkpoint: as large as the model and more
_REDUCED = 0.5  # a picture that would be seen at less than this of the scale that was trained at is cut into tiles


@dataclass
class Trained:
    """`points` is what `operating_points` gave, None where the checkpoint is none of a judged epoch; `trained_px` the median
    width and height in px of the pictures that were trained on, None of an earlier release; `state` all else of the checkpoint
    but what a run goes on by."""

    path: Path
    model: Detector
    classes: list[str]
    cfg: ModelConfig
    dtype: torch.dtype | None
    state: Mapping[str, Any]
    points: dict[str, Any] | None
    trained_px: list[float] | None

    @classmethod
    def load(cls, path: str, device: torch.device) -> Trained:
        """Raises DataError for a file that is no checkpoint."""
        state = checkpoint.load(path)
        cfg, trainer_cfg = section(state["config"], "model"), section(state["config"], "trainer")
        model = build_detector(cfg, len(state["classes"]))
        model.load_state_dict(checkpoint.weights(state))
        return cls(Path(path), model.to(device, memory_format=torch.channels_last), state["classes"], cfg,
                   autocast_dtype(trainer_cfg.precision, device), {k: v for k, v in state.items() if k not in _TO_GO_ON},
                   (state.get("metrics") or {}).get("operating_points"), state.get("trained_px"))

    @property
    def epoch(self) -> int:
        """That it is of, from 0."""
        return checkpoint.epochs_done(self.state) - 1

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def window(self) -> Window:
        """By which its pictures are shown."""
        return Window.of(self.cfg)

    def made_of(self) -> dict[str, str]:
        """What it is, for a reader."""
        saved = self.state["config"]
        return {
            "checkpoint": str(self.path),
            "its SHA-256": hashlib.sha256(self.path.read_bytes()).hexdigest(),
            "model": f"{self.cfg.backbone}, min_size {self.cfg.min_size}, max_size {self.cfg.max_size}, trained on "
                     + (f"tiles ({self.cfg.tiles})" if self.cfg.tiles else "whole pictures")
                     + f" in {self.epoch + 1} epochs, {self.step} steps",
            "trained on": f"{saved['dataset']['root'] or saved['dataset']['format']}, seed {saved['seed']}",
        }

    @property
    def thresholds(self) -> dict[str, float]:
        """By class; empty where the checkpoint holds none."""
        return {name: point["threshold"] for name, point in self.points["points"].items()} if self.points else {}

    def overlap(self, name: str, shown: np.ndarray) -> int | None:
        """How many of these pictures, `identities`, it was `trained_on` or its thresholds were `chosen_on`; None where that is
        not known, as of an earlier release."""
        known = self.state.get(name)
        return None if known is None else int(np.isin(shown, known.numpy()).sum())

    def with_points(self, points: Mapping[str, Any], chosen_on: np.ndarray) -> dict[str, Any]:
        """A checkpoint of these thresholds, with all that judging and predicting need and nothing to resume by."""
        kept = ("format", "classes", "config", "epoch", "batch", "step", "trained_px", "trained_on")
        return {**{key: self.state[key] for key in kept if key in self.state}, "model": checkpoint.weights(self.state),
                "chosen_on": torch.from_numpy(chosen_on),
                "metrics": {**(self.state.get("metrics") or {}), "operating_points": dict(points)}}

    def samples(self, index: AnnotationIndex, tiles: int | str) -> tuple[AnnotationIndex, ModelConfig]:
        """An index and settings for a dataset of its pictures in tiles: as the model was trained (`model`), of so many px,
        `none`, or `auto`: as trained, and where that was on whole pictures those in tiles that the model would see at less than
        half the scale it was trained at."""
        whole = replace(self.cfg, tiles=None)
        if tiles == "model" or (tiles == AUTO and self.cfg.tiles is not None):
            return index, self.cfg
        if isinstance(tiles, int):
            return TiledIndex(index, tiles, self.cfg.tile_overlap), whole
        if tiles == "none" or self.trained_px is None:
            return index, whole
        sizes = np.concatenate([[self.trained_px], index.sizes])
        scales = target_sizes(sizes, whole.min_size, whole.max_size).max(1) / sizes.max(1)
        cut = scales[1:] < _REDUCED * scales[0]
        return (TiledIndex(index, round(whole.min_size / scales[0]), self.cfg.tile_overlap, cut) if cut.any() else index), whole
