"""Checkpoints: whole or not there, plain, and damaged ones named."""

import os
import pickle
import subprocess

import pytest
import torch

from weldtrain.engine import checkpoint
from weldtrain.errors import DataError, TrainingError

STATE = {"model": {"w": torch.arange(4.0)}, "classes": ["crack"], "config": {}, "metrics": {"map": None}}


def test_round_trip_and_a_second_name_that_stays(tmp_path):
    last = tmp_path / "last.pt"
    checkpoint.save(last, STATE)
    best = checkpoint.publish(last, "best.pt")
    checkpoint.save(last, STATE | {"classes": ["slag"]})
    assert checkpoint.load(best)["classes"] == ["crack"] and checkpoint.load(last)["classes"] == ["slag"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "last.pt"]
    assert torch.load(best, weights_only=True)["metrics"] == {"map": None}
    checkpoint.publish(last, "best.pt")
    os.truncate(last, 100)  # in place: a copy is not touched by it
    assert checkpoint.load(best)["classes"] == ["slag"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this sandbox may not mount")
    try:
        last = tmp_path / "last.pt"
        checkpoint.save(last, STATE)
        with pytest.raises(TrainingError, match=r"last\.pt.*free some disk space"):
            checkpoint.save(last, STATE | {"model": {"w": torch.zeros(10**6)}})
        assert checkpoint.load(last)["classes"] == ["crack"]
        assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]
        checkpoint.save(last, STATE | {"model": {"w": torch.zeros(150_000)}})
        best = checkpoint.publish(last, "best.pt")  # there is no room for a copy
        assert best.samefile(last) and sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "last.pt"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


class Malice:
    def __reduce__(self):
        return os.system, ("touch owned",)


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path / "good.pt", STATE)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:500])
    (tmp_path / "empty.pt").touch()
    (tmp_path / "malice.pt").write_bytes(pickle.dumps(Malice()))
    torch.save({"model": Malice()}, tmp_path / "zipped.pt")
    torch.save({"a": torch.zeros(1)}, tmp_path / "bare.pt")
    torch.save({**STATE, "format": 99}, tmp_path / "later.pt")
    for name in ("cut", "empty", "malice", "zipped", "bare", "later", "absent"):
        with pytest.raises(DataError, match=f"{name}.pt") as caught:
            checkpoint.load(tmp_path / f"{name}.pt")
        assert "weights_only" not in str(caught.value)  # torch's advice is to load what may be malice
    assert not (tmp_path / "owned").exists()
