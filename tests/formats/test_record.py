"""What all formats share: true sizes from headers, sound boxes with an account of the others, stamps that see every change."""

import os
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from weldtrain.data.images import read_image
from weldtrain.errors import DataError
from weldtrain.formats.record import DIFFICULT, MIN_SIDE_PX, Box, list_files, make_record, picture_size, stamp_files

RNG = np.random.default_rng(0)


@pytest.fixture
def root(tmp_path):
    Image.fromarray(RNG.integers(0, 255, (240, 320, 3), np.uint8)).save(tmp_path / "w.jpg")
    return tmp_path


def record(root, *boxes):
    return make_record(root, "w.jpg", "train", "w.xml", boxes)


def test_every_box_is_kept_inside_the_picture_or_accounted_for(root):
    corners = RNG.uniform(-200, 500, (300, 4)).round(1)
    made = record(root, *(Box(tuple(map(float, c)), f"n{i}", i + 10, i % 2) for i, c in enumerate(corners)))
    assert made.boxes.dtype == np.float32 and (made.width, made.height) == (320, 240)
    assert (made.boxes >= 0).all() and (made.boxes <= [320, 240, 320, 240]).all()
    assert (made.boxes[:, 2:] - made.boxes[:, :2] >= MIN_SIDE_PX - 1e-4).all()
    # What belongs together stays together, and no box is lost without a word.
    rows = made.lines - 10
    np.testing.assert_allclose(made.boxes, np.clip(corners[rows], 0, [320, 240, 320, 240]), atol=1e-4)
    assert made.names == [f"n{i}" for i in rows] and made.flags.tolist() == [i % 2 for i in rows]
    assert sorted([*made.lines, *(f.line for f in made.findings)]) == list(range(10, 310))
    assert 0 < len(made.boxes) < 300


@pytest.mark.parametrize(("corners", "kept"), [
    ((10, 10, 10.5, 20), True), ((10, 10, 10.4, 20), False), ((0, 0, 320, 240), True), ((20, 10, 10, 30), False),
    ((319.7, 0, 400, 50), False), ((-50, -50, 0, 0), False), ((1e30, 0, 1e31, 9), False)])
def test_a_box_needs_half_a_pixel_of_the_picture(root, corners, kept):
    made = record(root, Box(corners, "crack", 7, DIFFICULT), Box((1, 2, 30, 40), "slag", 8))
    assert made.names == ["crack"] * kept + ["slag"]
    assert [(f.file, f.line) for f in made.findings] == [("w.xml", 7)] * (not kept)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", range(4))
def test_a_number_that_is_not_finite_never_becomes_a_large_box(root, bad, at):
    corners = [10.0, 10.0, 50.0, 50.0]
    corners[at] = bad
    with pytest.raises(DataError, match=r"w\.xml:7: object 2 \(crack\)"):
        record(root, Box((1, 2, 30, 40), "slag", 6), Box(tuple(corners), "crack", 7))


def test_no_box_is_an_empty_array_of_the_same_shape(root):
    made = record(root)
    assert made.boxes.shape == (0, 4) and made.boxes.dtype == np.float32 and made.flags.dtype == np.uint8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_that_of_the_upright_picture(root, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.open(root / "w.jpg").save(root / "turned.jpg", exif=exif.tobytes())
    width, height = picture_size(root / "turned.jpg")
    assert read_image(root / "turned.jpg").shape == (height, width, 3)
    assert (width < height) == (orientation > 4)


def test_the_size_needs_the_header_alone(root):
    (root / "w.jpg").write_bytes((root / "w.jpg").read_bytes()[:1000])
    assert picture_size(root / "w.jpg") == (320, 240)


def test_links_that_lead_nowhere_are_files_and_are_named(root):
    (root / "gone.jpg").symlink_to(root / "was_here.jpg")
    (root / "self.jpg").symlink_to(root / "self.jpg")
    assert list_files(root) == ["gone.jpg", "self.jpg", "w.jpg"]
    before = stamp_files([root / "gone.jpg"])
    for name in ("gone.jpg", "self.jpg"):
        said = set()
        for reader in (picture_size, read_image):
            with pytest.raises(DataError, match=rf"{name}: no such picture; a broken link\?") as caught:
                reader(root / name)
            said.add(str(caught.value))
        assert len(said) == 1
    shutil.copy(root / "w.jpg", root / "was_here.jpg")
    assert stamp_files([root / "gone.jpg"]) != before


def test_files_are_listed_deep_sorted_and_without_the_systems_own(root):
    for name in ("b/a.jpg", "b/c/Z.jpg", "a.jpg", ".hidden.jpg", ".git/x.jpg", "__MACOSX/._a.jpg", "b/.DS_Store"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    assert list_files(root) == ["a.jpg", "b/a.jpg", "b/c/Z.jpg", "w.jpg"]


def rewritten(file):
    """Other bytes of the same number and date."""
    st = file.stat()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(st.st_atime_ns, st.st_mtime_ns))


CHANGES = {
    "content": lambda d: rewritten(d / "a/1"),
    "length": lambda d: (d / "a/1").write_text("onee"),
    "date": lambda d: os.utime(d / "a/1", (0, 0)),
    "added": lambda d: (d / "a/b/3").touch(),
    "removed": lambda d: (d / "a/1").unlink(),
    "renamed": lambda d: (d / "a/1").rename(d / "a/4"),
    "swapped": lambda d: [(d / x).rename(d / y) for x, y in (("a/1", "t"), ("a/2", "a/1"), ("t", "a/2"))],
    "single": lambda d: rewritten(d / "s.csv"),
    "gone": lambda d: (d / "s.csv").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_stamp_sees_every_change_and_nothing_else(tmp_path, change):
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("a/1", "a/2", "a/b/0", "s.csv"):
        (tmp_path / name).write_text("one!")
        os.utime(tmp_path / name, (1e9, 1e9))
    watched = [tmp_path / "s.csv", tmp_path / "a"]
    before = stamp_files(watched)
    (tmp_path / "other").touch()
    assert stamp_files(watched) == before
    CHANGES[change](tmp_path)
    assert stamp_files(watched) != before


def test_an_error_is_one_line_and_travels_between_processes(root):
    error = DataError("has two\nlines", root / "w.xml", "mend\n it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is DataError and copy.exit_code == 2
    assert str(copy) == str(error) == f"{root}/w.xml: has two lines; mend it"
