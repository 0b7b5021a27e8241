"""The run record is whole after any end, and one directory holds one run."""

import json
import logging
from dataclasses import asdict

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from weldtrain.errors import ConfigError, TrainingError
from weldtrain.telemetry.machine import MachineCounters
from weldtrain.telemetry.record import RunRecord


def test_what_is_logged_stands_in_all_writers(tmp_path, configured):
    with RunRecord(tmp_path / "run", asdict(configured())) as record:
        record.scalars(10, {"loss/total": 1.5, "val/map": None, "optim/grad_norm": float("nan")}, epoch=0)
        record.summary["map"] = None
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert (line["step"], line["epoch"], line["loss/total"], line["val/map"]) == (10, 0, 1.5, None)
    assert line["optim/grad_norm"] == "nan"
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert events.Scalars("loss/total")[0].value == 1.5 and "val/map" not in events.Tags()["scalars"]
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "done"


@pytest.mark.parametrize(("error", "status"), [(TrainingError("x"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_an_error_leaves_everything_flushed(tmp_path, configured, error, status):
    with pytest.raises(type(error)), RunRecord(tmp_path / "run", asdict(configured())) as record:
        record.scalars(1, {"loss/total": 2.0})
        raise error
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == status
    assert EventAccumulator(str(tmp_path / "run/tensorboard")).Reload().Scalars("loss/total")[0].value == 2.0
    assert ("Traceback" in (tmp_path / "run/run.log").read_text()) == (status == "failed")


def test_two_runs_never_share_a_directory_and_handlers_do_not_pile_up(tmp_path, configured):
    before = list(logging.getLogger("weldtrain").handlers)
    with RunRecord(tmp_path / "run", asdict(configured())), pytest.raises(ConfigError, match="holds another run"):
        RunRecord(tmp_path / "run", asdict(configured()))
    assert logging.getLogger("weldtrain").handlers == before


def test_machine_counters_are_plausible():
    values = MachineCounters(torch.device("cpu")).read()
    assert 0 <= values["system/cpu_pct"] <= 100 and values["system/rss_mb"] > 50
