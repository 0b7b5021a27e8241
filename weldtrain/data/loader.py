"""The loader: threads, or torch's worker processes; every setting of the article's section 3 decided, checked, explained."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.utils.data import DataLoader

from weldtrain.config import LoaderConfig
from weldtrain.data.batch import STAGES, STRIDE, Batch, Failure
from weldtrain.data.buffers import KEY, PID, ROW, SINCE_NS, STAGE, SharedBuffers, keep_pages
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.processes import Keys, Processes, as_it_is, init_worker
from weldtrain.data.sampler import InOrder, Key, Order, balancing, repeat_factors
from weldtrain.data.threads import ThreadStream
from weldtrain.diagnosis import diagnosed
from weldtrain.errors import ConfigError, DataError, WorkerError
from weldtrain.interruption import starting_processes
from weldtrain.telemetry.machine import memory_available, oom_kills, usable_cores

log = logging.getLogger(__name__)

# Its warning of more workers than cores comes at every start; `plan` has a note of it.
warnings.filterwarnings("ignore", message="This DataLoader will create")

AUTO_WORKERS_AT_MOST = 8
AUTO_PREFETCH = 2
# Pinned pages are taken from every other program; beyond this share of free memory they do harm.
PINNED_SHARE = 0.25
# Batches in hand may take this share of free memory.
AHEAD_SHARE = 0.25  # of each of the two loaders of a run
# In the trainer's hands: the batch of this step and the one before. Beside a worker's own that it has ahead.
_IN_USE = 2
_TARGET_BYTES = 2**20  # of a batch's boxes; memory that is not touched costs nothing
_FILES_OF_WORKER, _FILES_BESIDE = 8, 128  # that a run has open


@dataclass
class Plan:
    """How batches are loaded, and why where a setting was decided or dropped here."""

    workers: str  # thread or process; with num_workers=0 the training process itself
    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None
    timeout_s: float
    multiprocessing_context: str | None
    notes: list[str]


class Loader:
    """Iterates over batches of one epoch; `set_epoch` says of which. Errors keep type and text.

    Workers outlive the epoch, and while its last batches are used they are at the next one's first: there is no gap.
    """

    def __init__(self, dataset: DetectionDataset, order: Order | InOrder, settled: Plan, until: int | None = None) -> None:
        """`until` is the number of epochs, after which nothing is loaded ahead; None if it is not known."""
        self.dataset, self.order, self.plan, self._until = dataset, order, settled, until
        self._at = (0, 0)  # the epoch and batch that comes next
        self._stream: Iterator[Batch | Failure] | None = None
        self._stream_at = (-1, -1)
        self._shared: SharedBuffers | None = None
        self._oom_kills = oom_kills()
        self._batch_bytes = batch_bytes(dataset, order.batch_size)

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """The next iteration yields this epoch's batches from the `start`th on."""
        self._at = (epoch, start)

    def __iter__(self) -> Iterator[Batch]:
        if self._stream is None or self._stream_at != self._at or self._at[0] == self._until:
            self.close()
            self._stream, self._stream_at = self._open(*self._at), self._at
        stream, (epoch, start) = self._stream, self._at
        ended = False
        try:
            for i in range(start, len(self)):
                with self.explained():
                    batch = next(stream)
                if isinstance(batch, Failure):
                    batch.reraise()
                ended = i + 1 == len(self)  # whether or not the next one is asked for
                self._at = self._stream_at = (epoch + 1, 0) if ended else (epoch, i + 1)
                yield batch
        finally:
            if self._stream is stream and not (ended and self.plan.persistent_workers):
                self.close()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Says of a worker's end or silence what was being read and what to set; around all that trains on its batches, since
        torch notices the end of a process wherever the main thread is then."""
        try:
            yield
        except (RuntimeError, TimeoutError, ConnectionError, EOFError) as e:
            better = self._explained(e)
            if better is e:
                raise
            better.samples = self.dataset.named([place[KEY] for place in self._begun(str(e))])
            if stacks := self.stacks():
                log.debug("stacks of the workers:\n%s", stacks)
            self.kill()  # the others may hang as well, and to wait for each takes long
            raise better from e

    @property
    def ready(self) -> int | None:
        """How many batches wait to be taken; None where that cannot be known."""
        return self._stream.ready if isinstance(self._stream, ThreadStream) else None

    def kill(self) -> None:
        """Ends worker processes whatever they do."""
        if isinstance(self._stream, Processes):
            self._stream.kill()

    def close(self) -> None:
        """Ends threads and worker processes. Another iteration starts them anew."""
        stream, self._stream = self._stream, None
        if isinstance(stream, (ThreadStream, Processes)):
            stream.close()

    def _open(self, epoch: int, start: int) -> Iterator[Batch | Failure]:
        settled = self.plan
        until = self._until if settled.persistent_workers else epoch + 1
        if until is not None and epoch >= until:
            until = None  # more than was announced
        keep_pages()
        if settled.workers == "process" or not settled.num_workers:
            try:
                return self._open_processes(self.order.epochs(epoch, start, until))
            except OSError as e:
                log.warning("worker processes cannot be started (%s): threads load instead", e.strerror)
        self.dataset.watch(settled.num_workers)
        return ThreadStream(self.dataset, self.order.epochs(epoch, start, until), settled.num_workers, settled.prefetch_factor,
                            settled.timeout_s, settled.pin_memory)

    def _open_processes(self, keys: Iterator[list[Key]]) -> Iterator[Batch | Failure]:
        """Torch's own; without any worker, this process. Raises OSError where no process can be started."""
        settled, self._shared = self.plan, None
        if settled.num_workers and SharedBuffers.supported:
            self._shared = SharedBuffers(settled.num_workers, settled.prefetch_factor + _IN_USE, self._batch_bytes)
        self._oom_kills = oom_kills()
        self.dataset.watch(settled.num_workers, self._shared)
        batches = DataLoader(
            self.dataset,
            batch_sampler=Keys(keys),
            generator=torch.Generator(),  # else it draws from torch's own, and the model's losses depend on the loader
            num_workers=settled.num_workers,
            collate_fn=as_it_is,
            pin_memory=settled.pin_memory,
            timeout=settled.timeout_s,
            worker_init_fn=init_worker,
            multiprocessing_context=settled.multiprocessing_context,
            prefetch_factor=settled.prefetch_factor,
        )
        if not settled.num_workers:
            return iter(batches)
        with starting_processes(settled.multiprocessing_context):
            return Processes(batches)

    def _explained(self, error: Exception) -> Exception:
        text = " ".join(str(error).split())
        if isinstance(error, TimeoutError) or "DataLoader timed out" in text:
            stopped = self._stream.stopped() if isinstance(self._stream, Processes) else []
            how = f": process {', '.join(map(str, stopped))} is stopped" if stopped else ""
            return WorkerError(
                f"no batch came from the workers within {self.plan.timeout_s:g} s{how}{self._were_reading()}", "loader.timeout_s",
                "slow storage or very large pictures: raise it; a worker that was stopped: let it go on, or end it",
            )
        lost = isinstance(error, (ConnectionError, EOFError))  # while torch fetched a batch from it
        killed = re.search(r"killed by signal: ([\w ]+)", text)
        if lost or killed or "exited unexpectedly" in text:
            by = killed[1] if killed else self._stream.killed_by() if isinstance(self._stream, Processes) else None
            how = by or text.partition(" Details")[0] or type(error).__name__
            cause = diagnosed(f"killed by signal: {by}" if by else text) or diagnosed("killed by signal: Killed")
            if by == signal.strsignal(signal.SIGKILL) and oom_kills() > self._oom_kills:
                how = "the system ended it, since memory was full"
            return WorkerError(f"a loader worker died ({how}){self._were_reading(text)}", "loader.num_workers", cause.fix)
        return error

    def _were_reading(self, text: str = "") -> str:
        """The pictures that workers have begun and not ended."""
        begun = self._begun(text)
        now_s = time.perf_counter()
        at = ", ".join(f"{self.dataset.index.path(place[ROW])} ({STAGES[place[STAGE]]}, {now_s - place[SINCE_NS] / 1e9:.0f} s)"
                       for place in begun[:8])
        return f" while at {at}" if at else ""

    def _begun(self, text: str) -> list[list[int]]:
        """The places of the workers that are at a picture: of those whose process a message names, if it does."""
        pids = {int(number) for number in re.findall(r"\d+", text)}
        begun = [place for place in self.dataset.reading.tolist() if place[ROW] >= 0]
        return [place for place in begun if place[PID] in pids] or begun

    def stacks(self) -> str:
        """Where worker processes are in their code, of those that can say it; nothing of threads, which are this process's."""
        return self._shared.stacks() if self._shared and self._stream is not None else ""


