"""Signals that ask a run to end: they unwind the stack like Ctrl-C, but not in the midst of what must be whole; and processes
that end with the one that started them.

The first asks, a second one ends the process at once: unless it is the same that came twice, as where a launcher passes on
what the whole process group was sent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection, resource_tracker
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A run was asked to end by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM: what a shell says of a process that ended by the signal."""
        return 128 + self.number

    def __str__(self) -> str:
        return {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}.get(self.number, f"ended by signal {self.number}")


_TWICE_S = 1.0

_listened: set[int] = set()
_deferred = False
_came: int | None = None


def listen(*numbers: int) -> None:
    """From now on these signals raise Interrupted, wherever the main thread is then."""
    for number in numbers:
        _listened.add(number)
        signal.signal(number, _receive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # which whoever started this process may have held back


def end_anyway(after_s: float) -> None:
    """Ends the process so long after a signal, also where the main thread waits in a library and cannot raise: a rank for
    another that is gone."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            number = os.read(read, 1)[0]
            if number in _listened:
                time.sleep(after_s)
                os._exit(128 + number)

    threading.Thread(target=watch, name="weldtrain-end", daemon=True).start()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """What happens inside is done to its end; a signal that came meanwhile raises Interrupted after it."""
    global _deferred, _came
    if _deferred:  # within another
        yield
        return
    _deferred = True
    try:
        yield
    finally:
        _deferred = False
        number, _came = _came, None
    if number is not None:
        raise Interrupted(number)


@contextlib.contextmanager
def starting_processes(method: str | None = None) -> Iterator[None]:
    """Around starting worker processes, by that method of multiprocessing: they never get the signals of a run's end, which
    terminals and schedulers send to all of a process group. This process decides what comes of those, and does not raise
    half-way through."""
    if (method or multiprocessing.get_start_method()) != "fork":
        # As these methods do themselves, and then let the signals in again. It warns of the locks that a killed run leaves to it.
        with _environment(PYTHONWARNINGS="ignore:resource_tracker"):
            resource_tracker.ensure_running()
    with deferred():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _listened)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def end_with_main_process(sentinel: int | None = None) -> None:
    """Called in a process that another started: it ends when that one does, however that comes about. `sentinel` is the end of a
    pipe that closes then; multiprocessing's own is known."""
    def watch(sentinel: int) -> None:
        connection.wait([sentinel])
        os._exit(1)

    sentinel = multiprocessing.parent_process().sentinel if sentinel is None else sentinel
    threading.Thread(target=watch, args=(sentinel,), name="weldtrain-end", daemon=True).start()


def came() -> int | None:
    """The signal that came while it was deferred."""
    return _came


def _receive(number: int, frame: FrameType | None) -> None:
    global _came
    first_s = time.monotonic()

    def again(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - first_s > _TWICE_S:
            os.write(2, b"weldtrain: ended at once\n")
            os._exit(128 + number)

    for each in _listened:
        signal.signal(each, again)
    if not _deferred:
        raise Interrupted(number)
    _came = number
