"""Training: it learns, stops on a loss that is not finite, and leaves only finite weights behind."""

import gzip
import json
import os
import subprocess
import threading
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from weldtrain.config import ModelConfig, OptimizerConfig
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.engine import checkpoint, fitting, trainer
from weldtrain.engine.device import autocast_dtype, choose_device
from weldtrain.engine.ema import Ema
from weldtrain.engine.evaluator import Judged
from weldtrain.engine.optim import build_optimizer, set_rates
from weldtrain.errors import ConfigError, TrainingError
from weldtrain.metrics.matching import Boxes
from weldtrain.models.detector import build_detector
from weldtrain.tasks import train
from weldtrain.telemetry.record import RunRecord


def run(cfg, folder):
    with RunRecord(folder, asdict(cfg)) as record:
        return train.run(cfg, record), record


def test_a_run_writes_everything_it_promises(configured, tmp_path):
    objective, record = run(configured("trainer.epochs=2", "trainer.max_steps=null", "loader.batch_size=4"), tmp_path / "run")
    summary = json.loads((record.dir / "summary.json").read_text())
    assert summary.keys() >= {
        "status", "epochs", "steps", "map", "map_50", "map_75", "per_class_ap", "best_epoch", "images_per_s",
        "data_wait_pct", "epoch_start_s", "train_s", "checkpoint", "run_dir", "classes"}
    assert (summary["status"], summary["epochs"], summary["steps"]) == ("done", 2, 4)
    assert objective == summary["map_50"] and 0 <= summary["map_50"] <= 1
    lines = [json.loads(line) for line in (record.dir / "metrics.jsonl").read_text().splitlines()]
    tags = {tag for line in lines for tag in line}
    assert tags >= {f"loss/{n}" for n in ("total", *trainer.LOSSES)} | {
        "optim/lr", "optim/grad_norm", "loader/images_per_s", "loader/data_wait_ms", "loader/data_wait_pct", "loader/h2d_ms",
        "loader/epoch_start_s", "step/compute_ms", "step/total_ms", "system/cpu_pct", "system/workers_cpu_pct", "system/rss_mb",
        "system/workers_rss_mb", "system/page_tables_mb", "val/map", "val/map_50", "val/ap/crack"}
    assert [line["step"] for line in lines if "loss/total" in line] == [1, 2, 3, 4]
    best = checkpoint.load(summary["checkpoint"])
    assert checkpoint.epochs_done(best) == summary["best_epoch"] + 1
    assert best["classes"] == summary["classes"] and best["metrics"]["map"] == summary["map"]
    (file,) = (record.dir / "tensorboard").iterdir()
    shown = EventAccumulator(str(file), size_guidance={"images": 0}).Reload()
    assert {tag for tag in tags if "/" in tag} <= {*shown.Tags()["scalars"]} | {"loader/queue_depth"} | {
        tag for tag in tags if all(line.get(tag) is None for line in lines)}
    assert [image.step for image in shown.Images("val/examples")] == [2, 4]
    pr = {f"val/pr/{name}" for name, ap in summary["per_class_ap"].items() if ap is not None}
    assert pr and {"run/text_summary", "custom_scalars__config__", *pr} <= {*shown.Tags()["tensors"]}
    assert file.stat().st_size < 2e6


@pytest.mark.parametrize(("epochs", "every", "log_every", "shown"), [
    (3, 1, 10, [1, 2, 3]), (100, 1, 16, list(range(5, 101, 5))), (26, 4, 10, [4, 8, 12, 16, 20, 24, 26])])
def test_a_long_run_is_told_in_fewer_lines_and_pictures(configured, tmp_path, epochs, every, log_every, shown):
    cfg = configured(f"trainer.epochs={epochs}", f"trainer.eval_every={every}", "trainer.max_steps=null",
                     "trainer.log_every=auto")
    model = build_detector(cfg.model, 4)
    order = SimpleNamespace(rounds=801, drop_last=True)
    with RunRecord(tmp_path, {}) as record:
        loader = SimpleNamespace(order=order, dataset=None)
        it = trainer.Trainer(model, loader, None, ["a"], cfg, torch.device("cpu"), None, record)
        assert it.log_every == log_every
        told = []
        for it.epoch in range(1, epochs + 1):
            if it._evaluation_due() and it._shown():
                told.append(it.epoch)
    assert told == shown


def test_it_learns(configured, tmp_path):
    """The loss on two pictures falls to a fraction: gradients, optimiser and targets fit together."""
    cfg = configured("trainer.epochs=12", "trainer.max_steps=null", "trainer.eval_every=12", "augment=none",
                     "loader.batch_size=4", "optimizer.lr=2e-3")
    _, record = run(cfg, tmp_path / "run")
    totals = [json.loads(line).get("loss/total") for line in (record.dir / "metrics.jsonl").read_text().splitlines()]
    totals = [t for t in totals if t is not None]
    assert sum(totals[-4:]) < 0.5 * sum(totals[:4])


