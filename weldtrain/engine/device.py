"""Where and in which numbers to compute."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from weldtrain.errors import ConfigError


def choose_device(wanted: str, cpu_threads: int | None = None) -> torch.device:
    """The device for `device=auto|cuda|cpu|mps`; what is computed on the CPU takes `cpu_threads`, torch's own choice where None.
    Raises ConfigError for a device that this machine or torch lacks."""
    if cpu_threads:
        torch.set_num_threads(cpu_threads)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, there in available.items() if there)
    if not available[wanted]:
        build = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
        raise ConfigError(f"no usable {wanted} device ({build})", f"device={wanted}", "check the driver, or set device=cpu")
    return torch.device(wanted, torch.cuda.current_device()) if wanted == "cuda" else torch.device(wanted)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def wait_for(device: torch.device) -> None:
    """Until everything that was queued on it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The type that convolutions and products compute in; None for plain fp32. Raises ConfigError for fp16 on a CPU."""
    if precision == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return torch.bfloat16 if device.type == "cpu" and _cpu_computes_bf16() else None
    if precision == "fp16" and device.type != "cuda":
        raise ConfigError(f"needs a CUDA device, this is {device.type}", "trainer.precision=fp16", "use auto, bf16 or fp32")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def make_deterministic(device: torch.device) -> list[str]:
    """Chooses algorithms that give the same bits on each run, where there are; says what that does not cover."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    if device.type == "cuda":
        return ["torchvision's roi_align adds gradients in any order on a GPU: weights agree to about 1e-5, not bit for bit"]
    if torch.get_num_threads() > 1:
        return [f"{torch.get_num_threads()} threads add in any order: exact only with trainer.cpu_threads=1"]
    return ["exact, on this machine with these packages"]


def _cpu_computes_bf16() -> bool:
    # Without matrix units bf16 is emulated and slower than fp32.
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text()
