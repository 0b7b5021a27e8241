"""Batch: what collate puts together comes out again, whatever sizes and box counts meet."""

import pickle

import numpy as np
import pytest
import torch

from weldtrain.data.batch import IGNORED, STRIDE, Failure, Sample, collate
from weldtrain.errors import DataError


def sample(height, width, boxes, row=0, channels=3, ignored=0):
    rng = np.random.default_rng(row)
    corners = np.arange(4 * boxes, dtype=np.float32).reshape(-1, 4)
    labels = np.arange(1, boxes + 1, dtype=np.int64)
    labels[boxes - ignored :] = IGNORED
    return Sample(rng.integers(1, 255, (height, width, channels), np.uint8), corners, labels, row, (2 * height, 2 * width))


def test_pictures_lie_top_left_and_the_padding_is_zero():
    samples = [sample(40, 70, 2, 0), sample(65, 30, 0, 1)]
    batch = collate(samples)
    assert batch.images.dtype == torch.uint8 and batch.images.shape == (2, 3, 96, 96)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    for i, s in enumerate(samples):
        h, w = s.image.shape[:2]
        assert np.array_equal(batch.images[i, :, :h, :w].permute(1, 2, 0).numpy(), s.image)
        assert not batch.images[i, :, h:].any() and not batch.images[i, :, :, w:].any()
    assert batch.image_sizes.tolist() == [[40, 70], [65, 30]]
    assert batch.original_sizes.tolist() == [[80, 140], [130, 60]]
    assert batch.images.shape[2] % STRIDE == 0


def test_boxes_keep_their_picture():
    batch = collate([sample(32, 32, 2, 5), sample(32, 32, 0, 6), sample(32, 32, 3, 7)])
    assert batch.batch_index.tolist() == [0, 0, 2, 2, 2]
    assert batch.boxes5().shape == (5, 5) and batch.boxes5()[:, 0].tolist() == [0, 0, 2, 2, 2]
    targets = batch.targets()
    assert [len(t["boxes"]) for t in targets] == [2, 0, 3]
    assert targets[1]["boxes"].shape == (0, 4) and targets[1]["labels"].dtype == torch.int64
    assert torch.equal(torch.cat([t["boxes"] for t in targets]), batch.boxes)
    assert batch.image_ids.tolist() == [5, 6, 7]


def test_a_batch_of_defect_free_pictures_is_whole():
    batch = collate([sample(32, 32, 0), sample(32, 32, 0)])
    assert batch.boxes.shape == (0, 4) and batch.boxes.dtype == torch.float32
    assert batch.boxes5().shape == (0, 5)
    assert batch.labels.shape == (0,) and batch.labels.dtype == torch.int64


@pytest.mark.parametrize("channels", [(1, 1), (3, 1), (1, 3)])
def test_grey_pictures_stay_one_channel_unless_one_has_colour(channels):
    samples = [sample(40, 70, 1, i, c) for i, c in enumerate(channels)]
    batch = collate(samples)
    assert batch.images.shape == (2, max(channels), 64, 96)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    for i, s in enumerate(samples):
        shown = np.repeat(s.image, max(channels) // s.image.shape[2], axis=2)
        assert np.array_equal(batch.images[i, :, :40, :70].permute(1, 2, 0).numpy(), shown)
        assert not batch.images[i, :, 40:].any() and not batch.images[i, :, :, 70:].any()


def test_ignored_boxes_are_told_apart_and_no_targets():
    batch = collate([sample(32, 32, boxes, ignored=ignored) for boxes, ignored in ((3, 1), (0, 0), (2, 2), (1, 0))])
    assert batch.box_counts == (3, 0, 2, 1) and batch.ignored_counts == (1, 0, 2, 0)
    targets = batch.to(torch.device("cpu")).targets()
    assert [t["labels"].tolist() for t in targets] == [[1, 2], [], [], [1]]
    assert [(len(t["boxes"]), len(t["ignored"])) for t in targets] == [(2, 1), (0, 0), (0, 2), (1, 0)]
    assert torch.equal(torch.cat([torch.cat([t["boxes"], t["ignored"]]) for t in targets]), batch.boxes)


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_be_pickled_travels_as_its_text():
    failure = pickle.loads(pickle.dumps(Failure.of(Stubborn(1, 2))))
    assert str(failure.error) == "Stubborn: 1 and 2"


def test_a_failure_travels_instead_of_the_batch_and_keeps_type_and_text():
    try:
        raise DataError("is cut off", "a.jpg", "copy it again")
    except DataError as error:
        failure = Failure.of(error)
    arrived = pickle.loads(pickle.dumps(collate([sample(32, 32, 1), failure])))
    try:
        arrived.reraise()
    except DataError as error:
        assert str(error) == "a.jpg: is cut off; copy it again"
        assert "test_batch.py" in str(error.__cause__)
    else:
        raise AssertionError("nothing was raised")
