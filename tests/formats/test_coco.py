"""COCO files as Roboflow, CVAT, Label Studio, labelme and people write them."""

import json

import pytest

from weldtrain.errors import DataError
from weldtrain.formats.record import CROWD, DIFFICULT, DROPPED, ERROR, NOTE

BBOX, BOX = [16, 12, 32, 24], (16.0, 12.0, 48.0, 36.0)


def coco(annotations, images=((1, "a.jpg"),), categories=((1, "crack"), (2, "porosity"))):
    """A COCO file with the fewest keys: `(image_id, category_id, bbox)` or whole annotations."""
    return json.dumps({
        "images": [{"id": i, "file_name": n} if isinstance(n, str) else n for i, n in images],
        "annotations": [a if isinstance(a, dict) else {"id": 100 + k, "image_id": a[0], "category_id": a[1], "bbox": a[2]}
                        for k, a in enumerate(annotations)],
        "categories": [{"id": i, "name": n} for i, n in categories]})


def one(tree, read, *annotations, **more):
    """What is made of one file for one picture."""
    return read(tree({"a.jpg": None, "annotations.json": coco(annotations, **more)}), "coco")


def said(reading, level=ERROR):
    return [f"{f.file}: {f.text}" for f in reading.findings if f.level == level]


@pytest.mark.parametrize("ids", [(3, 17, 91), (0, 1, 2), (91, 3, 17), ("a", "b", "0"), (1.0, 2.0, 30.0), (-1, 0, 10**30)])
def test_ids_are_names_for_classes_and_never_numbers(tree, read, ids):
    categories = list(zip(ids, ("weld-defects", "crack", "porosity")))
    reading = one(tree, read, (1, ids[2], BBOX), (1, ids[1], [0, 0, 9, 9]), categories=categories)
    assert reading.boxes == {"a.jpg": [("porosity", BOX), ("crack", (0, 0, 9, 9))]} and not reading.findings
    assert sorted(reading.reader.classes) == ["crack", "porosity", "weld-defects"]


def test_the_order_of_categories_in_the_file_changes_nothing(tree, read):
    categories = [(17, "slag"), (3, "crack"), (91, "no")]
    orders = [one(tree, read, categories=c).reader.classes for c in (categories, categories[::-1])]
    assert orders == [["crack", "slag", "no"]] * 2


@pytest.mark.parametrize("ids", [(0, 1), ("w 01", "w 02"), (7, 3)])
def test_ids_of_pictures_may_be_anything(tree, read, ids):
    text = coco([(ids[0], 1, BBOX)], images=[(ids[0], "a.jpg"), (ids[1], "b.jpg")])
    reading = read(tree({"a.jpg": None, "b.jpg": None, "x.json": text}), "coco")
    assert reading.boxes == {"a.jpg": [("crack", BOX)], "b.jpg": []} and not reading.findings


@pytest.mark.parametrize("more", [{}, {"bbox": []}, {"bbox": None}])
@pytest.mark.parametrize("polygons", [[[16, 12, 48, 12, 48, 36]], [[16, 12, 20, 12, 20, 20], [48, 36, 40, 30, 44, 30]],
                                      [16, 12, 48, 12, 48, 36]])
def test_polygons_stand_for_the_box_around_them(tree, read, polygons, more):
    assert one(tree, read, {"image_id": 1, "category_id": 1, "segmentation": polygons, **more}).boxes["a.jpg"] == [("crack", BOX)]


@pytest.mark.parametrize(("more", "flags"), [
    ({}, 0), ({"iscrowd": 0}, 0), ({"iscrowd": True}, CROWD),
    ({"iscrowd": 1, "segmentation": {"counts": "x", "size": [1, 1]}}, CROWD),
    ({"ignore": 1}, DIFFICULT), ({"ignore": 0}, 0), ({"iscrowd": 1, "ignore": 1}, CROWD | DIFFICULT)])
def test_crowds_and_what_is_to_be_ignored_keep_a_flag(tree, read, more, flags):
    reading = one(tree, read, {"id": 1, "image_id": 1, "category_id": 1, "bbox": BBOX, **more})
    assert reading.records["a.jpg"].flags.tolist() == [flags]


