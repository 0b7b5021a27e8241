"""The environment report: what this machine and its libraries are, what is wrong with them, and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from weldtrain.telemetry.machine import memory_available, processor, usable_cores

_LOAD_S, _LOAD_PCT = 0.5, 15.0
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "lustre", "ceph", "beegfs")


class Fact(NamedTuple):
    """One line of the report; `problem` and `fix` are empty where nothing is wrong."""

    name: str
    value: str
    problem: str = ""
    fix: str = ""


def environment(device, data: Path, cache_dir: Path) -> list[Fact]:
    """The facts for a run on a torch device with data and caches in these folders."""
    return [Fact("Python", f"{platform.python_version()} on {platform.system()} {platform.release()}"),
            *_torch(device), *_processor(), *_memory(), *_opencv(), *_places(data, cache_dir), *_limits()]


def _torch(device) -> Iterator[Fact]:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU only"
    yield Fact("torch", f"{torch.__version__} ({built}), torchvision {importlib.metadata.version('torchvision')}, "
                        f"{torch.get_num_threads()} threads")
    driver, gpus, why = _nvidia()
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            about = f"{p.name}, {p.total_memory / 2**30:.0f} GB, compute {p.major}.{p.minor}, driver {driver or 'unknown'}"
            yield Fact(f"GPU {i}", about, *(("is not used", "set device=cuda") if device.type != "cuda" else ()))
    elif gpus:
        what = f"torch cannot use {gpus[0]} (driver {driver})"
        fix = ("install a torch built for CUDA" if not torch.version.cuda else
               f"the driver must support CUDA {torch.version.cuda}: update it, or install a torch for an older CUDA; "
               "in a container pass the GPU through (--gpus all)")
        yield Fact("GPU", ", ".join(gpus), what, fix)
    else:
        yield Fact("GPU", f"none seen by the driver ({why})" if why else "none")


def _nvidia() -> tuple[str, list[str], str]:
    """Driver version, names of the GPUs that it sees, and why there are none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        names = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
        return pynvml.nvmlSystemGetDriverVersion(), names, ""
    except ImportError:
        return "", [], "nvidia-ml-py is not installed"
    except pynvml.NVMLError as e:
        return "", [], str(e)


def _processor() -> Iterator[Fact]:
    machine, usable = os.cpu_count() or 1, usable_cores()
    name = processor() or "unknown"
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    special = [flag for flag in ("avx2", "avx512f", "amx_bf16") if flag in flags]
    yield Fact("processor", f"{name}, {usable} of {machine} cores usable" + f" ({', '.join(special)})" * bool(special))
    busy = psutil.cpu_percent(interval=_LOAD_S)  # while this process only waits
    if busy > _LOAD_PCT:
        yield Fact("load", f"{busy:.0f} % of the processor", "other programs use it",
                   "measure again when they are gone: computing on a processor that is shared can be ten times slower")


def _memory() -> Iterator[Fact]:
    total, free = psutil.virtual_memory().total, memory_available()
    little = free < 2 * 2**30
    yield Fact("memory", f"{free / 2**30:.1f} GB of {total / 2**30:.1f} GB free to this process",
               *(("little is left", "end other programs, or raise the container's limit") if little else ()))
    swapped = psutil.swap_memory()
    if swapped.total and swapped.used > 0.5 * swapped.total:
        yield Fact("swap", f"{swapped.used / 2**30:.1f} GB in use", "memory is short", "fewer workers, a smaller batch")
    if os.path.isdir("/dev/shm"):
        room = shutil.disk_usage("/dev/shm")
        yield Fact("/dev/shm", f"{room.free / 2**20:.0f} MB free of {room.total / 2**20:.0f} MB",
                   *(("full: not even the locks of worker processes find room", "remove what others left there, or "
                      "docker run --shm-size=64m; loader.workers=thread needs none") if room.free < 2**20 else ()))


def _opencv() -> Iterator[Fact]:
    import cv2

    built = cv2.getBuildInformation()
    jpeg = next((line.partition(":")[2].strip() for line in built.splitlines() if line.strip().startswith("JPEG:")), "unknown")
    kinds = ("opencv-python", "opencv-contrib-python", "opencv-python-headless", "opencv-contrib-python-headless")
    installed = [name for name in kinds if _installed(name)]
    problem: tuple[str, ...] = ()
    if "turbo" not in jpeg:
        problem = ("its JPEG decoder is not libjpeg-turbo, which is two to four times as fast",
                   "install opencv-python-headless from PyPI")
    elif len(installed) > 1:
        problem = (f"{' and '.join(installed)} overwrite each other's files",
                   "uninstall all of them, then install opencv-python-headless")
    yield Fact("OpenCV", f"{cv2.__version__}, JPEG by {re.sub(r'[()]', '', jpeg)}", *problem)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _places(data: Path, cache_dir: Path) -> Iterator[Fact]:
    for name, folder in (("data", data), ("cache_dir", cache_dir)):
        kind = _file_system(folder)
        free = shutil.disk_usage(folder).free
        remote = kind in _NETWORK
        fix = "loader.cache=disk keeps pictures in cache_dir" if name == "data" else "set cache_dir to a folder on a local disk"
        yield Fact(name, f"{folder} ({kind or 'unknown file system'}, {free / 2**30:.0f} GB free)",
                   *(("lies on a network", fix) if remote else ()))


def _file_system(folder: Path) -> str:
    mounts = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""


def _limits() -> Iterator[Fact]:
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = [str(n) if n != resource.RLIM_INFINITY else "unlimited" for n in (soft, hard)]
    yield Fact("open files", f"{words[0]}, can be raised to {words[1]}",
               *(("few for worker processes", "ulimit -n 4096") if 0 < hard < 1024 else ()))
