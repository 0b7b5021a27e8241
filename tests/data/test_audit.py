"""The audit finds what is shared between splits and what is too small to see, and nothing where there is nothing."""

from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from weldtrain.config import ModelConfig
from weldtrain.data import audit
from weldtrain.data.audit import sources_across, survival, survival_findings, twins_across, twins_within
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.synthetic import draw_weld
from weldtrain.models.detector import build_detector

RNG = np.random.default_rng(5)


def thumb(picture, side=audit.THUMB_PX):
    grey = picture if picture.ndim == 2 else cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    return cv2.resize(np.ascontiguousarray(grey), (side, side), interpolation=cv2.INTER_AREA)


@pytest.fixture(scope="module")
def plates():
    """Forty pictures of coarse and fine texture, none like another."""
    layers = [RNG.integers(0, 255, (40, *size), np.uint8) for size in ((7, 9), (60, 80))]
    coarse, fine = ([cv2.resize(p, (360, 280), interpolation=cv2.INTER_CUBIC) for p in layer] for layer in layers)
    return [cv2.addWeighted(c, 0.7, f, 0.3, 0) for c, f in zip(coarse, fine)]


def across(pictures, splits):
    """Twins across splits of whole pictures."""
    return search(twins_across, pictures, splits)


def within(pictures, splits):
    return search(twins_within, pictures, splits)


def search(find, pictures, splits):
    index = SimpleNamespace(split_ids=np.asarray(splits), splits=["test", "val", "other"])
    return find(np.stack([thumb(p) for p in pictures]), index, lambda row: thumb(pictures[row], audit.DETAIL_PX))


def recoded(picture):
    return cv2.imdecode(cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 40])[1], cv2.IMREAD_GRAYSCALE)


