"""The loader: same pixels, boxes and order however it is run; errors as they were; options dropped where they do not apply."""

import hashlib
import shutil
from dataclasses import replace

import cv2
import numpy as np
import psutil
import pytest
import torch

from weldtrain.config import AugmentConfig, LoaderConfig, ModelConfig
from weldtrain.data import loader as loader_module
from weldtrain.data.augment import augment
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.index import open_index
from weldtrain.data.loader import evaluation_loader, plan, training_loader
from weldtrain.data.sampler import EpochSampler
from weldtrain.data.synthetic import CLASSES
from weldtrain.errors import DataError, PictureError, TrainingError

CPU = torch.device("cpu")
LIGHT = AugmentConfig(hflip=0.5, vflip=0.5, brightness=0.2, contrast=0.2)
SIMPLE = LoaderConfig(batch_size=2, num_workers=0, drop_last=False)


SCALE = ModelConfig(min_size=96, max_size=96)


def dataset(index, seed=0, **more):
    return DetectionDataset(index, "train", CLASSES, SCALE, **({"augment": LIGHT, "seed": seed} | more))


def epochs(index, cfg, n=2, seed=0):
    """{(epoch, row): digest of the sample's pixels and boxes} and the order of rows, over n epochs."""
    loader = training_loader(dataset(index, seed), cfg, CPU, seed)
    samples, order = {}, []
    for epoch in range(n):
        loader.set_epoch(epoch)
        for batch in loader:
            for i, row in enumerate(batch.image_ids.tolist()):
                boxes = batch.boxes[batch.batch_index == i].numpy().tobytes()
                samples[epoch, row] = hashlib.sha1(batch.images[i].numpy().tobytes() + boxes).hexdigest()
                order.append((epoch, row))
    return samples, order


@pytest.fixture(scope="module")
def in_process(index):
    return epochs(index, SIMPLE)


@pytest.mark.parametrize("change", [
    {"num_workers": 1},
    {"num_workers": 4, "prefetch_factor": 1},
    {"num_workers": 2, "persistent_workers": False},
    {"batch_size": 8},
    {"num_workers": 1, "multiprocessing_context": "spawn"},
    {"num_workers": 1, "multiprocessing_context": "forkserver"},
], ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()))
def test_samples_and_order_do_not_depend_on_how_they_are_loaded(index, in_process, change):
    assert epochs(index, replace(SIMPLE, **change)) == in_process


def test_samples_and_order_depend_on_epoch_and_seed(index, in_process):
    samples, order = in_process
    rows = {row for _, row in order}
    assert [r for e, r in order if e == 0] != [r for e, r in order if e == 1]
    assert sorted(r for e, r in order if e == 0) == sorted(rows) == sorted(index.rows("train").tolist())
    assert all(samples[0, row] != samples[1, row] for row in rows)
    other, other_order = epochs(index, SIMPLE, seed=1)
    assert other_order != order and all(other[key] != samples[key] for key in samples)


def test_evaluation_sees_every_picture_once_in_path_order_and_drops_none(index):
    loader = evaluation_loader(dataset(index, augment=None), LoaderConfig(num_workers=0, drop_last=True), 3, CPU)
    rows = torch.cat([b.image_ids for b in loader]).tolist()
    assert rows == index.rows("train").tolist()
    assert [index.path(r) for r in rows] == sorted(index.path(r) for r in rows)


def cut(index):
    """Cuts one training picture at its middle, after the index was built."""
    bad = index.root / "images" / "0003.jpg"
    bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])
    return bad


def removed(index):
    bad = index.root / "images" / "0005.jpg"
    bad.unlink()
    return bad


@pytest.mark.parametrize(("harm", "text"), [(cut, "cut off"), (removed, "no such picture")])
def test_the_same_error_with_and_without_workers(configured, welds, tmp_path, harm, text):
    shutil.copytree(welds, tmp_path / "welds")
    index = open_index(configured(f"dataset.root={tmp_path / 'welds'}").dataset, tmp_path)
    check_errors(dataset(index), harm(index), text)


def test_a_picture_torn_inside_is_named_by_every_loader(plates, tmp_path, torn_png):
    index = open_index(plates({"a.png": None, "b.png": None, "torn.png": torn_png}), tmp_path)
    check_errors(DetectionDataset(index, "train", ["crack"], SCALE), index.root / "images" / "torn.png", "damaged")


def check_errors(data, bad, text):
    texts = []
    for change in ({}, {"num_workers": 2}, {"num_workers": 1, "multiprocessing_context": "spawn"}):
        cfg = replace(SIMPLE, persistent_workers=False, **change)  # else each is waited for 5 s when the loader is collected
        with pytest.raises(PictureError) as caught:
            list(training_loader(data, cfg, CPU, 0))
        texts.append(str(caught.value))
    assert len(set(texts)) == 1 and texts[0].startswith(str(bad)) and text in texts[0]


class Sleeper(DetectionDataset):
    def load(self, epoch, row):
        import time

        time.sleep(30)