def training_loader(
    dataset: DetectionDataset, cfg: LoaderConfig, device: torch.device, seed: int, epochs: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> Loader:
    """The loader of a training run, of one rank of how many; its plan's notes say what was decided for it.

    Raises DataError where there are too few pictures for one batch.
    """
    expected = None
    if cfg.sampling != "uniform":
        shown = dataset.shown_by_class()
        expected = (balancing(shown, len(dataset)) if cfg.sampling == "balanced"
                    else repeat_factors(shown, len(dataset), cfg.repeat_threshold))
    shapes = dataset.shapes() if cfg.group_by_aspect else None
    order = Order(dataset.rows, cfg.batch_size, shuffle=cfg.shuffle, drop_last=cfg.drop_last, seed=seed, expected=expected,
                  shapes=shapes, share=share)
    if not len(order):
        of_ranks = f" on each of {share[1]} ranks" * (share[1] > 1)
        raise DataError(f"{len(dataset)} training pictures do not fill one batch of {cfg.batch_size}{of_ranks}",
                        "loader.batch_size", "lower it, or set loader.drop_last=false")
    settled = plan(cfg, device, len(order), batch_bytes(dataset, cfg.batch_size))
    return Loader(dataset, order, settled, epochs)


def evaluation_loader(
    dataset: DetectionDataset, cfg: LoaderConfig, batch_size: int, device: torch.device, share: tuple[int, int] = (0, 1)
) -> Loader:
    """Every picture once, in path order. Its workers end with each evaluation, so that none idle during training."""
    order = InOrder(dataset.rows, -(-dataset.sizes[dataset.rows] // STRIDE), batch_size, share)
    settled = replace(plan(cfg, device, max(len(order), 1), batch_bytes(dataset, batch_size)), persistent_workers=False)
    return Loader(dataset, order, settled)


def plan(cfg: LoaderConfig, device: torch.device, batches: int, bytes_per_batch: int) -> Plan:
    """The settings that apply on this machine to an epoch of `batches`, with the rule behind each decision."""
    cores = usable_cores()
    notes = []
    kind = cfg.workers
    if kind == "auto":
        kind = "process" if cfg.multiprocessing_context else "thread"
    if cfg.num_workers == "auto":
        # Of processes one core less, which is the training process's own. More than eight rarely help and cost memory each.
        workers = min(max(1, cores - (kind == "process")), AUTO_WORKERS_AT_MOST)
        notes.append(f"loader.num_workers=auto: {workers} of kind {kind} ({cores} usable cores)")
    else:
        workers = int(cfg.num_workers)
    if kind == "process":
        _allow_files(workers, notes)
    if kind == "process" and workers > batches:  # threads share a batch
        if cfg.num_workers != "auto":
            notes.append(f"loader.num_workers={workers} for {batches} batch{'es' * (batches != 1)}: one each")
        workers = batches
    if workers > 2 * cores:
        notes.append(f"loader.num_workers={workers} on {cores} usable cores: they will take turns")
    prefetch = AUTO_PREFETCH if cfg.prefetch_factor == "auto" else int(cfg.prefetch_factor)
    fillers = workers if kind == "process" else min(workers, 1)  # threads fill one batch together
    prefetch = _fit_memory(fillers, prefetch, bytes_per_batch, notes)
    pin, why = _pin(cfg.pin_memory, device, workers, fillers * prefetch * bytes_per_batch)
    notes.append(f"loader.pin_memory={str(cfg.pin_memory).lower()}: {'on' if pin else 'off'}, {why}")
    context = cfg.multiprocessing_context if workers and kind == "process" else None
    if cfg.multiprocessing_context and kind == "thread":
        notes.append(f"loader.multiprocessing_context={cfg.multiprocessing_context}: has no meaning for threads")
    if context and context not in torch.multiprocessing.get_all_start_methods():
        raise ConfigError(f"this system has no '{context}'", "loader.multiprocessing_context", "leave it null")
    return Plan(
        workers=kind,
        num_workers=workers,
        pin_memory=pin,
        persistent_workers=cfg.persistent_workers and workers > 0,
        prefetch_factor=prefetch if workers else None,
        timeout_s=cfg.timeout_s if workers else 0,
        multiprocessing_context=context,
        notes=notes,
    )


def batch_bytes(dataset: DetectionDataset, batch_size: int) -> int:
    """Bytes of the largest batch that can come: all pictures of the largest padded size, and many boxes."""
    width, height = (int(-(-side // STRIDE) * STRIDE) for side in dataset.largest())
    return batch_size * (1 if dataset.index.grey[dataset.rows].all() else 3) * width * height + _TARGET_BYTES


def _pin(wanted: bool | str, device: torch.device, workers: int, pinned_bytes: int) -> tuple[bool, str]:
    """The article's decision tree of section 3.2."""
    if device.type != "cuda":
        return False, f"batches do not leave the host (device {device.type})"
    if wanted != "auto":
        return bool(wanted), "as set"
    if workers == 0:
        return False, "no workers: the main process would wait for the pinning copy itself"
    free = memory_available()
    if pinned_bytes > PINNED_SHARE * free:
        return False, f"{pinned_bytes >> 20} MB in flight is too much of the {free >> 20} MB of free memory"
    return True, "batches go from workers to CUDA"


def _fit_memory(workers: int, prefetch: int, bytes_per_batch: int, notes: list[str]) -> int:
    """Fewer batches ahead where memory would not hold them."""
    free = memory_available()
    fits = int(AHEAD_SHARE * free) // bytes_per_batch
    if not workers or workers * prefetch <= fits:
        return prefetch
    fewer = max(1, fits // workers)
    if fewer < prefetch:
        notes.append(f"{free / 2**30:.1f} GB of free memory, a batch takes {bytes_per_batch / 2**30:.2f} GB: "
                     f"loader.prefetch_factor={fewer} instead of {prefetch} for {workers} workers")
    return fewer


def _allow_files(workers: int, notes: list[str]) -> None:
    """Raises this process's limit of open files, of which a worker process takes several."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_OF_WORKER * workers + _FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        reached = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
        notes.append(f"loader.num_workers={workers} may need {wanted} open files, the limit (ulimit -n) "
                     + (f"was {soft}: raised to {reached}" if reached > soft else f"is {soft}: set fewer workers if that fails"))
