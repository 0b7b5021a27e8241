"""The checks of a composed configuration that come before any data is read or torch is imported: every value in its range, and
what keys ask of each other.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from weldtrain.config import AUTO, PATH_KEYS, Config, absolute, nearest, schema_keys, unknown_key
from weldtrain.errors import ConfigError


def validated(composed: DictConfig, cwd: str | os.PathLike[str]) -> Config:
    """The composed configuration as dataclasses, every value in its range, every path absolute.

    Relative paths are taken from `cwd` (the shell's folder); `~` and `$NAME` are expanded.
    Raises ConfigError for the first key that is wrong.
    """
    known = schema_keys()
    for name in _names(composed):
        if name not in known:  # only `open_dict` or a caller of this function gets past Hydra's own check
            raise unknown_key(name)
    for name in PATH_KEYS:
        value = OmegaConf.select(composed, name)
        if value is not None and not value.strip():
            raise ConfigError("is empty", name, "was a variable not set? Give a path, or null")
        if value is not None and (name, value) != ("resume", AUTO):
            OmegaConf.update(composed, name, absolute(value, cwd))
    cfg = OmegaConf.to_object(composed)
    assert isinstance(cfg, Config)
    for name, f in known.items():
        _check_range(name, OmegaConf.select(composed, name), f.metadata)
    _check_together(cfg)
    return cfg


def _names(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in node:
        yield f"{prefix}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            yield from _names(child, f"{prefix}{name}.")


def _check_range(name: str, value: Any, limits: dict[str, Any]) -> None:
    choices = limits.get("choices", ())
    if choices and OmegaConf.is_list(value):
        for item in value:
            _check_range(name, item, limits)
        return
    if isinstance(value, str):
        if choices and value not in choices:
            others = " or a number" if "ge" in limits else ""
            near = nearest(value, choices)
            raise ConfigError(
                f"'{value}' is not one of {', '.join(choices)}{others}", name, f"did you mean '{near}'?" if near else ""
            )
        return
    tests = {"ge": lambda v, x: v >= x, "gt": lambda v, x: v > x, "le": lambda v, x: v <= x, "lt": lambda v, x: v < x}
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [(op, limits[op]) for op in tests if op in limits]
    is_list = OmegaConf.is_list(value)
    if is_list and not len(value) and bounds:
        raise ConfigError("the list is empty", name, "give at least one value")
    for v in value if is_list else [value]:
        # NaN fails every comparison, so `not` is what refuses it.
        if v is not None and bounds and (v == math.inf or any(not tests[op](v, x) for op, x in bounds)):
            rule = " and ".join(f"{words[op]} {x}" for op, x in bounds) + (" and finite" if v == math.inf else "")
            raise ConfigError(f"{v} is out of range", name, f"it must be {rule}")


_OBJECTIVES = r"val/(map(_50|_75|_small|_medium|_large)?|mar|ap/.+|false_calls\w*)|images_per_s|train_s"


def _check_together(cfg: Config) -> None:
    if cfg.model.max_size < cfg.model.min_size:
        raise ConfigError(
            f"{cfg.model.max_size} is smaller than model.min_size={cfg.model.min_size}", "model.max_size",
            "min_size bounds the shorter side of a picture, max_size the longer",
        )
    if cfg.dataset.format != "synthetic" and cfg.dataset.root is None:
        raise ConfigError("not set", "dataset.root", "give the folder of your data: dataset.root=/path/to/it")
    if cfg.dataset.format == "synthetic" and cfg.dataset.root is not None:
        raise ConfigError("has no meaning for drawn pictures", "dataset.root", "add dataset=auto to read your own folder")
    for name in ("output_dir", "cache_dir"):
        folder = getattr(cfg, name)
        if cfg.dataset.root is not None and Path(folder).is_relative_to(cfg.dataset.root):
            raise ConfigError(f"{folder} lies below dataset.root, where nothing is written", name, "name another folder")
    if cfg.dataset.split.val + cfg.dataset.split.test >= 1:
        raise ConfigError("val and test leave nothing to train on", "dataset.split", "their sum must be below 1")
    try:
        re.compile(cfg.dataset.split.group or "")  # `auto` is one as well
    except re.error as e:
        raise ConfigError(f"is no regular expression ({e})", "dataset.split.group", "for instance 'weld_[0-9]+'") from None
    for name in ("window_percentiles", "window_levels"):
        window = getattr(cfg.model, name)
        if window is not None and not (len(window) == 2 and window[0] < window[1]):
            raise ConfigError(f"{window} is no window", f"model.{name}", "give two numbers, the lower first")
    if cfg.dataset.classes is not None and not (
            cfg.dataset.classes and all(isinstance(name, str) and name.strip() for name in cfg.dataset.classes)):
        raise ConfigError("names no class", "dataset.classes", "list every class, or set null to find them in the data")
    if cfg.dataset.classes is not None and len(set(cfg.dataset.classes)) != len(cfg.dataset.classes):
        raise ConfigError("a class stands twice in the list", "dataset.classes", "name each class once")
    if "jsonl" not in cfg.trainer.log:
        raise ConfigError("jsonl cannot be left out", "trainer.log", "resuming and comparing runs read metrics.jsonl: add it")
    for package in ("mlflow", "wandb"):
        if package in cfg.trainer.log and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed", "trainer.log", f"pip install 'weldtrain[{package}]'")
    steps = cfg.trainer.profile
    if steps is not None and not (len(steps) == 2 and steps[0] <= steps[1]):
        raise ConfigError(f"{steps} are no steps", "trainer.profile", "give the first and the last: [20,25]")
    if not re.fullmatch(_OBJECTIVES, cfg.sweep.objective):
        raise ConfigError(f"'{cfg.sweep.objective}' is nothing a run is judged by", "sweep.objective",
                          "for instance val/map_50, val/map, val/ap/CLASS, val/false_calls_per_picture, images_per_s, train_s")
    if cfg.task == "compare" and cfg.runs is None:
        raise ConfigError("not set", "runs", "give the directory of a sweep, or of several runs: runs=outputs/…")
    if cfg.task == "replay" and cfg.run is None:
        raise ConfigError("not set", "run", "give the directory of a run that failed: run=outputs/…")
    if cfg.task == "evaluate" and (cfg.checkpoint is None) == (cfg.evaluate.predictions is None):
        what = "not set" if cfg.checkpoint is None else "is given beside evaluate.predictions"
        raise ConfigError(what, "checkpoint", "give the model to judge, checkpoint=outputs/…/best.pt, or what one found, "
                          "evaluate.predictions=outputs/…/predictions.json")
    if cfg.task == "predict" and cfg.checkpoint is None:
        raise ConfigError("not set", "checkpoint", "give the model to use: checkpoint=outputs/…/best.pt")
    if cfg.task == "predict" and cfg.predict.source is None:
        raise ConfigError("not set", "predict.source", "give a folder, a picture, a pattern such as 'in/*.png', or a list")
    if not cfg.predict.save:
        raise ConfigError("the list is empty", "predict.save", "name at least one of pictures, json, csv, voc, yolo")
