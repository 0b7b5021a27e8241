"""The doctor's bench: a sample of the data, the model and this machine, put through every measurement."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weldtrain.config import Config, LoaderConfig, OptimizerConfig
from weldtrain.data.baselines import ArticleDataset, NaiveDataset, article_loader, naive_loader
from weldtrain.data.buffers import SharedBuffers
from weldtrain.data.cache import PictureCache, open_cache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.loader import AUTO_PREFETCH, Loader, batch_bytes, plan, training_loader
from weldtrain.data.sampler import Order
from weldtrain.engine.device import autocast_dtype, wait_for
from weldtrain.engine.ledger import BETWEEN, Ledger, take_ledger
from weldtrain.engine.optim import build_optimizer
from weldtrain.engine.probes import between_processes_ms, copy_gb_s, h2d_gb_s, read_rates, sequential_mb_s
from weldtrain.engine.rates import Rate, measure, plain_rate, step_rate, trained
from weldtrain.engine.step import TrainingStep
from weldtrain.engine.tuning import Point, Setting
from weldtrain.errors import one_line
from weldtrain.models.detector import Detector
from weldtrain.telemetry.machine import MachineCounters, memory_available, usable_cores

_SAMPLE_BYTES = 512 * 2**20  # of pictures at the model's scale, which are measured over and over
_SAMPLE = 256
_STEP_S = 4.0  # a slower training step is measured on fewer pictures


class Bench:
    """The things that are measured: a sample of the training pictures, the model, and the loader as it is set now."""

    def __init__(
        self, cfg: Config, dataset: DetectionDataset, model: Detector, device: torch.device, present: LoaderConfig
    ) -> None:
        """`dataset` keeps only the sample; `present` is the loader's configuration, with what is known of its `auto`."""
        self.cfg, self.dataset, self.device = cfg, dataset, device
        self.cores = usable_cores()
        self.total = len(dataset)
        place = {"rows": dataset.rows, "workers": self.cores, "decoded": dataset.decoded}
        scaled = (dataset.index, dataset.sizes, dataset.window, cfg.cache_dir)
        now, self.why = open_cache(present, *scaled, passes=cfg.trainer.epochs, **place)
        self.cache = now or open_cache(replace(present, cache="auto"), *scaled, passes=2, **place)[0]
        # Enough pictures that none is met too often, few enough that all are in memory after the first look.
        share = dataset.sizes[dataset.rows].prod(1).mean() * 3
        count = int(min(len(dataset), _SAMPLE, max(_SAMPLE_BYTES / share, present.batch_size)))
        dataset.keep(np.sort(np.random.default_rng(cfg.seed).permutation(dataset.rows)[:count]))
        self.batch_size = min(present.batch_size, count)
        self.settings = replace(present, batch_size=self.batch_size, cache="none", drop_last=False)
        settled = plan(self.settings, device, 10**6, batch_bytes(dataset, self.batch_size))
        self.now = Setting(settled.workers, settled.num_workers, settled.prefetch_factor or AUTO_PREFETCH, now is not None)
        counters = MachineCounters(device)
        self.gpu_pct: Callable[[], float] | None = None
        if "system/gpu_util_pct" in counters.read():
            self.gpu_pct = lambda: counters.read()["system/gpu_util_pct"]
        self.step = idle_step(model, cfg.optimizer, device, autocast_dtype(cfg.trainer.precision, device))
        self.step_size = self._step_size()

    def ledgers(self, seconds: float) -> dict[str, Ledger]:
        """Of the first epoch, in which every picture is decoded, and of the later ones where there is a cache."""
        taken = {}
        for name, cache in (("first epoch", None), ("later epochs", self.cache)):
            if name == "first epoch" or cache is not None:
                self.dataset.cache = cache
                if cache is not None:
                    self._fill(cache)
                order = Order(self.dataset.rows, self.step_size, shuffle=True)
                taken[name] = take_ledger(self.dataset, order.epochs(0), self.step, self.device.type == "cuda", seconds)
        return taken

    def model_rate(self, seconds: float) -> Rate:
        """Of training on one batch that stays on the device."""
        batch = self.dataset.fetch(next(Order(self.dataset.rows, self.step_size, shuffle=True).batches(0)))
        return step_rate(self.step, batch.to(self.device), seconds)

    def rate(self, setting: Setting, seconds: float, train: bool | None = None) -> Rate:
        """Of the loader with a setting, alone or with `train` of training with it; by default of training on a GPU only, where
        a step is short enough."""
        if train is None:
            train = self.device.type == "cuda"
        loader = self._loader(setting, self.step_size if train else self.batch_size)
        return measure(loader, self.device, seconds, self.cores, self.step if train else None, self.gpu_pct)

    def predicted(self, ledger: Ledger, model_per_s: float) -> float:
        """Images per second of training by the ledger alone: those of the slower of loader and model, or, where both share
        the processor or take turns, what the sum of both allows."""
        loading_s, workers = ledger.loading_ms / 1e3, self.now.num_workers
        if not workers:
            return 1 / (loading_s + 1 / model_per_s)
        if self.device.type == "cuda":
            return 1 / max(loading_s / min(workers, self.cores), 1 / model_per_s)
        return 1 / max(loading_s / workers, loading_s / self.cores + 1 / model_per_s)

    def ceilings(self, ledgers: dict[str, Ledger], model: Rate) -> dict[str, dict[str, float]]:
        """What each resource could do were it alone, and how many pictures a second that is."""
        first = ledgers["first epoch"]
        rows = self.dataset.rows
        batch = self.dataset.fetch(next(Order(rows, self.batch_size, shuffle=True).batches(0)))
        picture_mb = batch.memory.nbytes / len(batch) / 1e6
        files = read_rates(self.dataset, rows[:64], self.cores)
        disk, copied = sequential_mb_s(Path(self.cfg.cache_dir)), copy_gb_s(self.cores)
        found = {
            "disk, these files": files | {"images_per_s": files["random_files_s"]},
            "cache_dir's disk, in one piece": disk | {"images_per_s": disk["read_mb_s"] * 1024 / files["file_kb"]},
            "decoding on all cores": {"images_per_s": self.cores * 1e3 / first.ms["decode"], "ms_per_core": first.ms["decode"]},
            "copying memory": {"gb_s": copied, "images_per_s": copied * 1e3 / picture_mb},
            "the model alone": {"images_per_s": model.mean},
        }
        if SharedBuffers.supported and 4 * batch.memory.nbytes < 0.5 * memory_available():
            sent_ms = between_processes_ms(batch)
            # That it costs nothing is noise.
            found |= {BETWEEN: {"ms": sent_ms, "images_per_s": 1e3 / sent_ms}} if sent_ms > 0 else {}
        if self.device.type == "cuda":
            for name, pin in (("host to device, pinned", True), ("host to device, pageable", False)):
                gb_s = h2d_gb_s(self.device, pin)
                found[name] = {"gb_s": gb_s, "images_per_s": gb_s * 1e3 / picture_mb}
        return found

    def compared(self, best: Point, model_per_s: float, seconds: float) -> list[dict[str, Any]]:
        """A first attempt, the article's loader and the tuned one: their own rates, and an epoch with this model."""
        pictures, made = (self.dataset.index, self.dataset.rows, self.cfg.augment), []
        room = min(memory_available(), shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else sys.maxsize)
        for name, build in (
            ("naive", lambda: naive_loader(NaiveDataset(*pictures), self.batch_size)),
            ("the article's", lambda: article_loader(ArticleDataset(*pictures), self.batch_size, pin=self.device.type == "cuda")),
        ):
            # Floats of full size, of which the article's workers keep two batches each in shared memory.
            nbytes = int(self.batch_size * self.dataset.index.sizes[self.dataset.rows].prod(1).max() * 12)
            nbytes *= 1 if name == "naive" else 10
            problem = "" if nbytes < 0.5 * room else f"needs {nbytes / 2**30:.1f} GB of memory and shared memory"
            try:
                rate = 0.0 if problem else plain_rate(build(), self.device, seconds)
            except Exception as e:  # whatever such a loader cannot do with this data is part of the comparison
                rate, problem = 0.0, one_line(str(e))
            made.append({"loader": name, "images_per_s": rate, "problem": problem})
        made.append({"loader": "tuned", "images_per_s": self.rate(best.setting, 2 * seconds, train=False).mean, "problem": ""})
        for entry in made:
            if entry["problem"]:
                entry |= {"training_per_s": 0.0, "epoch_s": 0.0, "device_pct": 0.0}
                continue
            # The first loads in the training process itself, which trains on nothing meanwhile.
            in_turn = entry["loader"] == "naive" or self.device.type == "cpu"
            rate = entry["images_per_s"]
            together = 1 / (1 / rate + 1 / model_per_s) if in_turn else min(rate, model_per_s)
            entry |= {"training_per_s": together, "epoch_s": self.total / together, "device_pct": 100 * together / model_per_s}
        return made

    def _loader(self, setting: Setting, batch_size: int) -> Loader:
        self.dataset.cache = self.cache if setting.cache else None
        settings = replace(setting.of(self.settings), batch_size=batch_size)
        return training_loader(self.dataset, settings, self.device, self.cfg.seed)

    def _fill(self, cache: PictureCache) -> None:
        for row in self.dataset.rows.tolist():
            if row not in cache:
                cache.put(row, self.dataset.decoded(row))

    def _step_size(self) -> int:
        """Pictures of a training step that takes no longer than _STEP_S, the loader's batch if that does."""
        keys = next(Order(self.dataset.rows, 1, shuffle=True).batches(0))
        batch = self.dataset.fetch(keys).to(self.device)
        trained(self.step, batch)
        wait_for(self.device)
        start = time.perf_counter()
        trained(self.step, batch)
        wait_for(self.device)
        return int(np.clip(_STEP_S / (time.perf_counter() - start), 1, self.batch_size))


def idle_step(model: Detector, cfg: OptimizerConfig, device: torch.device, dtype: torch.dtype | None) -> TrainingStep:
    """A step that costs what training's does and changes nothing: the weights of a thousand steps on one batch would run
    away."""
    optimizer = build_optimizer(model.train(), cfg)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return TrainingStep(model, optimizer, device, dtype)
