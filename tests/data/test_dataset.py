"""DetectionDataset: what becomes of channels, depths, sizes and marked boxes between the file and the sample, and that a
sample is the same however its batch is put together."""

import pickle
import random
import time
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from weldtrain.config import AugmentConfig, ModelConfig
from weldtrain.data.batch import IGNORED, STAGES, Failure, collate
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.errors import DataError, PictureError

AS_IT_IS = ModelConfig(min_size=48, max_size=64)  # the scale of pictures of 64x48
RNG = np.random.default_rng(2)
GREY = RNG.integers(0, 256, (48, 64)).astype(np.uint8)
RADIOGRAPH = RNG.integers(500, 3500, (48, 64)).astype(np.uint16)


@pytest.fixture
def dataset(plates, cache):
    def make(pictures, xml=None, model=AS_IT_IS, **settings):
        index = open_index(plates(pictures, xml, **settings), cache)
        return DetectionDataset(index, "train", index.names or ["crack"], model)

    return make


def samples(data):
    return [data.load(0, row) for row in data.rows]


def test_grey_pictures_travel_as_one_channel(dataset):
    data = dataset({"a.png": GREY, "b.tif": GREY, "c.png": RADIOGRAPH, "d.bmp": GREY, "e.jpg": GREY})
    assert {s.image.shape for s in samples(data)} == {(48, 64, 1)}
    assert all(np.array_equal(s.image[..., 0], GREY) for i, s in enumerate(samples(data)) if i in (0, 1, 3))
    assert collate(samples(data)).images.shape == (5, 1, 64, 64)


def test_grey_beside_colour_is_repeated(dataset, plates):
    batch = collate(samples(dataset({"a.png": GREY, "b.png": None})))
    assert batch.images.shape == (2, 3, 64, 64)
    assert all(np.array_equal(channel[:48], GREY) for channel in batch.images[0])
    assert np.array_equal(batch.images[1, :, :48].permute(1, 2, 0), plates.noise[..., ::-1])


