"""All formats alike: they are recognised, say what they lack, find the same files, and give the same boxes and splits."""

import json
import os
import re

import numpy as np
import pytest

from weldtrain.config import DatasetConfig, SplitConfig
from weldtrain.data.indexing import open_index
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder
from weldtrain.formats.record import ERROR, NOTE
from weldtrain.formats.splits import make_splits, settle_splits

BOXES = {"w1": [("crack", (16.0, 12.0, 48.0, 36.0)), ("pore 1", (1.25, 2.5, 9.75, 8.125))], "w2": [],
         "w3": [("pore 1", (0.0, 0.0, 64.0, 48.0))]}
SPLITS = {"w1": "train", "w2": "train", "w3": "val"}


def xml(*boxes):
    return "<annotation>" + "".join(
        f"<object><name>{name}</name><bndbox>" + "".join(f"<{t}>{v}</{t}>" for t, v in zip(("xmin", "ymin", "xmax", "ymax"), b))
        + "</bndbox></object>" for name, b in boxes) + "</annotation>"


def rows(*boxes):
    return "".join(f"{['crack', 'pore 1'].index(n)} {(x1 + x2) / 128} {(y1 + y2) / 96} {(x2 - x1) / 64} {(y2 - y1) / 48}\n"
                   for n, (x1, y1, x2, y2) in boxes)


def voc():
    return {**{f"JPEGImages/{w}.jpg": None for w in BOXES}, **{f"Annotations/{w}.xml": xml(*b) for w, b in BOXES.items()},
            "ImageSets/Main/train.txt": "w1\nw2\n", "ImageSets/Main/val.txt": "w3\n"}


def article():
    return {**{f"images/{w}.jpg": None for w in BOXES}, **{f"annotations/{w}.xml": xml(*b) for w, b in BOXES.items()},
            "train_val_test_split.csv": "image_id,split\n" + "".join(f"{w},{s}\n" for w, s in SPLITS.items())}


def yolo():
    return {**{f"{SPLITS[w]}/images/{w}.jpg": None for w in BOXES},
            **{f"{SPLITS[w]}/labels/{w}.txt": rows(*b) for w, b in BOXES.items()},
            "data.yaml": "train: ../train/images\nval: ../val/images\nnames: [crack, pore 1]\n"}


def coco():
    def content(split):
        images = [w for w in BOXES if SPLITS[w] == split]
        return json.dumps({
            "categories": [{"id": 4, "name": "pore 1"}, {"id": 2, "name": "crack"}],
            "images": [{"id": k, "file_name": f"{w}.jpg"} for k, w in enumerate(images)],
            "annotations": [
                {"id": 0, "image_id": k, "category_id": {"crack": 2, "pore 1": 4}[n], "bbox": [x1, y1, x2 - x1, y2 - y1]}
                for k, w in enumerate(images) for n, (x1, y1, x2, y2) in BOXES[w]]})

    return {**{f"{SPLITS[w]}/{w}.jpg": None for w in BOXES},
            **{f"{s}/_annotations.coco.json": content(s) for s in ("train", "val")}}


def table():
    lines = [f"{w}.jpg,{','.join(map(str, b))},{n},{SPLITS[w]}" for w, boxes in BOXES.items() for n, b in boxes]
    return {**{f"{w}.jpg": None for w in BOXES},
            "boxes.csv": "image,x1,y1,x2,y2,class,split\n" + "\n".join([*lines, "w2.jpg,,,,,,train\n"])}


FORMATS = {"welding_v2": article, "voc": voc, "yolo": yolo, "coco": coco, "csv": table}
WHY = {"welding_v2": "3 .xml files and train_val_test_split.csv", "voc": "3 .xml files, such as Annotations/w1.xml",
       "yolo": "data.yaml", "coco": "train/_annotations.coco.json and val/_annotations.coco.json", "csv": "boxes.csv"}


def by_stem(found):
    return {image.rpartition("/")[2].rpartition(".")[0]: value for image, value in found.items()}


def said(reading, level=ERROR):
    return [f"{f.where()}: {f.text}" for f in reading.findings if f.level == level]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("folder", ["", "archive/", "VOCdevkit/VOC2012/"])
