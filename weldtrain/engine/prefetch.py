"""Batches on the device: copied on a side stream on CUDA, while the step before still computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weldtrain.data.batch import STAGES, Batch
from weldtrain.data.loader import Loader
from weldtrain.telemetry.clock import StepClock


def device_batches(loader: Loader, device: torch.device, clock: StepClock) -> Iterator[Batch]:
    """The batches of one epoch on `device`, with waiting and copying on the clock.

    On CUDA the host comes here as soon as it has queued a step, so the copy runs beside that step's kernels.
    """
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    batches = iter(loader)
    while True:
        with clock.wait():
            batch = next(batches, None)
        if batch is None:
            return
        clock.took(len(batch), dict(zip(STAGES, batch.work_s.sum(0).tolist())), loader.ready)
        if side is None:
            with clock.copy():
                batch = batch.to(device)
        else:
            with torch.cuda.stream(side), clock.copy():
                batch = batch.to(device, non_blocking=True)
            current = torch.cuda.current_stream(device)
            current.wait_stream(side)
            batch.record_stream(current)
        yield batch