def test_the_same_seed_gives_the_same_losses_on_one_thread(configured, tmp_path):
    threads = torch.get_num_threads()
    try:
        series = []
        ways = ([], ["loader.workers=thread", "loader.num_workers=2", "loader.cache=ram"], ["loader.num_workers=2"])
        for i, overrides in enumerate((*(["seed=1", *way] for way in ways), ["seed=2"])):
            _, record = run(configured("trainer.cpu_threads=1", "trainer.max_steps=3", *overrides), tmp_path / str(i))
            lines = (record.dir / "metrics.jsonl").read_text().splitlines()
            series.append([json.loads(line).get("loss/total") for line in lines])
    finally:
        torch.set_num_threads(threads)
    assert series[0] == series[1] == series[2] != series[3]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_pictures(configured, tmp_path):
    cfg = configured("optimizer=sgd", "optimizer.lr=1e25", "scheduler.warmup=0", "trainer.grad_clip=null", "trainer.epochs=3",
                     "trainer.max_steps=null", "loader.batch_size=8")
    with pytest.raises(TrainingError, match=r"loss is not finite \(.*epoch \d, step \d, pictures images/\d+\.jpg|"
                                            r"epoch \d, step \d, pictures images/\d+\.jpg.*loss is not finite"):
        run(cfg, tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    for file in (tmp_path / "run/checkpoints").glob("*.pt"):
        assert all(torch.isfinite(w).all() for w in checkpoint.load(file)["model"].values())


def test_a_validation_split_without_defects_is_na_and_still_has_a_best(configured, welds, tmp_path):
    import shutil

    root = tmp_path / "welds"
    shutil.copytree(welds, root)
    for line in (root / "train_val_test_split.csv").read_text().split()[1:]:
        image_id, split = line.split(",")
        if split == "val":
            (root / f"annotations/{image_id}.xml").write_text("<annotation/>")
    objective, record = run(configured(f"dataset.root={root}"), tmp_path / "run")
    summary = json.loads((record.dir / "summary.json").read_text())
    assert objective is None and summary["map"] is None and set(summary["per_class_ap"].values()) == {None}
    assert (record.checkpoints / "best.pt").exists() and summary["false_calls_per_clean_picture"] >= 0


def test_precision_and_device_follow_the_machine():
    cpu = torch.device("cpu")
    assert autocast_dtype("fp32", cpu) is None and autocast_dtype("bf16", cpu) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"trainer\.precision=fp16"):
        autocast_dtype("fp16", cpu)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"device=cuda.*set device=cpu"):
            choose_device("cuda")
        assert choose_device("auto").type in ("cpu", "mps")


STEADY = ("trainer.cpu_threads=1", "trainer.precision=fp32", "trainer.max_steps=null", "trainer.log_every=1", "model.norm=group",
          "optimizer=sgd", "optimizer.lr=1e-4")


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss/total"] for line in lines if "loss/total" in line]


@pytest.mark.parametrize("drop_last", [True, False])
def test_accumulated_batches_are_the_large_batch(configured, tmp_path, one_thread, drop_last):
    """Three a step of eight pictures: a rest of two, which drop_last leaves out and which else makes a smaller step."""
    more = (*STEADY, "trainer.epochs=2", f"loader.drop_last={str(drop_last).lower()}")
    _, large = run(configured(*more, "loader.batch_size=3"), tmp_path / "large")
    _, small = run(configured(*more, "loader.batch_size=1", "trainer.accumulate=3"), tmp_path / "small")
    ours, theirs = (losses(record.dir) for record in (small, large))
    assert len(ours) == (4 if drop_last else 6) and ours == pytest.approx(theirs, rel=5e-3)  # a proposal may fall otherwise
    weights = [checkpoint.load(record.checkpoints / "last.pt")["model"] for record in (small, large)]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-2, atol=1e-4)


def test_the_average_is_what_is_judged_and_kept(configured, tmp_path, one_thread):
    _, record = run(configured(*STEADY, "trainer.epochs=1", "trainer.ema=0.5", "loader.batch_size=4"), tmp_path / "run")
    state = checkpoint.load(record.checkpoints / "best.pt")
    assert state["ema_updates"] == 2 and checkpoint.weights(state) is state["ema"]
    assert not torch.equal(state["ema"]["rpn.head.cls_logits.weight"], state["model"]["rpn.head.cls_logits.weight"])
    model = torch.nn.Linear(2, 2)
    average, seen = Ema(model, 0.5), [model.weight.detach().clone()]
    for _ in range(30):
        torch.nn.init.normal_(model.weight)
        seen.append(model.weight.detach().clone())
        average.update()
    wanted = seen[0]
    for n, weight in enumerate(seen[1:], 1):
        decay = min(0.5, (1 + n) / (10 + n))
        wanted = decay * wanted + (1 - decay) * weight
    torch.testing.assert_close(average.model.weight.detach(), wanted)


