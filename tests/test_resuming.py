"""Which run `resume` means: the newest of the same task that is not going on, and its own settings under those given."""

import fcntl
import json
import zipfile
from pathlib import Path

import pytest
import yaml

from weldtrain import resuming
from weldtrain.errors import DataError


@pytest.fixture
def run_of(tmp_path):
    """Makes the directory of a run that was started with these overrides."""
    def made(name, *overrides, root="/data", checkpoints=("last.pt",)):
        folder = tmp_path / "outputs" / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "metrics.jsonl").touch()
        (folder / "config.yaml").write_text(yaml.safe_dump({"dataset": {"root": root}, "output_dir": f"{tmp_path}/outputs"}))
        (folder / "provenance.json").write_text(json.dumps({"command": ["weldtrain", *overrides]}))
        for file in checkpoints:
            with zipfile.ZipFile(folder / "checkpoints" / file, "w") as written:
                written.writestr("x", "x")
        return folder
    return made


def found(tmp_path, *overrides):
    resumption = resuming.find(overrides, tmp_path)
    return resumption and resumption.run_dir


def test_auto_is_the_newest_run_of_the_same_data_and_model(run_of, tmp_path):
    old = run_of("train/2026-01-01_000000_aaaaaa", "dataset.root=/data", "model=small", "optimizer.lr=0.1")
    other = run_of("train/2026-01-02_000000_aaaaaa", "dataset.root=other", root="/other")
    debug = run_of("debug/2026-01-03_000000_aaaaaa", "experiment=debug", root="/data")
    run_of("debug/2026-01-04_000000_aaaaaa", "experiment=debug", checkpoints=())
    assert found(tmp_path) is None and found(tmp_path, "resume=null") is None
    assert found(tmp_path, "resume=auto") == debug
    assert found(tmp_path, "resume=auto", "dataset.root=/other") == other
    assert found(tmp_path, "resume=auto", "dataset.root='/data'", "model=small", "optimizer.lr=0.2") == old
    assert found(tmp_path, "resume=auto", "model=large") is None and found(tmp_path, "resume=auto", "output_dir=no") is None
    with open(debug / "metrics.jsonl") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        assert found(tmp_path, "resume=auto") == other


def test_its_settings_are_those_of_its_command_and_over_them_the_given_ones(run_of, tmp_path):
    folder = run_of("train/2026-01-01_000000_aaaaaa", "dataset.root=data", "optimizer.lr=0.1", "trainer.epochs=5", "resume=auto",
                    "hydra.run.dir=x", root="/data")
    command = resuming.command(["resume=auto", "trainer.epochs=9"], resuming.find(["resume=auto"], tmp_path))
    assert command == ["dataset.root='/data'", "optimizer.lr=0.1", f"hydra.run.dir='{folder}'",
                       f"resume='{folder}/checkpoints/last.pt'", "trainer.epochs=9"]


def test_a_checkpoint_that_was_carried_off_begins_a_new_run(run_of, tmp_path):
    folder = run_of("train/2026-01-01_000000_aaaaaa", "dataset.root=/data")
    carried = (folder / "checkpoints/last.pt").rename(tmp_path / "mine.pt")
    assert resuming.find(["resume=mine.pt"], tmp_path) == (carried, None)
    assert resuming.command(["resume=mine.pt", "seed=1"], resuming.Resumption(carried, None)) == [f"resume='{carried}'", "seed=1"]
    for absent in ("nothing.pt", str(folder)):
        with pytest.raises(DataError, match=Path(absent).name):
            resuming.find([f"resume={absent}"], tmp_path)


def test_what_was_cut_off_is_named_and_passed_over(run_of, tmp_path, capsys):
    folder = run_of("train/2026-01-01_000000_aaaaaa", checkpoints=("best.pt", "last.pt"))
    last = folder / "checkpoints/last.pt"
    last.write_bytes(last.read_bytes()[:-20])
    assert resuming.find(["resume=auto"], tmp_path).checkpoint.name == "best.pt"
    assert capsys.readouterr().err == f"{last}: is damaged, and passed over\n"
