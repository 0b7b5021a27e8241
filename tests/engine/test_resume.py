"""A run that was stopped goes on as if nothing had happened: the same bits on one CPU thread, and the same series."""

import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
from dataclasses import asdict, replace

import pytest
import torch

from weldtrain import interruption
from weldtrain.engine import checkpoint
from weldtrain.engine.step import TrainingStep
from weldtrain.engine.trainer import Trainer
from weldtrain.errors import ConfigError, DataError
from weldtrain.interruption import Interrupted
from weldtrain.resuming import sound
from weldtrain.tasks import train
from weldtrain.telemetry.record import RunRecord

LONG = ("trainer.epochs=3", "trainer.max_steps=null", "trainer.log_every=3", "trainer.cpu_threads=1", "scheduler.warmup=0.5",
        "augment=light", "trainer.ema=0.9", "loader.batch_size=2", "model.backbone=mobilenet_v3_large", "model.min_size=96")


@pytest.fixture(autouse=True)
def as_it_was():
    threads, handlers = torch.get_num_threads(), {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(cfg, folder, resume=None):
    cfg = replace(cfg, resume=resume and str(resume))
    with RunRecord(folder, asdict(cfg), resumed=resume is not None) as record:
        return train.run(cfg, record)


def series(folder):
    """What was logged, but for what a clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.startswith(("loss", "optim", "val", "step")) and k.count("_ms") == 0}
            for line in lines]


def last(folder):
    return checkpoint.load(folder / "checkpoints/last.pt")


def same(one, other):
    assert one.keys() == other.keys()
    for name in ("model", "ema"):
        assert all(torch.equal(one[name][k], other[name][k]) for k in one[name]), name
    flat = [torch.utils._pytree.tree_leaves(state["optimizer"]) for state in (one, other)]
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*flat, strict=True))
    for name in ("epoch", "batch", "step", "best", "stale", "skipped", "unlogged"):
        assert one[name] == other[name], name


@pytest.fixture(scope="module")
def straight(configured, tmp_path_factory):
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("straight") / "run"
    run(configured(*LONG), folder)
    torch.set_num_threads(threads)
    return folder


def signalled(monkeypatch, owner, name, call, number=signal.SIGTERM):
    """Sends this process a signal in the midst of the nth call of a method."""
    plain, calls = getattr(owner, name), itertools.count(1)

    def calling(self, *args, **kwargs):
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return plain(self, *args, **kwargs)

    interruption.listen(signal.SIGTERM, signal.SIGINT)
    monkeypatch.setattr(owner, name, calling)


@pytest.mark.parametrize(("owner", "name", "call", "step"), [
    (TrainingStep, "add", 3, 3), (TrainingStep, "update", 4, 4), (TrainingStep, "update", 6, 6), (Trainer, "_log", 4, 8),
    (Trainer, "_validate", 1, 4), (Trainer, "_validate", 3, 12), (Trainer, "_save", 1, 4), (Trainer, "_end_epoch", 2, 8)],
    ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_signal_anywhere_leaves_a_checkpoint_from_which_the_run_goes_on_to_the_bit(
        configured, straight, tmp_path, monkeypatch, owner, name, call, step):
    cfg, folder = configured(*LONG), tmp_path / "run"
    with monkeypatch.context() as patch:
        signalled(patch, owner, name, call, signal.SIGINT if call % 2 else signal.SIGTERM)
        with pytest.raises(Interrupted):
            run(cfg, folder)
    assert last(folder)["step"] == step
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    run(cfg, folder, folder / "checkpoints/last.pt")
    same(last(folder), last(straight))
    assert series(folder) == series(straight)
    assert json.loads((folder / "summary.json").read_text())["map"] == json.loads((straight / "summary.json").read_text())["map"]


def start(cfg, folder):
    """A run in a process of its own, which goes on with what is there."""
    there = sound(folder)
    if not there:
        shutil.rmtree(folder, ignore_errors=True)
    run(cfg, folder, there[0] if there else None)


def test_a_run_that_is_killed_at_any_moment_goes_on_to_the_bit(configured, straight, tmp_path):
    """Twenty times, wherever it happens to be."""
    context = multiprocessing.get_context("forkserver")  # which has imported all, and has no threads
    context.set_forkserver_preload([__name__, "weldtrain.tasks.train"])
    cfg, folder, rng = configured(*LONG, "trainer.save_every=1"), tmp_path / "run", random.Random(0)
    for _ in range(20):
        process = context.Process(target=start, args=(cfg, folder))
        process.start()
        process.join(rng.uniform(0.4, 1.8))
        process.kill()
        process.join()
        for file in (folder / "checkpoints").glob("[!.]*.pt"):
            checkpoint.load(file)
        assert len(list((folder / "checkpoints").glob(".*"))) <= 2  # the next run tidies up
    start(cfg, folder)
    same(last(folder), last(straight))
    assert series(folder) == series(straight)
    assert not list((folder / "checkpoints").glob(".*"))


def test_a_run_that_was_killed_before_its_last_checkpoint_had_all_its_names_gets_them(configured, tmp_path):
    folder, cfg = tmp_path / "run", configured(*LONG, "trainer.epochs=1", "trainer.keep_every=1")
    run(cfg, folder)
    places = folder / "checkpoints"
    whole = {p.name: p.read_bytes() for p in places.iterdir()}
    (places / "best.pt").unlink()
    (places / "epoch_0001.pt").write_bytes(whole["last.pt"][:-1])
    (places / ".77.3.draft").write_bytes(b"half")
    run(cfg, folder, places / "last.pt")
    assert {p.name for p in places.iterdir()} == whole.keys() and len(whole) == 3
    assert (places / "last.pt").read_bytes() == whole["last.pt"]
    for name in ("best.pt", "epoch_0001.pt"):
        same(checkpoint.load(places / name), checkpoint.load(places / "last.pt"))
    before = (places / "best.pt").stat().st_mtime_ns
    run(cfg, folder, places / "last.pt")
    assert (places / "best.pt").stat().st_mtime_ns == before


def test_an_epoch_that_was_kept_but_not_judged_gets_its_name_as_well(configured, tmp_path):
    folder, cfg = tmp_path / "run", configured(*LONG, "trainer.epochs=2", "trainer.eval_every=2", "trainer.keep_every=1")
    run(cfg, folder)
    places = folder / "checkpoints"
    first = (places / "epoch_0001.pt").read_bytes()
    for file in places.iterdir():
        file.unlink()
    (places / "last.pt").write_bytes(first)
    run(cfg, folder, places / "last.pt")
    assert {p.name for p in places.iterdir()} == {"last.pt", "best.pt", "epoch_0001.pt", "epoch_0002.pt"}
    same(checkpoint.load(places / "epoch_0001.pt"), torch.load(io.BytesIO(first), weights_only=True))


def test_resuming_an_earlier_checkpoint_writes_what_followed_anew(configured, straight, tmp_path):
    folder = tmp_path / "run"
    cfg = configured(*LONG, "trainer.keep_every=1")
    run(cfg, folder)
    names = {p.name for p in (folder / "checkpoints").iterdir()}
    assert names == {"last.pt", "best.pt", "epoch_0001.pt", "epoch_0002.pt", "epoch_0003.pt"}
    run(cfg, folder, folder / "checkpoints/epoch_0001.pt")
    assert series(folder) == series(straight)
    same(last(folder), last(straight))


def test_a_finished_run_says_so_and_changes_nothing_and_more_epochs_go_on(configured, tmp_path, caplog):
    short, folder = configured(*LONG, "trainer.epochs=1"), tmp_path / "run"
    objective = run(short, folder)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file() and p.name != "run.log"}
    assert run(short, folder, folder / "checkpoints/last.pt") == objective
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file() and p.name != "run.log"} == before
    assert "this run is finished" in (folder / "run.log").read_text()
    run(configured(*LONG, "trainer.epochs=2"), folder, folder / "checkpoints/last.pt")
    assert last(folder)["step"] == 8 and "trainer.epochs is 2, it was 1; the new value counts" in (folder / "run.log").read_text()


def test_other_classes_and_other_models_are_refused(configured, straight):
    for override, words in (("dataset.classes=[crack,slag,porosity,incomplete_fusion,pore]", "class layer is kept|class layer"),
                            ("model.pyramid_channels=32", "does not fit this model")):
        with pytest.raises(ConfigError, match=words):
            run(configured(*LONG, override), straight, straight / "checkpoints/last.pt")


def test_a_damaged_checkpoint_is_named_and_the_next_one_taken(configured, straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    newest = folder / "checkpoints/last.pt"
    newest.write_bytes(newest.read_bytes()[:2000])
    assert [p.name for p in sound(folder)] == ["best.pt"]
    state = train.resumed_state(newest)
    assert state["classes"] == last(straight)["classes"]
    (folder / "checkpoints/best.pt").write_bytes(b"")
    with pytest.raises(DataError, match=r"last\.pt"):
        train.resumed_state(newest)