@pytest.mark.parametrize(("annotation", "text"), [
    ({"category_id": 5}, "annotation 9 has category_id 5, which is in no category"),
    ({"category_id": "1"}, "annotation 9 has category_id 1, which is in no category"),
    ({"category_id": None}, "annotation 9 has category_id None"), ({"category_id": [1]}, "annotation 9 has category_id [1]"),
    ({"image_id": 2}, "annotation 9 has image_id 2, which is in no image"), ({"image_id": {}}, "annotation 9 has image_id {}"),
    ({"bbox": [1, 2, 3]}, "annotation 9 (crack) has the bbox [1, 2, 3]"),
    ({"bbox": [1, 2, "3", 4]}, "annotation 9 (crack) has the bbox [1, 2, '3', 4]"),
    ({"bbox": [1, 2, True, 4]}, "annotation 9 (crack) has the bbox"),
    ({"bbox": [1, 2, None, 4]}, "annotation 9 (crack) has the bbox"),
    ({"bbox": "1 2 3 4"}, "annotation 9 (crack) has"), ({"bbox": [[1, 2, 3, 4]]}, "annotation 9 (crack) has the bbox"),
    ({"bbox": [1, 2, 10**400, 4]}, "annotation 9 (crack) has the bbox"),
    ({"bbox": None}, "annotation 9 (crack) has neither bbox nor polygon"),
    ({"bbox": None, "segmentation": {"counts": [1, 2], "size": [3, 4]}}, "annotation 9 (crack) has neither bbox nor polygon"),
    ({"bbox": None, "segmentation": [[1, 2, 3]]}, "annotation 9 (crack) has no bbox and a broken polygon")])
def test_what_an_annotation_lacks_is_an_error_with_its_id_and_costs_no_other(tree, read, annotation, text):
    reading = one(tree, read, (1, 1, BBOX), {"id": 9, "image_id": 1, "category_id": 1, "bbox": BBOX, **annotation})
    assert len(said(reading)) == 1 and said(reading)[0].startswith(f"annotations.json: {text}")
    assert reading.boxes["a.jpg"] == [("crack", BOX)]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("key", ["bbox", "segmentation"])
def test_what_is_not_finite_is_dropped_and_never_a_wide_box(tree, read, value, at, key):
    numbers = [*BBOX, 50, 40] if key == "segmentation" else list(BBOX)
    numbers[at] = "@"
    text = coco([{"id": 9, "image_id": 1, "category_id": 1, key: [numbers] if key == "segmentation" else numbers}, (1, 1, BBOX)])
    reading = read(tree({"a.jpg": None, "x.json": text.replace('"@"', value)}), "coco")
    assert [(f.level, f.kind) for f in reading.findings] == [(DROPPED, "box-not-finite")]
    assert "annotation 9 (crack)" in reading.findings[0].text and reading.boxes["a.jpg"] == [("crack", BOX)]


def test_shares_where_pixels_belong_are_refused_rather_than_dropped_one_by_one(tree, read):
    reading = one(tree, read, (1, 1, [0.2, 0.3, 0.5, 0.1]), (1, 1, [-0.1, 0.1, 1.3, 0.4]))
    assert said(reading) == ["annotations.json: all coordinates are shares of the picture"]
    assert not said(one(tree, read, (1, 1, [0, 0, 0, 0])))


def test_empty_outside_and_repeated_boxes_are_named_by_their_annotation(tree, read):
    reading = one(tree, read, (1, 1, BBOX), (1, 1, [9, 9, 0, 5]), (1, 1, [9, 9, -5, 5]), (1, 2, [90, 9, 5, 5]),
                  (1, 1, BBOX), (1, 2, BBOX), (1, 1, [60, 40, 100, 100]))
    assert [(f.kind, f.text.split(" (")[0]) for f in reading.findings] == [
        ("box-empty", "annotation 101"), ("box-empty", "annotation 102"), ("box-outside", "annotation 103"),
        ("box-twice", "annotation 104"), ("box-two-classes", "annotation 105")]
    assert reading.boxes["a.jpg"] == [("crack", BOX), ("crack", BOX), ("porosity", BOX), ("crack", (60, 40, 64, 48))]


def test_files_of_each_split_number_anew_and_take_the_pictures_of_their_own_folder(tree, read):
    files = {}
    for split, below, category in (("train", "", 1), ("valid", "images/", 2), ("test", "", 1)):
        files |= {f"{split}/{below}w1.jpg": None, f"{split}/{below}w2.jpg": None,
                  f"{split}/_annotations.coco.json": coco([(0, category, BBOX)], images=[(0, "w1.jpg"), (1, "w2.jpg")])}
    reading = read(tree(files), "coco")
    assert reading.splits == {"test/w1.jpg": "test", "test/w2.jpg": "test", "train/w1.jpg": "train", "train/w2.jpg": "train",
                              "valid/images/w1.jpg": "val", "valid/images/w2.jpg": "val"}
    assert {p: [n for n, _ in b] for p, b in reading.boxes.items() if b} == {
        "test/w1.jpg": ["crack"], "train/w1.jpg": ["crack"], "valid/images/w1.jpg": ["porosity"]} and not reading.findings


