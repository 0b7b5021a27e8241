"""A trace of some training steps by torch.profiler, which Perfetto and Chrome's tracing page open."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)

FILE = "trace.json.gz"


class Profile:
    """Of the steps from the first to the last of `steps`, counted from 1; of none where it is None."""

    def __init__(self, steps: list[int] | None, device: torch.device, run_dir: Path) -> None:
        self._first, self._last = steps or (0, 0)
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._run_dir, self._running = run_dir, None
        self.after(0)

    def after(self, step: int) -> None:
        """Called after each step. A run that is resumed beyond the first of them records none."""
        if step == self._last:
            self.close()
        elif step == self._first - 1:
            self._running = profile(activities=self._activities)
            self._running.start()

    def close(self) -> None:
        """Writes what was recorded, of a run that ends before the last of the steps as well."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
            running.export_chrome_trace(str(self._run_dir / FILE))
            log.info("trace of training steps from %d on: %s", self._first, self._run_dir / FILE)
