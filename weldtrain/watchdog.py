"""A hang is a failure too: where nothing has moved for too long, the run says where everything stands, and ends.

Who makes progress says so with `beat`, which costs a fraction of a microsecond. The error is raised in the main thread, which
then leaves a checkpoint; where that does not come back from a library, the process is ended, at last by a timer that needs no
Python.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from weldtrain.errors import HangError

_GRACE_S = 60.0  # without progress, from the error to the end of the process
_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGUSR2", None)
_beat: tuple[float, str] = (0.0, "")


def beat(at: str) -> None:
    """Something moved: what comes next, in words."""
    global _beat
    _beat = (time.monotonic(), at)


@contextlib.contextmanager
def watching(
    limit_s: float | None, log: Path, more: Callable[[], str], last_words: Callable[[HangError], None], grace_s: float = _GRACE_S
) -> Iterator[None]:
    """Inside, silence of `limit_s` raises HangError in the main thread; null watches nothing. The stacks of all threads are
    appended to `log`, and those of other processes that `more` gives; `last_words` is called before the process is ended, where
    it does not end itself."""
    # Signals reach the main thread alone.
    if limit_s is None or _SIGNAL is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    over, raised = threading.Event(), []

    def raise_it(number: int, frame: object) -> None:
        if raised and not over.is_set():
            raise raised[0]

    def watch() -> None:
        pause_s = min(limit_s / 4, 5.0)
        while True:
            if sys.__stderr__ is not None:  # against a library that keeps Python's lock, and with it this thread
                faulthandler.dump_traceback_later(2 * (limit_s + grace_s), exit=True, file=sys.__stderr__)
            if over.wait(pause_s):
                return
            since, at = _beat
            if time.monotonic() - since >= limit_s:
                break
        # Not by way of `logging`, whose locks the main thread may hold.
        with contextlib.suppress(OSError), open(log, "ab", buffering=0) as file:
            file.write(f"nothing has moved for {limit_s:g} s, in {at}; the stacks:\n".encode())
            faulthandler.dump_traceback(file)
            file.write(more().encode())
        error = HangError(f"nothing has moved for {limit_s:g} s, in {at}", "trainer.hang_s",
                          f"{log.name} has the stacks of all threads; raise it where so long is right")
        raised.append(error)
        beat("the end")
        signal.pthread_kill(threading.main_thread().ident, _SIGNAL)
        while not over.wait(pause_s):
            if time.monotonic() - _beat[0] > grace_s:
                try:
                    last_words(error)
                finally:
                    os._exit(error.exit_code)

    beat("the start")
    before = signal.signal(_SIGNAL, raise_it)
    thread = threading.Thread(target=watch, name="weldtrain-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        signal.signal(_SIGNAL, before)