@pytest.mark.parametrize("names", [("train2017/w.jpg", "val2017/w.jpg"), ("w.jpg", "w.jpg"),
                                   ("images\\train2017\\w.jpg", "x/val2017/w.jpg")])
def test_files_in_one_folder_give_the_split_by_their_name(tree, read, names):
    root = tree({"train2017/w.jpg": None, "val2017/w.jpg": None,
                 "annotations/instances_train2017.json": coco([(1, 1, BBOX)], images=[(1, names[0])]),
                 "annotations/instances_val2017.json": coco([(1, 2, BBOX)], images=[(1, names[1])])})
    reading = read(root, "coco")
    assert reading.splits == {"train2017/w.jpg": "train", "val2017/w.jpg": "val"} and not said(reading)
    assert reading.boxes == {"train2017/w.jpg": [("crack", BOX)], "val2017/w.jpg": [("porosity", BOX)]}
    assert list(read(root, "coco", annotations="*_val2017.json").boxes) == ["val2017/w.jpg"]


def test_one_file_for_pictures_in_folders_of_splits_takes_those(tree, read):
    root = tree({"train/a.jpg": None, "val/b.jpg": None,
                 "all.json": coco([(1, 1, BBOX)], images=[(1, "train/a.jpg"), (2, "b.jpg")])})
    assert read(root, "coco").splits == {"train/a.jpg": "train", "val/b.jpg": "val"}


@pytest.mark.parametrize("name", ["images/a.jpg", "images\\a.jpg", "./images/A.JPG", "C:\\me\\data\\images\\a.jpg",
                                  "/home/me/images/a.jpg", "../images/a.jpg", "a.jpg"])
def test_file_names_may_carry_any_path(tree, read, name):
    reading = read(tree({"images/a.jpg": None, "x.json": coco([(1, 1, BBOX)], images=[(1, name)])}), "coco")
    assert reading.boxes == {"images/a.jpg": [("crack", BOX)]} and not said(reading)


def test_no_file_name_leads_outside_the_root(tree, read):
    outside = tree({"b.jpg": None}, "outside")
    names = ["../outside/b.jpg", str(outside / "b.jpg"), "file:///etc/passwd", "a.jpg"]
    reading = read(tree({"a.jpg": None, "x.json": coco([(1, 1, BBOX)], images=list(enumerate(names)))}), "coco")
    assert list(reading.records) == ["a.jpg"] and [f.kind for f in reading.findings] == ["picture-missing"] * 3
    assert said(reading)[0].startswith("x.json: image 0: '../outside/b.jpg' is nowhere below the root")


def test_two_images_of_one_id_and_two_entries_of_one_picture_are_errors(tree, read):
    files = {"a.jpg": None, "b.jpg": None}
    twice = read(tree({**files, "x.json": coco([], images=[(1, "a.jpg"), (1, "b.jpg")])}, "one"), "coco")
    assert said(twice) == ["x.json: two images have the id 1: a.jpg and b.jpg"]
    again = read(tree({**files, "x.json": coco([], images=[(1, "a.jpg"), (2, "a.jpg")])}, "two"), "coco")
    assert said(again) == ["x.json: image 2: a.jpg is listed in x.json already"]
    copy = coco([(1, 1, BBOX)])
    files = read(tree({"a.jpg": None, "x.json": copy, "y.json": copy}, "three"), "coco")
    assert said(files) == ["y.json: image 1: a.jpg is listed in x.json already"] and len(files.boxes["a.jpg"]) == 1


def test_categories_that_cannot_be_told_apart_are_errors(tree, read):
    reading = one(tree, read, (1, 1, BBOX), categories=[(1, "crack"), (1, "slag"), (2, " "), (None, "x"), (3, 4)])
    assert said(reading)[0] == "annotations.json: categories 'crack' and 'slag' have the id 1"
    assert [f.kind for f in reading.findings] == ["category-twice", *["category-broken"] * 3]


