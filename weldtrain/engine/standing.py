"""How the epochs of a run stand: which is the best, for how long, and which of them keep a checkpoint of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weldtrain.config import TrainerConfig


class Standing:
    """`best` holds the `epoch`, from 0, and the `metrics` of the best, None before any was judged; `stale` counts the evaluations
    since. Epochs elsewhere count from 1."""

    def __init__(self, cfg: TrainerConfig) -> None:
        self._cfg = cfg
        self.best: dict[str, Any] | None = None
        self.stale = 0
        self._ranking: list[list[float]] = []  # [worth, epoch] of those that are kept, the best first

    @property
    def out_of_patience(self) -> bool:
        return self._cfg.patience is not None and self.stale >= self._cfg.patience

    def judged(self, epoch: int, metrics: dict[str, Any]) -> bool:
        """Whether this epoch is the best, as it is where none before was better: without any AP the latest is the best."""
        better = self.best is None or _worth(metrics) >= _worth(self.best["metrics"])
        self.stale = 0 if better else self.stale + 1
        if better:
            self.best = {"epoch": epoch - 1, "metrics": metrics}
        if self._cfg.keep_best > 1:
            self._ranking = sorted([*self._ranking, [_worth(metrics), epoch]], reverse=True)[: self._cfg.keep_best]
        return better

    def is_best(self, epoch: int) -> bool:
        return self.best is not None and self.best["epoch"] == epoch - 1

    def kept(self, epoch: int) -> set[str]:
        """The names of the checkpoints of single epochs that are to be there after this one."""
        every = self._cfg.keep_every
        epochs = {int(of) for _, of in self._ranking} | (set(range(every, epoch + 1, every)) if every else set())
        return {name_of(of) for of in epochs}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"best": self.best, "stale": self.stale, "ranking": self._ranking}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.stale, self._ranking = state["best"], state["stale"], state["ranking"]


def name_of(epoch: int) -> str:
    """Of the checkpoint of one epoch."""
    return f"epoch_{epoch:04d}.pt"


def _worth(metrics: Mapping[str, Any]) -> float:
    return -1.0 if metrics["map"] is None else metrics["map"]
