"""task=doctor: whatever is made slow is what it names, its ledger adds up, and what it found is what later runs use."""

import html
import json
import time
from dataclasses import asdict, replace

import pytest
import yaml

from weldtrain.config import LoaderConfig
from weldtrain.data import dataset as dataset_module
from weldtrain.data import images, tuned
from weldtrain.engine import bench
from weldtrain.engine.step import LOSSES
from weldtrain.errors import ConfigError
from weldtrain.tasks import doctor
from weldtrain.telemetry.record import RunRecord

pytestmark = pytest.mark.alone

QUICK = ("task=doctor", "doctor.budget_s=4", "loader=optimised", "loader.batch_size=2", "loader.cache=none", "augment=light")


DELAY_S = 0.1


@pytest.fixture
def diagnosed(configured, tmp_path):
    def run(*overrides):
        cfg = configured(*QUICK, f"cache_dir={tmp_path / 'cache'}", *overrides)
        with RunRecord(tmp_path / "run", asdict(cfg)) as record:
            share = doctor.run(cfg, record)
        result = json.loads((tmp_path / "run" / "doctor.json").read_text())
        assert share == result["verdict"]["share"]
        return cfg, result, (tmp_path / "run" / "report.html").read_text()

    return run


def delayed(function, seconds):
    def slow(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return slow


@pytest.mark.parametrize(("module", "name", "stage"), [
    (images, "read_bytes", "read"), (images, "decode", "decode"), (images, "resize", "resize"),
    (dataset_module, "paint", "augment")])
def test_a_stage_of_the_loader_that_is_made_slow_is_named(diagnosed, monkeypatch, module, name, stage):
    # A model that takes no time, however busy the machine: then the loader is the limit.
    monkeypatch.setattr(bench.Detector, "forward", lambda self, batch: dict.fromkeys(LOSSES, next(self.parameters()).sum() * 0))
    monkeypatch.setattr(module, name, delayed(getattr(module, name), DELAY_S))
    _, result, page = diagnosed()
    assert (result["verdict"]["stage"], result["verdict"]["limited_by"]) == (stage, "loader")
    assert result["ledger"]["first epoch"]["ms"][stage] == pytest.approx(1e3 * DELAY_S, rel=0.3)
    assert result["verdict"]["sentence"] in html.unescape(page)
    if stage != "augment":  # all others are gone with the cache
        assert "loader.cache=auto" in result["verdict"]["sentence"] and result["tuned"]["cache"] == "auto"


def test_a_slow_model_is_named(diagnosed, monkeypatch):
    monkeypatch.setattr(bench.Detector, "forward", delayed(bench.Detector.forward, 0.3))
    _, result, _ = diagnosed()
    assert (result["verdict"]["stage"], result["verdict"]["limited_by"]) == ("forward", "model")
    assert "stop tuning" in result["verdict"]["sentence"]


def test_the_ledger_adds_up_and_later_runs_use_what_was_found(diagnosed, configured, index, tmp_path):
    cfg, result, page = diagnosed("loader.cache=auto")
    for ledger in result["ledger"].values():
        assert ledger["ms"]["rest"] <= 0.05 * ledger["wall_ms"]
        assert sum(ledger["ms"].values()) == pytest.approx(ledger["wall_ms"])
    assert result["ledger"]["later epochs"]["ms"]["decode"] == 0
    assert {"disk, these files", "copying memory", "the model alone"} <= result["ceilings"].keys()
    assert [c["loader"] for c in result["compared"]] == ["naive", "the article's", "tuned"]
    assert all(p["images_per_s"] > 0 for p in result["points"]) and len(result["points"]) == 18
    assert all(text in page for text in ("Where the milliseconds go", "Before and after", "OpenCV"))
    file = tuned.tuned_file(cfg, index, "cpu")
    assert str(file) == result["tuned_file"]
    assert yaml.safe_load(file.read_text()) == result["tuned"]
    settled = tuned.tuned(configured("loader=tuned", f"cache_dir={tmp_path / 'cache'}").loader, file)
    assert {name: getattr(settled, name) for name in tuned.SETTINGS} == result["tuned"]
    mine = LoaderConfig(num_workers=7)
    assert tuned.tuned(mine, file) == replace(mine, cache=result["tuned"]["cache"])  # so many of a kind: all or nothing


def test_tuned_without_a_doctor_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="task=doctor"):
        tuned.tuned(LoaderConfig(tuned=True), tmp_path / "none.yaml")
    assert tuned.tuned(LoaderConfig(), tmp_path / "none.yaml") == LoaderConfig()
    (tmp_path / "bad.yaml").write_text("workers: [")
    with pytest.raises(ConfigError, match="cannot be understood"):
        tuned.tuned(LoaderConfig(), tmp_path / "bad.yaml")