CHANGES = {
    "nothing": lambda p: p,
    "turned": lambda p: np.ascontiguousarray(np.rot90(p)),
    "upside down": lambda p: p[::-1, ::-1],
    "mirrored": lambda p: p[:, ::-1],
    "mirrored and turned": lambda p: np.ascontiguousarray(np.rot90(p[:, ::-1], 3)),
    "smaller": lambda p: cv2.resize(p, (150, 117), interpolation=cv2.INTER_AREA),
    "compressed": recoded,
    "brighter": lambda p: np.clip(p.astype(int) * 0.8 + 40, 0, 255).astype(np.uint8),
    "shifted a little": lambda p: p[4:, 5:],
    "noisy": lambda p: np.clip(p + RNG.normal(0, 12, p.shape), 0, 255).astype(np.uint8),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_picture_is_found_again_in_another_split(plates, change):
    (twin,) = across([*plates, CHANGES[change](plates[7])], [1] * 40 + [0])
    assert (twin.row, twin.other) == (40, 7) and twin.correlation >= audit.TWIN_DETAIL


def test_pictures_that_have_nothing_in_common_are_no_twins(plates):
    dark = np.zeros((280, 360), np.uint8)
    ramp = np.tile(np.arange(360) * 0.7, (280, 1)).astype(np.uint8)
    # Drawn welds have the same layout, which their thumbnails alone would be fooled by.
    welds = [draw_weld(np.random.default_rng(i), 256)[0] for i in range(120)]
    pictures = [*plates, *welds, dark, dark.copy(), dark + 255, ramp]
    splits = np.arange(len(pictures)) % 3
    assert across(pictures, splits) == [] and within(pictures, splits) == []


def test_only_the_same_picture_counts_within_a_split_and_only_the_later_one(plates):
    found = within([*plates, recoded(plates[3]), plates[7][:, ::-1]], [0] * 42)
    assert [(t.row, t.other) for t in found] == [(40, 3)]


def test_the_answer_does_not_depend_on_how_many_are_compared_at_once(plates, monkeypatch):
    pictures, splits = [*plates, *(recoded(p) for p in plates[:9])], [0] * 40 + [1] * 9
    whole = across(pictures, splits)
    monkeypatch.setattr(audit, "_BLOCK", 50)
    assert across(pictures, splits) == whole and len(whole) == 9


def test_frames_and_copies_are_told_by_name_and_separate_pictures_are_not():
    hashes = [f"{i:032x}" for i in range(5)]
    paths = [f"train/images/film_mp4-1_jpg.rf.{hashes[0]}.jpg", f"val/images/film_mp4-22_jpg.rf.{hashes[1]}.jpg",
             f"train/images/weld_png.rf.{hashes[2]}.jpg", f"train/images/weld_png.rf.{hashes[3]}.jpg",
             "train/images/crack_1.jpg", "val/images/crack_2.jpg", "train/001.jpg", "val/002.jpg"]
    splits = [p.split("/")[0] for p in paths]
    assert sources_across(paths, splits) == {"film_mp4": {"train": [0], "val": [1]}}


def index_of(sizes, boxes, names=("pore",), flags=None):
    """An index of one box a picture, without a file."""
    index = object.__new__(AnnotationIndex)
    index.sizes, index.boxes = np.array(sizes, np.int32), np.array(boxes, np.float32)
    index.box_offsets = np.arange(len(sizes) + 1)
    index.names, index.name_ids = list(names), np.zeros(len(boxes), np.int32)
    index.flags = np.zeros(len(boxes), np.uint8) if flags is None else np.array(flags, np.uint8)
    return index


def test_sizes_on_the_device_follow_the_models_scale():
    # 12000x2000 at 800/1333: the long side decides, 0.111; 500x400 at the short side, 2.0.
    index = index_of([(12000, 2000), (500, 400)], [(0, 0, 9, 9), (10, 10, 20, 50)])
    (pores,) = survival(index, ModelConfig())
    np.testing.assert_allclose(pores.sizes_px, [9 * 1333 / 12000, 2 * np.sqrt(10 * 40)], rtol=1e-3)
    assert pores.limit_px == 8 and pores.below == 0.5


def test_the_advice_lifts_what_it_speaks_of_above_the_limit():
    index = index_of([(2000, 1500)] * 100, [(0, 0, s, s) for s in np.linspace(6, 30, 100)])
    model = ModelConfig()
    (pores,) = survival(index, model)
    assert 0.05 < pores.below < 0.5 and "raise model.min_size to " in pores.advice
    raised = [int(part.split()[0]) for part in pores.advice.replace(",", "").split(" to ")[1:]]
    (after,) = survival(index, ModelConfig(min_size=raised[0], max_size=raised[1]))
    assert after.below <= audit.SMALL_SHARE and after.advice == ""
    tile = int(pores.advice.split("model.tiles=")[1])
    (tiled,) = survival(index_of([(tile, tile)] * 100, index.boxes), model)
    assert tiled.below <= audit.SMALL_SHARE + 0.01
    kinds = {f.kind: f for f in survival_findings([pores], model)}
    small = round(100 * pores.below)
    assert kinds["boxes-small"].text == (f"{small} of 100 boxes of pore ({small}%) are below 8 px after resizing to "
                                         "model.min_size=800, model.max_size=1333")


def test_ignored_boxes_do_not_count():
    index = index_of([(800, 800)] * 2, [(0, 0, 2, 2), (0, 0, 50, 50)], flags=[1, 0])
    assert survival(index, ModelConfig())[0].sizes_px.tolist() == [50]


def test_a_shape_without_an_anchor_is_told():
    def share(box, **model):
        return survival(index_of([(800, 800)], [box]), ModelConfig(**model))[0].unanchored

    assert share((0, 0, 64, 64)) == 0 and share((0, 0, 400, 16)) == 1
    assert share((0, 0, 400, 16), anchor_ratios=[0.04]) == 0 and share((0, 0, 10, 10)) == 1


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v3_large"])
def test_the_finest_stride_is_that_of_the_model(backbone):
    import torch

    small = {"pyramid_channels": 16, "box_head_width": 16}
    model = build_detector(ModelConfig(backbone=backbone, **small), 1).eval()
    finest = next(iter(model.backbone(torch.zeros(1, 3, 256, 256)).values()))
    limit = survival(index_of([(256, 256)], [(0, 0, 9, 9)]), ModelConfig(backbone=backbone))[0].limit_px
    assert limit == 2 * 256 / finest.shape[-1]
