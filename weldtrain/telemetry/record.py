"""RunRecord: the run directory and its writers. The one place where a run is written down.

`config.yaml`, `metrics.jsonl`, `tensorboard/`, `run.log`, `summary.json`, `checkpoints/`. All are complete after any end:
success, error, Ctrl-C. A run that is resumed goes on in its directory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml

from weldtrain.errors import ConfigError
from weldtrain.locks import lock
from weldtrain.telemetry import crash
from weldtrain.telemetry.writers import WRITERS

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
DONE = "done"  # the status of a run that reached its end
PRUNED = "pruned"  # of one that a study ended early
FINISHED = (DONE, PRUNED)


class RunRecord:
    """A context manager: what happens inside is logged, and the way it ended becomes `status` of the summary."""

    def __init__(self, run_dir: str | os.PathLike[str], config: Mapping[str, Any], resumed: bool = False,
                 writers: Sequence[str] = ("tensorboard",)) -> None:
        """Takes the directory for this run, a new one or that of a run to be resumed; `writers` are names of `WRITERS`.

        Raises ConfigError if another run has the directory, or if it cannot be written.
        """
        self.dir, self.config = Path(run_dir), config
        self.checkpoints, self.log_file = self.dir / "checkpoints", self.dir / "run.log"
        self.summary: dict[str, Any] = {}
        self.unchanged = False  # by a run that had nothing left to do
        self._names, self._opened = [name for name in writers if name in WRITERS], None
        self._start_s = self._made_s = time.time()
        self._purge_step: int | None = None
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            # Created, never opened: two runs in one directory would mix.
            self._jsonl = open(self.dir / METRICS, "a" if resumed else "x", 1, "utf-8", "backslashreplace")  # noqa: SIM115
        except FileExistsError:
            raise ConfigError("holds another run", self.dir, "leave hydra.run.dir alone, or name a new folder") from None
        except OSError as e:
            raise ConfigError(f"cannot be written ({e.strerror})", self.dir, "set output_dir to a folder with room") from None
        if lock(self._jsonl.fileno(), exclusive=True, wait=False) is False:
            raise ConfigError("is being written by a run that is still going on", self.dir, "wait for it, or end it")
        if not resumed:
            self._write_config()
        self._root_logger = logging.getLogger("weldtrain")
        self._handlers = [_to_file(self.log_file), _handler(_Stderr(), "%(message)s")]
        # A traceback belongs into run.log; the screen gets one line from the entry point.
        self._handlers[1].addFilter(lambda r: r.exc_info is None)
        self._handlers[1].setLevel(logging.INFO)

    def __enter__(self) -> RunRecord:
        self._root_logger.setLevel(logging.DEBUG)  # stacks, which are for run.log alone
        self._root_logger.propagate = False
        for handler in self._handlers:
            self._root_logger.addHandler(handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            status = DONE
        elif issubclass(kind, KeyboardInterrupt):
            status = "interrupted"
        else:
            status = "failed"
            log.error("the run failed", exc_info=error)
            _leave(error, self.config, self.log_file, self.dir / crash.FILE)
        known = {"status": status, "run_dir": str(self.dir)} | (
            {"error": str(error), "exit_code": getattr(error, "exit_code", 1)} if status == "failed" else {})
        if status == "interrupted" and (other := self._failed_elsewhere()):
            known |= {"status": "failed", "error": other, "exit_code": 1}  # torchrun ends all ranks where one fails
        if status == DONE:
            for file in (self.dir / crash.FILE, *self.dir.glob(crash.OF_RANKS)):
                file.unlink(missing_ok=True)  # of an earlier process of a run that went on
        if not self.unchanged:
            self.write(SUMMARY, known | self.summary)
        self._jsonl.close()
        for writer in self._opened or ():
            writer.close((known | self.summary)["status"])
        for handler in self._handlers:
            self._root_logger.removeHandler(handler)
            handler.close()

    def _failed_elsewhere(self) -> str | None:
        """What another rank failed of, while this process ran."""
        for file in self.dir.glob(crash.OF_RANKS):
            with contextlib.suppress(OSError, ValueError, KeyError):  # not written to its end
                if file.stat().st_mtime >= self._made_s:
                    return json.loads(file.read_text("utf-8"))["error"]
        return None

    @property
    def elapsed_s(self) -> float:
        """Since the run began, without the time between its processes where it was resumed."""
        return time.time() - self._start_s

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes a JSON file into the run directory."""
        _write(self.dir / name, values)

    def rewind(self, step: int, judged: bool = True) -> None:
        """What was written of later steps is dropped, and of this one's evaluation where the run is yet to be `judged`: a run
        that is resumed writes it again."""
        self._purge_step = step + 1
        file = self.dir / METRICS
        end = step + 0.5 * judged
        kept = list(itertools.takewhile(lambda line: _place_of(line) <= end, file.read_bytes().splitlines(keepends=True)))
        if kept:
            self._start_s = time.time() - json.loads(kept[-1])["time_s"]
        os.truncate(file, sum(map(len, kept)))
        self._write_config()

    def _write_config(self) -> None:
        (self.dir / "config.yaml").write_text(yaml.safe_dump(dict(self.config), sort_keys=False, allow_unicode=True), "utf-8")

    def scalars(self, step: int, values: Mapping[str, float | None], **more: float) -> None:
        """Writes one set of figures under their TensorBoard tags. None means "nothing can be said" and is null in
        metrics.jsonl; numbers that are not finite stand there as text, since JSON has none."""
        line = {"step": step, **more, "time_s": round(self.elapsed_s, 3), **_plain(values)}
        self._jsonl.write(json.dumps(line, ensure_ascii=False) + "\n")
        for writer in self._writers:
            writer.scalars(step, {tag: value for tag, value in values.items() if value is not None})

    def picture(self, step: int, tag: str, image: np.ndarray) -> None:
        """Shows uint8 [H,W,3] RGB."""
        for writer in self._writers:
            writer.picture(step, tag, image)

    def curves(self, step: int, tag: str, curves: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Shows precision and recall by class, as `pr_curves` gives them."""
        for writer in self._writers:
            writer.curves(step, tag, curves)

    def describe(self, facts: Mapping[str, object], settings: Mapping[str, Any]) -> None:
        """Says what the run is: facts in words, settings by dotted key. Raises ConfigError where a writer has no server."""
        for writer in self._writers:
            writer.describe("/".join(self.dir.parts[-2:]), facts, settings)

    def result(self, settings: Mapping[str, Any], metrics: Mapping[str, float | None]) -> None:
        """Says what came of it: settings by dotted key, metrics by tag."""
        for writer in self._writers:
            writer.result(settings, {tag: value for tag, value in metrics.items() if value is not None})

    @property
    def _writers(self) -> list:
        """Opened on first use: their imports take seconds."""
        if self._opened is None:
            self._opened = []
            for name in self._names:  # one by one: where one has no server, those before it are closed
                self._opened.append(WRITERS[name](self.dir, self._purge_step))
        return self._opened


class Follower:
    """In the place of a RunRecord on every rank but the first, which alone writes: only errors reach the screen, and files of
    this rank's own."""

    def __init__(self, run_dir: str | os.PathLike[str], config: Mapping[str, Any], rank: int) -> None:
        self.dir, self.config, self._rank = Path(run_dir), config, rank
        self.checkpoints, self.log_file = self.dir / "checkpoints", self.dir / f"run.rank{rank}.log"
        self.summary: dict[str, Any] = {}
        self.unchanged = False
        self._root_logger = logging.getLogger("weldtrain")
        self._handlers = [_to_file(self.log_file, delay=True), _handler(_Stderr(), f"rank {rank}: %(message)s")]
        self._handlers[0].addFilter(lambda r: r.levelno >= logging.ERROR or r.levelno == logging.DEBUG)  # the rest the first says
        self._handlers[1].addFilter(lambda r: r.exc_info is None)
        self._handlers[1].setLevel(logging.ERROR)

    def __enter__(self) -> Follower:
        self._root_logger.setLevel(logging.DEBUG)
        self._root_logger.propagate = False
        for handler in self._handlers:
            self._root_logger.addHandler(handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, KeyboardInterrupt):
            log.error("this rank failed", exc_info=error)
            _leave(error, self.config, self.log_file, self.dir / crash.OF_RANKS.replace("*", str(self._rank)))
        for handler in self._handlers:
            self._root_logger.removeHandler(handler)
            handler.close()

    elapsed_s = 0.0

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        pass

    def rewind(self, step: int, judged: bool = True) -> None:
        pass

    def scalars(self, step: int, values: Mapping[str, float | None], **more: float) -> None:
        pass

    def picture(self, step: int, tag: str, image: np.ndarray) -> None:
        pass

    def curves(self, step: int, tag: str, curves: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        pass

    def describe(self, facts: Mapping[str, object], settings: Mapping[str, Any]) -> None:
        pass

    def result(self, settings: Mapping[str, Any], metrics: Mapping[str, float | None]) -> None:
        pass


def _place_of(line: bytes) -> float:
    """The step of a line of metrics.jsonl, of an evaluation's half a step later; infinity for the torn last line of a run that
    was killed."""
    try:
        values = json.loads(line)
        return values["step"] + 0.5 * any(name.startswith("val/") for name in values)
    except (ValueError, KeyError, TypeError):
        return math.inf


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


def _to_file(file: Path, delay: bool = False) -> logging.Handler:
    """With `delay` it is made when there is something to say. What is said may hold names of files that are no text."""
    return _handler(logging.FileHandler(file, encoding="utf-8", errors="backslashreplace", delay=delay),
                    "%(asctime)s %(levelname)s %(name)s: %(message)s")


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(_plain(values), indent=2, ensure_ascii=False) + "\n", "utf-8", errors="backslashreplace")


def _leave(error: BaseException, config: Mapping[str, Any], log_file: Path, file: Path) -> None:
    """What a report of a failure needs; where there is no room for it, the log has the most of it."""
    try:
        _write(file, crash.crash(error, config, log_file))
        error.crash = file
    except OSError as e:
        log.warning("%s cannot be written: %s", file.name, e.strerror)


def _plain(value: Any) -> Any:
    """What JSON can hold: not-finite numbers as text, paths as text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value) if isinstance(value, Path) else value
