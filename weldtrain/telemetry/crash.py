"""crash.json: what a report of a failed run needs, and what `task=replay` goes by."""

from __future__ import annotations

import platform
import shutil
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from weldtrain.telemetry.machine import memory_available, oom_kills, processor, usable_cores

FILE, OF_RANKS = "crash.json", "crash.rank*.json"  # of the first rank, and of the others
_LINES = 50  # of run.log
_PACKAGES = ("torch", "torchvision", "numpy", "cv2", "hydra", "weldtrain")


def crash(error: BaseException, config: Mapping[str, Any], log_file: Path) -> dict[str, Any]:
    """The failure, its samples, the settings, the machine at this moment and the end of the log. No environment variables."""
    try:
        log = log_file.read_text("utf-8", errors="replace").splitlines()[-_LINES:]
    except OSError:
        log = []
    return {
        "error": str(error),
        "type": type(error).__name__,
        "samples": list(getattr(error, "samples", ())),
        "command": sys.argv,
        "traceback": "".join(traceback.format_exception(error)).splitlines(),
        "environment": {
            "python": platform.python_version(), "system": platform.platform(), "processor": processor(),
            "cores": usable_cores(),
            **{name: str(getattr(sys.modules[name], "__version__", "")) for name in _PACKAGES if name in sys.modules},
        },
        "machine": {
            "memory_available_mb": memory_available() >> 20,
            "rss_mb": psutil.Process().memory_info().rss >> 20,
            "oom_kills": oom_kills(),
            **{f"free_mb {place}": shutil.disk_usage(place).free >> 20 for place in ("/dev/shm", str(log_file.parent))
               if Path(place).is_dir()},
        },
        "config": dict(config),
        "log": log,
    }
