"""Two ranks on this machine: what one process learns and measures, one record, and an end for all where one fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from weldtrain.engine import checkpoint

STEADY = ("device=cpu", "trainer.cpu_threads=1", "trainer.precision=fp32", "trainer.log_every=1", "trainer.max_steps=null",
          "model.norm=group", "optimizer=sgd", "optimizer.lr=1e-4", "loader.drop_last=false")


@pytest.fixture
def start(welds, cache, tmp_path):
    """Starts weldtrain on the small welds, alone or with ranks; returns the process."""
    def started(*args, ranks=1, task="train", root=welds, restarts=0):
        together = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                    f"--max-restarts={restarts}"] * (ranks > 1)
        env = os.environ | {"WELDTRAIN_CACHE": str(cache), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        base = ["experiment=debug"] if task == "train" else [f"task={task}"]
        return subprocess.Popen(
            [sys.executable, *together, "-m", "weldtrain", *base, "dataset=welding_v2", f"dataset.root={root}", *args],
            cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    return started


def ended(process, within=150):
    out, err = process.communicate(timeout=within)
    return process.returncode, out, err


def series(folder):
    lines = [json.loads(line) for line in next(folder.glob("**/metrics.jsonl")).read_text().splitlines()]
    return [(line["step"], line.get("loss/total"), line.get("optim/grad_norm")) for line in lines if "loss/total" in line]


def test_two_ranks_learn_what_one_process_does_and_write_one_record(start, tmp_path):
    """Eight pictures: one batch of 6 and one of 2 a step, of which the second rank has one; accumulated as well."""
    ways = {"one": (1, "loader.batch_size=6"), "two": (2, "loader.batch_size=3"),
            "both": (2, "loader.batch_size=1", "trainer.accumulate=3")}
    for name, (ranks, *more) in ways.items():
        code, _, err = ended(start(*STEADY, *more, "trainer.epochs=2", f"output_dir={name}", ranks=ranks))
        assert code == 0, err
    assert [step for step, *_ in series(tmp_path / "one")] == [1, 2, 3, 4]
    for name in ("two", "both"):
        for ours, theirs in zip(series(tmp_path / name), series(tmp_path / "one"), strict=True):
            assert ours == pytest.approx(theirs, rel=5e-3)
        assert len(list((tmp_path / name).glob("*/*"))) == len(list((tmp_path / name).glob("**/events.*"))) == 1
    best = next((tmp_path / "one").glob("**/best.pt"))
    for name, ranks in (("alone", 1), ("ranks", 2)):
        code, _, err = ended(start("device=cpu", f"checkpoint={best}", "evaluate.batch_size=1", f"output_dir={name}",
                                   ranks=ranks, task="evaluate"))
        assert code == 0, err
    alone, ranks = (json.loads(next((tmp_path / name).glob("**/summary.json")).read_text()) for name in ("alone", "ranks"))
    for name in alone.keys() - {"run_dir"}:
        assert alone[name] == ranks[name], name


def test_a_rank_that_fails_ends_all_with_its_message(start, welds, tmp_path):
    root = tmp_path / "welds"
    shutil.copytree(welds, root)
    picture = sorted((root / "images").glob("*.jpg"))[0]
    whole = picture.read_bytes()
    begun = time.monotonic()
    process = start(*STEADY, "trainer.epochs=400", "loader.batch_size=2", ranks=2, root=root)
    _wait_for(tmp_path, "last.pt")
    picture.write_bytes(whole[:200] + bytes(len(whole) - 200))
    code, _, err = ended(process, 60)
    assert code != 0 and time.monotonic() - begun < 140
    lines = [line for line in err.splitlines() if line.startswith("weldtrain: ")]
    assert any(picture.name in line for line in lines), err
    told = json.loads(next(tmp_path.glob("outputs/**/summary.json")).read_text())
    assert told["status"] == "failed" and picture.name in told["error"]  # whichever rank met it


def test_a_signal_to_all_leaves_a_checkpoint_of_one_step_and_the_same_command_goes_on(start, tmp_path):
    command = (*STEADY, "trainer.epochs=200", "loader.batch_size=2", "resume=auto")
    process = start(*command, ranks=2)
    _wait_for(tmp_path, "last.pt")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process, 60)
    assert code != 0 and not psutil.wait_procs(children, timeout=10)[1]
    last = next(tmp_path.glob("outputs/**/last.pt"))
    step = checkpoint.load(last)["step"]
    assert step > 0 and json.loads(next(tmp_path.glob("outputs/**/summary.json")).read_text())["status"] == "interrupted", err
    code, _, err = ended(start(*command, f"trainer.max_steps={step + 2}", ranks=2))
    assert code == 0 and re.search(rf"resumed from .* step {step} of", err), err
    assert checkpoint.load(last)["step"] == step + 2 and len(list(tmp_path.glob("outputs/*/*"))) == 1


def test_after_a_rank_is_killed_torchrun_starts_them_again_and_the_run_goes_on(start, tmp_path):
    process = start(*STEADY, "trainer.epochs=400", "trainer.max_steps=24", "loader.batch_size=2", "trainer.eval_every=400",
                    ranks=2, restarts=1)
    _wait_for(tmp_path, "last.pt")
    (second,) = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
    second.kill()
    code, _, err = ended(process)
    assert code == 0, err
    assert checkpoint.load(next(tmp_path.glob("outputs/**/last.pt")))["step"] == 24
    assert int(re.search(r"resumed from .* step (\d+) of 24", err)[1]) > 0
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1 and [step for step, *_ in series(tmp_path)] == list(range(1, 25))


def test_a_sweep_under_torchrun_is_refused(start):
    code, _, err = ended(start("device=cpu", "-m", "seed=1,2", ranks=2))
    assert code != 0 and "does not work under torchrun" in err


def _wait_for(folder, name, seconds=90):
    until = time.monotonic() + seconds
    while not list(folder.glob(f"outputs/**/{name}")) and time.monotonic() < until:
        time.sleep(0.2)
    torch.load(next(folder.glob(f"outputs/**/{name}")), weights_only=True)