def test_every_format_is_recognised_says_why_and_gives_the_same_boxes_and_splits(tree, read, fmt, folder):
    root = tree({folder + name: content for name, content in FORMATS[fmt]().items()})
    reading = read(root, "auto")
    assert {w: [(n, pytest.approx(b, abs=1e-3)) for n, b in boxes] for w, boxes in BOXES.items()} == by_stem(reading.boxes)
    assert by_stem(reading.splits) == SPLITS and [f.level for f in reading.findings] == [NOTE]
    if not folder:
        assert said(reading, NOTE) == [f": dataset=auto: read as {fmt}, because of {WHY[fmt]}"]
        settings = {"split_csv": "train_val_test_split.csv"} if fmt == "welding_v2" else {}
        assert by_stem(read(root, fmt, **settings).boxes) == by_stem(reading.boxes)


def test_the_other_formats_of_a_folder_are_said(tree, read):
    files = {**voc(), **{f"labels/{w}.txt": rows(*b) for w, b in BOXES.items()}, "labels/classes.txt": "crack\npore 1\n",
             "voc.json": coco()["train/_annotations.coco.json"], "boxes.csv": table()["boxes.csv"]}
    assert said(read(tree(files), "auto"), NOTE)[0] == (
        f": dataset=auto: read as voc, because of {WHY['voc']}; there is also coco (voc.json): dataset=coco; "
        "yolo (rows of numbers in labels/w1.txt): dataset=yolo; csv (boxes.csv): dataset=csv")


def test_the_articles_split_file_counts_in_every_format(tree, read):
    root = tree({"w1.jpg": None, "w2.jpg": None, "w1.txt": rows(*BOXES["w1"]), "w2.txt": "", "classes.txt": "crack\npore 1",
                 "train_val_test_split.csv": "image_id,split\nw1,train\nw2,val\n"})
    reading = read(root, "auto")
    assert reading.splits == {"w1.jpg": "train", "w2.jpg": "val"}
    assert said(reading, NOTE)[0].endswith(", with the splits of train_val_test_split.csv")


def test_an_xml_or_text_that_belongs_to_no_picture_makes_no_format(tree, read):
    files = {"w1.jpg": None, "sitemap.xml": "<x/>", "requirements.txt": "1 2 3 4 5"}
    with pytest.raises(DataError, match=r"data: holds no annotations of a known format; found .*1 \.xml.*known are Pascal VOC"):
        read(tree(files), "auto")
    reading = read(tree({**files, "w1.txt": "0 .5 .5 .1 .1", "classes.txt": "crack"}), "auto")
    assert said(reading, NOTE)[0] == ": dataset=auto: read as yolo, because of rows of numbers in w1.txt"


@pytest.mark.parametrize("fmt", ["auto", *FORMATS])
def test_a_folder_of_nothing_is_one_clear_error(tree, read, fmt):
    with pytest.raises(DataError, match=r"data: no pictures; found there: 2 \.txt, 1 \.gif"):
        read(tree({"a.txt": "", "b.txt": "", "c.gif": "GIF89a"}), fmt)
    with pytest.raises(DataError, match="no file of data at all"):
        read(tree({"a.xyz": ""}, "other"), fmt)
    for root in (tree({}) / "none", tree({}) / "a.txt"):
        with pytest.raises(DataError, match=r"dataset\.root=.*(no such folder|is not a folder)"):
            read(root, fmt)


@pytest.mark.parametrize("wrong", ["voc", "yolo", "coco", "csv"])
@pytest.mark.parametrize("fmt", ["voc", "yolo", "coco", "csv"])
def test_the_wrong_format_is_told_in_one_sentence_that_names_the_right_one(tree, read, fmt, wrong):
    if wrong == fmt:
        return
    for classes in (None, ["crack"]):
        with pytest.raises(DataError) as caught:
            read(tree(FORMATS[fmt]()), wrong, classes=classes, missing="negative")
        assert str(caught.value).endswith(f"{WHY[fmt]} look like {fmt}: set dataset={fmt}, or auto")


def test_lists_of_a_voc_tree_name_pictures_in_every_dialect(tree, read):
    names = ["w01.jpg", "w02.jpg", "w03.png", "w04.png", "w05.jpg", "w.v1.003.jpg", "w06_jpg.rf.ab12.jpg", "w07.jpg"]
    root = tree({**{f"images/{n}": None for n in names}, **{f"Annotations/{n.rpartition('.')[0]}.xml": xml() for n in names},
                 "ImageSets/Main/train.txt": "w01\nw02.jpg\nimages/w03.png\n./images/w04.png  \nw05 -1\r\n\nw.v1.003\n"
                                             "w06_jpg.rf.ab12.jpg\nW07.JPG\n",
                 "ImageSets/Main/val.txt": "w01_other\nw01\nw99  1\n../../etc/passwd\n",
                 "ImageSets/Main/crack_train.txt": "w01 -1\n", "ImageSets/Main/trainval.txt": "w01\n"})
    reading = read(root, "voc")
    assert reading.splits == {f"images/{n}": "train" for n in names}
    assert said(reading) == ["ImageSets/Main/val.txt:1: no picture for 'w01_other'",
                             "ImageSets/Main/val.txt:2: images/w01.jpg is in val here and in train at ImageSets/Main/train.txt:1",
                             "ImageSets/Main/val.txt:3: no picture for 'w99  1'",
                             "ImageSets/Main/val.txt:4: no picture for '../../etc/passwd'"]


