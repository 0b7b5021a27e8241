"""TensorBoard beside its curves, read back as its own server does."""

import numpy as np
import pytest

from weldtrain.telemetry.board import card
from weldtrain.telemetry.record import RunRecord


@pytest.fixture
def events(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read():
        accumulator = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0})
        accumulator.Reload()
        return accumulator

    return read


def test_boards_card_pictures_and_settings_lie_in_one_file(tmp_path, events):
    with RunRecord(tmp_path / "run", {"task": "train"}) as record:
        record.describe({"command": "weldtrain a=b", "<script>": "x | y\nz"}, {})
        record.scalars(3, {"val/map_50": 0.5})
        record.picture(3, "val/examples", np.full((40, 60, 3), 200, np.uint8))
        counts = np.array([2.0, 1.0, 0.0])
        record.curves(3, "val/pr", {"crack": {"tp": counts, "fp": counts, "fn": 2 - counts, "precision": counts / 2,
                                              "recall": counts / 2}})
        record.result({"optimizer.lr": 0.1, "trainer.ema": None, "loader.cache": "auto"}, {"val/map_50": 0.5, "val/map": None})
    read = events()
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 1
    (image,) = read.Images("val/examples")
    assert (image.width, image.height, image.step) == (60, 40, 3) and image.encoded_image_string[:2] == b"\xff\xd8"
    tags = read.Tags()
    assert {"run/text_summary", "custom_scalars__config__", "val/pr/crack"} <= set(tags["tensors"])
    assert "_hparams_/experiment" in read.summary_metadata and "_hparams_/session_start_info" in read.summary_metadata


def test_a_card_is_one_table_whatever_its_values_hold():
    assert card({"a|b": "x\ny | z"}).splitlines() == ["| | |", "|---|---|", "| a\\|b | x y \\| z |"]


def test_the_files_of_a_long_run_stay_small(tmp_path):
    tags = [f"{group}/{name}_{i}" for group in ("loss", "loader", "system", "step") for name in ("value_ms",) for i in range(11)]
    noise = np.random.default_rng(0).integers(0, 256, (4 * 324, 644, 3), np.uint8)  # as large as a JPEG can be
    counts = np.arange(101.0)
    curve = {name: counts for name in ("tp", "fp", "fn", "precision", "recall")}
    with RunRecord(tmp_path / "run", {}) as record:
        for step in range(0, 5100, 50):  # a fiftieth of the lines, and all pictures and curves that a run of 100 epochs keeps
            record.scalars(step, dict.fromkeys(tags, 1.0))
        lines = sum(file.stat().st_size for file in (tmp_path / "run").glob("tensorboard/*"))
        for step in range(20):
            record.picture(step, "val/examples", noise)
            record.curves(step, "val/pr", {f"class {i}": curve for i in range(20)})
    whole = sum(file.stat().st_size for file in (tmp_path / "run").glob("tensorboard/*"))
    assert whole - lines + 50 * lines < 50e6