@pytest.mark.parametrize("min_size", [48, 24, 96])
def test_a_grey_sample_is_one_channel_of_the_rgb_sample(dataset, min_size):
    data = dataset({"a.png": GREY, "b.png": np.dstack([GREY] * 3)}, model=ModelConfig(min_size=min_size, max_size=2 * min_size))
    data.augment = AugmentConfig(hflip=0.5, vflip=0.5, brightness=0.2, contrast=0.2)
    grey, rgb = (data.load(4, row) for row in data.rows)
    again = data.load(4, data.rows[0])
    assert grey.image.shape == (min_size, min_size * 4 // 3, 1) and np.array_equal(grey.image, again.image)
    assert rgb.image.shape == (min_size, min_size * 4 // 3, 3) and (rgb.image == rgb.image[..., :1]).all()
    data.augment = None
    grey, rgb = samples(data)
    assert np.array_equal(np.repeat(grey.image, 3, axis=2), rgb.image)


def test_the_window_of_the_model_decides_how_16_bits_are_seen(dataset):
    def shown(**window):
        (sample,) = samples(dataset({"a.png": RADIOGRAPH}, model=replace(AS_IT_IS, **window)))
        return sample.image[..., 0].astype(float)

    exact = RADIOGRAPH * (255 / 4095)
    assert np.abs(shown(window_levels=[0, 4095]) - exact).max() <= 0.51
    low, high = np.percentile(RADIOGRAPH, [10, 90])
    assert np.abs(shown(window_percentiles=[10, 90]) - np.clip((RADIOGRAPH - low) * 255 / (high - low), 0, 255)).max() <= 0.51
    assert shown().min() == 0 and shown().max() == 255 and shown(window_levels=[0, 4095]).max() < 255


def test_boxes_marked_difficult_come_last_and_are_ignored(dataset, plates):
    marked = "<difficult>1</difficult>"
    xml = {"a": "".join(plates.crack((i, 2, i + 9, 30), name, marked * hard)
                        for i, (name, hard) in enumerate([("crack", 1), ("slag", 0), ("slag", 1), ("crack", 0)]))}
    (sample,) = samples(dataset({"a.png": None}, xml))
    assert sample.labels.tolist() == [2, 1, IGNORED, IGNORED] and sample.boxes[:, 0].tolist() == [1, 3, 0, 2]
    assert collate([sample]).ignored_counts == (2,)
    (used,) = samples(dataset({"a.png": None}, xml, difficult="use"))
    assert used.labels.tolist() == [1, 2, 2, 1] and used.boxes[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "bmp"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_of_one_pixel_is_a_picture(dataset, plates, suffix, channels):
    pixel = np.full((1, 1, channels), 200, np.uint8)
    (sample,) = samples(dataset({f"a.{suffix}": pixel}, {"a": plates.crack((0, 0, 1, 1))}))
    assert sample.image.shape == (48, 48, channels) and (np.abs(sample.image.astype(int) - 200) < 4).all()
    assert sample.boxes.tolist() == [[0, 0, 48, 48]] and sample.original_size == (1, 1)


def test_a_picture_replaced_by_one_of_another_size_is_named(dataset):
    data = dataset({"a.png": GREY})
    cv2.imwrite(str(data.index.root / "images" / "a.png"), GREY[:40])
    with pytest.raises(DataError, match=r"images/a\.png: decodes to 64x40, its header says 64x48"):
        data.load(0, 0)


LIGHT = AugmentConfig(hflip=0.5, vflip=0.5, brightness=0.2, contrast=0.2)


@pytest.fixture
def mixed(kinds):
    return kinds(augment=LIGHT, seed=5)


def parts(batch, i):
    """The ith sample of a batch: its pixels in RGB, its boxes, its labels."""
    height, width = batch.image_sizes[i].tolist()
    own = batch.batch_index == i
    return (batch.images[i, :, :height, :width].expand(3, -1, -1).numpy().tobytes(), batch.boxes[own].tolist(),
            batch.labels[own].tolist(), batch.original_sizes[i].tolist(), int(batch.image_ids[i]))


def test_a_sample_does_not_depend_on_its_batch_or_what_came_before(mixed):
    keys = [(epoch, row, repeat) for epoch in (0, 3) for row in mixed.rows.tolist() for repeat in (0, 1)]
    alone = {key: parts(mixed.fetch([key]), 0) for key in keys}
    assert len({pixels for pixels, *_ in alone.values()}) > len(keys) * 3 // 4  # of a picture not all are turned alike
    for size in (2, 5, len(keys)):
        shuffled = random.Random(size).sample(keys, size)
        batch = mixed.fetch(shuffled)
        assert [parts(batch, i) for i in range(size)] == [alone[key] for key in shuffled]
    mixed.seed = 6
    assert any(parts(mixed.fetch([key]), 0) != alone[key] for key in keys)


def test_a_batch_is_filled_in_any_order_into_any_memory(mixed):
    keys = [(1, row, 0) for row in mixed.rows.tolist()]
    straight = mixed.fetch(keys)
    draft = mixed.draft(keys, lambda nbytes: torch.full((nbytes,), 77, dtype=torch.uint8))
    for i in random.Random(1).sample(range(10), 10):
        mixed.fill(draft, i)
    assert torch.equal(draft.batch.images, straight.images) and draft.batch.box_counts == straight.box_counts
    assert [parts(draft.batch, i) for i in range(10)] == [parts(straight, i) for i in range(10)]


def test_a_sample_is_what_a_batch_of_it_holds(mixed):
    mixed.augment = None
    batch = mixed.fetch([(4, row, 0) for row in mixed.rows.tolist()])
    together = collate([mixed.load(4, row) for row in mixed.rows])
    assert [parts(together, i) for i in range(10)] == [parts(batch, i) for i in range(10)]
    assert torch.equal(together.images, batch.images)


def test_no_sample_exceeds_the_largest(mixed):
    width, height = mixed.largest()
    sizes = mixed.fetch([(0, row, 0) for row in mixed.rows.tolist()]).image_sizes
    assert sizes.amax(0).tolist() == [height, width]
    for row, (h, w) in zip(mixed.rows.tolist(), sizes.tolist()):
        assert [w, h] == mixed.sizes[row].tolist()


def test_a_dataset_that_travels_to_a_worker_gives_the_same(mixed):
    there = pickle.loads(pickle.dumps(mixed))
    keys = [(2, row, 0) for row in mixed.rows.tolist()]
    assert [parts(there.fetch(keys), i) for i in range(10)] == [parts(mixed.fetch(keys), i) for i in range(10)]


def test_the_stages_of_the_work_are_all_of_it(mixed):
    shares = []
    for _ in range(5):
        start = time.perf_counter()
        batch = mixed.fetch([(0, row, 0) for row in mixed.rows.tolist()])
        shares.append(batch.work_s.sum() / (time.perf_counter() - start))
    assert (batch.work_s >= 0).all() and max(shares) > 0.6 and max(shares) <= 1
    work = dict(zip(STAGES, batch.work_s.sum(0)))
    assert all(work[stage] > 0 for stage in ("read", "decode", "resize", "augment", "assemble")) and work["cache"] == 0


def test_what_cannot_be_read_is_named_and_travels_as_a_failure(mixed):
    bad = mixed.index.root / "images" / "d.png"
    bad.write_bytes(b"")
    keys = [(0, row, 0) for row in mixed.rows.tolist()]
    with pytest.raises(PictureError, match=rf"{bad}: is empty"):
        mixed.fetch(keys)
    failure = mixed.__getitems__(keys)
    assert isinstance(failure, Failure) and isinstance(failure.error, PictureError) and "read_bytes" in failure.traceback
    assert len(mixed.__getitems__([key for key in keys if mixed.index.path(key[1]) != "images/d.png"])) == 9


def test_which_pictures_show_a_class(dataset, plates):
    marked = "<difficult>1</difficult>"
    xml = {"a": plates.crack() + plates.crack(name="slag"), "b": "", "c": plates.crack(name="slag", more=marked),
           "d": plates.crack() + plates.crack((1, 1, 9, 9))}
    data = dataset({f"{stem}.png": GREY for stem in "abcd"}, xml)
    assert [shown.tolist() for shown in data.shown_by_class()] == [[0, 3], [0]]


def test_a_picture_that_cannot_be_decoded_is_an_error_or_where_asked_black_and_marked(plates, cache):
    index = open_index(plates({"a.png": GREY, "b.png": GREY, "c.png": GREY}), cache)
    file = index.root / index.path(1)
    file.write_bytes(file.read_bytes()[:200] + bytes(4000))
    keys = [(0, row, 0) for row in range(3)]
    with pytest.raises(PictureError):
        DetectionDataset(index, "train", index.names, AS_IT_IS).fetch(keys)
    batch = DetectionDataset(index, "train", index.names, AS_IT_IS, spare=True).fetch(keys)
    assert batch.unread.tolist() == [False, True, False] and not batch.images[1].any() and batch.images[2].any()
    assert pickle.loads(pickle.dumps(batch.host))["unread"].tolist() == [False, True, False]
