"""What all formats share: true sizes from headers, sound boxes with an account of the others, stamps that see every change."""

import os
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from weldtrain.config import DatasetConfig
from weldtrain.data.images import read_image
from weldtrain.errors import DataError, PictureError
from weldtrain.formats.files import Folder, list_files, stamp_files
from weldtrain.formats.pictures import Header, picture_header
from weldtrain.formats.record import CROWD, DIFFICULT, DROPPED, MIN_SIDE_PX, NOTE, Box, Finding, Size, make_record

RNG = np.random.default_rng(0)


@pytest.fixture
def root(tmp_path):
    Image.fromarray(RNG.integers(0, 255, (240, 320, 3), np.uint8)).save(tmp_path / "w.jpg")
    return tmp_path


def record(*items, **options):
    return make_record("w.jpg", Header(320, 240), "w.xml", items, DatasetConfig(**options))


def size_of(path):
    return picture_header(path, 200)[:2]


def test_every_box_is_kept_inside_the_picture_or_accounted_for():
    corners = RNG.uniform(-200, 500, (300, 4)).round(1)
    made = record(*(Box(tuple(map(float, c)), f"n{i}", i + 10, i % 2) for i, c in enumerate(corners)))
    assert made.boxes.dtype == np.float32 and (made.header.width, made.header.height) == (320, 240)
    assert (made.boxes >= 0).all() and (made.boxes <= [320, 240, 320, 240]).all()
    assert (made.boxes[:, 2:] - made.boxes[:, :2] >= MIN_SIDE_PX - 1e-4).all()
    # What belongs together stays together, and no box is lost without a word.
    rows = made.lines - 10
    np.testing.assert_allclose(made.boxes, np.clip(corners[rows], 0, [320, 240, 320, 240]), atol=1e-4)
    assert made.names == [f"n{i}" for i in rows] and made.flags.tolist() == [i % 2 for i in rows]
    assert sorted([*made.lines, *(f.line for f in made.findings if f.level == DROPPED)]) == list(range(10, 310))
    assert 0 < len(made.boxes) < 300


@pytest.mark.parametrize(("corners", "kept"), [
    ((10, 10, 10.5, 20), True), ((10, 10, 10.4, 20), False), ((0, 0, 320, 240), True), ((20, 10, 10, 30), False),
    ((319.7, 0, 400, 50), False), ((-50, -50, 0, 0), False), ((1e30, 0, 1e31, 9), False)])
def test_a_box_needs_half_a_pixel_of_the_picture(corners, kept):
    made = record(Box(corners, "crack", 7, DIFFICULT), Box((1, 2, 30, 40), "slag", 8))
    assert made.names == ["crack"] * kept + ["slag"]
    assert [(f.level, f.file, f.line) for f in made.findings] == [(DROPPED, "w.xml", 7)] * (not kept)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", range(4))
def test_a_number_that_is_not_finite_never_becomes_a_large_box(bad, at):
    corners = [10.0, 10.0, 50.0, 50.0]
    corners[at] = bad
    made = record(Box((1, 2, 30, 40), "slag", 6), Box(tuple(corners), "crack", 7))
    assert made.names == ["slag"] and made.boxes.tolist() == [[1, 2, 30, 40]]
    (finding,) = made.findings
    assert (finding.level, finding.kind, finding.where()) == (DROPPED, "box-not-finite", "w.xml:7")
    assert finding.text.startswith("object 2 (crack) [") and f"{bad:g}" in finding.text


