"""Signals unwind the stack, but not what must be whole; the same one twice is one, another later ends all."""

import os
import signal
import subprocess
import sys
import time

import pytest

from weldtrain import interruption


@pytest.fixture(autouse=True)
def as_it_was():
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_what_is_deferred_ends_first_also_from_within():
    interruption.listen(signal.SIGTERM)
    done = []
    with pytest.raises(interruption.Interrupted) as asked, interruption.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        with interruption.deferred():
            done.append(interruption.came())
        done.append("outer")
    assert done == [signal.SIGTERM, "outer"] and asked.value.exit_code == 143 and str(asked.value) == "terminated"
    assert interruption.came() is None
    with interruption.deferred():
        pass


def test_an_error_in_what_is_deferred_is_what_is_told():
    interruption.listen(signal.SIGINT)
    with pytest.raises(ValueError, match="mine"), interruption.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("mine")


@pytest.mark.parametrize(("pause_s", "code"), [(0.05, 0), (1.3, 143)])
def test_twice_at_once_is_once_and_again_later_ends_it(pause_s, code):
    script = f"""
import os, signal, time
from weldtrain import interruption
interruption.listen(signal.SIGTERM, signal.SIGINT)
try:
    with interruption.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep({pause_s})
        os.kill(os.getpid(), signal.SIGTERM)
except interruption.Interrupted:
    pass
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == code


def test_a_process_that_cannot_raise_ends_anyway_and_not_for_other_signals():
    script = """
import ctypes, os, signal, threading, time
from weldtrain import interruption
interruption.listen(signal.SIGTERM)
signal.signal(signal.SIGUSR1, lambda *_: None)
interruption.end_anyway(after_s=0.3)
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.8)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
until, one = time.monotonic() + 25, ctypes.CDLL(None)
while time.monotonic() < until:
    try:
        one.pause()  # a library's own waiting
    except BaseException:
        pass
"""
    begun = time.monotonic()
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 143
    assert time.monotonic() - begun < 20
