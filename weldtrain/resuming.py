"""Which run `resume` means, and the command that goes on with it: before anything is composed or read."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from weldtrain import config
from weldtrain.errors import ConfigError, DataError
from weldtrain.locks import lock
from weldtrain.overrides import named, quoted, without
from weldtrain.telemetry.record import METRICS

_PLACES = {"resume", "hydra.run.dir", "hydra.output_subdir"}
SWEPT = "multirun.yaml"  # what a sweep was started with
MADE_OF = "provenance.json"  # written once a run trains: unlike Hydra's record of its overrides not by one that is refused


class Resumption(NamedTuple):
    """A checkpoint to go on from, and the directory of its run; None for one that lies elsewhere, which begins a new run."""

    checkpoint: Path
    run_dir: Path | None


def find(overrides: Sequence[str], cwd: Path) -> Resumption | None:
    """What a command line asks to resume; None for nothing, also where `resume=auto` finds nothing.

    Raises DataError for a checkpoint or a run directory without one.
    """
    given = named(overrides)
    wanted = given.get("resume", "null")
    if wanted == "null":
        return None
    if wanted == config.AUTO:
        for run_dir in _runs(given, cwd):
            whole = sound(run_dir)
            for file in sorted({*_checkpoints(run_dir)} - {*whole}):
                print(f"{file}: is damaged, and passed over", file=sys.stderr)  # before there is a log
            if whole:
                return Resumption(whole[0], run_dir)
        return None
    path = Path(config.absolute(wanted, cwd))
    if path.is_dir():
        whole = sound(path)
        if not whole:
            raise DataError("no whole checkpoint in it", path, "give a run directory or a checkpoint")
        return Resumption(whole[0], path)
    if not path.is_file():
        raise DataError("no such checkpoint", path, "give the path of a best.pt or last.pt, a run directory, or auto")
    run_dir = path.parent.parent
    return Resumption(path, run_dir if (run_dir / MADE_OF).is_file() and path.parent.name == "checkpoints" else None)


def sweep(overrides: Sequence[str], cwd: Path) -> list[str]:
    """The command of a sweep, and where it has `resume` the directory that it goes on in: auto is the newest of the same command.

    Raises ConfigError for a sweeper that cannot go on so, for a directory that is not a sweep's, and for one that all jobs
    would share.
    """
    given = named(overrides)
    if "${" not in given.get("hydra.sweep.subdir", "${"):
        raise ConfigError("is one directory for all jobs", "hydra.sweep.subdir", "leave it alone, or have ${hydra.job.num} in it")
    wanted = given.get("resume", "null")
    if wanted == "null" or (wanted == config.AUTO and "hydra.sweep.dir" in given):
        return [*overrides]
    _refuse_drawn_trials(given)
    if wanted == config.AUTO:
        folders = Path(config.absolute(given.get("output_dir", "outputs"), cwd)).glob(f"*/*/{SWEPT}")
        own = sorted(o for o in without(overrides, "resume") if not o.startswith("hydra"))
        for file in sorted(folders, key=lambda f: f.stat().st_mtime_ns, reverse=True):
            if sorted(without(_swept(file)[0], "resume")) == own:
                return [*overrides, f"hydra.sweep.dir={quoted(str(file.parent))}"]
        return [*overrides]
    file = Path(config.absolute(wanted, cwd)) / SWEPT
    if not file.is_file():
        raise ConfigError("is not the directory of a sweep", "resume", "give one, or auto; resume a single run without -m")
    before, before_cwd = _swept(file)
    _refuse_drawn_trials(named(before))
    kept = [f"{name}={quoted(config.absolute(value, before_cwd))}" if name in config.PATH_KEYS else f"{name}={value}"
            for name, _, value in (o.partition("=") for o in before) if name.lstrip("+") not in given]
    return [*kept, *without(overrides, "resume"), "resume=auto", f"hydra.sweep.dir={quoted(str(file.parent))}"]


def _refuse_drawn_trials(given: dict[str, str]) -> None:
    if given.get("hydra/sweeper", "basic") != "basic" or given.get("sweep", "null") != "null":
        raise ConfigError("is not for a sweeper that draws its trials", "resume",
                          "a study goes on by hydra.sweeper.storage=sqlite:///FILE hydra.sweeper.study_name=NAME")


def varied(overrides: Sequence[str], run_dir: Path) -> dict[str, str] | None:
    """Of a run's overrides those that its sweep varies, by key; None where it is no job of a sweep."""
    file = run_dir.parent / SWEPT
    if not file.is_file():
        return None
    common, _ = _swept(file)
    return named([o for o in overrides if o not in common])


