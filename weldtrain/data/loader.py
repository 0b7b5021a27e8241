"""The loader: torch's DataLoader with every setting of the article's section 3 decided, checked and explained."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import cv2
import psutil
import torch
from torch.utils.data import DataLoader

from weldtrain.config import LoaderConfig
from weldtrain.data.batch import STRIDE, Batch, Failure, collate
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.images import target_size
from weldtrain.data.index import usable_cores
from weldtrain.data.sampler import EpochSampler
from weldtrain.errors import ConfigError, DataError, TrainingError

log = logging.getLogger(__name__)

AUTO_WORKERS_AT_MOST = 8
# Pinned pages are taken from every other program; beyond this share of free memory they do harm.
PINNED_SHARE = 0.25
SHM = "/dev/shm"
_TARGET_BYTES = 64 * 1024


@dataclass
class Plan:
    """What DataLoader is given, and why where a setting was decided or dropped here."""

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None
    timeout_s: float
    multiprocessing_context: str | None
    notes: list[str]


class Loader:
    """Iterates over batches of one epoch; `set_epoch` reaches workers that outlive it. Errors keep type and text.

    An epoch's first batch includes starting the workers, where they are not there yet.
    """

    def __init__(self, dataset: DetectionDataset, sampler: EpochSampler, plan: Plan, batch_size: int, drop_last: bool) -> None:
        self.dataset, self.plan, self._sampler = dataset, plan, sampler
        self._loader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=plan.num_workers,
            collate_fn=collate,
            pin_memory=plan.pin_memory,
            drop_last=drop_last,
            timeout=plan.timeout_s,
            worker_init_fn=_init_worker,
            multiprocessing_context=plan.multiprocessing_context,
            persistent_workers=plan.persistent_workers,
            prefetch_factor=plan.prefetch_factor,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order and the random states of the samples that the next iteration yields."""
        self._sampler.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        try:
            for batch in self._loader:
                if isinstance(batch, Failure):
                    batch.reraise()
                yield batch
        except RuntimeError as e:
            raise self._explained(e) from e

    def _explained(self, error: RuntimeError) -> Exception:
        text = str(error)
        if "timed out" in text:
            room = f"; {SHM} has {shutil.disk_usage(SHM).free >> 20} MB free" if os.path.isdir(SHM) else ""
            return TrainingError(
                f"no batch came from the workers within {self.plan.timeout_s:g} s{room}", "loader.timeout_s",
                "slow storage: raise it; full shared memory: fewer workers, a smaller batch or a larger --shm-size",
            )
        if "exited unexpectedly" in text or "killed by signal" in text:
            return TrainingError(
                f"a loader worker died ({' '.join(text.split())})", "loader.num_workers",
                "out of memory or shared memory: fewer workers or a smaller batch; loader=simple shows the cause",
            )
        return error


def training_loader(dataset: DetectionDataset, cfg: LoaderConfig, device: torch.device, seed: int) -> Loader:
    """The loader of a training run. Raises DataError where there are too few pictures for one batch."""
    batches = len(dataset) // cfg.batch_size if cfg.drop_last else -(-len(dataset) // cfg.batch_size)
    if batches == 0:
        raise DataError(f"{len(dataset)} training pictures do not fill one batch of {cfg.batch_size}", "loader.batch_size",
                        "lower it, or set loader.drop_last=false")
    settled = plan(cfg, device, batches, batch_bytes(dataset, cfg.batch_size))
    for note in settled.notes:
        log.info(note)
    sampler = EpochSampler(dataset.rows, shuffle=cfg.shuffle, seed=seed)
    return Loader(dataset, sampler, settled, cfg.batch_size, cfg.drop_last)


