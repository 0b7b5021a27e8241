"""Checkpoints: plain values and CPU tensors only, so that `torch.load(weights_only=True)` opens them anywhere."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from weldtrain.atomic import DRAFTS, whole
from weldtrain.errors import DataError, TrainingError, origins, reason

FORMAT = 2
_MAKE_ROOM = "free some disk space; the last whole checkpoint is untouched"


class Writer:
    """Writes checkpoints in the background, one after the other: training goes on as soon as their values are copied."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "weldtrain-checkpoint")
        self._writing: Future[None] | None = None

    def write(self, path: Path, state: Mapping[str, Any], then: Callable[[Path], None] = lambda path: None) -> None:
        """Copies `state` and returns; `then` is called with the path once the file is there.

        Raises TrainingError for the checkpoint before, where that could not be written.
        """
        self.wait()
        self._writing = self._pool.submit(_write, path, snapshot(state), then)

    def wait(self) -> None:
        """Until all is written. Raises TrainingError where it could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Waits and ends the thread; an error of the last checkpoint is raised."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()


def _write(path: Path, state: Mapping[str, Any], then: Callable[[Path], None]) -> None:
    save(path, state)
    then(path)


def snapshot(value: Any) -> Any:
    """The same with every tensor a copy in the CPU's memory, of its own storage."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {k: snapshot(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(v) for v in value)
    return value


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Writes `state` to `path`. Raises TrainingError where that fails; an older file at `path` then stays."""
    try:
        with whole(path, "wb", sync=True) as out:
            torch.save({"format": FORMAT, **state}, out)
    except (OSError, RuntimeError) as e:  # torch makes a RuntimeError of a full disk's
        said = next((origin.strerror for origin in origins(e) if isinstance(origin, OSError) and origin.strerror), str(e))
        raise TrainingError(f"the checkpoint cannot be written ({said})", path, _MAKE_ROOM) from e


def publish(path: Path, name: str) -> Path:
    """Copies the checkpoint at `path` under another name in its folder, so that damage to one leaves the other; where there is
    no room for a copy it is a second name of the same file. Raises TrainingError where neither can be."""
    target, link = path.with_name(name), path.with_name(f".{name}.draft")
    try:
        try:
            with open(path, "rb") as source, whole(target, "wb", sync=True) as out:
                shutil.copyfileobj(source, out, 2**20)
        except OSError:
            link.unlink(missing_ok=True)
            os.link(path, link)
            os.replace(link, target)
    except OSError as e:
        raise TrainingError(f"the checkpoint cannot be written ({e.strerror})", target, _MAKE_ROOM) from e
    return target


def tidy(folder: Path) -> None:
    """Removes what a run that was killed left half written."""
    for file in folder.glob(DRAFTS):
        with contextlib.suppress(OSError):
            file.unlink()


def load(path: str | Path) -> dict[str, Any]:
    """The checkpoint at `path`, on the CPU. Raises DataError for a file that is absent, damaged or something else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError("no such checkpoint", path, "give the path of a best.pt or last.pt") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, KeyError, ValueError) as e:
        raise DataError(f"cannot be loaded as a checkpoint ({reason(e)})", path, "it is damaged or not weldtrain's") from e
    if not isinstance(state, dict) or not {"format", "model", "classes", "config"} <= state.keys():
        raise DataError("is not a checkpoint of weldtrain", path, "bare weights go into model.weights=PATH")
    if state["format"] not in (1, FORMAT):
        raise DataError(f"has format {state['format']}, this release reads {FORMAT}", path, "use the release that wrote it")
    return state


def is_of_step(path: Path, step: int) -> bool:
    """Whether there is a sound checkpoint of that step."""
    try:
        return load(path)["step"] == step
    except DataError:
        return False


def epochs_done(state: Mapping[str, Any]) -> int:
    """How many epochs a checkpoint has behind it, one that was begun included."""
    return state["epoch"] + (state["batch"] > 0 if state["format"] == FORMAT else 1)


def weights(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint's weights to judge by and to use: their moving average where there is one."""
    return state.get("ema") or state["model"]
