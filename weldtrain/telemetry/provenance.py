"""What a run was made of, so that it can be made again: code, packages, data, command, machine."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from weldtrain.telemetry.machine import processor, usable_cores


def provenance(**known: Any) -> dict[str, Any]:
    """`known` and what can be found out here."""
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return {
        "command": sys.argv,
        **known,
        "git": git(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": usable_cores(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def version() -> str | None:
    """Of this package; None where it is not installed."""
    try:
        return importlib.metadata.version("weldtrain")
    except importlib.metadata.PackageNotFoundError:
        return None


def git() -> dict[str, Any] | None:
    """The commit of the code and the files that differ from it; None where it is no checkout."""
    def said(*command: str) -> str:
        here = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "timeout": 10, "check": True}
        return subprocess.run(["git", *command], **here).stdout.strip()

    try:
        return {"commit": said("rev-parse", "HEAD"), "changed": said("status", "--porcelain", "--", ".").splitlines()}
    except (OSError, subprocess.SubprocessError):
        return None
