"""DetectionDataset: what becomes of channels, depths, sizes and marked boxes between the file and the sample."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from weldtrain.config import AugmentConfig, ModelConfig
from weldtrain.data.batch import IGNORED, collate
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.index import open_index
from weldtrain.errors import DataError

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