def test_a_step_that_is_not_finite_can_be_left_out_and_changes_nothing(configured, tmp_path, monkeypatch, one_thread):
    plain, calls = trainer.TrainingStep.add, iter(range(100))

    def broken(self, batch, weight=1.0, last=True, **more):
        before = [p.grad for p in self._parameters]
        parts = plain(self, batch, weight, last, **more)
        if next(calls) == 1:
            assert before[0] is None
            self._parameters[0].grad[:] = float("nan")
            next(b for b in self.model.buffers() if b.is_floating_point()).fill_(float("nan"))
            parts = parts * float("nan")
        return parts

    monkeypatch.setattr(trainer.TrainingStep, "add", broken)
    more = ("trainer.max_steps=4", "trainer.cpu_threads=1", "trainer.non_finite=skip", "model.norm=batch")
    _, record = run(configured(*more), tmp_path / "run")
    assert record.summary["skipped_steps"] == 1 and record.summary["steps"] == 4
    assert "left out" in (record.dir / "run.log").read_text()
    state = checkpoint.load(record.checkpoints / "last.pt")
    assert all(torch.isfinite(w).all() for w in state["model"].values() if w.is_floating_point())
    monkeypatch.setattr(trainer.TrainingStep, "add", lambda *a, **k: plain(*a, **k) * float("inf"))
    with pytest.raises(TrainingError, match=r"3 steps were left out"):
        run(configured(*more, "trainer.skip_at_most=2"), tmp_path / "capped")


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    for made in (torch.optim.SGD, torch.optim.AdamW):
        model = torch.nn.Linear(3, 1)
        step = trainer.TrainingStep(model, made(model.parameters(), 0.1, fused=True), torch.device("cpu"), None)
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.tensor([[1.0, 2.0, float("inf")]])).sum().backward()
        assert not torch.isfinite(step.update())
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        model(torch.ones(1, 3)).sum().backward()
        step.update()
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def judged_as(monkeypatch, aps):
    given = iter(aps)
    empty = {"map_50": 0.0, "map_75": 0.0, "per_class_ap": {}, "per_class_ap_50": {}}
    nothing = Boxes(np.zeros(0, int), np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))
    monkeypatch.setattr(train, "evaluate", lambda *_: Judged({"map": next(given), **empty}, nothing, nothing,
                                                            np.zeros(0, int), shown=np.zeros(0, int)))


def test_training_ends_where_patience_does_and_the_best_epochs_stay(configured, tmp_path, monkeypatch):
    judged_as(monkeypatch, [0.1, 0.3, 0.2, 0.2, 0.9])
    cfg = configured("trainer.epochs=5", "trainer.max_steps=null", "trainer.patience=2", "trainer.keep_best=2",
                     "trainer.keep_every=4", "loader.batch_size=8")
    _, record = run(cfg, tmp_path / "run")
    assert (record.summary["best_epoch"], record.summary["epochs"]) == (1, 4)
    assert {p.name for p in record.checkpoints.iterdir()} == {"last.pt", "best.pt", "epoch_0002.pt", "epoch_0004.pt"}
    assert checkpoint.load(record.checkpoints / "best.pt")["epoch"] == 2
    assert "training ends (trainer.patience)" in (record.dir / "run.log").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("steps", ["[2,3]", "[3,99]"])
