"""Batch: what collate puts together comes out again, whatever sizes and box counts meet."""

import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weldtrain.data.batch import IGNORED, STAGES, STRIDE, Batch, Failure, Sample, blank, collate, room
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


def parts(batch):
    """All that a batch holds, as bytes."""
    tensors = (batch.images, batch.boxes, batch.batch_index, batch.labels, batch.image_sizes, batch.image_ids,
               batch.original_sizes)
    values = [(t.dtype, tuple(t.shape), t.contiguous().numpy().tobytes()) for t in tensors]
    return [*values, batch.box_counts, batch.ignored_counts, batch.work_s.tobytes()]


batches = st.builds(
    lambda pictures, channels: collate([sample(h, w, n, i, channels, min(n, k)) for i, (h, w, n, k) in enumerate(pictures)]),
    st.lists(st.tuples(*[st.integers(1, 70)] * 2, *[st.integers(0, 9)] * 2), min_size=1, max_size=5), st.sampled_from([1, 3]))


@settings(max_examples=40, deadline=None)
@given(batches)
def test_a_batch_moves_whole_and_in_one_piece(batch):
    before = parts(batch)
    batch.work_s[:] = 0.5
    before[-1] = batch.work_s.tobytes()
    # Torch teaches the pickler of its queues to send memory as a file descriptor.
    for moved in (pickle.loads(pickle.dumps(batch)), pickle.loads(ForkingPickler.dumps(batch)), batch.to(torch.device("cpu"))):
        assert parts(moved) == before and len(moved) == len(batch)
        assert moved.images.is_contiguous(memory_format=torch.channels_last)
        for view in (moved.images, moved.boxes, moved.batch_index, moved.labels):
            assert view.untyped_storage().data_ptr() == moved.memory.untyped_storage().data_ptr()
            assert view.data_ptr() % view.element_size() == 0
    assert batch.to(torch.device("meta")).boxes.shape == batch.boxes.shape


@settings(max_examples=40, deadline=None)
@given(batches, st.integers(0, 255), st.randoms(use_true_random=False))
def test_pictures_come_in_any_order_into_memory_that_held_something_else(batch, dirt, random):
    """What threads do: the same batch as if its samples had been put together, whatever was in its memory."""
    owners = batch.batch_index.tolist()
    random.shuffle(owners)  # boxes too may come in any order, but for that of one picture's
    boxes_of = [iter(np.flatnonzero(batch.batch_index == i)) for i in range(len(batch))]
    order = [next(boxes_of[owner]) for owner in owners]
    asked = []

    def empty(nbytes):
        asked.append(nbytes)
        return torch.full((nbytes,), dirt, dtype=torch.uint8)

    of_boxes = [values.numpy()[order] for values in (batch.boxes, batch.labels, batch.batch_index)]
    of_pictures = [values.numpy() for values in (batch.image_ids, batch.original_sizes, batch.seeds)]
    made, canvas = blank(batch.image_sizes.numpy(), batch.shape[3], *of_boxes, *of_pictures, empty)
    for i in random.sample(range(len(batch)), len(batch)):
        size = batch.image_sizes[i].tolist()
        room(canvas[i], *size)[:] = room(batch.images[i].permute(1, 2, 0).numpy(), *size)
    assert parts(made) == parts(batch) and asked == [len(batch.memory)]


def test_work_is_noted_by_picture_and_stage():
    batch = collate([sample(32, 32, 1), sample(40, 32, 0)])
    assert batch.work_s.shape == (2, len(STAGES)) and not batch.work_s.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_a_batch_pins_itself_and_arrives_unchanged():
    batch = collate([sample(40, 70, 2, 0), sample(65, 30, 0, 1)])
    pinned = batch.pin_memory()
    assert isinstance(pinned, Batch) and pinned.memory.is_pinned() and pinned.images.is_pinned() and parts(pinned) == parts(batch)
    there = pinned.to(torch.device("cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert there.images.is_cuda and there.labels.is_cuda and not there.image_sizes.is_cuda
    assert parts(there.to(torch.device("cpu"))) == parts(batch)