@pytest.mark.parametrize(("size", "kind"), [
    ({}, []), ({"width": 64, "height": 48}, []), ({"width": 0, "height": 0}, []), ({"width": None, "height": "48"}, []),
    ({"width": 48, "height": 64}, ["size-transposed"]), ({"width": 640, "height": 480}, ["size-differs"])])
def test_the_picture_itself_says_how_large_it_is(tree, read, size, kind):
    reading = one(tree, read, (1, 1, BBOX), images=[(1, {"id": 1, "file_name": "a.jpg", **size})])
    assert reading.records["a.jpg"].header[:2] == (64, 48) and reading.boxes["a.jpg"] == [("crack", BOX)]
    assert [f.kind for f in reading.findings if f.level == NOTE] == kind


@pytest.mark.parametrize(("data", "text"), [
    (b'{"images": [], "annotations": [], "categories": [', r"x\.json:1: is not JSON"),
    (b'{"images": [], "annotations": {}, "categories": []}', r"x\.json: has no list 'annotations'"),
    (b'["images", "annotations", "categories"]', r"x\.json: has no list 'images'"),
    (b'"images" "annotations" "categories"', r"x\.json:1: is not JSON"),
    (b'{"images": "annotations", "categories": ' + b"[" * 200_000, r"x\.json: is nested too deeply"),
    (b'{"images": [' + b"9" * 5000 + b'], "annotations": [], "categories": []}', r"x\.json: is not JSON that can be read"),
    ('{"images": [], "annotations": [], "categories": ["裂"]}'.encode("gbk"), r"x\.json: is not in UTF-8 encoding"),
    (b'{"images": [], "annotations": [], "categories": []}', r"x\.json: lists no picture that is there"),
    (coco([], images=[(1, "b.jpg")]).encode(), r"x\.json: lists no picture that is there; image 1: 'b\.jpg'"),
    (b'{"images": []}', "no COCO file"), (b"", "no COCO file")])
def test_a_file_that_is_no_coco_is_one_clear_error(tree, read, data, text):
    with pytest.raises(DataError, match=text) as caught:
        read(tree({"a.jpg": None, "x.json": data}), "coco")
    assert len(str(caught.value)) < 500


def test_a_file_of_more_bytes_than_can_be_parsed_is_refused(tree, read, monkeypatch):
    monkeypatch.setattr("weldtrain.formats.coco.MAX_JSON_BYTES", 100)
    with pytest.raises(DataError, match=r"annotations\.json: is larger than"):
        one(tree, read, (1, 1, BBOX))


@pytest.mark.parametrize("entry", [None, 1, "x", [], {}, {"id": 1}, {"file_name": "a.jpg"}, {"id": True, "file_name": "a.jpg"},
                                   {"id": 1, "file_name": 5}, {"id": float("nan"), "file_name": "a.jpg"}])
def test_broken_entries_are_errors_of_their_own(tree, read, entry):
    text = json.dumps({"images": [entry, {"id": 5, "file_name": "a.jpg"}], "annotations": [entry], "categories": [entry]})
    reading = read(tree({"a.jpg": None, "x.json": text}), "coco")
    assert [f.kind for f in reading.findings] == ["category-broken", "image-broken", "class-number"]


def test_a_byte_order_mark_and_other_json_do_not_matter(tree, read):
    root = tree({"a.jpg": None, "x.json": b"\xef\xbb\xbf" + coco([(1, 1, BBOX)]).encode(), "._x.json": b"\x00\x05\x16\x07",
                 "predictions.json": "[]", "__MACOSX/._x.json": "mac", "package.json": '{"name": "x"}', "._a.jpg": b"mac"})
    reading = read(root, "coco")
    assert reading.boxes == {"a.jpg": [("crack", BOX)]} and not reading.findings


def test_names_of_classes_and_pictures_are_text_of_any_language(tree, read):
    reading = read(tree({"焊缝 1.jpg": None, "x.json": coco([(1, 1, BBOX)], [(1, "焊缝 1.jpg")], [(1, " 裂纹 ")])}), "coco")
    assert reading.boxes == {"焊缝 1.jpg": [("裂纹", BOX)]} and not reading.findings


def test_pictures_that_no_file_lists_are_counted_and_not_used(tree, read):
    reading = read(tree({"a.jpg": None, "b.jpg": None, "c.jpg": None, "x.json": coco([(1, 1, BBOX)])}), "coco")
    assert list(reading.records) == ["a.jpg"] and said(reading, NOTE) == ["b.jpg: 2 pictures are not in x.json: not used"]
