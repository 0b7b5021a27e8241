"""Checkpoints: plain values and CPU tensors only, so that `torch.load(weights_only=True)` opens them anywhere.

A file appears whole or not at all: written beside its place, synced, renamed.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weldtrain.errors import DataError, TrainingError

FORMAT = 1


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Writes `state` to `path`. Raises TrainingError where that fails; an older file at `path` then stays."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as out:
            try:
                torch.save({"format": FORMAT, **_on_cpu(state)}, out)
                out.flush()
                os.fsync(out.fileno())
                os.replace(out.name, path)
            except BaseException:
                os.unlink(out.name)
                raise
    except (OSError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        raise TrainingError(f"the checkpoint cannot be written ({' '.join(str(e).split())})", path,
                            "free some disk space; the last whole checkpoint is untouched") from e


def publish(path: Path, name: str) -> Path:
    """Gives the checkpoint at `path` a second name in the same folder, at once and without writing it again."""
    target, temporary = path.with_name(name), path.with_name(f".{name}.link")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:  # some network and USB file systems have no hard links
        shutil.copyfile(path, temporary)
    os.replace(temporary, target)
    return target


def load(path: str | Path) -> dict[str, Any]:
    """The checkpoint at `path`, on the CPU. Raises DataError for a file that is absent, damaged or something else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError("no such checkpoint", path, "give the path of a best.pt or last.pt") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, KeyError, ValueError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise DataError(f"cannot be loaded as a checkpoint ({reason})", path, "it is damaged or not weldtrain's") from e
    if not isinstance(state, dict) or not {"format", "model", "classes", "config"} <= state.keys():
        raise DataError("is not a checkpoint of weldtrain", path, "bare weights go into model.weights=PATH")
    if state["format"] != FORMAT:
        raise DataError(f"has format {state['format']}, this release reads {FORMAT}", path, "use the release that wrote it")
    return state


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {k: _on_cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(v) for v in value)
    return value
