"""What task=doctor measured for a machine and a data set, kept in `cache_dir` for every later run's `auto`."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace
from datetime import date
from pathlib import Path

import yaml

from weldtrain.config import Config, LoaderConfig
from weldtrain.data.index import AnnotationIndex
from weldtrain.errors import ConfigError
from weldtrain.telemetry.machine import processor, usable_cores

log = logging.getLogger(__name__)

SETTINGS = ("workers", "num_workers", "prefetch_factor", "pin_memory", "cache")  # which the doctor decides


def tuned_file(cfg: Config, index: AnnotationIndex, device_name: str) -> Path:
    """Where the settings for these pictures, at this scale, on this machine are kept."""
    known = [str(index.root), cfg.model.min_size, cfg.model.max_size, processor(), usable_cores(), device_name]
    name = hashlib.blake2b(json.dumps(known).encode(), digest_size=12).hexdigest()
    return Path(cfg.cache_dir) / "tuned" / f"{name}.yaml"


def save(file: Path, settings: LoaderConfig, verdict: str) -> None:
    """Writes the settings as a file of `conf/loader/` has them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    body = yaml.safe_dump({name: getattr(settings, name) for name in SETTINGS}, sort_keys=False)
    file.write_text(f"# Measured by task=doctor on {date.today()}: {verdict}\n{body}", "utf-8")


def tuned(cfg: LoaderConfig, file: Path) -> LoaderConfig:
    """The settings with what was measured in place of every `auto` among SETTINGS.

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
        chosen = {name: known[name] for name in SETTINGS if getattr(cfg, name) == "auto"}
    except (yaml.YAMLError, KeyError, TypeError) as e:
        raise ConfigError(f"cannot be understood ({type(e).__name__})", file, "remove it, or run task=doctor again") from None
    if chosen:
        log.info("loader: %s, as task=doctor measured (%s)", ", ".join(f"{k}={v}" for k, v in chosen.items()), file)
    return replace(cfg, **chosen)