def test_no_box_is_an_empty_array_of_the_same_shape():
    made = record()
    assert made.boxes.shape == (0, 4) and made.boxes.dtype == np.float32 and made.flags.dtype == np.uint8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_that_of_the_upright_picture(root, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.open(root / "w.jpg").save(root / "turned.jpg", exif=exif.tobytes())
    width, height = size_of(root / "turned.jpg")
    assert read_image(root / "turned.jpg").shape == (height, width, 3)
    assert (width < height) == (orientation > 4)


def test_the_size_needs_the_header_alone(root):
    Image.open(root / "w.jpg").save(root / "w.png")
    data = (root / "w.jpg").read_bytes()
    (root / "w.jpg").write_bytes(data[:1000] + bytes(len(data) - 1002) + data[-2:])
    (root / "w.png").write_bytes((root / "w.png").read_bytes()[:1000])
    assert size_of(root / "w.jpg") == size_of(root / "w.png") == (320, 240)
    (root / "w.jpg").write_bytes(data[:-2])
    with pytest.raises(PictureError, match="cut off"):  # the one damage that two bytes tell
        size_of(root / "w.jpg")


def test_links_that_lead_nowhere_are_files_and_are_named(root):
    (root / "gone.jpg").symlink_to(root / "was_here.jpg")
    (root / "self.jpg").symlink_to(root / "self.jpg")
    assert list_files(root) == ["gone.jpg", "self.jpg", "w.jpg"]
    before = stamp_files([root / "gone.jpg"])
    for name in ("gone.jpg", "self.jpg"):
        said = set()
        for reader in (size_of, read_image):
            with pytest.raises(PictureError, match=rf"{name}: no such picture; a broken link\?") as caught:
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
    "content": lambda d: rewritten(d / "a/1.txt"),
    "length": lambda d: (d / "a/1.txt").write_text("onee"),
    "date": lambda d: os.utime(d / "a/1.txt", (0, 0)),
    "added": lambda d: (d / "a/b/3.JPG").touch(),
    "removed": lambda d: (d / "a/1.txt").unlink(),
    "renamed": lambda d: (d / "a/1.txt").rename(d / "a/4.txt"),
    "swapped": lambda d: [(d / x).rename(d / y) for x, y in (("a/1.txt", "t"), ("a/2.xml", "a/1.txt"), ("t", "a/2.xml"))],
    "single": lambda d: rewritten(d / "s.csv"),
    "gone": lambda d: (d / "s.csv").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_stamp_sees_every_change_and_nothing_else(tmp_path, change):
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("a/1.txt", "a/2.xml", "a/b/0.jpg", "s.csv"):
        (tmp_path / name).write_text("one!")
        os.utime(tmp_path / name, (1e9, 1e9))
    watched = [tmp_path / "s.csv", tmp_path / "a"]
    before = stamp_files(watched)
    for other in ("other.txt", "a/README.md", "a/.hidden.txt"):
        (tmp_path / other).touch()
    assert stamp_files(watched) == before
    CHANGES[change](tmp_path)
    assert stamp_files(watched) != before


def test_an_error_is_one_line_and_travels_between_processes(root):
    error = PictureError("has two\nlines", root / "w.xml", "mend\n it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is PictureError and isinstance(copy, DataError) and copy.exit_code == 2
    assert str(copy) == str(error) == f"{root}/w.xml: has two lines; mend it"


@pytest.mark.parametrize(("flags", "use", "left"), [(DIFFICULT, False, DIFFICULT), (DIFFICULT, True, 0), (CROWD, True, CROWD)])
def test_difficult_objects_may_be_used_and_crowds_never(flags, use, left):
    made = record(Box((1, 2, 30, 40), "crack", 7, flags), difficult="use" if use else "ignore")
    assert made.flags.tolist() == [left] and made.names == ["crack"]


def test_one_based_corners_move_the_upper_left_alone():
    made = record(Box((1, 1, 320, 240), "crack", 7), Box((5, 6, 5, 6), "pore", 8), one_based=True)
    assert made.boxes.tolist() == [[0, 0, 320, 240], [4, 5, 5, 6]] and not made.findings  # a box of one pixel is one


@pytest.mark.parametrize(("width", "height", "kind"), [
    (320, 240, None), (0, 0, None), (320, 0, None), (240, 320, "size-transposed"), (640, 480, "size-differs"),
    (320, 241, "size-differs")])
def test_a_claimed_size_that_is_not_the_pictures_is_a_note_and_changes_no_box(width, height, kind):
    made = record(Size(width, height, 4), Box((1, 2, 310, 230), "crack", 7))
    assert made.boxes.tolist() == [[1, 2, 310, 230]]
    assert [(f.level, f.kind, f.where()) for f in made.findings] == [(NOTE, kind, "w.xml:4")] * bool(kind)
    assert all(f"{width}x{height}" in f.text and "320x240" in f.text for f in made.findings)


def test_boxes_of_the_same_corners_are_both_kept_and_told():
    made = record(Box((1, 2, 30, 40), "crack", 7), Box((1, 2, 30, 40), "crack", 8), Box((1, 2, 30, 40), "slag", 9))
    assert made.names == ["crack", "crack", "slag"]
    assert [(f.level, f.kind, f.line) for f in made.findings] == [(NOTE, "box-twice", 8), (NOTE, "box-two-classes", 9)]


def test_what_the_reader_found_comes_with_the_record_and_counts_as_no_object():
    found = Finding(NOTE, "odd", "w.xml", 3, "is odd")
    made = record(found, Box((9, 9, 9, 9), "crack", 7))
    assert made.findings[0] == found and made.findings[1].text.startswith("object 1 (crack)")


@pytest.mark.parametrize("wanted", ["Prüf/Bilder", "prüf/bilder", "./Prüf/Bilder/", "Prüf\\Bilder", "Pru\u0308f/Bilder"])
@pytest.mark.parametrize("name", ["Prüf/Bilder", "Pru\u0308f/Bilder"], ids=["composed", "apart"])
def test_a_folder_is_found_however_its_name_is_spelt_and_its_accents_are_composed(tmp_path, name, wanted):
    (tmp_path / name).mkdir(parents=True)
    Image.new("L", (9, 9)).save(tmp_path / name / "a.jpg")
    folder = Folder(tmp_path, wanted)
    assert folder.pictures == [f"{name}/a.jpg"] and folder.path(folder.pictures[0]).is_file()
    assert folder.has_folder(wanted.replace("\\", "/").strip("./")) == name