def test_a_trace_of_some_steps_is_one_that_perfetto_opens(configured, tmp_path, steps):
    run(configured(f"trainer.profile={steps}", "trainer.max_steps=3"), tmp_path / "run")
    events = json.loads(gzip.decompress((tmp_path / "run/trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::conv2d" for event in events) > 10


def test_a_disk_that_fills_ends_the_run_in_one_line_and_leaves_a_checkpoint(configured, tmp_path):
    (tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=230m", "tmpfs", tmp_path / "disk"], capture_output=True).returncode:
        pytest.skip("this sandbox may not mount")
    try:
        cfg = configured("trainer.epochs=3", "trainer.max_steps=null", "loader.batch_size=8")
        folder = tmp_path / "disk/run"
        with pytest.raises(TrainingError, match=r"cannot be written.*free some disk space"):
            run(cfg, folder)
        assert [p.name for p in (folder / "checkpoints").glob("*")] == ["last.pt"]
        checkpoint.load(folder / "checkpoints/last.pt")
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


def test_saving_does_not_hold_training_up(tmp_path, monkeypatch):
    """The values are copied, and then are free to change while they are written."""
    begun, go_on, plain = threading.Event(), threading.Event(), checkpoint.save

    def slow(path, state):
        begun.set()
        assert go_on.wait(20)
        plain(path, state)

    monkeypatch.setattr(checkpoint, "save", slow)
    writer, weight = checkpoint.Writer(), torch.ones(3)
    state = {"model": {"w": weight}, "classes": [], "config": {}}
    writer.write(tmp_path / "last.pt", state)
    assert begun.wait(20)
    weight.zero_()
    go_on.set()
    writer.close()
    assert checkpoint.load(tmp_path / "last.pt")["model"]["w"].tolist() == [1, 1, 1]


def test_optimiser_groups_and_a_rate_for_so_many_pictures():
    model = build_detector(ModelConfig(backbone="resnet18", pyramid_channels=16, box_head_width=16), 2)
    cfg = OptimizerConfig(lr=0.01, weight_decay=0.1, norm_weight_decay=0.0, backbone_lr=0.1, pictures_per_lr=8)
    optimizer = build_optimizer(model, cfg, pictures=32)
    set_rates(optimizer, 0.5)
    named = {id(p): name for name, p in model.named_parameters()}
    seen = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            seen[named[id(p)]] = (round(group["lr"], 9), group["weight_decay"])
    assert len(seen) == len(named)
    assert seen["backbone.body.conv1.weight"] == (0.002, 0.1) and seen["backbone.body.bn1.weight"] == (0.002, 0.0)
    assert seen["roi_heads.box_head.fc6.weight"] == (0.02, 0.1) and seen["roi_heads.box_head.fc6.bias"] == (0.02, 0.0)


def test_the_batch_that_fits_is_the_last_before_memory_runs_out(configured, welds, cache, monkeypatch):
    cfg = configured()
    index = open_index(cfg.dataset, cache)
    dataset = DetectionDataset(index, "train", index.names, cfg.model)
    model, sizes = build_detector(cfg.model, len(index.names)), []

    def peak(_, batch, *rest):
        sizes.append(len(batch))
        if len(batch) > 4:
            raise torch.OutOfMemoryError
        return 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2**31))
    assert fitting._worst(dataset, 2).images.shape == (2, 1, 128, 128)
    monkeypatch.setattr(fitting, "_peak", peak)
    assert fitting.fitting_batch_size(model, dataset, cfg.optimizer, torch.device("cuda"), None)[0] == 4 and sizes == [1, 2, 4, 8]
    assert fitting.fitting_batch_size(model, dataset, cfg.optimizer, torch.device("cpu"), None)[0] == fitting.ELSEWHERE


@pytest.mark.parametrize(("pictures", "accumulate", "told"), [
    (16, 2, "set loader.batch_size=8 with trainer.accumulate=4, which learns the same$"), (1, 1, "halve model.min_size"),
    (5, 1, "set loader.batch_size=2$"), (8, 0, "set loader.batch_size=4$")])
def test_a_gpu_that_is_full_says_by_how_much_to_lower_which_key(monkeypatch, pictures, accumulate, told):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 8 * 2**30))
    with pytest.raises(TrainingError, match=f"a batch of {pictures} took 7.0 of 8.0 GB and wanted more; {told}"), \
            fitting.memory_told("loader.batch_size", pictures, torch.device("cuda"), accumulate):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_checkpoint_knows_all_pictures_that_are_in_its_weights(configured, tmp_path, index):
    short = ("trainer.max_steps=1", "loader.batch_size=4", "dataset.split.make=always", "dataset.split.group=null")
    _, first = run(configured(*short), tmp_path / "first")
    one = checkpoint.load(first.summary["checkpoint"])
    _, other = run(configured(*short, "dataset.split.seed=5", f"model.weights={first.summary['checkpoint']}"), tmp_path / "other")
    two = checkpoint.load(other.summary["checkpoint"])
    known = set(two["trained_on"].tolist())
    assert set(one["trained_on"].tolist()) < known and not set(two["chosen_on"].tolist()) <= set(one["chosen_on"].tolist())
    assert known <= set(index.identities(np.arange(len(index))).tolist())


def test_training_in_tiles_judges_whole_pictures_and_says_how_rare_defects_are(configured, tmp_path):
    cfg = configured("model.tiles=64", "model.min_size=64", "model.max_size=64", "trainer.max_steps=2", "loader.batch_size=4")
    _, record = run(cfg, tmp_path / "run")
    said = (record.dir / "run.log").read_text()
    assert "model.tiles=64: 72 tiles of 8 training pictures" in said
    best = checkpoint.load(record.summary["checkpoint"])
    assert best["trained_px"] == [128.0, 128.0] and best["metrics"]["operating_points"]["points"].keys() == set(best["classes"])
