"""The drawn data set: reproducible, tightly boxed, readable on disk, and visible to the eye."""

import csv
import xml.etree.ElementTree as ET

import cv2
import numpy as np
import pytest

from weldtrain.data import synthetic
from weldtrain.data.synthetic import CLASSES, draw_weld, write_dataset


def draw(i, size_px=256):
    return draw_weld(np.random.default_rng([7, i]), size_px)


@pytest.fixture(scope="module")
def sample():
    return [draw(i) for i in range(150)]


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def by_split(folder):
    with open(folder / "train_val_test_split.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    splits = {}
    for row in rows:
        parts = [folder / "images" / f"{row['image_id']}.jpg", folder / "annotations" / f"{row['image_id']}.xml"]
        objects = ET.parse(parts[1]).findall("object")
        splits.setdefault(row["split"], []).append((parts[0].read_bytes(), [ET.tostring(item) for item in objects]))
    return splits


def check_contract(image, boxes, names, size_px):
    assert image.dtype == np.uint8 and image.shape == (size_px, size_px)
    assert boxes.dtype == np.float32 and boxes.shape == (len(names), 4) and set(names) <= set(CLASSES)
    assert (boxes >= 0).all() and (boxes <= size_px).all()
    assert (boxes[:, 2:] - boxes[:, :2] >= 8 * size_px / 256).all()
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert (a[:2] > b[2:]).any() or (b[:2] > a[2:]).any()


def test_boxes_lie_inside_apart_and_are_large_enough(sample):
    for image, boxes, names in sample:
        check_contract(image, boxes, names, 256)
        assert len(names) <= 4


@pytest.mark.parametrize("size_px", [128, 512])
def test_indications_grow_with_the_picture(size_px, sample):
    drawn = [draw(i, size_px) for i in range(25)]
    for picture in drawn:
        check_contract(*picture, size_px)

    def side(pictures, px):
        return np.median(np.concatenate([boxes[:, 2:] - boxes[:, :2] for _, boxes, _ in pictures])) / px

    assert 0.6 < side(drawn, size_px) / side(sample, 256) < 1.6


@pytest.mark.parametrize("size_px", [64, 4096])
def test_a_size_out_of_range_is_named(size_px):
    with pytest.raises(ValueError, match="size_px"):
        draw(0, size_px)


def test_every_class_is_common_and_a_fifth_is_clean(sample):
    names = [name for _, _, found in sample for name in found]
    assert all(0.15 < names.count(name) / len(names) < 0.4 for name in CLASSES)
    assert 0.1 < sum(not found for _, _, found in sample) / len(sample) < 0.3


def test_same_stream_same_pixels_other_stream_other_pixels():
    first, again, other = draw(3), draw(3), draw(4)
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1]) and first[2] == again[2]
    assert not np.array_equal(first[0], other[0])


def test_an_indication_darkens_its_own_box_and_nothing_else(monkeypatch, sample):
    """The same random stream without contrast gives the same picture free of indications."""
    monkeypatch.setattr(synthetic, "_CNR", dict.fromkeys(CLASSES, (0, 0)))
    for i, (image, boxes, names) in enumerate(sample[:40]):
        sound, same_boxes, _ = draw(i)
        assert np.array_equal(boxes, same_boxes)
        darker = sound.astype(int) - image
        assert darker.min() >= 0
        outside = np.ones(image.shape, bool)
        for (x1, y1, x2, y2), name in zip(boxes.astype(int), names, strict=True):
            inside = darker[y1:y2, x1:x2]
            assert inside.max() >= 7, name
            # Tight: the mark reaches every side that was not widened to the least size.
            for axis, length in ((0, x2 - x1), (1, y2 - y1)):
                line = inside.max(axis)
                assert length <= 15 or min(line[:2].max(), line[-2:].max()) > 0, name
            outside[y1:y2, x1:x2] = False
            assert darker[max(0, y1 - 4):y2 + 4, max(0, x1 - 4):x2 + 4].max() == inside.max()
        assert darker[outside].max() <= 0.3 * darker.max() + 1


