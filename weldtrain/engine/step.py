"""TrainingStep: forward, backward and update. The one way in which weights change, for the trainer and for the doctor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weldtrain.data.batch import Batch

STEP_STAGES = ("forward", "backward", "optimizer")
LOSSES = ("classifier", "box_reg", "objectness", "rpn_box_reg")


class TrainingStep:
    """`add` once for each batch of a step, then `update`. Never waits for a CUDA device."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype | None,
        grad_clip: float | None = None,
    ) -> None:
        """`model` gives losses of a Batch, alone or within DistributedDataParallel; `dtype` is what it computes in, None for
        plain fp32."""
        self.model, self.optimizer, self.device, self.dtype = model, optimizer, device, dtype
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._clip = math.inf if grad_clip is None else grad_clip

    def add(
        self, batch: Batch, weight: float = 1.0, last: bool = True, lap: Callable[[str], None] = lambda stage: None
    ) -> torch.Tensor:
        """Adds the gradient of `weight` times the loss of a batch, the step's `last` one or not; returns its losses [4], by
        LOSSES. Ranks exchange gradients with the last."""
        apart = isinstance(self.model, DistributedDataParallel) and not last
        with self.model.no_sync() if apart else contextlib.nullcontext():
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                losses = self.model(batch)
            parts = torch.stack([losses[name] for name in LOSSES])
            lap("forward")
            self.scaler.scale(weight * parts.sum()).backward()
            lap("backward")
        return parts.detach()

    def update(self, lap: Callable[[str], None] = lambda stage: None) -> torch.Tensor:
        """Changes the weights by the gradients added so far; returns their norm, a scalar, before clipping.

        Where that is not finite the weights stay as they are.
        """
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        if not self.scaler.is_enabled():
            if self.optimizer.defaults["fused"]:
                self.optimizer.found_inf = (~torch.isfinite(norm)).float()  # as a scaler would tell it, on the device
            elif not torch.isfinite(norm):
                self.optimizer.zero_grad(set_to_none=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        lap("optimizer")
        return norm
