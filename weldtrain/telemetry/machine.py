"""The machine: what this process may use of it, and counters that are read in a fraction of a millisecond."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import zlib
from pathlib import Path

import psutil

log = logging.getLogger(__name__)


def usable_cores() -> int:
    """Cores this process may run on, which in a container are fewer than the machine has; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = (_cgroup("cpu.max") or f"{_cgroup('cpu/cpu.cfs_quota_us')} {_cgroup('cpu/cpu.cfs_period_us')}").split()
    if len(quota) == 2 and quota[0].isdecimal():
        cores = min(cores, max(1, round(int(quota[0]) / int(quota[1]))))
    return cores


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def memory_available() -> int:
    """Bytes that can be taken without swapping, within a container's limit."""
    free = psutil.virtual_memory().available
    limit = _cgroup("memory.max") or _cgroup("memory/memory.limit_in_bytes")
    used = _cgroup("memory.current") or _cgroup("memory/memory.usage_in_bytes")
    if limit.isdecimal() and used.isdecimal():
        # Pages of files count as used but are given up on demand.
        stat = dict(line.split() for line in (_cgroup("memory.stat") or _cgroup("memory/memory.stat")).splitlines())
        cached = int(stat.get("file", stat.get("total_cache", 0))) - int(stat.get("shmem", stat.get("total_shmem", 0)))
        free = min(free, max(0, int(limit) - int(used) + cached))
    return free


def boot_id() -> int:
    """A number of 32 bits for the time since the machine last started."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return zlib.crc32(file.read_bytes() if file.exists() else str(int(psutil.boot_time())).encode())


def _cgroup(name: str) -> str:
    """A file of this process's control group, version 2 or as a container of version 1 sees it; "" if there is none."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        places = [Path("/sys/fs/cgroup") / own.lstrip("/") / name, Path("/sys/fs/cgroup") / name]
        return next((p.read_text().strip() for p in places if p.is_file()), "")
    except OSError:
        return ""


class MachineCounters:
    """`read()` gives the `system/*` figures of this moment; the processor's is the mean since the last reading."""

    def __init__(self, device) -> None:
        """For a torch device."""
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


def _nvml_handle(device):
    """The driver's handle of a torch device, by its UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices only."""
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as e:
        log.warning("no GPU counters: %s", e)
        return None
