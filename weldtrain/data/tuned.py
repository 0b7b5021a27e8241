"""What task=doctor measured for a machine and a data set, kept in `cache_dir` for every later run's `auto`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import replace
from datetime import date
from pathlib import Path

import yaml

from weldtrain.config import Config, LoaderConfig
from weldtrain.data.index import AnnotationIndex
from weldtrain.errors import ConfigError
from weldtrain.telemetry.machine import processor, usable_cores

log = logging.getLogger(__name__)

TOGETHER = ("workers", "num_workers", "prefetch_factor")  # one setting: so many of such a kind with so much in hand
SETTINGS = (*TOGETHER, "cache")  # which the doctor decides


def tuned_file(cfg: Config, index: AnnotationIndex, device_name: str) -> Path:
    """Where the settings for these pictures, at this scale, on this machine are kept."""
    known = [str(index.root), cfg.model.min_size, cfg.model.max_size, processor(), usable_cores(), device_name]
    name = hashlib.blake2b(json.dumps(known).encode(), digest_size=12).hexdigest()
    return Path(cfg.cache_dir) / "tuned" / f"{name}.yaml"


def save(file: Path, settings: LoaderConfig, verdict: str) -> None:
    """Writes the settings as a file of `conf/loader/` has them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    body = yaml.safe_dump({name: getattr(settings, name) for name in SETTINGS}, sort_keys=False)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(f"# Measured by task=doctor on {date.today()}: {verdict}\n{body}", "utf-8")
    beside.replace(file)


def tuned(cfg: LoaderConfig, file: Path) -> LoaderConfig:
    """The settings with what was measured in place of `auto`: of TOGETHER only where all are and no start method is set.

    Raises ConfigError for loader=tuned where nothing was, or where the file cannot be understood.
    """
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        if cfg.tuned:
            raise ConfigError("nothing was measured yet for this data, scale and machine", "loader=tuned",
                              "run task=doctor with the same dataset and model first") from None
        return cfg
    try:
        known = yaml.safe_load(text)
        free = not cfg.multiprocessing_context and all(getattr(cfg, name) == "auto" for name in TOGETHER)
        chosen = {name: known[name] for name in TOGETHER if free} | ({"cache": known["cache"]} if cfg.cache == "auto" else {})
        if free and not (chosen["workers"] in ("thread", "process") and chosen["num_workers"] >= 1 <= chosen["prefetch_factor"]):
            raise ValueError
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"cannot be understood ({type(e).__name__})", file, "remove it, or run task=doctor again") from None
    if chosen:
        log.info("loader: %s, as task=doctor measured (%s)", ", ".join(f"{k}={v}" for k, v in chosen.items()), file)
    return replace(cfg, **chosen)
