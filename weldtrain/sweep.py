"""Sweeps: each job is a run in a process of its own, whatever launcher starts it. So nothing leaks from one to the next, what
kills one stops no other, and a job gives what the same command gives alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from weldtrain import cluster, config, resuming
from weldtrain.errors import WeldtrainError
from weldtrain.interruption import listen, starting_processes
from weldtrain.overrides import named, quoted, without
from weldtrain.telemetry.machine import oom_kills
from weldtrain.telemetry.record import FINISHED, SUMMARY
from weldtrain.validation import validated

# Of the sweep, not of a job's own command.
_OF_SWEEP = ("hydra.mode", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra.sweeper", "hydra/sweeper", "hydra.run.dir")
exit_code = 0  # of this process's last sweep: 2 where all that failed was refused


def job(composed: DictConfig, hydra: DictConfig) -> float:
    """Runs one job; returns its objective, the worst there is where it has none, so that a failure stops no sweeper."""
    from weldtrain.engine.pruning import study_of

    run_dir, cwd = Path(hydra.runtime.output_dir), hydra.runtime.cwd
    own = [o for o in (*hydra.overrides.task, *hydra.overrides.hydra) if not o.lstrip("+~").startswith(_OF_SWEEP)]
    going_on = named(own).get("resume") == config.AUTO
    own = without(own, "resume")
    if hasattr(signal, f"SIG{composed.trainer.stop_signal}"):
        listen(getattr(signal, f"SIG{composed.trainer.stop_signal}"))
    with cluster.place_in_cluster() as (rank, ranks):
        ended = None
        if rank == 0:
            ended = _before(run_dir, own, composed, cwd) if going_on or cluster.submitted() else None
            if ended in FINISHED and ranks == 1:
                print(f"job {hydra.job.num}: done before, kept", file=sys.stderr)
                return _objective(run_dir, composed)
        command = [*own, f"resume={quoted(str(run_dir))}"] if ended else [*own, f"hydra.run.dir={quoted(str(run_dir))}"]
        kills = oom_kills()
        code = _wait_for(command, cwd, run_dir, study_of(hydra.sweeper, own))
    if rank == 0:
        _tell_of_a_kill(run_dir, code, code == -signal.SIGKILL and oom_kills() > kills)
    return _objective(run_dir, composed)


def _wait_for(command: list[str], cwd: str, run_dir: Path, environment: dict[str, str]) -> int:
    """Starts the job's process and returns its exit code. A signal that reaches this process alone reaches that one as well,
    which then writes a checkpoint."""
    ours, theirs = os.pipe()  # the job sees its end close when this process is gone
    try:
        with starting_processes("fork"):
            process = subprocess.Popen([sys.executable, "-m", "weldtrain.job", str(ours), str(run_dir), *command], cwd=cwd,
                                       pass_fds=[ours], env=os.environ | environment)
        try:
            return process.wait()
        except KeyboardInterrupt as asked:
            # Others, such as a cluster's, are known to this process alone.
            process.send_signal(signal.SIGINT if getattr(asked, "number", None) in (None, signal.SIGINT) else signal.SIGTERM)
            process.wait()
            raise
    finally:
        os.close(ours)
        os.close(theirs)


def _tell_of_a_kill(run_dir: Path, code: int, out_of_memory: bool) -> None:
    """Of a process that could not do so itself."""
    if code in (0, None) or (code > 0 and (run_dir / SUMMARY).exists()):
        return
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended with exit code {code}"
    how += ", since memory was full" if out_of_memory else ", for want of memory?" * (code == -signal.SIGKILL)
    print(f"weldtrain: {run_dir}: {how}", file=sys.stderr)
    write_summary(run_dir, _summary(run_dir) | {"status": "failed", "error": how})


def _before(run_dir: Path, command: list[str], composed: DictConfig, cwd: str) -> str | None:
    """The status of what this very job has left in its directory; None, and nothing is left, where it must begin anew."""
    from weldtrain.data.indexing import open_index
    from weldtrain.telemetry.provenance import git, version

    try:
        made = json.loads((run_dir / resuming.MADE_OF).read_text("utf-8"))
        same = sorted(resuming.own_overrides(made["command"])) == sorted(command)
        same = same and (made["git"], made["packages"].get("weldtrain")) == (git(), version())
        if same and resuming.sound(run_dir):
            cfg = validated(composed, cwd)
            if made["data"] == open_index(cfg.dataset, cfg.cache_dir).stamp:
                return _summary(run_dir).get("status", "killed")
        print(f"weldtrain: {run_dir}: begins anew, since its code, command or data are others, or it left no checkpoint",
              file=sys.stderr)
    except (OSError, ValueError, KeyError, WeldtrainError):
        pass  # nothing that could be gone on with
    for path in run_dir.iterdir():
        if path.name != ".hydra":  # which is this start's
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return None


def _objective(run_dir: Path, composed: DictConfig) -> float:
    from weldtrain.metrics.comparison import objective_of, worst

    summary, name = _summary(run_dir), composed.sweep.objective
    value = objective_of(summary, name) if summary.get("status") in FINISHED else None
    return worst(name) if value is None else value


def _summary(run_dir: Path) -> dict[str, Any]:
    try:
        return json.loads((run_dir / SUMMARY).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Of a run that could not write it itself."""
    (run_dir / SUMMARY).write_text(json.dumps({"run_dir": str(run_dir), **summary}, indent=2) + "\n", "utf-8")


class Conclusion(Callback):
    """Called by Hydra: the table of all jobs at a sweep's end."""

    def on_multirun_start(self, config: DictConfig, **more: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)  # where a sweeper may keep its study
        OmegaConf.save(config, folder / resuming.SWEPT)  # as Hydra's own sweeper does, and no other

    def on_multirun_end(self, config: DictConfig, **more: Any) -> None:
        global exit_code
        from weldtrain.tasks.compare import compare

        folder = Path(config.hydra.sweep.dir)
        ended = [_summary(file.parent) for file in folder.glob(f"*/{SUMMARY}")]
        exit_code = min((summary.get("exit_code", 1) for summary in ended if summary.get("status") not in FINISHED), default=0)
        if config.task == "train":
            compare(folder, config.sweep.objective)
