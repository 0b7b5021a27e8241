"""Machine counters: processor, memory, shared memory and GPU, read in a fraction of a millisecond."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil

import psutil
import torch

log = logging.getLogger(__name__)


class MachineCounters:
    """`read()` gives the `system/*` figures of this moment; the processor's is the mean since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._gpu = _nvml_handle(device) if device.type == "cuda" else None
        psutil.cpu_percent()  # the first call only starts its clock

    def read(self) -> dict[str, float]:
        values = {
            "system/cpu_pct": psutil.cpu_percent(),
            "system/rss_mb": self._process.memory_info().rss / 2**20,
            "system/workers_rss_mb": self._workers_rss() / 2**20,
        }
        if os.path.isdir("/dev/shm"):
            values["system/shm_used_mb"] = shutil.disk_usage("/dev/shm").used / 2**20
        if self._gpu is not None:
            import pynvml

            values["system/gpu_util_pct"] = float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu)
            values["system/gpu_mem_mb"] = pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used / 2**20
        return values

    def _workers_rss(self) -> int:
        total = 0
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may end between listing and asking
                total += child.memory_info().rss
        return total


def _nvml_handle(device: torch.device):
    """The driver's handle of a torch device, by its UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices only."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as e:
        log.warning("no GPU counters: %s", e)
        return None
