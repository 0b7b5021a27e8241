"""What a detector found is read back as it was written, whatever pictures are called and however many were empty."""

import csv
import json
import os
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from weldtrain.formats import written
from weldtrain.formats.files import folded
from weldtrain.formats.written import Found, coco_results, csv_table, names, write_voc, write_yolo, write_yolo_classes

CLASSES = ["crack", "Überlappung", "气孔", "no", "a, \"b\" & <c>"]
PICTURES = ["w1.jpg", "A/w1.jpg", "A/deep er/w.2.png", "B/Naht №7, ü.jpg", "裂纹/空.jpg", "classes/x.bmp"]
LOST = "bad\udcff\x01.jpg"


def found(picture, n=3, size=(64, 48), seed=0):
    rng = np.random.default_rng([seed, n, *map(ord, picture)])
    width, height = size
    corners = rng.uniform(0, 0.8, (n, 2)) * size
    boxes = np.concatenate([corners, corners + rng.uniform(0.05, 0.2, (n, 2)) * size], 1)
    return Found(picture, width, height, boxes, rng.integers(1, len(CLASSES) + 1, n), rng.uniform(0.3, 1, n).astype(np.float32))


@pytest.fixture
def findings():
    """Of each picture some, of one none."""
    return [found(p, 0 if "空" in p else 3) for p in PICTURES]


def pictures(tree):
    return tree(dict.fromkeys(PICTURES))


def same(seen, findings, tolerance):
    """Whether a reader sees the findings, to some px."""
    assert not [f for f in seen.findings if f.kind not in ("recognised", "picture-unlisted")]
    assert set(seen.records) == {f.picture for f in findings}
    for f in findings:
        record = seen.records[f.picture]
        assert record.names == [CLASSES[k - 1] for k in f.labels]
        np.testing.assert_allclose(record.boxes, f.boxes.reshape(-1, 4), atol=tolerance, rtol=0)


def test_voc_is_read_back(tree, read, findings):
    root = pictures(tree)
    outputs = names(PICTURES, ".xml")
    for f in findings:
        write_voc(root, outputs[f.picture], f, CLASSES)
    for fmt in ("voc", "auto"):
        same(read(root, fmt), findings, 0.01)
    scores = etree.parse(root / outputs[PICTURES[0]]).findall("object/score")
    np.testing.assert_allclose([float(s.text) for s in scores], findings[0].scores, atol=1e-5)


def test_yolo_is_read_back(tree, read, findings):
    root = pictures(tree)
    outputs = names(PICTURES, ".txt", (written.CLASSES,))
    for f in findings:
        write_yolo(root, outputs[f.picture], f)
    write_yolo_classes(root, outputs.values(), CLASSES)
    for fmt in ("yolo", "auto"):
        same(read(root, fmt), findings, 0.05)
    for name in outputs.values():  # where labelImg looks
        assert (root / name).with_name("classes.txt").read_text("utf-8").splitlines() == CLASSES
    assert (root / outputs["裂纹/空.jpg"]).read_bytes() == b""


