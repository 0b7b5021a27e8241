"""The machine: what this process may use of it, and counters that are read in a fraction of a millisecond."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import threading
import time
import zlib
from pathlib import Path
from statistics import fmean

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


def oom_kills() -> int:
    """How many processes of this control group the kernel has ended for want of memory; 0 where that cannot be known."""
    events = dict(line.split() for line in _cgroup("memory.events").splitlines())
    return int(events.get("oom_kill", 0))


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
    """`read()` gives the `system/*` figures of this moment; percentages are means since the last reading: `cpu_pct` of the whole
    machine, `workers_cpu_pct` of one core."""

    def __init__(self, device, workers: str = "weldtrain-loader") -> None:
        """For a torch device. Workers are the processes below this one, and its threads whose names begin with `workers`."""
        self._process, self._workers = psutil.Process(), workers
        self._gpu = _nvml_handle(device) if device.type == "cuda" else None
        self._machine_s = (0.0, 0.0)  # so far: of all cores together, and of it idle
        self._worker_s, self._at = {}, time.perf_counter()  # so far, by process or thread
        self.read()  # starts these clocks

    def read(self) -> dict[str, float]:
        children = self._process.children(recursive=True)
        worker_s = {child.pid: seconds for child in children if (seconds := _processor_s(f"/proc/{child.pid}/stat"))}
        worker_s |= {t.native_id: _processor_s(f"/proc/self/task/{t.native_id}/stat") for t in threading.enumerate()
                     if t.name.startswith(self._workers)}
        spent = sum(max(0.0, seconds - self._worker_s.get(worker, 0.0)) for worker, seconds in worker_s.items())
        now, machine_s = time.perf_counter(), _machine_s()
        whole, idle = (new - old for new, old in zip(machine_s, self._machine_s))
        values = {
            "system/cpu_pct": max(0.0, 100 * (1 - idle / whole)) if whole else 0.0,
            "system/workers_cpu_pct": 100 * spent / (now - self._at),
            "system/rss_mb": self._process.memory_info().rss / 2**20,
            "system/workers_rss_mb": sum(map(_rss, children)) / 2**20,
            "system/page_tables_mb": sum(_page_tables_kb(process.pid) for process in (self._process, *children)) / 2**10,
        }
        self._at, self._machine_s, self._worker_s = now, machine_s, worker_s
        if os.path.isdir("/dev/shm"):
            values["system/shm_used_mb"] = shutil.disk_usage("/dev/shm").used / 2**20
        if self._gpu is not None:
            import pynvml

            with contextlib.suppress(pynvml.NVMLError):  # the driver may have no answer for a moment
                values["system/gpu_util_pct"] = float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu)
                values["system/gpu_mem_mb"] = pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used / 2**20
        return values


class Sampler:
    """Reads counters in a thread of its own: every two seconds, or less often where that would take more than `share` of a core,
    as it does on a machine with thousands of processes."""

    def __init__(self, counters: MachineCounters, every_s: float = 2.0, share: float = 0.0025) -> None:
        self._counters, self._every_s, self._share = counters, every_s, share
        self._samples: list[dict[str, float]] = []  # since the last reading, or that one's last
        self._told = False  # what is in `_samples`
        self._reading, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._sample, name="weldtrain-counters", daemon=True)
        self._thread.start()

    def read(self) -> dict[str, float]:
        """What was seen since the last reading, or else the last again: of percentages the mean, of sizes the largest."""
        with self._reading:
            if not self._samples:  # called before the thread came to it
                self._samples.append(self._counters.read())
            samples, self._samples, self._told = self._samples, self._samples[-1:], True
        return {name: (fmean if name.endswith("_pct") else max)([sample[name] for sample in samples if name in sample])
                for name in set().union(*samples)}

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        start, pause = time.perf_counter(), 0.2  # the first one soon, for runs of a few steps
        while not self._over.wait(pause):
            with self._reading, contextlib.suppress(OSError, psutil.Error):  # a process that is ending may be half there
                sample = self._counters.read()
                if self._told:
                    self._samples.clear()
                self._samples.append(sample)
                self._told = False
            pause = max(self._every_s, time.thread_time() / self._share - (time.perf_counter() - start))


def _machine_s() -> tuple[float, float]:
    """Seconds of all cores together, and of these the idle ones."""
    times = psutil.cpu_times()
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # part of user and nice
    return sum(times) - guest, times.idle + getattr(times, "iowait", 0.0)


def _processor_s(stat: str) -> float:
    """Seconds that a process or thread has computed; 0 where it is gone, or where there is no /proc."""
    try:
        fields = Path(stat).read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):  # it may end between listing and asking
        return process.memory_info().rss
    return 0


def _page_tables_kb(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmPTE:")), 0)


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
