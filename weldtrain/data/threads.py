"""ThreadStream: batches in order, filled by threads straight into the memory in which they are handed over.

Decoding, resizing and copying release Python's lock, so threads do what worker processes do without sending a batch from one
process to another. All threads work on the earliest batch first, picture by picture.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from weldtrain.data.batch import Batch, Failure
from weldtrain.data.buffers import Buffers, pinned
from weldtrain.data.dataset import DetectionDataset, Draft
from weldtrain.data.sampler import Key

_STOP_WAIT_S = 5.0


class ThreadStream:
    """An iterator over batches, or failures in their place; `threads` threads keep `ahead` of them in hand."""

    def __init__(
        self, dataset: DetectionDataset, keys: Iterator[list[Key]], threads: int, ahead: int, timeout_s: float, pin: bool
    ) -> None:
        self._keys, self._ahead, self._timeout_s = keys, ahead, timeout_s or None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: deque[_Job] = deque()
        empty = pinned if pin else Buffers(ahead + 2)
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs, dataset, empty, slot), name=f"weldtrain-loader-{slot}", daemon=True)
            for slot in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        # Also for a stream that is forgotten, to which its threads do not refer, and before the interpreter ends: it would
        # end a thread within OpenCV by an exception, and that the process.
        self._end = weakref.finalize(self, _end, self._jobs, self._threads, self._pending)

    def __iter__(self) -> ThreadStream:
        return self

    def __next__(self) -> Batch | Failure:
        """Raises TimeoutError if the next batch is not ready in time, StopIteration after the last."""
        self._feed()
        if not self._pending:
            raise StopIteration
        job = self._pending[0]
        if not job.done.wait(self._timeout_s):
            raise TimeoutError
        self._pending.popleft()
        self._feed()
        return job.result

    @property
    def ready(self) -> int:
        """How many batches are waiting to be taken."""
        return sum(job.done.is_set() for job in self._pending)

    def close(self) -> None:
        """Ends the threads after the picture that each is at; one that hangs is left behind."""
        self._end()

    def _feed(self) -> None:
        while len(self._pending) < self._ahead and (keys := next(self._keys, None)) is not None:
            job = _Job(keys)
            self._pending.append(job)
            for _ in self._threads:
                self._jobs.put(job)


class _Job:
    """A batch that several threads fill. The first to come drafts it."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys
        self.done = threading.Event()
        self.result: Batch | Failure
        self.claims = iter(range(len(keys)))  # the next of an iterator is handed out once, whoever asks
        self._ended = itertools.count(1)
        self._lock = threading.Lock()
        self._draft: Draft | Failure | None = None
        self._failures: dict[int, Failure] = {}

    def cancel(self) -> None:
        """No picture of it is begun any more."""
        self.claims = iter(())
        self.done.set()

    def work(self, dataset: DetectionDataset, empty: Callable[[int], torch.Tensor], slot: int) -> None:
        with self._lock:
            if self._draft is None and not self.done.is_set():
                try:
                    self._draft = dataset.draft(self.keys, empty)
                except Exception as error:
                    self._draft = Failure.of(error)
        while (i := next(self.claims, None)) is not None:  # not a for, which would not see that it was cancelled
            try:
                if isinstance(self._draft, Failure):
                    self._failures[i] = self._draft
                else:
                    dataset.fill(self._draft, i, slot)
            except Exception as error:
                self._failures[i] = Failure.of(error)
            if next(self._ended) == len(self.keys):
                # Of several the first in order, as a single worker would meet it.
                self.result = self._failures[min(self._failures)] if self._failures else self._draft.batch
                self.done.set()
                self._draft = None


def _end(jobs: queue.SimpleQueue[_Job | None], threads: Sequence[threading.Thread], pending: deque[_Job]) -> None:
    for job in pending:
        job.cancel()
    for _ in threads:
        jobs.put(None)
    until = time.monotonic() + _STOP_WAIT_S
    for thread in threads:
        if thread is not threading.current_thread():  # in which a stream may be collected
            thread.join(max(0.0, until - time.monotonic()))


def _work(
    jobs: queue.SimpleQueue[_Job | None], dataset: DetectionDataset, empty: Callable[[int], torch.Tensor], slot: int
) -> None:
    while (job := jobs.get()) is not None:
        job.work(dataset, empty, slot)
        job = None  # its batch belongs to whoever took it
