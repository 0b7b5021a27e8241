"""Training: it learns, stops on a loss that is not finite, and leaves only finite weights behind."""

import json
from dataclasses import asdict

import pytest
import torch

from weldtrain.engine import checkpoint, trainer
from weldtrain.engine.device import autocast_dtype, choose_device
from weldtrain.errors import ConfigError, TrainingError
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
        "loader/epoch_start_s", "step/compute_ms", "step/total_ms", "system/cpu_pct", "system/rss_mb", "val/map", "val/map_50",
        "val/ap/crack"}
    assert [line["step"] for line in lines if "loss/total" in line] == [1, 2, 3, 4]
    best = checkpoint.load(summary["checkpoint"])
    assert best["classes"] == summary["classes"] and best["metrics"]["map"] == summary["map"]


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
