"""The exponential moving average of a model's weights, which is judged, kept and used in their place."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Ema:
    """`model` is the average; its buffers are the trained model's latest."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay, self.updates = decay, 0
        self._trained, self._buffers = list(model.parameters()), list(model.buffers())
        self._averages, self._kept = list(self.model.parameters()), list(self.model.buffers())

    @torch.no_grad()
    def update(self) -> None:
        """After each step. Early on the average is over the steps so far: its decay climbs as (1 + n) / (10 + n), as in
        TensorFlow's ExponentialMovingAverage."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self._averages, self._trained, 1 - decay)
        for kept, latest in zip(self._kept, self._buffers):
            kept.copy_(latest)
