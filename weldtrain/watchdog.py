"""A hang is a failure too: where nothing has moved for too long, the run says where everything stands, and ends.

Who makes progress says so with `beat`; it costs a fraction of a microsecond. The error is raised in the main thread, which then
leaves a checkpoint; where that does not come back from a library either, the process is ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from weldtrain.errors import HangError

log = logging.getLogger(__name__)

_GRACE_S = 20.0  # from the error to the end of the process
_beat: tuple[float, str] = (0.0, "")


def beat(at: str) -> None:
    """Something moved: what comes next, in words."""
    global _beat
    _beat = (time.monotonic(), at)


@contextlib.contextmanager
def watching(
    limit_s: float | None, more: Callable[[], str], last_words: Callable[[HangError], None], grace_s: float = _GRACE_S
) -> Iterator[None]:
    """Inside, silence of `limit_s` raises HangError in the main thread; null watches nothing. `more` adds stacks of other
    processes; `last_words` is called before the process is ended, where it does not end itself."""
    if limit_s is None or threading.current_thread() is not threading.main_thread():  # signals reach that one alone
        yield
        return
    over = threading.Event()
    raised: list[HangError] = []

    def raise_it(number: int, frame: object) -> None:
        if raised and not over.is_set():
            raise raised[0]

    def watch() -> None:
        while not over.wait(min(limit_s / 4, 5.0)):
            since, at = _beat
            if time.monotonic() - since < limit_s:
                continue
            log.debug("stacks:\n%s%s", stacks(), more())
            error = HangError(f"nothing has moved for {limit_s:g} s, in {at}", "trainer.hang_s",
                              "run.log has the stacks of all threads; raise it where so long is right")
            raised.append(error)
            signal.pthread_kill(threading.main_thread().ident, _SIGNAL)
            if not over.wait(grace_s):
                last_words(error)
                os._exit(error.exit_code)
            return

    beat("the start")
    before = signal.signal(_SIGNAL, raise_it)
    thread = threading.Thread(target=watch, name="weldtrain-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(_SIGNAL, before)


_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGTERM) + 5


def stacks() -> str:
    """Where each thread of this process is."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")
