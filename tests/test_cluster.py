"""Jobs of submitit, started by its executor for this machine: two ranks, queued again when their time is over."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from weldtrain.engine import checkpoint

pytest.importorskip("submitit")


def tasks(main):
    """The job's processes that compute."""
    return [p for p in psutil.Process(main.pid).children(recursive=True) if "submitit.core._submit" in p.cmdline()]


def test_two_tasks_are_ranks_and_go_on_after_they_were_queued_again(welds, cache, tmp_path):
    env = os.environ | {"WELDTRAIN_CACHE": str(cache), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    main = subprocess.Popen(
        [sys.executable, "-m", "weldtrain", "-m", "experiment=debug", "dataset=welding_v2", f"dataset.root={welds}", "device=cpu",
         "hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "trainer.max_steps=60", "trainer.epochs=100",
         "trainer.eval_every=100", "model.norm=group"],
        cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until = time.monotonic() + 90
    while not list(tmp_path.glob("outputs/**/last.pt")) and time.monotonic() < until:
        time.sleep(0.1)
    first = tasks(main)
    assert len(first) == 2
    for task in first:  # as Slurm does
        task.send_signal(signal.SIGUSR2)
    _, err = main.communicate(timeout=120)
    assert main.returncode == 0, err
    assert not psutil.wait_procs(first, timeout=10)[1]
    (run_dir,) = tmp_path.glob("outputs/*/*/0")
    assert "resumed from" in (run_dir / "run.log").read_text()
    assert checkpoint.load(run_dir / "checkpoints/last.pt")["step"] == 60
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss/total" in line] == list(range(1, 61))


def test_the_clusters_launcher_composes_and_its_absence_is_told(tmp_path):
    def weldtrain(*more, **env):
        return subprocess.run([sys.executable, "-m", "weldtrain", "hydra/launcher=slurm", *more], cwd=tmp_path, text=True,
                              capture_output=True, env=os.environ | env)

    shown = weldtrain("hydra.launcher.tasks_per_node=8", "hydra.launcher.partition=gpu", "--cfg", "hydra", "-p", "hydra.launcher")
    assert "SlurmLauncher" in shown.stdout and "tasks_per_node: 8" in shown.stdout and "partition: gpu" in shown.stdout
    hidden = tmp_path / "hydra_plugins"  # another package of that name, which holds none
    hidden.mkdir()
    (hidden / "__init__.py").touch()
    absent = weldtrain("-m", "seed=1", PYTHONPATH=str(tmp_path))
    assert absent.returncode == 2
    assert absent.stderr == "weldtrain: hydra/launcher: its plug-in is not installed; pip install 'weldtrain[slurm]'\n"
