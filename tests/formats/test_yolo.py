"""YOLO folders as Roboflow, Ultralytics, CVAT, labelImg and people write them."""

import io

import pytest
from PIL import Image

from weldtrain.errors import DataError
from weldtrain.formats.record import DROPPED, ERROR, NOTE

ROW = "0 0.5 0.5 0.5 0.5\n"
BOX = (16.0, 12.0, 48.0, 36.0)  # of ROW, in a picture of 64x48
NAMES = "names: [crack, porosity]\n"


def kinds(reading, level=None):
    return [f.kind for f in reading.findings if level in (None, f.level)]


def problems(reading):
    """Every finding but notes, as `file:line: text; fix`."""
    return [f"{f.where()}: {f.text}; {f.fix}" for f in reading.findings if f.level != NOTE]


def one(tree, read, row, names=NAMES, **settings):
    """What is made of one label file."""
    return read(tree({"a.jpg": None, "a.txt": row, "data.yaml": names}), "yolo", **settings)


LAYOUTS = {
    "roboflow": ("train: ../train/images\nval: ../valid/images\n", "train/images", "valid/images",
                 "train/labels", "valid/labels"),
    "ultralytics": ("path: .\ntrain: images/train\nval: images/val\n", "images/train", "images/val",
                    "labels/train", "labels/val"),
    "path is a name": ("path: ../datasets/welds\ntrain: images/train\nval: images/val\n", "images/train", "images/val",
                       "labels/train", "labels/val"),
    "path of another machine": ("path: /home/me/welds\ntrain: images/train\nval: images/val\n", "images/train", "images/val",
                                "labels/train", "labels/val"),
    "path below the root": ("path: inner\ntrain: images/train\nval: images/val\n", "inner/images/train", "inner/images/val",
                            "inner/labels/train", "inner/labels/val"),
    "absolute": ("train: /home/me/welds/train/images\nval: /home/me/welds/val/images\n", "train/images", "val/images",
                 "train/labels", "val/labels"),
    "windows": ("train: C:\\me\\welds\\train\\images\nval: D:/me/val/images\n", "train/images", "val/images",
                "train/labels", "val/labels"),
    "valid for val": ("train: train/images\nval: val/images\n", "train/images", "valid/images", "train/labels", "valid/labels"),
    "upper case": ("train: Train/Images\nval: VAL/images/\n", "train/images", "val/images", "train/labels", "val/labels"),
    "lists of folders": ("train: [images/a, images/b]\nval: [images/val]\n", "images/b", "images/val", "labels/b", "labels/val"),
    "beside the pictures": ("train: train\nval: val\n", "train", "val", "train", "val"),
    "beside, below images": ("train: ../train/images\nval: ../val/images\n", "train/images", "val/images",
                             "train/images", "val/images"),
    "another folder": ("train: pictures/train\nval: pictures/val\n", "pictures/train", "pictures/val", "rows/train", "rows/val"),
    "blanks and CJK": ("train: 焊缝 一/train\nval: 焊缝 一/val\n", "焊缝 一/train", "焊缝 一/val",
                       "焊缝 一/train", "焊缝 一/val"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_folders_of_data_yaml_are_found_in_every_dialect_and_equal_names_keep_their_labels(tree, read, layout):
    text, train, val, train_labels, val_labels = LAYOUTS[layout]
    root = tree({"data.yaml": text + NAMES, f"{train}/a.jpg": None, f"{val}/a.jpg": None, f"{val}/b.jpg": None,
                 f"{train_labels}/a.txt": ROW, f"{val_labels}/a.txt": "1 0.5 0.5 0.5 0.5\n", f"{val_labels}/b.txt": "",
                 **({"images/a/c.jpg": None, "labels/a/c.txt": ""} if layout == "lists of folders" else {})})
    reading = read(root, "yolo")
    reading.splits.pop("images/a/c.jpg", None)
    reading.boxes.pop("images/a/c.jpg", None)
    assert reading.splits == {f"{train}/a.jpg": "train", f"{val}/a.jpg": "val", f"{val}/b.jpg": "val"}
    assert reading.boxes == {f"{train}/a.jpg": [("crack", BOX)], f"{val}/a.jpg": [("porosity", BOX)], f"{val}/b.jpg": []}
    assert not problems(reading)
    assert kinds(reading).count("split-renamed") == {"valid for val": 1, "upper case": 2}.get(layout, 0)


@pytest.mark.parametrize("line", ["./images/a.jpg", "images/a.jpg", "a.jpg", "/home/me/welds/images/a.jpg", "..\\images\\a.jpg",
                                  "data/images/A.JPG"])
def test_lists_name_pictures_by_any_path_and_only_below_the_root(tree, read, line):
    tree({"b.jpg": None}, "outside")
    root = tree({"data.yaml": f"train: train.txt\nval: lists/v.txt\n{NAMES}", "images/a.jpg": None, "images/c.jpg": None,
                 "train.txt": f"{line}\r\n\r\n", "lists/v.txt": "images/c.jpg\n../outside/b.jpg\n",
                 "labels/a.txt": ROW, "labels/c.txt": ""})
    reading = read(root, "yolo")
    assert reading.splits == {"images/a.jpg": "train", "images/c.jpg": "val"}
    assert [p for p in problems(reading) if "lists/v.txt:2: no picture for '../outside/b.jpg'" in p] == problems(reading) != []


@pytest.mark.parametrize("place", ["../outside", "{out}", "images/../../outside"])
def test_a_folder_outside_the_root_is_never_read(tree, read, tmp_path, place):
    tree({"x.jpg": None, "x.txt": ROW}, "outside")
    root = tree({"data.yaml": f"train: images\nval: {place.format(out=tmp_path / 'outside')}\n{NAMES}",
                 "images/a.jpg": None, "labels/a.txt": ROW})
    reading = read(root, "yolo")
    assert list(reading.records) == ["images/a.jpg"] and "data.yaml: val: " in problems(reading)[0]
    assert kinds(reading, ERROR) == ["split-missing"]


def test_a_test_folder_that_an_export_names_but_lacks_stops_no_training(tree, read):
    reading = read(tree({"data.yaml": f"train: ../train\nval: ../val\ntest: ../test\n{NAMES}",
                         "train/a.jpg": None, "train/a.txt": ROW, "val/b.jpg": None, "val/b.txt": ""}), "yolo")
    assert sorted(reading.splits.values()) == ["train", "val"] and kinds(reading) == ["split-missing"] == kinds(reading, DROPPED)


def test_a_folder_without_a_picture_is_no_split(tree, read):
    reading = read(tree({"data.yaml": f"train: train\nval: val\n{NAMES}", "train/a.jpg": None, "train/a.txt": ROW,
                         "val/b.txt": ROW}), "yolo")
    assert problems(reading)[0].startswith("data.yaml: val: val names no picture") and kinds(reading, ERROR) == ["split-missing"]


def test_the_root_itself_may_be_a_split_and_null_is_none(tree, read):
    reading = read(tree({"data.yaml": f"train: .\nval: null\ntest:\n{NAMES}", "a.jpg": None, "a.txt": ROW}), "yolo")
    assert reading.splits == {"a.jpg": "train"} and not reading.findings


def test_a_picture_in_two_splits_is_an_error(tree, read):
    reading = read(tree({"data.yaml": f"train: images\nval: images\n{NAMES}", "images/a.jpg": None, "labels/a.txt": ROW}), "yolo")
    assert problems(reading)[0].startswith("data.yaml: images/a.jpg is in train and in val")


@pytest.mark.parametrize("names", ["names: [no, '1', 裂纹 内, 1.50]", "names: {0: no, 1: 1, 2: 裂纹 内, 3: 1.50}",
                                   "names:\n  3: 1.50\n  2: 裂纹 内\n  1: '1'\n  0: no\nnc: 4",
                                   "nc: 4\r\nnames:\r\n- no\r\n- 1\r\n- 裂纹 内\r\n- 1.50\r\n"])
def test_class_names_are_text_as_they_are_written(tree, read, names):
    rows = "".join(f"{k} 0.5 0.5 0.5 0.5\n" for k in range(4))
    reading = one(tree, read, rows, names)
    assert reading.records["a.jpg"].names == reading.reader.classes == ["no", "1", "裂纹 内", "1.50"]


@pytest.mark.parametrize("encode", [lambda t: t.replace("\n", "\r\n").encode(), lambda t: b"\xef\xbb\xbf" + t.encode(),
                                    lambda t: t.encode("utf-16"), lambda t: t.replace("\n", "\r").encode()],
                         ids=["crlf", "bom", "utf-16", "cr"])
def test_labels_yaml_and_classes_are_read_in_what_editors_save(tree, read, encode):
    rows = encode(ROW + "\n1\t0.5  0.5 0.5 0.5 \n")
    for described in ({"data.yaml": encode(f"{NAMES}nc: 2\n")}, {"classes.txt": encode("crack\nporosity\n\n")}):
        reading = read(tree({"a.jpg": None, "a.txt": rows, **described}, next(iter(described))), "yolo")
        assert reading.boxes == {"a.jpg": [("crack", BOX), ("porosity", BOX)]}


@pytest.mark.parametrize("file", ["classes.txt", "labels/classes.txt", "obj.names", "predefined_classes.txt"])
def test_names_may_come_from_labelimg_darknet_or_cvat(tree, read, file):
    reading = read(tree({"a.jpg": None, "labels/a.txt": ROW, file: "crack\nporosity\n"}), "yolo")
    assert reading.boxes == {"a.jpg": [("crack", BOX)]} and not reading.findings


def test_dataset_classes_stand_for_names_that_the_folder_lacks(tree, read):
    root = tree({"a.jpg": None, "a.txt": ROW})
    with pytest.raises(DataError, match=r"no names for the class numbers.*dataset\.classes"):
        read(root, "yolo")
    assert read(root, "yolo", classes=["slag"]).boxes == {"a.jpg": [("slag", BOX)]}


def test_the_list_beside_the_labels_says_what_a_number_means_whatever_order_the_user_prefers(tree, read):
    root = tree({"a.jpg": None, "a.txt": ROW, "classes.txt": "crack\nporosity\n"})
    assert read(root, "yolo", classes=["porosity", "crack"]).boxes == {"a.jpg": [("crack", BOX)]}


def test_two_lists_of_classes_that_differ_are_refused(tree, read):
    files = {"t/a.jpg": None, "t/a.txt": ROW, "v/a.jpg": None, "v/a.txt": ROW, "t/classes.txt": "crack\nslag\n"}
    assert len(read(tree({**files, "v/classes.txt": "crack\r\nslag"}, "same"), "yolo").boxes) == 2
    with pytest.raises(DataError, match=r"t/classes\.txt and v/classes\.txt name the classes differently"):
        read(tree({**files, "v/classes.txt": "slag\ncrack\n"}, "differ"), "yolo")


def test_of_two_folders_of_labels_the_one_that_is_named_is_read(tree, read):
    root = tree({"a.jpg": None, "old/a.txt": ROW, "New/a.txt": "1 .5 .5 .5 .5", "data.yaml": NAMES})
    assert kinds(read(root, "yolo"), ERROR) == ["pair-unclear"]
    assert read(root, "yolo", annotations="new").boxes == {"a.jpg": [("porosity", BOX)]}


@pytest.mark.parametrize(("names", "text"), [
    (NAMES + "nc: 3", r"data\.yaml: nc is 3, but there are 2 names"),
    ("names: [crack, crack]", r"data\.yaml: class 'crack' stands twice"),
    ("names: {1: crack, 2: slag}", r"data\.yaml: names are numbered 1, 2"),
    ("names: {a: crack}", r"data\.yaml: the keys of names are no numbers"),
    ("names: [crack, ' ']", r"data\.yaml: no names"), ("names: [[a], b]", r"data\.yaml: no names"),
    ("names: [", r"data\.yaml: is not readable YAML")])
def test_names_that_cannot_be_told_apart_are_refused(tree, read, names, text):
    with pytest.raises(DataError, match=text):
        one(tree, read, ROW, names)


def test_two_yaml_files_that_describe_one_folder_ask_which(tree, read):
    root = tree({"a.jpg": None, "a.txt": ROW, "one.yaml": "names: [crack]", "two.yml": "names: [slag]", "other.yaml": "x: 1"})
    with pytest.raises(DataError, match=r"one\.yaml and two\.yml; say which: dataset\.annotations="):
        read(root, "yolo")
    assert read(root, "yolo", annotations="two.yml").reader.classes == ["slag"]


@pytest.mark.parametrize(("row", "text"), [
    ("2 .5 .5 .2 .2", "class 2 is not in 0-1 (crack, porosity); numbers count from 0: do yours count from 1?"),
    ("7 .5 .5 .2 .2", "class 7 is not in 0-1 (crack, porosity);"), ("-1 .5 .5 .2 .2", "class -1 is not in 0-1"),
    ("0.5 .5 .5 .2 .2", "class 0.5 is not in 0-1"), ("nan .5 .5 .2 .2", "class nan is not in 0-1"),
    ("0 .5 .5 .2 .2 .9", "has six columns: a confidence"), ("0 .5 .5 .2", "has 4 columns"), ("0", "has 1 columns"),
    ("0 .1 .1 .9 .1 .9 .5 .3", "has 8 columns"), ("crack .5 .5 .2 .2", "holds 'crack'"), ("0 .5 .5 .2 1_0", "holds '1_0'"),
    ("0,.5,.5,.2,.2", "holds '0,.5,.5,.2,.2'"), ("0 32 24 10 10", "holds 32: pixels?"), ("0 -5 .5 .1 .1", "holds -5: pixels?")])
def test_a_row_that_means_nothing_names_file_and_line_and_costs_no_other_row(tree, read, row, text):
    reading = one(tree, read, f"{ROW}\n{row}\n1 0.5 0.5 0.5 0.5\n")
    (said,) = problems(reading)
    assert said.startswith(f"a.txt:3: {text}") and kinds(reading, ERROR)
    assert reading.records["a.jpg"].names == ["crack", "porosity"]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN", "1e999"])
@pytest.mark.parametrize("at", range(1, 5))
def test_a_row_that_is_not_finite_is_dropped_and_never_a_wide_box(tree, read, value, at):
    row = ROW.split()
    row[at] = value
    reading = one(tree, read, " ".join(row) + f"\n0 0.1 0.1 {value} 0.1 0.9 0.5 0.1 0.5\n{ROW}")
    assert [p[:8] for p in problems(reading)] == ["a.txt:1:", "a.txt:2:"] and set(kinds(reading)) == {"box-not-finite"}
    assert reading.boxes["a.jpg"] == [("crack", BOX)] and kinds(reading, DROPPED)


@pytest.mark.parametrize(("row", "box"), [
    ("1.0 .5 .5 .5 .5", BOX), ("1 5e-1 .5 .5 +.5", BOX), ("1 0 0 0.5 0.5", (0, 0, 16, 12)),
    ("1 0.9 0.9 0.4 0.4", (44.8, 33.6, 64, 48)),
    ("1 0.1 0.1 0.9 0.1 0.9 0.5 0.1 0.5", (6.4, 4.8, 57.6, 24)), ("1 0.5 0.25 0.75 0.75 0.25 0.5", (16, 12, 48, 36))])
def test_rows_become_boxes_in_pixels_and_polygons_the_box_around_them(tree, read, row, box):
    reading = one(tree, read, row)
    assert reading.boxes["a.jpg"] == [("porosity", pytest.approx(box, abs=1e-3))] and not problems(reading)


def test_keypoints_follow_the_box_where_data_yaml_says_how_many(tree, read):
    described = f"{NAMES}kpt_shape: [2, 3]\n"
    reading = one(tree, read, "0 .5 .5 .5 .5 .1 .1 2 .9 .9 0\n1 .5 .5 .5 .5\n", described)
    assert reading.boxes["a.jpg"] == [("crack", BOX)] and problems(reading)[0].startswith("a.txt:2: has 5 columns")


def test_boxes_that_enclose_nothing_are_dropped_with_their_line(tree, read):
    reading = one(tree, read, f"0 .5 .5 0 .5\n0 .5 .5 -.5 .5\n0 1.9 .5 .1 .5\n{ROW}{ROW}")
    assert len(reading.boxes["a.jpg"]) == 2
    assert [(f.kind, f.line) for f in reading.findings] == [
        ("box-empty", 1), ("box-empty", 2), ("box-outside", 3), ("box-twice", 5)]


def test_an_empty_label_is_a_perfect_weld_and_a_missing_one_is_asked_about(tree, read):
    root = tree({"a.jpg": None, "a.txt": ROW, "b.jpg": None, "b.txt": " \n", "c.jpg": None, "data.yaml": NAMES})
    assert problems(read(root, "yolo"))[0].startswith("c.jpg: no annotation in labels/") and kinds(read(root, "yolo"), ERROR)
    as_negative, skipped = read(root, "yolo", missing="negative"), read(root, "yolo", missing="skip")
    assert as_negative.boxes == {"a.jpg": [("crack", BOX)], "b.jpg": [], "c.jpg": []}
    assert kinds(as_negative, NOTE) == ["annotation-missing"]
    assert list(skipped.records) == ["a.jpg", "b.jpg"] and kinds(skipped, DROPPED) == ["annotation-missing"]


def test_labels_for_none_of_the_pictures_stop_the_run_whatever_the_option(tree, read):
    root = tree({"a.jpg": None, "labels/b.txt": ROW, "data.yaml": NAMES})
    with pytest.raises(DataError, match=r"no annotation for any of 1 pictures; for a\.jpg .*labels/b\.txt"):
        read(root, "yolo", missing="negative")


def test_a_picture_takes_no_label_of_its_namesake_in_another_folder(tree, read):
    root = tree({"train/images/a.jpg": None, "val/images/a.jpg": None, "val/labels/a.txt": ROW, "data.yaml": NAMES})
    reading = read(root, "yolo", missing="negative")
    assert reading.boxes == {"train/images/a.jpg": [], "val/images/a.jpg": [("crack", BOX)]}


def test_a_label_that_two_pictures_claim_is_an_error(tree, read):
    reading = read(tree({"a.jpg": None, "a.png": None, "a.txt": ROW, "data.yaml": NAMES}), "yolo")
    assert problems(reading)[0].startswith("a.txt: may belong to a.jpg or a.png")


def test_text_beside_labels_is_no_label_and_odd_names_are_found(tree, read):
    names = ["焊 缝.jpg", "w.v1.003.png", "a_jpg.rf.12ab.jpg", "B.JPG"]
    root = tree({**{f"images/{n}": None for n in names}, **{f"labels/{n.rpartition('.')[0]}.txt": ROW for n in names[:3]},
                 "labels/b.TXT": ROW, "README.txt": "hello", "labels/README.dataset.txt": "x", "labels/classes.txt": "crack\n",
                 "labels/._B.txt": "mac", "__MACOSX/labels/B.txt": "mac", "data.yaml": "names: [crack]"})
    reading = read(root, "yolo")
    assert reading.boxes == {f"images/{n}": [("crack", BOX)] for n in names} and not reading.findings


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_shares_are_of_the_upright_picture(tree, read, orientation):
    exif, data = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.new("RGB", (64, 48)).save(data, "jpeg", exif=exif.tobytes())
    reading = read(tree({"a.jpg": data.getvalue(), "a.txt": "0 .25 .25 .5 .5", "data.yaml": NAMES}), "yolo")
    assert reading.boxes["a.jpg"] == [("crack", (0, 0, 24, 32) if orientation > 4 else (0, 0, 32, 24))]


def test_a_label_in_another_encoding_is_named_and_costs_no_other_picture(tree, read):
    reading = read(tree({"a.jpg": None, "a.txt": "0 裂".encode("gbk"), "b.jpg": None, "b.txt": ROW, "data.yaml": NAMES}), "yolo")
    assert kinds(reading, ERROR) == ["label-unreadable"] and problems(reading)[0].startswith("a.txt: is not in utf-8")
    assert reading.boxes["b.jpg"] == [("crack", BOX)]


@pytest.mark.parametrize("bomb", ["names: [a]\ntrain: [*i9]\n", "names: *i9\n", "names: [a]\npath: *i9\ntrain: x\n",
                                  f"names: [a]\ntrain: {'/'.join(['train'] * 40)}\n"])
def test_a_yaml_that_grows_without_end_is_refused_at_once(tree, read, bomb):
    layers = "i0: &i0 lol\n" + "".join(f"i{k}: &i{k} [{', '.join([f'*i{k - 1}'] * 10)}]\n" for k in range(1, 10))
    root = tree({"a.jpg": None, "a.txt": ROW, "data.yaml": layers + bomb})
    try:
        assert problems(read(root, "yolo"))
    except DataError as e:
        assert len(str(e)) < 1000
