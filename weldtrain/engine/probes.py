"""What this machine could do at best: its disks, its memory, the way to the device and between processes."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from weldtrain.data import images
from weldtrain.data.batch import Batch
from weldtrain.data.buffers import SharedBuffers
from weldtrain.data.dataset import DetectionDataset

_PROBE_BYTES = 128 * 2**20


def read_rates(dataset: DetectionDataset, rows: np.ndarray, workers: int) -> dict[str, float]:
    """MB/s and files/s of the pictures' own files: from the disk, in random order by `workers` threads, and from memory.

    The system is asked to forget the files first; where it does not (network storage may), both are the same.
    """
    paths = [dataset.index.root / dataset.index.path(int(row)) for row in rows]
    nbytes = sum(path.stat().st_size for path in paths)

    def read_all(threads: int) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(images.read_bytes, paths))
        return time.perf_counter() - start

    for path in paths:
        _forget(path)
    cold, warm = read_all(max(workers, 1)), read_all(1)
    return {"random_mb_s": nbytes / 2**20 / cold, "random_files_s": len(paths) / cold, "memory_mb_s": nbytes / 2**20 / warm,
            "file_kb": nbytes / 1024 / len(paths)}


def sequential_mb_s(folder: Path) -> dict[str, float]:
    """Writing to and reading from the disk of a folder, in MB/s: 128 MB in one piece."""
    file = folder / f".probe-{os.getpid()}"
    block = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8).tobytes()  # no disk can compress it
    try:
        start = time.perf_counter()
        with open(file, "wb") as f:
            for _ in range(_PROBE_BYTES // len(block)):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
        written = time.perf_counter() - start
        _forget(file)
        start = time.perf_counter()
        with open(file, "rb", buffering=0) as f:
            while f.read(len(block)):
                pass
        read = time.perf_counter() - start
    finally:
        file.unlink(missing_ok=True)
    return {"write_mb_s": _PROBE_BYTES / 2**20 / written, "read_mb_s": _PROBE_BYTES / 2**20 / read}


def copy_gb_s(threads: int) -> float:
    """Memory copied by so many threads at once, in GB/s."""
    threads = min(threads, 16)  # more do not raise it, and each takes 64 MB
    pairs = [(np.ones(32 * 2**20, np.uint8), np.ones(32 * 2**20, np.uint8)) for _ in range(threads)]
    rounds = 4

    def copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
        for _ in range(rounds):
            np.copyto(*pair)

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(copy, pairs))
        return threads * rounds * pairs[0][0].nbytes / 1e9 / (time.perf_counter() - start)


def h2d_gb_s(device: torch.device, pin: bool) -> float:
    """Host to device in GB/s, from page-locked memory or not."""
    host = torch.empty(256 * 2**20, dtype=torch.uint8, pin_memory=pin)
    host.to(device)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(4):
        host.to(device, non_blocking=True)
    torch.cuda.synchronize(device)
    return 4 * host.nbytes / 1e9 / (time.perf_counter() - start)


def between_processes_ms(batch: Batch, batches: int = 12) -> float:
    """Milliseconds per picture between a worker process that fills shared memory and this one that reads it, beyond a copy
    within one process: pickling, waking up."""
    loader = DataLoader(_Ready(batch, batches), batch_size=None, num_workers=1, prefetch_factor=2)
    arrivals = []
    for sent in loader:
        sent.memory.sum()  # the trainer's copy reads it too
        arrivals.append(time.perf_counter())
    target = batch.memory.clone()
    start = time.perf_counter()
    for _ in range(batches):
        target.copy_(batch.memory).sum()
    here_s = (time.perf_counter() - start) / batches
    # Of the first ones some lay ready when they were asked for.
    sending_s = (arrivals[-1] - arrivals[3]) / (len(arrivals) - 4)
    return 1e3 * max(sending_s - here_s, 0.0) / len(batch)


class _Ready(Dataset):
    def __init__(self, batch: Batch, count: int) -> None:
        self._batch, self._count = batch, count
        self._shared = SharedBuffers(1, 4, batch.memory.nbytes)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Batch:
        return replace(self._batch, memory=self._shared.of(0)(self._batch.memory.nbytes).copy_(self._batch.memory))


def _forget(path: Path) -> None:
    """Asks the system to drop a file from memory, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