def test_a_whole_name_comes_before_one_that_lacks_its_suffix(tree, read):
    root = tree({"a.jpg": None, "a.jpg.png": None, "a.xml": xml(), "a.jpg.xml": xml(),
                 "train.txt": "a.jpg\n", "val.txt": "a.jpg.png\n"})
    assert read(root, "voc").splits == {"a.jpg": "train", "a.jpg.png": "val"}


def test_a_picture_that_a_list_names_twice_counts_once(tree, read):
    root = tree({**voc(), "ImageSets/Main/train.txt": "w1\nw2\nw1.jpg\n"})
    reading = read(root, "voc")
    assert len(reading.splits) == 3
    where = "ImageSets/Main/train.txt"
    assert said(reading, NOTE) == [f"{where}:3: 'w1.jpg' stands at {where}:1 already: counted once"]


def test_masks_beside_the_pictures_of_a_voc_tree_are_no_pictures(tree, read):
    masks = {f"{folder}/{w}.png": None for folder in ("SegmentationClass", "SegmentationObject") for w in BOXES}
    assert list(by_stem(read(tree({**voc(), **masks}), "voc").boxes)) == list(BOXES)
    unlisted = {n: c for n, c in voc().items() if not n.startswith("ImageSets")}
    assert not said(read(tree({**unlisted, **masks}, "unlisted"), "voc"))


def test_xml_beside_pictures_in_folders_of_splits(tree, read):
    root = tree({f"{s}/{n}": c for s in ("train", "valid", "test")
                 for n, c in (("w.jpg", None), ("w.xml", xml((s, (1, 2, 30, 40)))))})
    reading = read(root, "auto")
    assert reading.splits == {"test/w.jpg": "test", "train/w.jpg": "train", "valid/w.jpg": "val"}
    assert {p.split("/")[0]: b[0][0] for p, b in reading.boxes.items()} == {"test": "test", "train": "train", "valid": "valid"}


def test_every_spelling_of_a_suffix_counts_and_other_pictures_are_named(tree, read):
    names = ["a.jpg", "b.JPG", "c.Jpeg", "d.PNG", "e.tif", "f.bmp", "g.webp", "h.jfif", "i.TIFF"]
    stems = [n.partition(".")[0] for n in names]
    files = dict.fromkeys(names) | dict.fromkeys(("x.heic", "y.HEIC", "z.dcm", "Thumbs.db", ".DS_Store", "._a.jpg",
                                                  "__MACOSX/a.jpg", "desktop.ini"), b"x")
    as_voc = read(tree({**files, **{f"{s}.{'XML' if s in 'be' else 'xml'}": xml() for s in stems}}, "voc"), "auto")
    labels = {f"{s}.{'TXT' if s in 'ce' else 'txt'}": rows(("crack", (1, 2, 30, 40))) for s in stems}
    as_yolo = read(tree({**files, **labels, "classes.txt": "crack"}, "yolo"), "auto")
    for reading in (as_voc, as_yolo):
        assert list(reading.records) == sorted(names) and not said(reading)
        assert said(reading, NOTE)[1:] == [": files of kinds that are not read: 2 .heic, 1 .dcm"]


def test_folders_behind_links_are_read_and_circles_end(tree, read):
    real = tree(voc(), "elsewhere")
    root = tree({"a": b""})
    for name in ("JPEGImages", "Annotations", "ImageSets"):
        os.symlink(real / name, root / name)
    os.symlink(root, root / "self")
    os.symlink("nowhere", root / "gone.jpg")
    reading = read(root, "voc")
    assert by_stem(reading.boxes).keys() == BOXES.keys() and by_stem(reading.splits) == SPLITS