def _swept(file: Path) -> tuple[list[str], str]:
    """A sweep's own overrides, and the folder where that command was given."""
    saved = yaml.safe_load(file.read_text("utf-8"))["hydra"]
    return saved["overrides"]["task"], saved["runtime"]["cwd"]


def sound(run_dir: Path) -> list[Path]:
    """The checkpoints of a run that were written to their end, the newest first."""
    newest_first = sorted(_checkpoints(run_dir), key=lambda f: (f.stat().st_mtime_ns, f.name == "last.pt"), reverse=True)
    return [f for f in newest_first if zipfile.is_zipfile(f)]


def _checkpoints(run_dir: Path) -> list[Path]:
    return list((run_dir / "checkpoints").glob("[!.]*.pt"))


def command(overrides: Sequence[str], found: Resumption) -> list[str]:
    """The overrides of the run that is resumed, and over them those of this command line."""
    kept = []
    if found.run_dir is not None:
        saved = _config_of(found.run_dir)
        for override in without(_command_of(found.run_dir), *named(overrides)):
            name, _, value = override.partition("=")
            if name in config.PATH_KEYS and value != "null":  # as it was meant in the folder where that command was given
                override = f"{name}={quoted(saved[name])}"
            kept.append(override)
        kept.append(f"hydra.run.dir={quoted(str(found.run_dir))}")
    kept.append(f"resume={quoted(str(found.checkpoint))}")
    return [*kept, *without(overrides, "resume")]


def _runs(given: dict[str, str], cwd: Path) -> Iterator[Path]:
    """Directories of training runs, the newest first: without those still going on, and those of other data or models than
    the command line names."""
    if "hydra.run.dir" in given:
        folders = [Path(config.absolute(given["hydra.run.dir"], cwd))]
    else:
        output_dir = Path(config.absolute(given.get("output_dir", "outputs"), cwd))
        folders = sorted(output_dir.glob(f"{given.get('experiment', '*')}/*"), key=lambda folder: folder.name, reverse=True)
    for folder in folders:
        if (folder / METRICS).is_file() and (folder / MADE_OF).is_file():
            with open(folder / METRICS) as file:
                free = lock(file.fileno(), exclusive=True, wait=False) is not False
            if free and _same_task(given, folder, cwd):
                yield folder


def _same_task(given: dict[str, str], run_dir: Path, cwd: Path) -> bool:
    before, saved = named(_command_of(run_dir)), _config_of(run_dir)
    for name, value in given.items():
        if name == "dataset.root":
            if config.absolute(value, cwd) != saved["dataset.root"]:
                return False
        elif name.split(".")[0] in ("experiment", "dataset", "model") and before.get(name) != value:
            return False
    return True


def _command_of(run_dir: Path) -> list[str]:
    """The overrides a run was started with."""
    return own_overrides(json.loads((run_dir / MADE_OF).read_text("utf-8"))["command"])


def own_overrides(command: Sequence[str]) -> list[str]:
    """Of a run's command what says what it does, not where it does it."""
    return without((a for a in command[1:] if "=" in a and not a.startswith("-")), *_PLACES)


def _config_of(run_dir: Path) -> dict[str, Any]:
    """The values it had, by dotted key."""
    return config.flat(yaml.safe_load((run_dir / "config.yaml").read_text("utf-8")))