class Suicide(DetectionDataset):
    def load(self, epoch, row):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("kind", "text"), [(Sleeper, "no batch came from the workers within 1 s"),
                                            (Suicide, "a loader worker died")])
def test_a_worker_that_hangs_or_dies_ends_the_run_with_its_key(index, kind, text):
    stuck = kind(index, "train", CLASSES, SCALE)
    with pytest.raises(TrainingError, match=text) as caught:
        next(iter(training_loader(stuck, replace(SIMPLE, num_workers=1, timeout_s=1), CPU, 0)))
    assert "loader." in str(caught.value)


def test_options_that_do_not_apply_are_dropped():
    settled = plan(LoaderConfig(num_workers=0, persistent_workers=True, prefetch_factor=4, pin_memory=True), CPU, 10, 1000)
    assert (settled.persistent_workers, settled.prefetch_factor, settled.timeout_s, settled.pin_memory) == (False, None, 0, False)
    assert plan(LoaderConfig(num_workers=16), CPU, 3, 1000).num_workers == 3
    assert plan(LoaderConfig(num_workers="auto"), CPU, 1, 1000).num_workers == 1


def test_pinning_follows_the_articles_tree():
    cuda = torch.device("cuda")
    assert plan(LoaderConfig(num_workers=2), cuda, 10, 1000).pin_memory
    assert not plan(LoaderConfig(num_workers=0), cuda, 10, 1000).pin_memory
    assert not plan(LoaderConfig(num_workers=2), cuda, 10, psutil.virtual_memory().total).pin_memory
    assert plan(LoaderConfig(num_workers=0, pin_memory=True), cuda, 10, 1000).pin_memory
    assert not plan(LoaderConfig(num_workers=2), CPU, 10, 1000).pin_memory


def test_less_is_in_flight_where_shared_memory_is_small(monkeypatch):
    monkeypatch.setattr(loader_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(64 << 20, 0, 64 << 20))
    settled = plan(LoaderConfig(num_workers=4, prefetch_factor=2), CPU, 100, 10 << 20)
    assert settled.num_workers * settled.prefetch_factor * (10 << 20) < 0.9 * (64 << 20)
    assert any("shm" in note for note in settled.notes)
    assert plan(LoaderConfig(num_workers=4), CPU, 100, 100 << 20).num_workers == 0


def test_too_few_pictures_for_a_batch_names_the_key(index):
    with pytest.raises(DataError, match=r"loader\.batch_size"):
        training_loader(dataset(index), LoaderConfig(batch_size=100, num_workers=0), CPU, 0)


def test_opencv_keeps_to_one_thread():
    assert cv2.getNumThreads() <= 1


def test_the_order_is_a_permutation_and_its_keys_carry_the_epoch():
    sampler = EpochSampler(np.array([3, 5, 8, 9]), shuffle=True, seed=1)
    sampler.epoch = 7
    assert sorted(sampler) == [(7, 3), (7, 5), (7, 8), (7, 9)] and list(sampler) == list(sampler)


def test_flipping_moves_boxes_with_their_pixels():
    image = np.zeros((40, 60, 3), np.uint8)
    image[5:9, 10:30] = 200
    boxes = np.array([[10, 5, 30, 9]], np.float32)
    for h, v in ((1, 0), (0, 1), (1, 1)):
        out, moved = augment(image, boxes, AugmentConfig(hflip=h, vflip=v), np.random.default_rng(0))
        x1, y1, x2, y2 = moved[0].astype(int)
        assert (out[y1:y2, x1:x2] == 200).all() and out.sum() == image.sum()
    assert boxes.tolist() == [[10, 5, 30, 9]]


@pytest.mark.parametrize("cfg", [AugmentConfig(), AugmentConfig(hflip=1), AugmentConfig(vflip=1), AugmentConfig(hflip=1, vflip=1),
                                 AugmentConfig(brightness=0.3), AugmentConfig(contrast=0.3), LIGHT])
def test_a_grey_picture_is_augmented_as_each_channel_of_its_rgb(cfg):
    rng = np.random.default_rng(1)
    grey = rng.integers(0, 256, (40, 60, 1)).astype(np.uint8)
    boxes = np.array([[10, 5, 30, 9]], np.float32)
    before = grey.copy()
    for seed in range(5):
        one, moved = augment(grey, boxes, cfg, np.random.default_rng(seed))
        three, also = augment(np.repeat(grey, 3, axis=2), boxes, cfg, np.random.default_rng(seed))
        assert one.shape == (40, 60, 1) and np.array_equal(np.repeat(one, 3, axis=2), three) and np.array_equal(moved, also)
    assert np.array_equal(grey, before)


def test_defects_stay_where_they_are_when_pictures_are_resized(index):
    row = int(index.rows("train")[np.diff(index.box_offsets)[index.rows("train")].argmax()])
    large, small = (DetectionDataset(index, "train", CLASSES, ModelConfig(min_size=s, max_size=s)).load(0, row)
                    for s in (128, 64))
    assert small.image.shape == (64, 64, 1)  # drawn radiographs are grey
    np.testing.assert_allclose(small.boxes * 2, large.boxes, rtol=1e-6)
    assert small.labels.min() >= 1
