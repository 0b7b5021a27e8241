"""Which run `resume` means, and the command that goes on with it: before anything is composed or read."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from weldtrain import config
from weldtrain.errors import DataError
from weldtrain.telemetry.record import METRICS, locked

_MADE_OF = "provenance.json"  # written once a run trains: unlike Hydra's record of its overrides not by one that is refused


class Resumption(NamedTuple):
    """A checkpoint to go on from, and the directory of its run; None for one that lies elsewhere, which begins a new run."""

    checkpoint: Path
    run_dir: Path | None


def find(overrides: Sequence[str], cwd: Path) -> Resumption | None:
    """What a command line asks to resume; None for nothing, also where `resume=auto` finds nothing.

    Raises DataError for a checkpoint or a run directory without one.
    """
    given = _named(overrides)
    wanted = given.get("resume", "null")
    if wanted == "null":
        return None
    if wanted == config.AUTO:
        for run_dir in _runs(given, cwd):
            for file in sorted(set(_checkpoints(run_dir)) - set(sound(run_dir))):
                print(f"{file}: is damaged, and passed over", file=sys.stderr)  # before there is a log
            if newest := next(iter(sound(run_dir)), None):
                return Resumption(newest, run_dir)
        return None
    path = Path(config.absolute(wanted, cwd))
    if path.is_dir():
        newest = next(iter(sound(path)), None)
        if newest is None:
            raise DataError("no whole checkpoint in it", path, "give a run directory or a checkpoint")
        return Resumption(newest, path)
    if not path.is_file():
        raise DataError("no such checkpoint", path, "give the path of a best.pt or last.pt, a run directory, or auto")
    run_dir = path.parent.parent
    return Resumption(path, run_dir if (run_dir / _MADE_OF).is_file() and path.parent.name == "checkpoints" else None)


def sound(run_dir: Path) -> list[Path]:
    """The checkpoints of a run that were written to their end, the newest first."""
    newest_first = sorted(_checkpoints(run_dir), key=lambda f: (f.stat().st_mtime_ns, f.name == "last.pt"), reverse=True)
    return [f for f in newest_first if zipfile.is_zipfile(f)]


def _checkpoints(run_dir: Path) -> list[Path]:
    return list((run_dir / "checkpoints").glob("[!.]*.pt"))


def command(overrides: Sequence[str], found: Resumption) -> list[str]:
    """The overrides of the run that is resumed, and over them those of this command line."""
    given = {o.partition("=")[0].lstrip("+") for o in overrides}
    kept = []
    if found.run_dir is not None:
        saved = yaml.safe_load((found.run_dir / "config.yaml").read_text("utf-8"))
        for override in _command_of(found.run_dir):
            name, _, value = override.partition("=")
            if name.lstrip("+") in given | {"resume", "hydra.run.dir", "hydra.output_subdir"}:
                continue
            if name in config.PATH_KEYS and value != "null":  # as it was meant in the folder where that command was given
                override = f"{name}={config.quoted(_at(saved, name))}"
            kept.append(override)
        kept.append(f"hydra.run.dir={config.quoted(str(found.run_dir))}")
    kept.append(f"resume={config.quoted(str(found.checkpoint))}")
    return [*kept, *(o for o in overrides if o.partition("=")[0].lstrip("+") != "resume")]


def _runs(given: dict[str, str], cwd: Path) -> Iterator[Path]:
    """Directories of training runs, the newest first: without those still going on, and those of other data or models than
    the command line names."""
    if "hydra.run.dir" in given:
        folders = [Path(config.absolute(given["hydra.run.dir"], cwd))]
    else:
        output_dir = Path(config.absolute(given.get("output_dir", "outputs"), cwd))
        folders = sorted(output_dir.glob(f"{given.get('experiment', '*')}/*"), key=lambda folder: folder.name, reverse=True)
    for folder in folders:
        if (folder / METRICS).is_file() and (folder / _MADE_OF).is_file():
            with open(folder / METRICS) as file:
                free = locked(file.fileno())
            if free and _same_task(given, folder, cwd):
                yield folder


def _same_task(given: dict[str, str], run_dir: Path, cwd: Path) -> bool:
    before, saved = _named(_command_of(run_dir)), yaml.safe_load((run_dir / "config.yaml").read_text("utf-8"))
    for name, value in given.items():
        if name == "dataset.root":
            if config.absolute(value, cwd) != saved["dataset"]["root"]:
                return False
        elif name.split(".")[0] in ("experiment", "dataset", "model") and before.get(name) != value:
            return False
    return True


def _command_of(run_dir: Path) -> list[str]:
    """The overrides a run was started with."""
    return [a for a in json.loads((run_dir / _MADE_OF).read_text("utf-8"))["command"][1:] if "=" in a and not a.startswith("-")]


def _named(overrides: Sequence[str]) -> dict[str, str]:
    return {name.lstrip("+"): value.strip("'\"") for name, _, value in (o.partition("=") for o in overrides)}


def _at(tree: dict, name: str) -> str:
    for part in name.split("."):
        tree = tree[part]
    return str(tree)
