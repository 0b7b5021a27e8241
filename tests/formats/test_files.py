"""The listing of a folder: every file once, nothing that is no file, and each name found in it alone."""

import os

import pytest

from weldtrain.errors import DataError
from weldtrain.formats.files import Folder, list_files


@pytest.fixture
def folder(tmp_path):
    """`folder("a/b.jpg", …, images="a")`: the listing of a folder with these files."""

    def make(*names, images=None):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return Folder(tmp_path, images)

    return make


def test_pipes_and_devices_are_no_data(folder, tmp_path):
    folder("a.jpg")
    os.mkfifo(tmp_path / "b.jpg")
    os.mkfifo(tmp_path / "data.yaml")
    os.symlink("/dev/zero", tmp_path / "c.jpg")
    assert list_files(tmp_path) == ["a.jpg"]


def test_a_folder_with_two_names_is_entered_once_by_its_own(folder, tmp_path):
    folder("v1/a.jpg", "v1/sub/b.jpg")
    os.symlink("v1", tmp_path / "latest")
    os.symlink("v1/sub", tmp_path / "a_link")
    os.symlink("..", tmp_path / "v1/sub/up")
    assert list_files(tmp_path) == ["v1/a.jpg", "v1/sub/b.jpg"]


def test_folders_that_link_each_other_end(folder, tmp_path):
    folder(*(f"{i}/x.jpg" for i in range(12)))
    for i in range(12):
        for j in range(12):
            os.symlink(f"../{j}", tmp_path / f"{i}/to{j}")
    assert list_files(tmp_path) == sorted(f"{i}/x.jpg" for i in range(12))


@pytest.mark.parametrize(("name", "found"), [
    ("w1", ["a/w1.jpg", "b/w1.jpg"]), ("a/w1", ["a/w1.jpg"]), ("./b/W1.JPG", ["b/w1.jpg"]), ("C:\\x\\b\\w1.jpg", ["b/w1.jpg"]),
    ("/mnt/old/b/w1.jpg", ["b/w1.jpg"]), ("c/w1", []), ("w2", ["a/w2.v1.png"]), ("w2.v1", ["a/w2.v1.png"]),
    ("w2.v1.jpg", ["a/w2.v1.png"]), ("../../etc/passwd", []), ("", []), ("..", [])])
def test_a_name_means_the_picture_that_shares_most_of_its_folders(folder, name, found):
    assert folder("a/w1.jpg", "b/w1.jpg", "a/w2.v1.png").find(name) == (found if name != "w2" else [])


def test_of_equal_names_the_nearer_is_meant(folder):
    listing = folder("train/images/w.jpg", "val/images/w.jpg")
    assert listing.find("w.jpg", "val") == ["val/images/w.jpg"] and len(listing.find("w.jpg")) == 2


def test_annotations_go_to_the_nearest_picture_and_never_to_two(folder):
    pictures = ["train/images/w.jpg", "val/images/w.jpg", "x.jpg"]
    listing = folder(*pictures)
    pairs, unclear = listing.pair(pictures, ["train/labels/w.txt", "val/labels/w.txt", "labels/x.txt"])
    assert pairs == {"train/images/w.jpg": "train/labels/w.txt", "val/images/w.jpg": "val/labels/w.txt", "x.jpg": "labels/x.txt"}
    assert unclear == []
    assert listing.pair(pictures, ["val/labels/w.txt"])[0] == {"val/images/w.jpg": "val/labels/w.txt"}
    assert listing.pair(["a.jpg", "a.png"], ["a.xml"])[1] == [("a.xml", ["a.jpg", "a.png"])]
    assert listing.pair(["a.jpg"], ["p/a.xml", "q/a.xml"])[1] == [("a.jpg", ["p/a.xml", "q/a.xml"])]


def test_folders_are_found_in_any_case_but_their_own_first(folder):
    listing = folder("Images/a.jpg", "images/b.jpg")
    assert listing.has_folder("images") == "images" and listing.has_folder("IMAGES") == "Images"
    with pytest.raises(DataError, match=r"nowhere: no such folder.*dataset\.images.*holds Images, images"):
        folder(images="nowhere")


def test_the_root_itself_may_be_named(folder):
    assert folder("a.jpg", images=".").pictures == ["a.jpg"]


def test_sound_pictures_are_told_from_names_alone(folder):
    listing = folder("a.JPG", "b.heic", "c.HEIC", "d.txt", ".e.jpg", "__MACOSX/f.jpg")
    assert listing.pictures == ["a.JPG"] and listing.strange == {".heic": 2}