def contrasts(sample):
    """Per class [n, 2]: in the picture as shown, how far the core of an indication lies below the metal beside it
    (grey values), and that over the scatter (grain and ripples) of the metal beside it."""
    found = {name: [] for name in CLASSES}
    for i, (image, boxes, names) in enumerate(sample):
        sound = draw(i)[0].astype(int)  # without contrast: tells where the drawn mask is
        for box, name in zip(boxes.astype(int), names, strict=True):
            x1, y1, x2, y2 = np.clip(box + np.array([-6, -6, 6, 6]), 0, 256)
            mark, shown = (sound - image)[y1:y2, x1:x2], image[y1:y2, x1:x2].astype(float)
            beside = cv2.dilate((mark > 0).astype(np.uint8), np.ones((7, 7))).astype(bool) & (mark == 0)
            detail = shown - cv2.GaussianBlur(shown, (0, 0), 3.0)
            gap = np.median(shown[beside]) - shown[mark > 0.5 * mark.max()].mean()
            found[name].append((gap, gap / detail[beside].std()))
    return {name: np.array(values) for name, values in found.items()}


def test_every_class_stands_out_from_the_metal_beside_it(monkeypatch, sample):
    monkeypatch.setattr(synthetic, "_CNR", dict.fromkeys(CLASSES, (0, 0)))
    for name, values in contrasts(sample).items():
        gap, over_scatter = values.T
        assert np.median(gap) > 12 and np.percentile(gap, 5) > 6, name
        assert np.median(over_scatter) > 3 and np.percentile(over_scatter, 5) > 1.5, name


def test_layout_on_disk(tmp_path):
    folder = tmp_path / "welds"
    write_dataset(folder, counts={"train": 4, "val": 2, "test": 1}, size_px=128)
    lines = (folder / "train_val_test_split.csv").read_text().splitlines()
    assert lines == ["image_id,split", *(f"{n:04d},train" for n in (1, 2, 3, 4)), "0005,val", "0006,val", "0007,test"]
    ids = [line.split(",")[0] for line in lines[1:]]
    assert sorted(path.stem for path in (folder / "images").iterdir()) == ids
    assert sorted(path.stem for path in (folder / "annotations").iterdir()) == ids
    for n, image_id in enumerate(ids[:4]):
        image = cv2.imread(str(folder / "images" / f"{image_id}.jpg"), cv2.IMREAD_UNCHANGED)
        assert image.shape == (128, 128)
        drawn, boxes, names = draw_weld(np.random.default_rng([0, 0, n]), 128)
        assert np.abs(image.astype(int) - drawn).mean() < 4
        root = ET.parse(folder / "annotations" / f"{image_id}.xml").getroot()
        assert [root.findtext(f"size/{tag}") for tag in ("width", "height", "depth")] == ["128", "128", "1"]
        assert [item.findtext("name") for item in root.iter("object")] == names
        read = [[float(edge.text) for edge in item] for item in root.iter("bndbox")]
        assert np.array_equal(np.reshape(read, (-1, 4)), boxes)


def test_same_seed_same_bytes_and_splits_differ(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_dataset(tmp_path / name, counts={"train": 3, "val": 3}, size_px=128, seed=seed)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    pictures = [image for name in "ac" for split in by_split(tmp_path / name).values() for image, _ in split]
    assert len(set(pictures)) == len(pictures) == 12


def test_larger_counts_keep_the_earlier_pictures(tmp_path):
    write_dataset(tmp_path / "few", counts={"train": 2, "test": 2, "field": 1}, size_px=128)
    write_dataset(tmp_path / "more", counts={"train": 4, "val": 1, "test": 3, "field": 2}, size_px=128)
    few, more = by_split(tmp_path / "few"), by_split(tmp_path / "more")
    assert all(more[split][: len(pictures)] == pictures for split, pictures in few.items())


def test_an_existing_folder_stays_and_no_draft_is_left(tmp_path, monkeypatch):
    folder = tmp_path / "welds"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    write_dataset(folder, counts={"train": 1}, size_px=128)
    assert files(folder) == {"mine.txt": b"keep"}

    def another_process_is_first(*args):
        (tmp_path / "race").mkdir(exist_ok=True)
        (tmp_path / "race" / "theirs.txt").write_text("keep")
        return draw_weld(*args)

    monkeypatch.setattr(synthetic, "draw_weld", another_process_is_first)
    write_dataset(tmp_path / "race", counts={"train": 1}, size_px=128)
    assert files(tmp_path / "race") == {"theirs.txt": b"keep"}
    assert {path.name for path in tmp_path.iterdir()} == {"welds", "race"}


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "_voc", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_dataset(tmp_path / "welds", counts={"train": 1}, size_px=128)
    assert not list(tmp_path.iterdir())


def test_a_negative_count_is_refused(tmp_path):
    with pytest.raises(ValueError, match="counts"):
        write_dataset(tmp_path / "welds", counts={"train": -1})
