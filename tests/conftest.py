"""Fixtures shared by all tests: a small weld data set on disk, its index, and the configuration for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from weldtrain import config
from weldtrain.data import synthetic
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.indexing import open_index
from weldtrain.validation import validated

# Beside other tests each has one core: two threads that wait for a core each burn another's.
_THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
torch.set_num_threads(_THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(_THREADS))  # of the processes that tests start


@pytest.fixture(scope="session")
def welds(tmp_path_factory) -> Path:
    """Twelve drawn welds of 128 px, 8 to train and 4 to validate, in the welding_v2 layout."""
    folder = tmp_path_factory.mktemp("data") / "welds"
    synthetic.write_dataset(folder, counts={"train": 8, "val": 4}, size_px=128, seed=3)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def configured(welds, cache):
    """`configured("loader.batch_size=2")`: the validated configuration of a debug run on `welds`."""

    def make(*overrides: str) -> config.Config:
        config.register()
        base = ["experiment=debug", "dataset=welding_v2", f"dataset.root={welds}", f"cache_dir={cache}", "device=cpu",
                f"dataset.classes=[{','.join(synthetic.CLASSES)}]"]
        with initialize_config_dir(str(config.CONF_DIR), version_base="1.3"):
            return validated(compose("config", [*base, *overrides]), os.getcwd())

    return make


@pytest.fixture(scope="session")
def index(configured, cache) -> AnnotationIndex:
    return open_index(configured().dataset, cache)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real pictures, where this machine has it."""
    for place in (os.environ.get("WELDTRAIN_REAL_DATA"), Path(__file__).parents[2] / "shared" / "data"):
        if place and (Path(place) / "welding_v2_real").is_dir():
            return Path(place)
    pytest.skip("no real data: set WELDTRAIN_REAL_DATA")