def evaluation_loader(dataset: DetectionDataset, cfg: LoaderConfig, batch_size: int, device: torch.device) -> Loader:
    """Every picture once, in path order. Its workers end with each evaluation, so that none idle during training."""
    batches = -(-len(dataset) // batch_size)
    settled = plan(cfg, device, batches, batch_bytes(dataset, batch_size))
    settled.persistent_workers = False
    return Loader(dataset, EpochSampler(dataset.rows, shuffle=False), settled, batch_size, drop_last=False)


def plan(cfg: LoaderConfig, device: torch.device, batches: int, bytes_per_batch: int) -> Plan:
    """The settings that apply on this machine to an epoch of `batches`, with the rule behind each decision."""
    cores = usable_cores()
    notes = []
    if cfg.num_workers == "auto":
        # One core is the training process's own. More than eight rarely help and cost memory each.
        workers = min(max(1, cores - 1), AUTO_WORKERS_AT_MOST)
        notes.append(f"loader.num_workers=auto: {min(workers, batches)} ({cores} usable cores)")
    else:
        workers = int(cfg.num_workers)
        if workers > 2 * cores:
            notes.append(f"loader.num_workers={workers} on {cores} usable cores: they will take turns")
    if workers > batches:
        if cfg.num_workers != "auto":
            notes.append(f"loader.num_workers={workers} for {batches} batches: {batches} are started")
        workers = batches
    prefetch = cfg.prefetch_factor
    workers, prefetch = _fit_shared_memory(workers, prefetch, bytes_per_batch, notes)
    pin, why = _pin(cfg.pin_memory, device, workers, workers * prefetch * bytes_per_batch)
    notes.append(f"loader.pin_memory={str(cfg.pin_memory).lower()}: {'on' if pin else 'off'}, {why}")
    context = cfg.multiprocessing_context if workers else None
    if context and context not in torch.multiprocessing.get_all_start_methods():
        raise ConfigError(f"this system has no '{context}'", "loader.multiprocessing_context", "leave it null")
    return Plan(
        num_workers=workers,
        pin_memory=pin,
        persistent_workers=cfg.persistent_workers and workers > 0,
        prefetch_factor=prefetch if workers else None,
        timeout_s=cfg.timeout_s if workers else 0,
        multiprocessing_context=context,
        notes=notes,
    )


def batch_bytes(dataset: DetectionDataset, batch_size: int) -> int:
    """Bytes of the largest batch of pictures that can come: all of the largest padded size."""
    sizes = {tuple(s) for s in dataset.index.sizes[dataset.rows].tolist()}
    scaled = [target_size(w, h, dataset.min_size, dataset.max_size) for w, h in sizes]
    width = -(-max(w for w, _ in scaled) // STRIDE) * STRIDE
    height = -(-max(h for _, h in scaled) // STRIDE) * STRIDE
    return batch_size * (1 if dataset.index.grey[dataset.rows].all() else 3) * width * height


def _pin(wanted: bool | str, device: torch.device, workers: int, pinned_bytes: int) -> tuple[bool, str]:
    """The article's decision tree of section 3.2."""
    if device.type != "cuda":
        return False, f"batches do not leave the host (device {device.type})"
    if wanted != "auto":
        return bool(wanted), "as set"
    if workers == 0:
        return False, "no workers: the main process would wait for the pinning copy itself"
    free = psutil.virtual_memory().available
    if pinned_bytes > PINNED_SHARE * free:
        return False, f"{pinned_bytes >> 20} MB in flight is too much of the {free >> 20} MB of free memory"
    return True, "batches go from workers to CUDA"


def _fit_shared_memory(workers: int, prefetch: int, bytes_per_batch: int, notes: list[str]) -> tuple[int, int]:
    """Fewer batches in flight where /dev/shm cannot hold them: a worker that fills it leaves the run hanging."""
    if not workers or not os.path.isdir(SHM):
        return workers, prefetch
    free = int(0.9 * shutil.disk_usage(SHM).free)
    # Two more than are prefetched: the one being filled and the one in the trainer's hands. Targets take a few pages.
    fits = free // (bytes_per_batch + _TARGET_BYTES) - 2
    if workers * prefetch <= fits:
        return workers, prefetch
    fitting = min(workers, max(fits, 0))
    notes.append(
        f"{SHM} has room for {max(fits, 0)} batches of {bytes_per_batch / 2**20:.1f} MB, {workers} workers x {prefetch} were "
        f"asked for: using {fitting} workers (raise --shm-size, or lower loader.batch_size)"
    )
    return fitting, max(1, fits // fitting) if fitting else prefetch


def _init_worker(worker_id: int) -> None:
    # The main process decides about Ctrl-C; a worker that also reacts prints a page of traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Schedulers signal the whole group. A worker that died of it would be reported as a failure of its own.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a worker never touches the device
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
