"""RunRecord: the run directory and its writers. The one place where a run is written down.

`config.yaml`, `metrics.jsonl`, `tensorboard/`, `run.log`, `summary.json`, `checkpoints/`. All are complete after any end:
success, error, Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from weldtrain.errors import ConfigError

log = logging.getLogger(__name__)


class RunRecord:
    """A context manager: what happens inside is logged, and the way it ended becomes `status` of the summary."""

    def __init__(self, run_dir: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
        """Takes the directory for this run and writes its configuration there.

        Raises ConfigError if another run has the directory, or if it cannot be written.
        """
        self.dir = Path(run_dir)
        self.checkpoints = self.dir / "checkpoints"
        self.summary: dict[str, Any] = {}
        self._tensorboard = None
        self._start_s = time.time()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            # Created, never opened: two runs in one directory would mix.
            self._jsonl = open(self.dir / "metrics.jsonl", "x", buffering=1, encoding="utf-8")  # noqa: SIM115
        except FileExistsError:
            raise ConfigError("holds another run", self.dir, "leave hydra.run.dir alone, or name a new folder") from None
        except OSError as e:
            raise ConfigError(f"cannot be written ({e.strerror})", self.dir, "set output_dir to a folder with room") from None
        (self.dir / "config.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), "utf-8")
        self._root_logger = logging.getLogger("weldtrain")
        self._handlers = [_handler(logging.FileHandler(self.dir / "run.log", encoding="utf-8"),
                                   "%(asctime)s %(levelname)s %(name)s: %(message)s"),
                          _handler(_Stderr(), "%(message)s")]
        # A traceback belongs into run.log; the screen gets one line from the entry point.
        self._handlers[1].addFilter(lambda r: r.exc_info is None)

    def __enter__(self) -> RunRecord:
        self._root_logger.setLevel(logging.INFO)
        self._root_logger.propagate = False
        for handler in self._handlers:
            self._root_logger.addHandler(handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            status = "done"
        elif issubclass(kind, KeyboardInterrupt):
            status = "interrupted"
        else:
            status = "failed"
            log.error("the run failed", exc_info=error)
        known = {"status": status, "run_dir": str(self.dir)} | ({"error": str(error)} if status == "failed" else {})
        text = json.dumps(_plain(known | self.summary), indent=2, ensure_ascii=False)
        (self.dir / "summary.json").write_text(text + "\n", "utf-8")
        self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        for handler in self._handlers:
            self._root_logger.removeHandler(handler)
            handler.close()

    def scalars(self, step: int, values: Mapping[str, float | None], **more: float) -> None:
        """Writes one set of figures under their TensorBoard tags. None means "nothing can be said" and is null in
        metrics.jsonl; numbers that are not finite stand there as text, since JSON has none."""
        line = {"step": step, **more, "time_s": round(time.time() - self._start_s, 3), **_plain(values)}
        self._jsonl.write(json.dumps(line, ensure_ascii=False) + "\n")
        for tag, value in values.items():
            if value is not None:
                self.tensorboard.add_scalar(tag, value, step)

    @property
    def tensorboard(self):
        """The SummaryWriter of `tensorboard/`, made on first use: its import takes a second."""
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(self.dir / "tensorboard", flush_secs=10)
        return self._tensorboard


class _Stderr(logging.StreamHandler):
    """Writes to what standard error is at that moment: the progress bar puts itself there while it is drawn."""

    @property
    def stream(self):
        return sys.stderr

    @stream.setter
    def stream(self, _) -> None:
        pass


def _handler(handler: logging.Handler, form: str) -> logging.Handler:
    handler.setFormatter(logging.Formatter(form))
    return handler


def _plain(value: Any) -> Any:
    """What JSON can hold: not-finite numbers as text, paths as text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value) if isinstance(value, Path) else value
