"""Memory for batches, where none is to be fresh: the system hands out pages of zeros one by one, which costs more than to fill
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import itertools
import mmap
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import DupFd
from typing import ClassVar

import numpy as np
import psutil
import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 2**28

_SHOW, _SHOW_S, _STACK_BYTES = getattr(signal, "SIGRTMIN", 0) + 4, 0.5, 2**16

PID, ROW, STAGE, SINCE_NS, KEY = *range(4), slice(4, 7)  # where a worker is, as the dataset's `reading` has it
PLACE = 7


@functools.cache
def keep_pages() -> None:
    """Makes glibc keep what is freed for the next picture: 1600 fresh pages for each took a quarter of its time.

    Left to itself it learns that late or never, depending on what else the process has freed.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class Buffers:
    """Memory of batches, used again once nothing refers to it: fresh pages would cost more than filling them."""

    def __init__(self, at_most: int) -> None:
        """`at_most` pieces are kept for later."""
        self._free: list[np.ndarray] = []
        self._at_most = at_most

    def __call__(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], with anything in it."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        if len(memory) < nbytes:
            memory = np.empty(nbytes, np.uint8)
        part = memory[:nbytes]
        # The tensor holds this very array, and whatever is made of the tensor holds the tensor.
        weakref.finalize(part, self._take_back, memory).atexit = False
        return torch.from_numpy(part)

    def _take_back(self, memory: np.ndarray) -> None:
        if len(self._free) < self._at_most:
            self._free.append(memory)


def pinned(nbytes: int) -> torch.Tensor:
    """Page-locked memory: torch's own pool, which gives none out while a copy from it is under way."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class SharedBuffers:
    """Memory that worker processes fill in turns, where each of them is, and a file for its stack. A batch travels as its place.

    Anonymous, so that it is not of /dev/shm, which containers keep small. The way of torch takes a piece of that and an open
    file for each batch, and to receive one waits without limit for a worker that has stopped.
    """

    supported = hasattr(os, "memfd_create")  # Linux; elsewhere batches are sent byte by byte
    _made: ClassVar[weakref.WeakValueDictionary[int, SharedBuffers]] = weakref.WeakValueDictionary()
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, workers: int, pieces: int, nbytes: int, number: int | None = None, files: Sequence[DupFd] = ()) -> None:
        """`pieces` for each worker, of uint8 [nbytes]. Raises OSError where there is no memory or file for it."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        places = 8 * PLACE * workers
        heads = -(-(places + workers * pieces) // mmap.PAGESIZE) * mmap.PAGESIZE
        total = heads + workers * pieces * nbytes
        made = not files
        self._files: list[int] = []
        weakref.finalize(self, _close, self._files)
        for i in range(1 + workers):  # batches, and the stack of each worker
            self._files.append(os.memfd_create("weldtrain") if made else files[i].detach())
        if made:
            os.ftruncate(self._files[0], total)
        memory = np.frombuffer(mmap.mmap(self._files[0], total), np.uint8)
        self._pieces = memory[heads:].reshape(workers, pieces, nbytes)
        self._taken = memory[places : places + workers * pieces].reshape(workers, pieces)
        self.reading = memory[:places].view(np.int64).reshape(workers, PLACE)  # as the dataset has it
        if made:
            self.reading[:] = -1
        self._number = next(self._numbers) if number is None else number
        self._made[self._number] = self

    def __reduce__(self) -> tuple:
        return SharedBuffers, (*self._pieces.shape, self._number, [DupFd(f) for f in self._files])  # to a process just started

    def show_stack(self, worker: int) -> None:
        """Called in that worker: from now on it writes where it is when it is asked, and when it crashes."""
        file = self._files[1 + worker]
        faulthandler.enable(file)
        faulthandler.register(_SHOW, file)

    def stacks(self) -> str:
        """Of all workers that can still say where they are, and of those that crashed."""
        before, asked = [os.fstat(file).st_size for file in self._files[1:]], []
        for worker, pid in enumerate(self.reading[:, PID].tolist()):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if pid > 0 and os.getpid() in [parent.pid for parent in psutil.Process(pid).parents()]:  # not another by now
                    os.kill(pid, _SHOW)
                    asked.append(worker)
        until = time.monotonic() + _SHOW_S
        while time.monotonic() < until and any(os.fstat(self._files[1 + w]).st_size == before[w] for w in asked):
            time.sleep(0.05)
        time.sleep(0.1)  # for the rest of it
        said = [os.pread(file, _STACK_BYTES, 0).decode(errors="replace") for file in self._files[1:]]
        return "\n".join(f"worker {i}:\n{stack}" for i, stack in enumerate(said) if stack)

    def of(self, worker: int) -> Callable[[int], torch.Tensor]:
        """Called in that worker: gives uint8 [nbytes], with anything in it. Other memory where no piece is free."""
        def empty(nbytes: int) -> torch.Tensor:
            free = np.flatnonzero(self._taken[worker] == 0)
            if nbytes > self._pieces.shape[2] or not len(free):
                return torch.empty(nbytes, dtype=torch.uint8)
            self._taken[worker, free[0]] = 1
            return torch.from_numpy(self._pieces[worker, free[0], :nbytes])

        return empty

    @classmethod
    def sent(cls, memory: torch.Tensor) -> tuple:
        """How to unpickle `memory` in the process that a worker sends it to: by its place, if it has one."""
        for buffers in cls._made.values():
            place = memory.data_ptr() - buffers._pieces.ctypes.data
            if 0 <= place < buffers._pieces.nbytes:
                return cls._received, (buffers._number, *divmod(place // buffers._pieces.shape[2], buffers._pieces.shape[1]),
                                       memory.nbytes)
        return torch.from_numpy, (memory.numpy(),)

    @classmethod
    def _received(cls, number: int, worker: int, piece: int, nbytes: int) -> torch.Tensor:
        """The piece is free again once nothing refers to the tensor."""
        self = cls._made[number]
        part = self._pieces[worker, piece, :nbytes]
        weakref.finalize(part, self._give_back, worker, piece).atexit = False
        return torch.from_numpy(part)

    def _give_back(self, worker: int, piece: int) -> None:
        self._taken[worker, piece] = 0


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
