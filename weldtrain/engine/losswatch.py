"""LossWatch: what happens to a step whose loss or gradient is not finite."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

import torch

from weldtrain.data.loader import Loader
from weldtrain.engine.distributed import summed
from weldtrain.engine.step import LOSSES
from weldtrain.errors import TrainingError
from weldtrain.models.detector import Detector

log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    values: torch.Tensor
    ready: torch.cuda.Event | None
    scaled: bool
    epoch: int
    step: int
    rows: list[int]


class LossWatch:
    """Stops the run on a loss or gradient that is not finite: at once on a CPU, one step late on CUDA, so that no step waits;
    the weights are not changed by such a step anyway. With `skip` it says which steps to leave out instead, and does wait."""

    def __init__(self, device: torch.device, loader: Loader, skip: bool) -> None:
        self._late = device.type == "cuda" and not skip
        self._skip = skip
        self._dataset = loader.dataset
        self._pending: deque[_Seen] = deque()
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, model: Detector) -> None:
        """Before a step: keeps the statistics of norms, which a forward pass changes at once."""
        if self._skip:
            self._kept = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def look(self, parts: torch.Tensor, norm: torch.Tensor, scaled: bool, epoch: int, step: int, rows: list[int]) -> bool:
        """Takes the losses [4] and the gradient's norm of a step on its way; `scaled` ones may overflow, which their scaler
        sees to. Returns whether to keep the step; raises TrainingError for an earlier one."""
        if self._skip:
            parts = summed(parts)  # all ranks leave the step out, or none
        values, ready = torch.cat([parts, norm[None]]), None
        if self._late:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._pending.append(_Seen(values, ready, scaled, epoch, step, rows))
        return self._check(keep=1 if self._late else 0)

    def settle(self) -> None:
        """Looks at all that is left; called before anything is saved."""
        self._check(keep=0)

    def _check(self, keep: int) -> bool:
        while len(self._pending) > keep:
            seen = self._pending.popleft()
            if seen.ready is not None:
                seen.ready.synchronize()
            if torch.isfinite(seen.values[:-1] if seen.scaled else seen.values).all():
                continue
            *parts, norm = seen.values.tolist()
            values = ", ".join(f"{name} {value:g}" for name, value in (*zip(LOSSES, parts), ("gradient norm", norm)))
            names = ", ".join(self._dataset.index.path(row) for row in seen.rows)
            error = TrainingError(
                f"the loss is not finite ({values})", f"epoch {seen.epoch + 1}, step {seen.step + 1}, pictures {names}",
                "lower optimizer.lr, raise scheduler.warmup, or set trainer.precision=fp32; last.pt is from before",
            )
            error.samples = self._dataset.named([(seen.epoch, row, 0) for row in seen.rows])
            if not self._skip:
                raise error
            log.warning("left out: %s", error)
            for buffer, before in self._kept:
                buffer.copy_(before)
            return False
        return True
