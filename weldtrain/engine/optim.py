"""Optimiser and learning rate."""

from __future__ import annotations

import bisect
import functools
import math

import torch
from torch import nn

from weldtrain.config import OptimizerConfig, SchedulerConfig


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """SGD or AdamW over the parameters that train."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = parameters[0].device.type in ("cuda", "cpu")  # one pass over memory instead of ten
    if cfg.name == "sgd":
        return torch.optim.SGD(parameters, cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay, fused=fused)
    return torch.optim.AdamW(parameters, cfg.lr, weight_decay=cfg.weight_decay, fused=fused)


def build_scheduler(
    optimizer: torch.optim.Optimizer, cfg: SchedulerConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Stepped once after each optimiser step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(lr_factor, total=total_steps, cfg=cfg))


def lr_factor(step: int, total: int, cfg: SchedulerConfig) -> float:
    """The share of `optimizer.lr` at `step` (from 0) of `total`: a linear warm-up, then the schedule.

    cosine: half a cosine from 1 to `final` (Loshchilov & Hutter 2017, eq. 5, without restarts).
    """
    warmup = round(cfg.warmup * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if cfg.name == "multistep":
        return cfg.gamma ** bisect.bisect_right(sorted(cfg.milestones), step / total)
    if cfg.name == "cosine":
        done = min(1.0, (step - warmup) / max(total - 1 - warmup, 1))
        return cfg.final + (1 - cfg.final) * 0.5 * (1 + math.cos(math.pi * done))
    return 1.0
