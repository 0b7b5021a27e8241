"""Sweeps: every job comes to an end of its own, a sweep that was stopped goes on, and the table says what is best."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from weldtrain import resuming
from weldtrain.engine import pruning
from weldtrain.errors import ConfigError, DataError
from weldtrain.metrics.comparison import objective_of, worst
from weldtrain.tasks.compare import compare


@pytest.fixture
def start(welds, cache, tmp_path):
    """Starts `weldtrain -m` on the small welds; returns the process."""
    def started(*args):
        env = os.environ | {"WELDTRAIN_CACHE": str(cache), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "weldtrain", "-m", "experiment=debug", "dataset=welding_v2", f"dataset.root={welds}",
             "device=cpu", "model.backbone=mobilenet_v3_large", "model.min_size=96", "trainer.max_steps=2", *args],
            cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    return started


def rows(folder):
    (table,) = folder.glob("outputs/*/*/sweep.csv")
    return {row["run"]: row for row in csv.DictReader(table.open(encoding="utf-8"))}


def test_a_failed_job_stops_no_other_and_the_table_tells_of_all(start, tmp_path):
    process = start("optimizer.lr=0.001,-1,1e30", "model.norm=group", "trainer.max_steps=3")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1, err
    table = rows(tmp_path)
    assert {run: row["status"] for run, row in table.items()} == {"0": "done", "1": "failed", "2": "failed"}
    assert "optimizer.lr: -1.0 is out of range" in table["1"]["error"] and "not finite" in table["2"]["error"]
    assert next(iter(table)) == "0" and table["1"]["optimizer.lr"] == "-1" and float(table["0"]["objective"]) >= 0
    assert "Best by val/map_50: optimizer.lr=0.001" in out and "2 of 3 runs have no result" in out
    for run in "12":
        (job,) = tmp_path.glob(f"outputs/*/*/{run}")
        assert "Traceback" in (job / "run.log").read_text()
        assert json.loads((job / "summary.json").read_text())["status"] == "failed"
    assert "Traceback" not in err


def test_a_killed_sweep_goes_on_and_runs_only_what_is_missing(start, tmp_path):
    command = ("seed=1,2,3", "trainer.log_every=1")
    process = start(*command)
    until = time.monotonic() + 120
    while not list(tmp_path.glob("outputs/*/*/1/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert children and not psutil.wait_procs(children, timeout=10)[1]
    (first,) = tmp_path.glob("outputs/*/*/0")
    before = (first / "summary.json").stat().st_mtime_ns
    process = start(*command, "resume=auto")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "job 0: done before, kept" in err and (first / "summary.json").stat().st_mtime_ns == before
    assert {row["status"] for row in rows(tmp_path).values()} == {"done"} and len(rows(tmp_path)) == 3
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1 and "±" in out


def test_a_job_that_is_killed_is_told_and_a_signal_ends_the_whole_sweep(start, tmp_path):
    process = start("seed=1,2", "trainer.epochs=500", "trainer.max_steps=null")

    def job(number):
        until = time.monotonic() + 90
        while not list(tmp_path.glob(f"outputs/*/*/{number}/checkpoints/last.pt")) and time.monotonic() < until:
            time.sleep(0.05)
        (found,) = psutil.Process(process.pid).children()
        return found

    job(0).kill()
    children = [job(1)]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and not psutil.wait_procs(children, timeout=5)[1]
    told = {p.parent.name: json.loads(p.read_text()) for p in tmp_path.glob("outputs/*/*/*/summary.json")}
    assert told["0"]["status"] == "failed" and "SIGKILL" in told["0"]["error"] and told["1"]["status"] == "interrupted"
    assert "Traceback" not in err


def test_a_job_gives_what_it_gives_alone(start, tmp_path, welds):
    process = start("seed=3,4", "trainer.cpu_threads=1", "trainer.precision=fp32")
    assert process.wait(200) == 0
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = json.loads(next(tmp_path.glob("outputs/*/*/1/provenance.json")).read_text())["command"][1:]
    alone = [o for o in command if not o.startswith("hydra.run.dir")] + ["output_dir=alone"]
    subprocess.run([sys.executable, "-m", "weldtrain", *alone], cwd=tmp_path, env=env, check=True, capture_output=True)

    def losses(pattern):
        (file,) = tmp_path.glob(pattern)
        return [line.get("loss/total") or line.get("val/map") for line in map(json.loads, file.read_text().splitlines())]

    assert losses("alone/*/*/metrics.jsonl") == losses("outputs/*/*/1/metrics.jsonl")


@pytest.mark.parametrize(("plugin", "more"), [
    ("joblib", ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2")),
    ("optuna", ("hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1",
                "optimizer.lr=tag(log,interval(1e-4,1e-2))"))])
def test_the_plugins_start_the_same_jobs(start, tmp_path, plugin, more):
    pytest.importorskip(plugin)
    process = start(*more)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert [row["status"] for row in rows(tmp_path).values()] == ["done", "done"]


def test_a_trial_that_is_worse_than_most_were_is_ended_early(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    storage = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(study_name="a", storage=storage, direction="maximize")

    def trial(lr):
        asked = study.ask({"optimizer.lr": optuna.distributions.UniformDistribution(lr, lr + 1e-9)})
        value = asked.params["optimizer.lr"]
        told = pruning.study_of({"storage": storage, "study_name": "a"}, [f"optimizer.lr={value}", "seed=1"])
        monkeypatch.setenv(pruning.STUDY, told[pruning.STUDY])
        return asked, pruning.Pruner("val/map_50")

    for lr in (0.1, 0.2, 0.3, 0.4, 0.5):
        asked, pruner = trial(lr)
        assert not any(pruner.hopeless(epoch, {"map_50": 0.5}) for epoch in (1, 2, 3))
        study.tell(asked, 0.5)
    _, bad = trial(0.6)
    assert not bad.hopeless(1, {"map_50": 0.1}) and not bad.hopeless(2, {"map_50": None}) and bad.hopeless(2, {"map_50": 0.1})
    _, good = trial(0.7)
    assert not any(good.hopeless(epoch, {"map_50": 0.9}) for epoch in (1, 2, 3))
    monkeypatch.delenv(pruning.STUDY)
    assert not pruning.Pruner("val/map_50").hopeless(2, {"map_50": 0.0}) and pruning.study_of({}, []) == {}


def made(folder, name, status="done", error="", **keys):
    """A run that never was."""
    values = {"map_50": keys.pop("map_50", None), "images_per_s": 10.0, "train_s": keys.pop("train_s", 5.0)}
    config = {"task": "train", "seed": keys.pop("seed", 0), "output_dir": name, "optimizer": {"lr": keys.pop("lr", 0.1)}}
    (folder / name).mkdir(parents=True)
    (folder / name / "summary.json").write_text(json.dumps({"status": status, "error": error, **values}))
    (folder / name / "config.yaml").write_text(yaml.safe_dump(config))


def test_any_folder_of_runs_is_compared(tmp_path, capsys):
    for i, (lr, seed, value) in enumerate([(0.1, 0, 0.80), (0.1, 1, 0.82), (0.1, 2, 0.81), (0.01, 0, 0.5), (0.01, 1, 0.51)]):
        made(tmp_path, f"deep/{i}", map_50=value, lr=lr, seed=seed)
    made(tmp_path, "deep/bad", status="failed", error="<script>alert(1)</script>", lr=9.0)
    made(tmp_path, "other", status="interrupted", map_50=0.99, lr=0.2)
    compare(tmp_path, "val/map_50")
    out = capsys.readouterr().out
    assert "Best by val/map_50: optimizer.lr=0.1 (0.810 ± 0.025)" in out and "2 of 7 runs have no result" in out
    assert "a tie" not in out
    table = list(csv.DictReader((tmp_path / "sweep.csv").open(encoding="utf-8")))
    assert [row["objective"] for row in table] == ["0.820", "0.810", "0.800", "0.510", "0.500", "n/a", "n/a"]
    page = (tmp_path / "sweep.html").read_text()
    assert "<script>alert" not in page and page.count("<polyline") == 5
    made(tmp_path, "cut", map_50=0.1)
    (tmp_path / "cut" / "summary.json").write_text('{"status": "done", "map_50"')
    made(tmp_path, "text", map_50=0.1, train_s="long")
    made(tmp_path, "list", map_50=0.1)
    (tmp_path / "list" / "summary.json").write_text("[]")
    compare(tmp_path, "train_s")
    err = capsys.readouterr()
    assert all(f"{tmp_path / name}: left out" in err.err for name in ("cut", "text", "list")) and "Best by train_s" in err.out
    with pytest.raises(DataError, match="no training run"):
        compare(tmp_path / "deep" / "bad" / "none", "val/map")


def test_keys_that_a_choice_decides_are_that_choice(tmp_path, capsys):
    for i, (choice, flip, lr) in enumerate([("none", 0.0, 0.1), ("light", 0.5, 0.1), ("light", 0.5, 0.2)]):
        made(tmp_path, str(i), map_50=0.1 * i, lr=lr)
        config = yaml.safe_load((tmp_path / str(i) / "config.yaml").read_text())
        (tmp_path / str(i) / "config.yaml").write_text(yaml.safe_dump(config | {"augment": {"hflip": flip, "vflip": flip}}))
        (tmp_path / str(i) / ".hydra").mkdir()
        (tmp_path / str(i) / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(
            {"hydra": {"runtime": {"choices": {"augment": choice, "optimizer": "sgd"}}}}))
    compare(tmp_path, "val/map_50")
    assert "Best by val/map_50: augment=light, optimizer.lr=0.2" in capsys.readouterr().out
    table = list(csv.DictReader((tmp_path / "sweep.csv").open(encoding="utf-8")))
    assert [(row["augment"], row["optimizer.lr"]) for row in table] == [("light", "0.2"), ("light", "0.1"), ("none", "0.1")]


def test_repeats_of_one_setting_are_told_as_that(tmp_path, capsys):
    for seed, value in enumerate([0.4, 0.6]):
        made(tmp_path, str(seed), map_50=value, seed=seed)
    compare(tmp_path, "val/map_50")
    assert "of settings that differ in no more than the seed: 0.500 ± 1.271" in capsys.readouterr().out


def test_objectives_and_what_is_worst():
    summary = {"map_50": 0.5, "per_class_ap": {"a/b": 0.25}, "images_per_s": "nan"}
    assert objective_of(summary, "val/map_50") == 0.5 and objective_of(summary, "val/ap/a/b") == 0.25
    assert objective_of(summary, "images_per_s") is None is objective_of({}, "val/map")
    assert worst("val/map_50") == -float("inf") and worst("train_s") == float("inf")


def test_which_sweep_goes_on(tmp_path):
    def swept(name, *overrides):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "multirun.yaml").write_text(yaml.safe_dump(
            {"hydra": {"overrides": {"task": list(overrides)}, "runtime": {"cwd": "/there"}}}))

    swept("outputs/a/1", "seed=1,2", "dataset.root=mine")
    swept("outputs/a/2", "seed=1,2,3")
    own = ["seed=1,2", "dataset.root=mine"]
    assert resuming.sweep(own, tmp_path) == own
    assert resuming.sweep([*own, "resume=auto"], tmp_path)[-1] == f"hydra.sweep.dir='{tmp_path}/outputs/a/1'"
    assert resuming.sweep(["seed=5,6", "resume=auto"], tmp_path) == ["seed=5,6", "resume=auto"]
    assert resuming.sweep(["resume=outputs/a/1", "trainer.epochs=9"], tmp_path) == [
        "seed=1,2", "dataset.root='/there/mine'", "trainer.epochs=9", "resume=auto", f"hydra.sweep.dir='{tmp_path}/outputs/a/1'"]
    with pytest.raises(ConfigError, match="one directory for all jobs"):
        resuming.sweep(["seed=1,2", "hydra.sweep.subdir=x"], tmp_path)
    assert resuming.sweep(["hydra.sweep.subdir='${hydra.job.num}_a'"], tmp_path)
    job = tmp_path / "outputs/a/1/0"
    assert resuming.varied(["seed=2", "dataset.root=mine"], job) == {"seed": "2"}
    assert resuming.varied(["seed=2", "augment=full"], tmp_path) is None
    with pytest.raises(ConfigError, match="not the directory of a sweep"):
        resuming.sweep(["seed=1,2", "resume=outputs"], tmp_path)
    with pytest.raises(ConfigError, match="study goes on by"):
        resuming.sweep(["hydra/sweeper=optuna", "resume=auto"], tmp_path)
    with pytest.raises(ConfigError, match="study goes on by"):
        resuming.sweep(["sweep=adamw", "resume=auto"], tmp_path)
    swept("outputs/a/3", "sweep=adamw")
    with pytest.raises(ConfigError, match="study goes on by"):
        resuming.sweep(["resume=outputs/a/3"], tmp_path)