def test_what_a_reader_finds_wrong_stops_the_index_with_file_line_and_number(tree, tmp_path):
    root = tree({"w1.jpg": None, "w2.jpg": None, "w1.txt": "5 .5 .5 .1 .1\n", "classes.txt": "crack\n",
                 "w2.txt": "0 .5 .5 .1 .1\n9 .5 .5 .1 .1\n0 nan .5 .1 .1\n"})
    dataset = DatasetConfig(format="auto", root=str(root))
    with pytest.raises(DataError, match=r"w1\.txt:1: class 5 is not in 0-0 \(crack\) .*w2\.txt:2: 2 of this kind") as caught:
        open_index(dataset, tmp_path / "cache")
    assert "\n" not in str(caught.value) and "task=check" in str(caught.value)
    (root / "w1.txt").write_text("")
    (root / "w2.txt").write_text("0 .5 .5 .1 .1\n0 nan .5 .1 .1\n")
    assert len(open_index(dataset, tmp_path / "cache").boxes) == 1
    dataset.strict = True
    with pytest.raises(DataError, match=r"w2\.txt:2: dataset\.strict: row 2 \(crack\)"):
        open_index(dataset, tmp_path / "cache")


# Splits made here.

def classes_of(n, rng, shares=(0.5, 0.2, 0.05)):
    """bool [n, 3]: which of three classes each picture shows; about a third show none."""
    return rng.random((n, len(shares))) < shares


def test_made_splits_depend_on_names_and_seed_and_on_no_order_of_files(tree, tmp_path):
    names = [f"plate{i:02d}{'abc'[i % 3]}" for i in range(30)]
    found = []
    for number, order in enumerate((names, names[::-1])):
        weld = ((".jpg", None), (".xml", xml(("crack", (1, 2, 30, 40)))))
        root = tree({f"{n}{suffix}": content for n in order for suffix, content in weld}, f"data{number}")
        for seed in (0, 1):
            index = open_index(DatasetConfig(format="voc", root=str(root), split=SplitConfig(seed=seed)), tmp_path / "cache")
            found.append({index.path(row): index.splits[s] for row, s in enumerate(index.split_ids)})
    assert found[0] == found[2] != found[1] == found[3] and set(found[0].values()) == {"train", "val", "test"}


@pytest.mark.parametrize("seed", range(5))
def test_every_class_and_the_perfect_welds_are_spread_in_the_same_shares(seed):
    shows = classes_of(300, np.random.default_rng(seed))
    splits = np.array(make_splits([f"{i}.jpg" for i in range(300)], shows, {"val": 0.15, "test": 0.1}, seed))
    for column in (*shows.T, ~shows.any(1), np.ones(300, bool)):
        for split, share in (("train", 0.75), ("val", 0.15), ("test", 0.1)):
            assert abs((column & (splits == split)).sum() - share * column.sum()) <= 2


def test_the_order_of_pictures_changes_no_split():
    shows, order = classes_of(80, np.random.default_rng(0)), np.random.default_rng(1).permutation(80)
    names = [f"{i}.jpg" for i in range(80)]
    one = make_splits(names, shows, {"val": 0.2}, 3)
    assert make_splits([names[i] for i in order], shows[order], {"val": 0.2}, 3) == [one[i] for i in order]


@pytest.mark.parametrize(("group", "key"), [(r"weld\d+", r"weld\d+"), ("^[^_]+", "^[^_]+"),
                                            (r"(weld\d+)_.*_(\w)\.", r"weld\d+|\w(?=\.)")])
def test_pictures_of_one_group_stay_together(group, key):
    images = [f"x/weld{i % 12}_{i}_{'ab'[i % 2]}.jpg" for i in range(120)]
    splits = make_splits(images, classes_of(120, np.random.default_rng(0)), {"val": 0.2, "test": 0.2}, 0, group)
    of_group = {}
    for image, split in zip(images, splits):
        of_group.setdefault(str(re.findall(key, image)), set()).add(split)
    assert all(len(s) == 1 for s in of_group.values()) and set(splits) == {"train", "val", "test"}


@pytest.mark.parametrize("n", [3, 4, 5, 10])
@pytest.mark.parametrize("shows", ["one class", "a class each", "nothing", "all"])
def test_no_split_is_lost_where_pictures_are_few(n, shows):
    has_class = {"one class": np.ones((n, 1), bool), "a class each": np.eye(n, dtype=bool), "nothing": np.zeros((n, 2), bool),
                 "all": np.ones((n, 4), bool)}[shows]
    for seed in range(10):
        splits = make_splits([f"{i}.jpg" for i in range(n)], has_class, {"val": 0.15, "test": 0.15}, seed)
        assert set(splits) == {"train", "val", "test"}
        assert splits.count("train") >= max(splits.count("val"), splits.count("test"))
    for m in (1, 2):
        assert "train" in make_splits([f"{i}.jpg" for i in range(m)], has_class[:m], {"val": 0.15, "test": 0.15}, 0)


