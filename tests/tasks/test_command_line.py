"""The whole program as a user runs it: exit codes, last lines, interrupts, evaluation that agrees with training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch


@pytest.fixture
def weldtrain(welds, cache, tmp_path):
    """Runs `python -m weldtrain` in an empty folder on the small welds; returns the finished process."""

    def start(*args, wait=True, before=()):
        command = [*before, sys.executable, "-m", "weldtrain", *args]
        env = os.environ | {"WELDTRAIN_CACHE": str(cache), "PYTHONWARNINGS": "ignore"}
        process = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   start_new_session=True,
                                   # A job in the background ignores Ctrl-C, and so would what it starts.
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        if not wait:
            return process
        process.out, process.err = process.communicate(timeout=240)
        return process

    return start


@pytest.fixture
def in_mounts():
    """`in_mounts("size=64k", "/dev/shm")`: what a command begins with that is to find an empty file system there."""

    def command(options, place):
        return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs {place} && exec "$@"', "sh"]

    if subprocess.run([*command("size=64k", "/dev/shm"), "true"], capture_output=True).returncode:
        pytest.skip("may not mount")
    return command


def on(welds, *more):
    return ("experiment=debug", "dataset=welding_v2", f"dataset.root={welds}", "device=cpu", *more)


def summaries(folder):
    return [json.loads(p.read_text()) for p in sorted(Path(folder).glob("outputs/**/summary.json"))]


@pytest.mark.parametrize("sizes", [(), ("model.min_size=96", "model.max_size=200", "loader.batch_size=3")])
def test_evaluation_of_a_checkpoint_agrees_with_training(weldtrain, welds, tmp_path, sizes):
    done = weldtrain(*on(welds, *sizes))
    assert done.returncode == 0, done.err
    assert "AP50" in done.out and "tensorboard --logdir" in done.err
    trained = summaries(tmp_path)[0]
    again = weldtrain("task=evaluate", "dataset=welding_v2", f"dataset.root={welds}", f"checkpoint={trained['checkpoint']}",
                      "device=cpu", "output_dir=judged", "loader.num_workers=1")
    assert again.returncode == 0, again.err
    judged = json.loads(next((tmp_path / "judged").glob("**/summary.json")).read_text())
    for name in ("map", "map_50", "map_75", "mar", "false_calls_per_picture"):
        assert judged[name] == pytest.approx(trained[name], abs=1e-6)
    assert judged["per_class_ap"] == pytest.approx(trained["per_class_ap"], abs=1e-6)
    told = judged["inspection"]["classes"]
    assert told.keys() == judged["per_class_ap"].keys()
    assert all(any(why in c["why"] for why in ("more are needed", "no number of defects", "no defect to choose by"))
               for c in told.values())
    said = " ".join(again.out.split())
    assert "no more than 2% of a class missed, with 95% confidence: thresholds chosen on val, which is judged here" in said


def test_relative_paths_mean_the_shells_folder_also_where_hydra_changes_it(weldtrain, welds, tmp_path):
    (tmp_path / "mine").symlink_to(welds)
    done = weldtrain(*on("mine", "hydra.job.chdir=true", "trainer.max_steps=1"))
    assert done.returncode == 0, done.err
    assert Path(summaries(tmp_path)[0]["checkpoint"]).exists()


def test_a_sweep_goes_on_past_a_bad_job(weldtrain, welds, tmp_path):
    done = weldtrain("-m", *on(welds, "trainer.max_steps=1", "optimizer.lr=0.001,-1,0.002"))
    assert done.returncode == 2 and any(line.startswith("weldtrain: optimizer.lr: -1") for line in done.err.splitlines())
    assert [s["status"] for s in summaries(tmp_path)] == ["done", "failed", "done"]
    assert len({Path(s["run_dir"]).parent for s in summaries(tmp_path)}) == 1


def test_a_folder_that_is_not_there_is_one_line(weldtrain, tmp_path):
    done = weldtrain("dataset=welding_v2", "dataset.root=nowhere")
    assert done.returncode == 2
    assert len(done.err.splitlines()) == 1 and f"{tmp_path}/nowhere" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_a_whole_record_and_no_process(weldtrain, welds, tmp_path, number, code, group):
    process = weldtrain(*on(welds, "loader=optimised", "loader.batch_size=2", "loader.num_workers=2", "trainer.epochs=500",
                            "trainer.max_steps=null", *["loader.workers=process"] * group), wait=False)
    deadline = time.time() + 120
    while not list(tmp_path.glob("outputs/**/last.pt")) and time.time() < deadline:
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number) if group else process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert err.splitlines()[-1].startswith("weldtrain: ") and "Traceback" not in err
    assert summaries(tmp_path)[0]["status"] == "interrupted"
    assert not psutil.wait_procs(children, timeout=10)[1]
    torch.load(next(tmp_path.glob("outputs/**/last.pt")), weights_only=True)


@pytest.mark.parametrize("signalled_after_s", [0.0, 0.4, 1.5])
def test_a_signal_to_all_while_workers_start_is_the_main_process_to_answer(weldtrain, welds, signalled_after_s):
    process = weldtrain(*on(welds, "loader.workers=process", "loader.num_workers=2", "loader.multiprocessing_context=spawn",
                            "trainer.epochs=500", "trainer.max_steps=null"), wait=False)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "resnet18 on cpu" in line:
            break
    time.sleep(signalled_after_s)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and len(err.splitlines()) <= 1, "".join(lines) + err


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_no_worker_outlives_a_main_process_that_is_killed(weldtrain, welds, tmp_path, context):
    process = weldtrain(*on(welds, "loader=optimised", "loader.batch_size=2", "loader.workers=process", "loader.num_workers=2",
                            f"loader.multiprocessing_context={context}", "trainer.epochs=500", "trainer.max_steps=null"),
                        wait=False)
    deadline = time.time() + 120
    while not list(tmp_path.glob("outputs/**/last.pt")) and time.time() < deadline:
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert len(children) >= 2 and not psutil.wait_procs(children, timeout=10)[1]


@pytest.mark.parametrize(("size", "said"), [("64k", False), ("4k", True)])
def test_processes_need_no_dev_shm(weldtrain, welds, size, said, in_mounts):
    """Docker gives 64 MB of it, and torch's loader fills them with one batch and then waits for ever."""
    done = weldtrain(*on(welds, "loader.workers=process", "loader.num_workers=2"), before=in_mounts(f"size={size}", "/dev/shm"))
    assert done.returncode == 0, done.err
    assert ("worker processes cannot be started (No space left on device): threads load instead" in done.err) == said
    assert "Traceback" not in done.err


def test_real_welds_train_and_are_judged(weldtrain, real_data, tmp_path):
    done = weldtrain(*on(real_data / "welding_v2_real"))
    assert done.returncode == 0, done.err
    summary = summaries(tmp_path)[0]
    assert summary["classes"] == ["Bad Weld", "Defect", "Good Weld"] and summary["steps"] == 4
