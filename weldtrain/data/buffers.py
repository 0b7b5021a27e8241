"""Memory for batches, where none is to be fresh: the system hands out pages of zeros one by one, which costs more than to fill
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref

import numpy as np
import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 2**28


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


def shared_memory(nbytes: int) -> torch.Tensor:
    """Memory in which a worker process hands its batch over: made elsewhere, it would be copied there."""
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(nbytes))
