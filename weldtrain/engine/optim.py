"""Optimiser and learning rate."""

from __future__ import annotations

import bisect
import math

import torch
from torch import nn

from weldtrain.config import OptimizerConfig, SchedulerConfig


def build_optimizer(model: nn.Module, cfg: OptimizerConfig, pictures: int | None = None) -> torch.optim.Optimizer:
    """SGD or AdamW over the parameters that train; `pictures` are those of a step, by which the rate may be scaled.

    Its groups know their rate at full as `full_lr`; `set_rates` gives them the one of a step.
    """
    lr = cfg.lr * (pictures / cfg.pictures_per_lr if pictures and cfg.pictures_per_lr else 1.0)
    groups = []
    for body in (False, True):
        for plain in (False, True):  # norms and biases have one dimension
            parameters = [p for name, p in model.named_parameters()
                          if p.requires_grad and name.startswith("backbone.body.") == body and (p.ndim < 2) == plain]
            if parameters:
                groups.append({"params": parameters, "full_lr": lr * (cfg.backbone_lr if body else 1.0),
                               "weight_decay": cfg.norm_weight_decay if plain else cfg.weight_decay})
    fused = groups[0]["params"][0].device.type in ("cuda", "cpu")  # one pass over memory instead of ten
    if cfg.name == "sgd":
        return torch.optim.SGD(groups, lr, momentum=cfg.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr, fused=fused)


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Gives each group `factor` times its own rate at full."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * factor


def lr_factor(step: int, total: int, cfg: SchedulerConfig) -> float:
    """The share of `optimizer.lr` at `step` (from 0) of `total`: a linear warm-up, then the schedule.

    cosine: half a cosine from 1 to `final` (Loshchilov & Hutter 2017, eq. 5, without restarts). onecycle: up from 1/25 and
    down to 1/10000, each along half a cosine (Smith & Topin 2018, with the shape and the ends that are usual today).
    """
    warmup = round(cfg.warmup * total) if cfg.warmup_steps is None else min(cfg.warmup_steps, total)
    if step < warmup:
        return _cosine(1 / 25, 1.0, step / warmup) if cfg.name == "onecycle" else (step + 1) / (warmup + 1)
    if cfg.name == "multistep":
        return cfg.gamma ** bisect.bisect_right(sorted(cfg.milestones), step / total)
    if cfg.name in ("cosine", "onecycle"):
        done = min(1.0, (step - warmup) / max(total - 1 - warmup, 1))
        return _cosine(1.0, cfg.final if cfg.name == "cosine" else 1e-4, done)
    return 1.0


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))
