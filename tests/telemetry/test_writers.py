"""The same figures in MLflow and in Weights & Biases, without a network; a resumed run is the same run there."""

import dataclasses

import numpy as np
import pytest

from weldtrain.errors import ConfigError
from weldtrain.telemetry.record import RunRecord


def written(run_dir, name, resumed=False, lr=0.1, steps=(1, 2)):
    with RunRecord(run_dir, {"task": "train"}, resumed, ["jsonl", name]) as record:
        record.describe({"data": "welds (12)"}, {"optimizer.lr": lr, "trainer.ema": None})
        for step in steps:
            record.scalars(step, {"loss/total": 1.0 / step, "val/ap/裂纹 (a)": 0.5, "val/map": None})
        record.picture(2, "val/examples", np.zeros((8, 8, 3), np.uint8))
        record.curves(2, "val/pr", {})
        record.result({"optimizer.lr": lr}, {"val/map_50": 0.5})
    return record


def test_mlflow_has_one_run_for_a_run_and_its_continuation(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    written(tmp_path / "run", "mlflow")
    written(tmp_path / "run", "mlflow", resumed=True, lr=0.2, steps=(3,))
    client = tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("weldtrain").experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss/total")] == [1, 2, 3]
    assert run.data.metrics["val/ap/裂纹 _a_"] == 0.5 and "val/map" not in run.data.metrics
    assert run.data.params["optimizer.lr"] == "0.1"  # MLflow lets no param change
    assert run.info.status == "FINISHED" and run.info.run_name.endswith("/run") and run.data.tags["data"] == "welds (12)"


def test_mlflow_that_is_not_there_is_said_before_the_first_step(tmp_path, monkeypatch):
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"trainer\.log: MLflow says: .*MLFLOW_TRACKING_URI"):
        written(tmp_path / "run", "mlflow")


def test_an_mlflow_that_goes_away_costs_a_line_and_no_run(tmp_path, monkeypatch, capsys):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    gone = tracking.MlflowClient("http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with RunRecord(tmp_path / "run", {}, writers=["jsonl", "mlflow"]) as record:
        record.describe({}, {})
        monkeypatch.setattr(tracking.MlflowClient, "log_batch", lambda _, *args, **what: gone.get_run("x"))
        record.scalars(1, {"loss/total": 1.0})
    assert "MLflow lacks 1 of 3 messages" in capsys.readouterr().err
    assert (tmp_path / "run/metrics.jsonl").read_text()


def test_wandb_keeps_a_run_offline_under_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    written(tmp_path / "run", "wandb")
    written(tmp_path / "run", "wandb", resumed=True, steps=(3,))
    name = (tmp_path / "run/wandb.id").read_text()
    files = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert files and {file.name for file in files} == {f"run-{name}.wandb"}
    assert any(b"loss/total" in file.read_bytes() for file in files)


@pytest.mark.parametrize(("given", "told"), [
    ("[tensorboard]", "jsonl cannot be left out"), ("[jsonl,tensorbord]", "did you mean 'tensorboard'"),
    ("[jsonl,mlflow]", r"mlflow is not installed; pip install 'weldtrain\[mlflow\]'")])
def test_a_list_of_writers_that_cannot_be_is_refused_at_once(configured, monkeypatch, given, told):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=told):
        configured(f"trainer.log={given}")


def test_only_jsonl_writes_no_event_file(tmp_path, configured):
    with RunRecord(tmp_path / "run", dataclasses.asdict(configured()), writers=["jsonl"]) as record:
        record.scalars(1, {"loss/total": 1.0})
    assert not (tmp_path / "run/tensorboard").exists() and (tmp_path / "run/metrics.jsonl").read_text()