def test_a_large_group_stays_in_train_where_small_ones_can_be_held_out():
    images = [*(f"film_{i}.jpg" for i in range(50)), "b_1.jpg", "c_1.jpg", "d_1.jpg"]
    for seed in range(10):
        splits = make_splits(images, np.ones((53, 1), bool), {"val": 0.15, "test": 0.15}, seed, "^[a-z]+")
        assert set(splits[:50]) == {"train"} and set(splits) == {"train", "val", "test"}


@pytest.mark.parametrize(("make", "given", "expected"), [
    ("missing", "    ", {"train", "val", "test"}), ("missing", "tttt", {"train", "val"}), ("missing", "tttv", "tttv"),
    ("missing", "ttvx", "ttvx"), ("missing", "tttx", {"train", "val", "test"}), ("always", "tttv", {"train", "val", "test"}),
    ("never", "tttv", "tttv"), ("never", "tttt", "tttt")])
def test_splits_are_made_where_the_data_has_none(make, given, expected):
    words = {" ": "", "t": "train", "v": "val", "x": "test"}
    given, images = [words[c] for c in given * 5], [f"{i}.jpg" for i in range(20)]
    splits, findings = settle_splits(images, given, np.ones((20, 1), bool), SplitConfig(make=make, val=0.2, test=0.2, group=None))
    if isinstance(expected, str):
        assert splits == given and not findings
    else:
        assert set(splits) == expected and [f.kind for f in findings] == ["split-made"]
        if make == "missing":  # what the data does say stays
            assert all(s in (g, "val") for s, g in zip(splits, given) if g)


def test_data_without_splits_is_refused_where_none_may_be_made():
    with pytest.raises(DataError, match=r"dataset\.split\.make"):
        settle_splits(["a.jpg"], [""], np.ones((1, 1), bool), SplitConfig(make="never"))


def test_pictures_that_the_data_gives_no_split_are_not_used_and_named():
    splits, findings = settle_splits(["a.jpg", "b.jpg", "c.jpg"], ["train", "", "val"], np.ones((3, 1), bool), SplitConfig())
    assert splits == ["train", "", "val"] and [(f.kind, f.file) for f in findings] == [("picture-unlisted", "b.jpg")]


def test_a_voc_release_without_train_list_trains_on_trainval_and_keeps_its_test(tree, read):
    names = [f"w{i}" for i in range(12)]
    files = {f"JPEGImages/{n}.jpg": None for n in names} | {f"Annotations/{n}.xml": xml(("crack", (9, 9, 30, 30))) for n in names}
    lists = {"ImageSets/Main/trainval.txt": "\n".join(names[:9]), "ImageSets/Main/test.txt": "\n".join(names[9:])}
    reading = read(tree(files | lists), "voc")
    assert {reading.splits[f"JPEGImages/{n}.jpg"] for n in names[:9]} == {"train"}
    assert {reading.splits[f"JPEGImages/{n}.jpg"] for n in names[9:]} == {"test"}


def test_trainval_beside_a_val_list_trains_on_the_rest_of_it(tree, read):
    names = [f"w{i}" for i in range(6)]
    files = {f"JPEGImages/{n}.jpg": None for n in names} | {f"Annotations/{n}.xml": xml(("crack", (9, 9, 30, 30))) for n in names}
    lists = {"ImageSets/Main/trainval.txt": "\n".join(names), "ImageSets/Main/val.txt": "w0\nw1"}
    reading = read(tree(files | lists), "voc")
    assert [reading.splits[f"JPEGImages/{n}.jpg"] for n in names] == ["val"] * 2 + ["train"] * 4 and not said(reading)


def test_one_name_in_very_many_folders_is_paired_by_its_folder_at_once(tree):
    root = tree({"seed.txt": ""})
    listing = Folder(root)
    pictures = [f"weld_{i:05}/xray.png" for i in range(20000)]
    pairs, unclear = listing.pair(pictures, [p.replace(".png", ".xml") for p in pictures[:-1]])
    # Comparing each with each would take minutes and gigabytes.
    assert len(pairs) == 19999 and unclear == [] and pairs[pictures[7]] == "weld_00007/xray.xml"
