"""What a picture costs on its way through the pipeline, stage by stage.

Stages are timed one after the other in one thread, waiting for the device at each boundary: nothing overlaps, so the parts add
up to the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from weldtrain.data.batch import STAGES
from weldtrain.data.buffers import Buffers, pinned
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.sampler import Key
from weldtrain.engine.device import wait_for
from weldtrain.engine.step import STEP_STAGES, TrainingStep

DEVICE_STAGES = ("h2d",)
BETWEEN = "between processes"


@dataclass
class Ledger:
    """Milliseconds per picture by stage, of the wall clock's; `rest` is what lies between the stages."""

    ms: dict[str, float]
    wall_ms: float
    pictures: int

    @property
    def loading_ms(self) -> float:
        """What the loader's workers do, on one core."""
        return sum(self.ms[stage] for stage in STAGES)

    @property
    def step_ms(self) -> float:
        return sum(self.ms[stage] for stage in STEP_STAGES)


def take_ledger(
    dataset: DetectionDataset, batches: Iterable[list[Key]], step: TrainingStep, pin: bool, budget_s: float
) -> Ledger:
    """Runs batches through every stage for `budget_s` seconds, at least two, the first of which is not counted."""
    device = step.device
    names = (*STAGES, *DEVICE_STAGES, *STEP_STAGES)
    empty = pinned if pin else Buffers(at_most=2)
    seconds, wall_s, pictures = dict.fromkeys(names, 0.0), 0.0, 0
    begun = time.perf_counter()
    for k, keys in enumerate(batches):
        start = mark = time.perf_counter()
        taken: dict[str, float] = {}

        def lap(stage: str) -> None:
            nonlocal mark
            wait_for(device)
            now = time.perf_counter()
            taken[stage] = now - mark  # noqa: B023
            mark = now

        batch = dataset.fetch(keys, empty)
        mark = time.perf_counter()
        batch = batch.to(device, non_blocking=pin)
        lap("h2d")
        step.add(batch, lap=lap)
        step.update(lap)
        end = time.perf_counter()
        if k:
            for stage, value in (taken | dict(zip(STAGES, batch.work_s.sum(0).tolist()))).items():
                seconds[stage] += value
            wall_s += end - start
            pictures += len(keys)
        if k and end - begun > budget_s:
            break
    ms = {stage: 1e3 * value / pictures for stage, value in seconds.items()}
    wall_ms = 1e3 * wall_s / pictures
    return Ledger(ms | {"rest": wall_ms - sum(ms.values())}, wall_ms, pictures)
