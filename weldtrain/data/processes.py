"""Worker processes: torch's iterator over their batches, ended well whatever they do, and what makes a process a worker."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Iterator

import cv2
import psutil
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from weldtrain.data.batch import Batch, Failure
from weldtrain.data.buffers import keep_pages
from weldtrain.data.sampler import Key
from weldtrain.interruption import end_with_main_process


class Processes(_MultiProcessingDataLoaderIter):
    """Torch's iterator over batches of worker processes, which it ends well only where all of them were started and work."""

    def __init__(self, batches: DataLoader) -> None:
        try:
            super().__init__(batches)
        except BaseException:
            self._shutdown = True  # there is no orderly end
            for worker in getattr(self, "_workers", ()):
                worker.kill()
            raise

    def killed_by(self) -> str | None:
        """The signal that ended the first worker that one did."""
        codes = [worker.exitcode or 0 for worker in self._workers]
        return next((signal.strsignal(-code) for code in codes if code < 0), None)

    def stopped(self) -> list[int]:
        """The processes of workers that somebody has halted, by SIGSTOP or a debugger."""
        halted = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return [worker.pid for worker in self._workers if worker.is_alive() and psutil.Process(worker.pid).status() in halted]

    def close(self) -> None:
        """As torch does when it is collected, which a traceback may delay."""
        with contextlib.suppress(RuntimeError):  # a worker died meanwhile: it would cover the error that was met before
            self._shutdown_workers()
        self.kill()

    def kill(self) -> None:
        """Ends the workers whatever they do."""
        if self._worker_pids_set:
            signal_handling._remove_worker_pids(id(self))  # else their end is an error
            self._worker_pids_set = False
        for worker in self._workers:
            worker.kill()


class Keys:
    """The keys of all batches to come, as torch's loader wants to be given them."""

    def __init__(self, keys: Iterator[list[Key]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[Key]]:
        return self._keys

    def __reduce__(self) -> tuple:
        return Keys, (iter(()),)  # a worker is sent its keys, batch by batch


def as_it_is(batch: Batch | Failure) -> Batch | Failure:
    return batch


def init_worker(worker_id: int) -> None:
    end_with_main_process()
    # As forked ones end. One that was spawned would first end Python, and that its threads, by an exception: the one that still
    # sends a batch may be within torch, and the process would abort.
    atexit.register(os._exit, 0)
    for number in (signal.SIGSEGV, signal.SIGBUS):
        signal.signal(number, signal.SIG_DFL)  # torch would print a line of its own, with another cause
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a worker never touches the device
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    keep_pages()
    get_worker_info().dataset.work_as(worker_id)
