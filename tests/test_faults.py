"""Faults provoked for real, in the whole program: the last line, the exit code, what is left behind, and what is not."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BEFORE = set(os.listdir("/dev/shm"))
FORK = ("loader.workers=process", "loader.num_workers=2", "loader.multiprocessing_context=fork",
        "trainer.max_steps=null")
HANGING = ("trainer.hang_s=2", "trainer.max_steps=4")
# What is done to the program before it starts; `it` is the fifth picture's row.
AT_FIFTH = """
import os, signal, time, faulthandler
from weldtrain.data.dataset import DetectionDataset as D
decoded = D.decoded
def fault(self, row, *args):
    if row == self.rows[4]:
        {}
    return decoded(self, row, *args)
D.decoded = fault
"""
IN_STEP = """
import os, signal, time
from weldtrain.engine.step import TrainingStep as T
add, steps = T.add, []
def fault(self, *args):
    steps.append(0)
    if len(steps) == 3:
        {}
    return add(self, *args)
T.add = fault
"""


@pytest.fixture
def faulty(welds, cache, tmp_path):
    """Runs the program with a fault in it; checks what holds after any end, and returns (exit code, last line, run directory)."""

    def run(fault, *args, before=(), timeout=120):
        code = f"{fault}\nimport sys\nfrom weldtrain.__main__ import main\nsys.argv[0] = 'weldtrain'\nmain()"
        command = [*before, sys.executable, "-c", code, "experiment=debug", "dataset=welding_v2", f"dataset.root={welds}",
                   "device=cpu", "model.backbone=mobilenet_v3_large", "model.min_size=96", *args]
        env = os.environ | {"WELDTRAIN_CACHE": str(cache), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   start_new_session=True)
        _, err = process.communicate(timeout=timeout)
        until = time.monotonic() + 10  # multiprocessing's tracker of resources ends a moment later
        while (left := children_of(process.pid)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left and not forgotten()
        last = err.strip().splitlines()[-1]
        assert last.startswith("weldtrain: ") and "Traceback" not in err, err
        runs = [file.parent for file in tmp_path.glob("outputs/*/*/run.log")]
        return process.returncode, last, runs[0] if runs else None

    return run


def children_of(session):
    def is_one(process):
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            return process.pid != session and os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE

    return list(filter(is_one, psutil.process_iter()))


def forgotten():
    """Files in /dev/shm that no process has mapped."""
    there, mapped = set(os.listdir("/dev/shm")), set()
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {line.rpartition("/")[2] for line in file.read_text().splitlines() if "/dev/shm/" in line}
    # What tests beside this one have there, such as joblib's, comes and goes.
    return {name for name in there & set(os.listdir("/dev/shm")) - mapped - BEFORE if name.startswith(("torch_", "psm_"))}


def crash_of(run_dir):
    return json.loads((run_dir / "crash.json").read_text())


@pytest.mark.parametrize(("signal", "cause"), [
    ("SIGKILL", "fewer loader.num_workers"), ("SIGSEGV", "task=check finds the picture"), ("SIGBUS", "make room in cache_dir")])
def test_a_worker_that_is_killed(faulty, signal, cause):
    code, last, run_dir = faulty(AT_FIFTH.format(f"os.kill(os.getpid(), signal.{signal})"), *FORK, "loader.shuffle=false")
    assert code == 1 and "a loader worker died (" in last and " while at images/" in last and cause in last
    (sample,) = crash_of(run_dir)["samples"]
    assert sample["picture"] in last and sample["epoch"] == 0
    assert (run_dir / "checkpoints/last.pt").exists()
    if signal != "SIGKILL":
        assert "Fatal Python error" in (run_dir / "run.log").read_text()  # where it was


def test_a_worker_that_hangs(faulty):
    code, last, run_dir = faulty(AT_FIFTH.format("time.sleep(60)"), *FORK, "loader.shuffle=false", "loader.timeout_s=2")
    assert code == 1 and "loader.timeout_s: no batch came from the workers within 2 s while at images/" in last
    log = (run_dir / "run.log").read_text()
    assert "stacks of the workers" in log and "in fault" in log
    assert (run_dir / "checkpoints/last.pt").exists()


def test_a_step_that_hangs(faulty):
    code, last, run_dir = faulty(IN_STEP.format("time.sleep(60)"), *HANGING)
    assert code == 1 and "trainer.hang_s: nothing has moved for 2 s, in epoch 1, step 3" in last
    assert "in fault" in (run_dir / "run.log").read_text() and (run_dir / "checkpoints/last.pt").exists()
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"


def test_a_step_that_hangs_where_no_signal_reaches_it(faulty):
    stuck = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(60)"
    shorter = "import weldtrain.watchdog as w; w.watching.__wrapped__.__defaults__ = (1.0,)"
    code, last, run_dir = faulty(IN_STEP.format(stuck) + shorter, *HANGING)
    assert code == 1 and "nothing has moved for 2 s" in last
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"


def test_what_cannot_be_sent_to_a_worker(faulty):
    fault = ("from weldtrain.data.dataset import DetectionDataset as D\nwatch = D.watch\n"
             "def fault(self, *args):\n    self.extra = lambda: 0\n    return watch(self, *args)\nD.watch = fault")
    code, last, _ = faulty(fault, *FORK, "loader.multiprocessing_context=spawn")
    assert code == 1 and "cannot be sent" in last and "loader.multiprocessing_context=fork" in last


@pytest.mark.parametrize("loader", [("loader=simple",), ("loader=optimised", "loader.workers=thread"), FORK])
def test_what_nobody_knows_is_told_with_its_sample_and_loaded_again(faulty, loader, welds, tmp_path):
    fault = AT_FIFTH.format("raise KeyError('crack')")
    code, last, run_dir = faulty(fault, *loader, "loader.cache=none", "loader.shuffle=false", "trainer.max_steps=null")
    assert code == 1 and last == f"weldtrain: KeyError: 'crack'; not a known failure: please report it with {run_dir}/crash.json"
    left = crash_of(run_dir)
    (sample,) = left["samples"]
    assert left["type"] == "KeyError" and "KeyError: 'crack'" in left["traceback"] and left["config"]["seed"] == 0
    assert left["environment"]["torch"] and left["machine"]["memory_available_mb"] > 0 and left["log"] and "PATH" not in str(left)
    code, last, _ = faulty(fault, "task=replay", f"run={run_dir}", "output_dir=again")
    assert code == 1 and "KeyError: 'crack'" in last
    done = subprocess.run([sys.executable, "-m", "weldtrain", "task=replay", f"run={run_dir}"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert done.returncode == 0 and sample["picture"] in done.stderr, done.stderr
    assert "loaded without an error: 1 of 1" in done.stderr


def test_memory_that_ends(faulty):
    limit = ("import resource, psutil; now = psutil.Process().memory_info().vms; "
             "resource.setrlimit(resource.RLIMIT_AS, (now + 2**24, now + 2**24)); import torch; torch.empty(2**30)")
    code, last, _ = faulty(IN_STEP.format(limit), "loader.batch_size=8", "trainer.max_steps=4", "trainer.epochs=4")
    assert code == 1 and "the machine's memory, or a limit on it" in last


@pytest.mark.parametrize(("options", "code", "text"), [
    ("ro", 1, "a place may not be written (Read-only file system); set output_dir"),
    ("size=3m", 1, "cannot be written (No space left on device); free some disk space")])
def test_a_place_for_results_that_takes_none(faulty, tmp_path, options, code, text):
    place = tmp_path / "outputs"
    place.mkdir()
    before = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs {place} && exec "$@"', "sh")
    if subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("may not mount")
    got, last, _ = faulty("", before=before)
    assert got == code and text in last and "outputs" in last


def test_a_limit_of_file_size(faulty):
    code, last, _ = faulty("", before=("bash", "-c", 'ulimit -f 4000 && exec "$@"', "sh"))
    assert code == 1 and "cannot be written (File too large)" in last


def test_few_open_files(faulty):
    few = ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99)); "
           "files = [open('/dev/null') for _ in range(99)]")
    code, last, _ = faulty(AT_FIFTH.format(few), *FORK)
    assert code == 1 and "the limit of open files is reached (Too many open files); raise it (ulimit -n" in last


class Malice:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


@pytest.mark.parametrize("key", ["checkpoint", "resume", "model.weights"])
@pytest.mark.parametrize("archive", [False, True])
def test_a_file_that_would_run_code_is_refused(faulty, tmp_path, key, archive):
    import torch

    bad, opened = tmp_path / "best.pt", tmp_path / "opened"
    if archive:
        torch.save({"model": Malice(str(opened))}, bad)
    else:
        bad.write_bytes(pickle.dumps(Malice(str(opened))))
    task = ("task=evaluate",) if key == "checkpoint" else ()
    code, last, _ = faulty("", *task, f"{key}={bad}")
    assert code == 2 and "best.pt" in last and not opened.exists()


def test_a_reader_that_goes_away(welds, cache, tmp_path):
    """`weldtrain … | head -1`."""
    process = subprocess.Popen([sys.executable, "-m", "weldtrain", "task=check", "dataset=welding_v2", f"dataset.root={welds}"],
                               cwd=tmp_path, env=os.environ | {"WELDTRAIN_CACHE": str(cache)}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 0 and "Traceback" not in err and "BrokenPipe" not in err
    assert list(Path(tmp_path).glob("outputs/*/*/report.html"))
