"""The entry: compose and check the configuration, then hand it to one task. Turns every failure into one line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 the user's configuration or data is wrong, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from weldtrain import config, interruption, resuming, sweep
from weldtrain.diagnosis import explained
from weldtrain.errors import ConfigError, WeldtrainError, one_line
from weldtrain.overrides import check_override_keys, named, quoted_text, without
from weldtrain.tasks.explain import explain
from weldtrain.validation import validated

_PLUGINS = {"submitit": "slurm", "joblib": "sweep", "optuna": "sweep", "ray": "ray"}  # of Hydra, and the extra that holds it


@hydra.main(version_base="1.3", config_path=str(config.CONF_DIR), config_name="config")
def _run(composed: DictConfig) -> float | None:
    """A single run, or one point of a sweep, of which it returns the objective."""
    from weldtrain.telemetry.record import Follower, RunRecord

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return sweep.job(composed, HydraConfig.get())
    try:
        runtime = HydraConfig.get().runtime
        cfg = validated(composed, runtime.cwd)
        resumed = cfg.resume is not None and Path(cfg.resume).parent.parent == Path(runtime.output_dir)
        rank = int(os.environ.get("RANK", 0))
        with (Follower(runtime.output_dir, asdict(cfg), rank) if rank
              else RunRecord(runtime.output_dir, asdict(cfg), resumed, cfg.trainer.log)) as record:
            try:
                return importlib.import_module(f"weldtrain.tasks.{cfg.task}").run(cfg, record)
            except Exception as error:
                if (better := explained(error)) is None:
                    raise
                better.samples = getattr(error, "samples", ())
                raise better from error
    except Exception as error:
        # SystemExit passes Hydra, which would print a line of its own before ours.
        raise SystemExit(_report(error)) from error


def main(quiet: bool = False) -> None:
    """`weldtrain` and `python -m weldtrain`. One that is `quiet` leaves it to the process that started it to say that it was
    interrupted."""
    sweeping = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a class named 裂纹 must not end a run whose screen cannot show it
    # None where it was closed before.
    sys.stdout, sys.stderr = (stream and _Outlived(stream) for stream in (sys.stdout, sys.stderr))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them
    interruption.listen(signal.SIGINT, signal.SIGTERM)
    try:
        sys.argv[1:] = [quoted_text(a) for a in sys.argv[1:]]
        overrides = [a for a in sys.argv[1:] if not a.startswith("-") and ("=" in a or a.startswith("~"))]
        others = [a for a in sys.argv[1:] if a not in overrides]
        if named(overrides).get("task") == "explain":
            return explain(named(overrides).get("error"))  # before all that a run needs, and may be what failed
        check_override_keys(overrides)
        keys = [o.partition("=")[0].lstrip("+") for o in overrides]
        for key in dict.fromkeys(k for k in keys if keys.count(k) > 1 and not int(os.environ.get("RANK", 0))):
            print(f"weldtrain: {key} is given more than once; the last counts", file=sys.stderr)
        sweeping = any(a in ("-m", "--multirun") for a in sys.argv[1:])
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        if ranks > 1 and (sweeping or named(overrides).get("task") in (
                "check", "doctor", "compare", "replay", "predict")):
            raise ConfigError("does not work under torchrun", "-m" if sweeping else "task", "start it alone")
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):  # after a failure torchrun starts the same command again
            overrides = [*without(overrides, "resume"), "resume=auto"]
        found = None if sweeping else resuming.find(overrides, Path.cwd())
        if found is not None:
            overrides = resuming.command(overrides, found)
        stamp = config.run_stamp()
        if ranks > 1:
            from weldtrain.engine import distributed

            distributed.join()
            interruption.end_anyway(after_s=20)
            stamp, overrides = distributed.agreed((stamp, overrides))
            if distributed.world().rank:
                overrides.append("hydra.output_subdir=null")  # written by the first
        config.register(stamp)
        given = named(overrides)
        if not given.keys() & {"experiment", "dataset"} and given.get("task") not in ("compare", "predict"):
            # A folder is recognised; without one a first run needs no arguments and no GPU.
            overrides.append("dataset=auto" if "dataset.root" in given else "experiment=quickstart")
        if sweeping:
            overrides = resuming.sweep(overrides, Path.cwd())
        # argparse wants them in one piece, and people write -m first, last or between.
        sys.argv[1:] = [*others, *overrides]
        _run()
        if ranks > 1:
            distributed.leave()
        sys.exit(sweep.exit_code)
    except interruption.Interrupted as asked:
        logging.disable(logging.INFO)  # torch tells figures of its own at the end, to whatever Hydra has set up by then
        if not quiet and not int(os.environ.get("RANK", 0)):
            more = ", and resume=auto goes on" * sweeping
            print(f"weldtrain: {asked}; what was written so far is complete{more}", file=sys.stderr)
        sys.exit(asked.exit_code)
    except Exception as error:
        sys.exit(_report(error))


class _Outlived:
    """Standard output or error, whose reader may go away before the run is over (`| head`), or whose disk may fill: what follows
    then goes nowhere."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._unbroken():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._unbroken():
            self._stream.flush()

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def _report(error: Exception) -> int:
    """Prints the error's one line and returns the exit code."""
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        error = explained(error) or error
    if isinstance(error, WeldtrainError):
        rank = int(os.environ.get("RANK", 0))
        print(f"weldtrain: rank {rank}: {error}" if rank else f"weldtrain: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        print(f"weldtrain: {_hydra_line(error)}", file=sys.stderr)
        return 2
    text = one_line(f"{type(error).__name__}: {error}")
    crash = getattr(error, "crash", None)  # of a run
    if crash is None:
        traceback.print_exception(error)
    print(f"weldtrain: {text}; not a known failure: please report it" + (f" with {crash}" if crash else ""), file=sys.stderr)
    return 1


def _hydra_line(error: Exception) -> str:
    """Hydra's several lines in one, with the nearest choice where a group has no such file."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
    lines = [part.strip() for part in f"{error}\n{cause or ''}".splitlines()]
    noise = ("full_key:", "object_type=", "reference_type=", "Config search")
    lines = [part for part in lines if part and not part.startswith(noise)]
    given = re.match(r"Error merging override \+*([\w.]+)=(\S*)", lines[0])
    if given and given[1] in config.schema_keys():
        return f"{given[1]}: '{given[2]}' does not fit; it takes {config.takes(given[1])}"
    absent = re.search(r"Could not (?:find|load) '(hydra/(?:launcher|sweeper))/([a-z]+)", lines[0])
    if absent and absent[2] in _PLUGINS:
        return f"{absent[1]}: its plug-in is not installed; pip install 'weldtrain[{_PLUGINS[absent[2]]}]'"
    if "Could not find '" in lines[0]:
        wanted = lines[0].split("Could not find '")[1].split("'")[0]
        group, _, choice = wanted.rpartition("/")
        choices = [part for part in lines[1:] if part.isidentifier()]
        near = config.nearest(choice, choices)
        return (f"{group}: no choice '{choice}'; " + (f"did you mean '{near}'? " if near else "")
                + f"there are {', '.join(choices)}")
    return " ".join(dict.fromkeys(lines))


if __name__ == "__main__":
    main()