def test_csv_is_read_back(tree, read, findings):
    root = pictures(tree)
    with csv_table(root / "predictions.csv", CLASSES) as write:
        for f in findings:
            write(f)
    for fmt in ("csv", "auto"):
        same(read(root, fmt), findings, 0.01)
    with open(root / "predictions.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(max(len(f.labels), 1) for f in findings)
    assert all(row["width_px"] == "64" and row["height_px"] == "48" for row in rows)
    (empty,) = [row for row in rows if row["image"] == "裂纹/空.jpg"]
    assert empty["class"] == empty["score"] == empty["x1"] == ""


def test_small_defects_of_a_long_strip_keep_their_place(tmp_path):
    boxes = np.array([[11989.1234, 3.3, 11998.9876, 7.77], [0.004, 1990.5, 3.0, 2000]])
    f = Found("strip.png", 12000, 2000, boxes, np.array([1, 2]), np.array([0.5, 0.6]))
    write_voc(tmp_path, "strip.xml", f, CLASSES)
    written_corners = [float(e.text) for e in etree.parse(tmp_path / "strip.xml").findall("object/bndbox/*")]
    np.testing.assert_allclose(np.reshape(written_corners, (2, 4)), boxes, atol=0.01, rtol=0)
    write_yolo(tmp_path, "strip.txt", f)
    cx, cy, w, h = (np.loadtxt(tmp_path / "strip.txt")[:, 1:] * (12000, 2000, 12000, 2000)).T
    np.testing.assert_allclose(np.c_[cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], boxes, atol=0.05, rtol=0)


def results(folder, findings, info=None):
    with coco_results(folder, CLASSES, info or {"score": 0.5, "checkpoint": "best.pt"}) as write:
        for f in findings:
            write(f)
    return (json.loads((folder / n).read_text("utf-8")) for n in (written.RESULTS, written.PICTURES))


def test_coco_results_open_with_the_evaluator(tmp_path, findings):
    from faster_coco_eval import COCO

    entries, described = results(tmp_path, findings)
    assert described["info"] == {"score": 0.5, "checkpoint": "best.pt"}
    assert [(p["id"], p["file_name"]) for p in described["images"]] == list(enumerate(PICTURES, 1))
    assert [c["name"] for c in described["categories"]] == CLASSES
    opened = COCO(str(tmp_path / written.PICTURES)).loadRes(str(tmp_path / written.RESULTS))
    for number, f in enumerate(findings, 1):
        loaded = opened.loadAnns(opened.getAnnIds(imgIds=[number]))
        assert [a["category_id"] for a in loaded] == f.labels.tolist()
        assert {e["file_name"] for e in entries if e["image_id"] == number} <= {f.picture}
        boxes = np.array([a["bbox"] for a in loaded]).reshape(-1, 4)
        np.testing.assert_allclose(np.c_[boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], f.boxes, atol=0.01)


def test_no_picture_and_no_finding_are_json_too(tmp_path):
    entries, described = results(tmp_path / "none", [])
    assert entries == [] and described["images"] == []
    entries, described = results(tmp_path / "empty", [found("a.jpg", 0)])
    assert entries == [] and len(described["images"]) == 1


def test_results_beside_the_pictures_are_no_data_set_of_perfect_welds(tree, read, findings):
    root = tree({**dict.fromkeys(PICTURES), "w1.xml": "<annotation><object/></annotation>"})
    list(results(root, findings))
    assert "coco" not in read(root, "auto", missing="negative").findings[0].text


def test_files_for_all_appear_whole_or_not_at_all(tmp_path, findings):
    kept = list(results(tmp_path, findings[:1]))
    for opened in (lambda: coco_results(tmp_path, CLASSES, {}), lambda: csv_table(tmp_path / "predictions.csv", CLASSES)):
        with pytest.raises(KeyboardInterrupt), opened() as write:
            write(findings[1])
            raise KeyboardInterrupt
    assert sorted(os.listdir(tmp_path)) == [written.PICTURES, written.RESULTS]
    assert kept == [json.loads((tmp_path / n).read_text("utf-8")) for n in (written.RESULTS, written.PICTURES)]


def test_nothing_is_at_its_place_before_the_end(tmp_path, findings):
    with csv_table(tmp_path / "p.csv", CLASSES) as write, coco_results(tmp_path, CLASSES, {}):
        write(findings[0])
        assert not [n for n in os.listdir(tmp_path) if not n.startswith(".")]


def test_a_failure_leaves_no_empty_label_which_would_mean_no_defect(tmp_path, findings):
    broken = findings[0]._replace(labels=np.array([1, 2]), boxes=np.array([[1, 2, 3, 4], ["x"] * 4], object))
    with pytest.raises(ValueError):
        write_yolo(tmp_path, "a.txt", broken)
    assert not os.listdir(tmp_path)


def test_names_that_are_no_text_are_written_visibly(tmp_path):
    f, classes = found(LOST), ["a\x02", "\udcfe", *CLASSES[2:]]
    with csv_table(tmp_path / "p.csv", classes) as write:
        write(f)
    with open(tmp_path / "p.csv", encoding="utf-8", newline="") as file:
        assert {row["image"] for row in csv.DictReader(file)} == {r"bad\udcff\x01.jpg"}
    _, described = results(tmp_path, [f], {"checkpoint": LOST})
    assert described["images"][0]["file_name"] == "bad\\udcff\x01.jpg" and "\\udcff" in described["info"]["checkpoint"]
    write_voc(tmp_path, "a.xml", f, classes)
    assert etree.parse(tmp_path / "a.xml").findtext("filename") == r"bad\udcff\x01.jpg"
    write_yolo_classes(tmp_path, ["a.txt"], classes)
    assert (tmp_path / written.CLASSES).read_text("utf-8").splitlines()[:2] == [r"a\x02", r"\udcfe"]


@pytest.mark.skipif(os.name == "nt" or os.uname().sysname == "Darwin", reason="this system has no such file names")
def test_outputs_of_pictures_with_such_names_have_them_too(tmp_path):
    name = names(["d/\udcff.jpg"], ".xml")["d/\udcff.jpg"]
    write_voc(tmp_path, name, found("d/\udcff.jpg"), CLASSES)
    assert os.listdir(os.fsencode(tmp_path / "d")) == [b"\xff.xml"]


def test_the_longest_name_has_room_for_its_draft(tmp_path):
    write_yolo(tmp_path, f"{'x' * 251}.txt", found("x.jpg"))


@pytest.mark.parametrize("pictures, expected", [
    (["a/w.1.jpg", "b/w.1.jpg", ".hidden", "plain"], ["a/w.1.xml", "b/w.1.xml", ".hidden.xml", "plain.xml"]),
    (["w1.jpg", "w1.png"], ["w1.jpg.xml", "w1.png.xml"]),
    (["w1.jpg", "W1.PNG"], ["w1.jpg.xml", "W1.PNG.xml"]),
    (["w1.jpg", "w1.png", "w1.png.jpg"], ["w1.jpg.xml", "w1.png.2.xml", "w1.png.xml"]),
    (["w.jpg", "w.JPG"], ["w.jpg.2.xml", "w.JPG.xml"]),
    (["classes.jpg", "a/Classes.png"], ["classes.jpg.xml", "a/Classes.png.xml"]),
])
def test_outputs_keep_the_stem_where_that_is_the_pictures_alone(pictures, expected):
    assert names(pictures, ".xml", ["classes.xml"]) == dict(zip(pictures, expected))


@settings(max_examples=300, deadline=None)
@given(st.sets(
    st.lists(st.sampled_from(["w1", "W1", ".jpg", ".png", ".JPG", ".2", "a/", "Ü", "U\u0308", "~"]), min_size=1, max_size=5)
    .map("".join).filter(lambda p: not p.endswith("/")), max_size=12))
def test_no_two_outputs_are_one_file(pictures):
    named = names(pictures, ".png", ["w1.png"])
    assert set(named) == pictures
    assert len({folded(n) for n in named.values()}) == len(pictures)
    for picture, name in named.items():
        assert name.rpartition("/")[0] == picture.rpartition("/")[0] and name.endswith(".png")
        assert folded(name.rpartition("/")[2]) != "w1.png"
    assert named == names(sorted(pictures, reverse=True), ".png", ["w1.png"])


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec=None), max_size=20), st.text(string.printable, max_size=10))
def test_any_text_can_be_written(picture, name):
    assert json.loads(written._json({picture: name})) is not None
    shown = written._shown(picture + name)
    shown.encode()
    etree.fromstring(etree.tostring(_element(shown), encoding="unicode").encode())


def _element(text):
    element = etree.Element("a")
    element.text = text
    return element
