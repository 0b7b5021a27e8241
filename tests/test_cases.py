"""What people reported of other tools, each case as they met it; the number is its row in the collection of cases.

Cases that a module's own tests cover are not repeated here.
"""

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from weldtrain import config, overrides
from weldtrain.config import DatasetConfig, LoaderConfig, ModelConfig
from weldtrain.data import indexing as index_module
from weldtrain.data.batch import collate
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import training_loader
from weldtrain.engine import checkpoint
from weldtrain.errors import ConfigError, DataError, PictureError
from weldtrain.formats.record import DROPPED, ERROR, NOTE
from weldtrain.models.detector import build_detector
from weldtrain.tasks import evaluate, train
from weldtrain.telemetry.record import RunRecord

RNG = np.random.default_rng(7)
PIXELS = RNG.integers(60, 200, (240, 320, 3)).astype(np.uint8)
SMALL = ModelConfig(min_size=48, max_size=64)
STEMS = [f"w{i:02d}" for i in range(1, 13)]


def picture(suffix=".jpg", pixels=PIXELS, **options):
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, {".jpg": "jpeg"}.get(suffix, suffix[1:]), **options)
    return data.getvalue()


PICTURE = picture()


def obj(x1, y1, x2, y2, name="crack"):
    return (f"<object><name>{name}</name><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox>"
            "</object>\n")


def xml(*objects, head="<size><width>320</width><height>240</height><depth>3</depth></size>"):
    return f"<annotation>\n{head}\n{''.join(objects or (obj(20, 30, 120, 110), obj(150, 60, 260, 200, 'porosity')))}</annotation>"


def tree(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def voc(root, annotations=(), pictures=()):
    """Twelve pictures, 8 to train and 4 to validate, of two classes; `annotations` and `pictures` replace some, None removes."""
    files = {f"JPEGImages/{s}.jpg": PICTURE for s in STEMS} | {f"Annotations/{s}.xml": xml() for s in STEMS}
    files |= {"ImageSets/Main/train.txt": "\n".join(STEMS[:8]), "ImageSets/Main/val.txt": "\n".join(STEMS[8:])}
    files |= {f"Annotations/{s}.xml": text for s, text in dict(annotations).items()} | dict(pictures)
    return tree(root, {name: content for name, content in files.items() if content is not None})


def yolo(root, labels=(), names="[crack, porosity]"):
    files = {"data.yaml": f"names: {names}\ntrain: images/train\nval: images/val\n"}
    for i, s in enumerate(STEMS):
        part = "train" if i < 8 else "val"
        files[f"images/{part}/{s}.jpg"] = PICTURE
        files[f"labels/{part}/{s}.txt"] = dict(labels).get(s, "0 .3 .3 .2 .2\n1 .6 .6 .3 .3\n")
    return tree(root, files)


def coco(root, categories=((3, "crack"), (17, "porosity"), (91, "slag")), pictures=()):
    files = {}
    for part, stems in (("train", STEMS[:8]), ("val", STEMS[8:])):
        images = [{"id": i, "file_name": f"{s}.jpg", "width": 320, "height": 240} for i, s in enumerate(stems)]
        annotations = [{"id": 10 * i + k, "image_id": i, "category_id": category, "bbox": [20 + 90 * k, 30, 80, 60]}
                       for i in range(len(stems)) for k, (category, _) in enumerate(categories[:2])]
        files |= {f"{part}/{s}.jpg": PICTURE for s in stems}
        files[f"{part}/_annotations.coco.json"] = json.dumps({
            "images": images, "annotations": annotations, "categories": [{"id": i, "name": n} for i, n in categories]})
    return tree(root, files | dict(pictures))


@pytest.fixture
def opened(tmp_path):
    """`opened(root, missing="skip")`: the index of a folder whose format is to be recognised."""
    def make(root, refuse=True, **settings):
        return open_index(DatasetConfig(**{"format": "auto"} | settings, root=str(root)), tmp_path / "cache", refuse=refuse)

    return make


@pytest.fixture
def run(configured, tmp_path):
    """`run(train, root, "loader.shuffle=false")`: the directory of a run of two steps, and what it logged."""
    def go(task, root, *overrides):
        cfg = configured("dataset=auto", f"dataset.root={root}", "dataset.classes=null", f"cache_dir={tmp_path / 'cache'}",
                         "trainer.max_steps=2", "model.min_size=64", "model.max_size=96", *overrides)
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        with RunRecord(folder, asdict(cfg)) as record:
            task.run(cfg, record)
        return folder, (folder / "run.log").read_text("utf-8")

    return go


class Reached(Exception):
    """Thrown where a test has seen enough."""


@pytest.fixture
def told_before_training(run, tmp_path, monkeypatch):
    """`told_before_training(root)`: what a training run logs before it builds its model."""
    def stop(*_):
        raise Reached

    def go(root):
        monkeypatch.setattr(train, "build_detector", stop)
        with pytest.raises(Reached):
            run(train, root)
        return next(tmp_path.glob("run*/run.log")).read_text("utf-8")

    return go


def weldtrain(*args, cwd, **env):
    return subprocess.run([sys.executable, "-m", "weldtrain", *args], cwd=cwd, capture_output=True, timeout=60,
                          env=os.environ | {"WELDTRAIN_CACHE": str(cwd / "cache")} | env)


def said(index, level):
    return [f"{f.where()}: {f.text}" for f in index.findings if f.level == level]


def boxes(index, stem):
    (row,) = [i for i in range(len(index)) if Path(index.path(i)).stem == stem]
    at = index.box_rows(row)
    return [(index.names[k], *box) for k, box in zip(index.name_ids[at], index.boxes[at].tolist())]


TWO = [("crack", 20, 30, 120, 110), ("porosity", 150, 60, 260, 200)]


def test_case_01_the_size_that_an_xml_claims_divides_nothing(tmp_path, opened):
    zero = "<size><width>0</width><height>0</height><depth>0</depth></size>"
    index = opened(voc(tmp_path / "d", {"w01": xml(head=zero), "w02": xml(head="")}))
    assert boxes(index, "w01") == boxes(index, "w02") == boxes(index, "w03") == TWO
    assert [f.kind for f in index.findings] == ["recognised"]


FLAT = {"w01": xml(obj(20, 30, 120, 110), obj(100, 20, 100, 60)),
        "w02": xml(obj("100.0", 20, "100.2", 60, "porosity"), obj(1, 2, 3, 4)),
        "w03": xml(obj(20, 30, 120, 110), obj(150, 20, 100, 60))}


def test_case_02_boxes_without_width_are_named_dropped_and_counted_before_the_first_step(tmp_path, opened, caplog):
    root = voc(tmp_path / "d", FLAT)
    index = opened(root)
    assert said(index, DROPPED) == [
        "Annotations/w01.xml:4: object 2 (crack) [100, 20, 100, 60] encloses nothing: dropped",
        "Annotations/w02.xml:3: object 1 (porosity) [100, 20, 100.2, 60] encloses nothing: dropped",
        "Annotations/w03.xml:4: object 2 (crack) [150, 20, 100, 60] encloses nothing: dropped"]
    index.report_findings()
    assert caplog.messages[-1] == index.dropped_boxes() == "3 boxes dropped in 3 files"
    assert boxes(index, "w01") == boxes(index, "w03") == TWO[:1] and boxes(index, "w02") == [("crack", 1, 2, 3, 4)]
    data = DetectionDataset(index, "train", index.names, ModelConfig(min_size=32, max_size=32))
    for batch in training_loader(data, LoaderConfig(batch_size=4, num_workers=0), torch.device("cpu"), 0):
        assert (batch.boxes[:, 2:] > batch.boxes[:, :2]).all()
    with pytest.raises(DataError, match=r"w01\.xml:4: dataset\.strict: object 2 .*w02\.xml:3, Annotations/w03\.xml:4: 3 of this"):
        opened(root, strict=True)


def test_case_02_the_check_says_how_many_are_dropped(tmp_path):
    done = weldtrain("task=check", f"dataset.root={voc(tmp_path / 'd', FLAT)}", cwd=tmp_path)
    assert done.returncode == 0 and "\n3 boxes dropped in 3 files\n" in done.stdout.decode()


def chinese(codec, declared, mark=b""):
    text = f'<?xml version="1.0" encoding="{declared}"?>\n' + xml().replace("crack", "裂纹").replace("porosity", "气孔")
    return mark + text.encode(codec)


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "latin-1"}])
def test_case_06_no_locale_changes_what_is_read_and_none_ends_the_run(tmp_path, locale):
    declared = {s: chinese("gbk", "GBK") for s in STEMS}
    root = voc(tmp_path / "d", declared | {"w02": chinese("utf-8", "utf-8", b"\xef\xbb\xbf"), "w03": chinese("utf-16", "utf-16")})
    done = weldtrain("task=check", f"dataset.root={root}", "output_dir=out", cwd=tmp_path, **locale)
    assert done.returncode == 0, done.stderr.decode()
    summary = json.loads(next(tmp_path.glob("out/**/summary.json")).read_text("utf-8"))
    assert summary["classes"] == ["气孔", "裂纹"] and summary["boxes"] == 24
    (root / "Annotations/w02.xml").write_bytes(chinese("gbk", "utf-8"))
    done = weldtrain("task=check", f"dataset.root={root}", cwd=tmp_path, **locale)
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 2 and "Annotations/w02.xml:4" in last and "encoding" in last and b"Traceback" not in done.stderr


def test_case_07_a_picture_belongs_to_the_xml_of_its_stem_whatever_that_says(tmp_path, opened):
    heads = {"w01": "<filename>w01</filename>", "w02": "<filename>w02.jpg</filename>",
             "w03": "<filename>old_name.png</filename><path>C:\\Users\\me\\w03.png</path>"}
    pictures = {f"JPEGImages/{s}.jpg": None for s in heads} | {f"JPEGImages/{s}.png": picture(".png") for s in heads}
    index = opened(voc(tmp_path / "d", {s: xml(head=head) for s, head in heads.items()}, pictures))
    assert len(index) == 12 and all(boxes(index, s) == TWO for s in heads)
    assert [f.kind for f in index.findings] == ["recognised"]


def test_case_09_a_class_that_is_none_is_named_with_what_is_allowed(tmp_path, opened):
    root = yolo(tmp_path / "d", {"w01": "1 .5 .5 .2 .2\n2 .5 .5 .2 .2\n", "w02": "1.0 .5 .5 .2 .2\n", "w03": "-1 .5 .5 .2 .2\n"})
    with pytest.raises(DataError, match=r"w01\.txt:2: class 2 is not in 0-1 \(crack, porosity\) \(and labels/train/w0") as caught:
        opened(root)
    assert "do yours count from 1?" in str(caught.value) and caught.value.exit_code == 2
    index = opened(root, refuse=False)
    assert [len(boxes(index, s)) for s in ("w01", "w02", "w03")] == [1, 1, 0]
    assert said(index, ERROR)[1] == "labels/train/w03.txt:1: class -1 is not in 0-1 (crack, porosity)"


def test_case_09_numbers_from_1_to_n_are_suspected(tmp_path, opened):
    root = yolo(tmp_path / "d", {s: "1 .3 .3 .2 .2\n2 .6 .6 .3 .3\n" for s in STEMS})
    with pytest.raises(DataError, match=r"w01\.txt:2: class 2 is not in 0-1 .* 12 of this kind\); numbers count from 0: do"):
        opened(root)


def test_case_09_where_no_row_is_left_the_cause_is_the_last_line(tmp_path):
    root = yolo(tmp_path / "d", {s: "15 .3 .3 .2 .2\n" for s in STEMS}, "[crack]")
    done = weldtrain("task=check", f"dataset.root={root}", cwd=tmp_path)
    assert done.returncode == 2
    assert "such as labels/train/w01.txt:1: class 15 is not in 0-0 (crack)" in done.stderr.decode().splitlines()[-1]


def test_case_13_ids_with_holes_become_labels_that_are_printed(tmp_path, told_before_training):
    told = told_before_training(coco(tmp_path / "d", ((91, "slag"), (3, "crack"), (17, "porosity"))))
    assert "labels: 1 crack, 2 slag" in told  # and every checkpoint holds them: tests/engine/test_trainer.py


def test_case_13_a_dummy_category_takes_no_label_and_the_order_is_stable(tmp_path, opened):
    roboflow = ((1, "crack"), (2, "porosity"), (0, "weld-defects"))
    one, two = (opened(coco(tmp_path / n, c)) for n, c in (("a", roboflow), ("b", (roboflow[1], roboflow[0], roboflow[2]))))
    assert one.names == two.names == ["crack", "porosity"] and one.labels(one.names).tolist() == [1, 2]
    assert one.classes == two.classes == ["weld-defects", "crack", "porosity"]


def test_case_15_a_batch_of_perfect_welds_trains_with_a_finite_loss_and_all_are_counted(tmp_path, run):
    lists = {"ImageSets/Main/train.txt": "w01\nw02\nw03\nw04", "ImageSets/Main/val.txt": "w05\nw06"}
    root = voc(tmp_path / "d", {"w03": "<annotation/>", "w04": None}, lists)
    with pytest.raises(DataError, match=r"w04\.jpg: no annotation in Annotations; .*dataset\.missing=negative or skip"):
        run(train, root)
    folder, log = run(train, root, "dataset.missing=negative", "loader.shuffle=false", "augment=none")
    assert "annotation-missing: JPEGImages/w04.jpg: no annotation: used as defect-free" in log
    assert "train: 4 pictures (2 without defects), 4 boxes: crack 2, porosity 2" in log
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with_defects, without = [{k: v for k, v in line.items() if k.startswith("loss/")} for line in lines if "loss/total" in line]
    assert all(np.isfinite(v) for v in [*with_defects.values(), *without.values()])
    assert without["loss/box_reg"] == without["loss/rpn_box_reg"] == 0 < with_defects["loss/rpn_box_reg"]


def test_case_15_an_empty_label_and_an_image_without_annotations_are_perfect_welds(tmp_path, opened):
    assert "8 pictures (1 without defects), 14 boxes" in opened(yolo(tmp_path / "y", {"w02": ""})).describe("train")
    root = coco(tmp_path / "c")
    content = json.loads((root / "train/_annotations.coco.json").read_text())
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 1]
    (root / "train/_annotations.coco.json").write_text(json.dumps(content))
    assert "8 pictures (1 without defects), 14 boxes" in opened(root).describe("train")


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return picture(exif=exif.tobytes())


def test_case_17_a_size_that_lies_on_its_side_is_told_with_the_picture(tmp_path, opened):
    for root, path, source in ((voc(tmp_path / "v", pictures={"JPEGImages/w01.jpg": turned()}), "JPEGImages/w01.jpg",
                                "Annotations/w01.xml:2"),
                               (coco(tmp_path / "c", pictures={"train/w01.jpg": turned()}), "train/w01.jpg",
                                "train/_annotations.coco.json")):
        assert said(opened(root), NOTE)[1:] == [f"{source}: says 320x240, {path} is 240x320 as a viewer shows it"]


def test_case_17_boxes_are_of_the_picture_as_a_viewer_shows_it(tmp_path, opened):
    upright = np.full((320, 240, 3), 50, np.uint8)
    upright[200:300, 30:90] = 250
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = {"JPEGImages/w01.jpg": picture(pixels=np.rot90(upright).copy(), exif=exif.tobytes())}
    index = opened(voc(tmp_path / "d", {"w01": xml(obj(30, 200, 90, 300), head="")}, lying))
    data = DetectionDataset(index, "train", index.names, ModelConfig(min_size=240, max_size=320))
    sample = data.load(0, int(data.rows[0]))
    x1, y1, x2, y2 = sample.boxes[0].astype(int)
    inside = sample.image[y1 + 5 : y2 - 5, x1 + 5 : x2 - 5]
    assert sample.image.shape == (320, 240, 3) and (inside > 240).all() and (sample.image > 240).sum() < 1.1 * 3 * 60 * 100


BAD = {"empty": lambda p: p.write_bytes(b""), "page": lambda p: p.write_text("<!DOCTYPE html><title>404</title>"),
       "folder": lambda p: (p.unlink(), p.mkdir()), "link": lambda p: (p.unlink(), p.symlink_to(p.parent / "nowhere.jpg")),
       "forbidden": lambda p: p.chmod(0)}


@pytest.mark.parametrize("kind", BAD)
def test_case_19_what_turns_bad_during_a_run_is_the_same_error_with_and_without_workers(tmp_path, opened, kind):
    if kind == "forbidden" and os.geteuid() == 0:
        pytest.skip("root may read everything")
    root = voc(tmp_path / "d")
    index = opened(root)
    bad = root / "JPEGImages/w03.jpg"
    BAD[kind](bad)
    errors = []
    for workers in (0, 2):
        data = DetectionDataset(index, "train", index.names, SMALL)
        cfg = LoaderConfig(batch_size=2, num_workers=workers, persistent_workers=False)
        with pytest.raises(PictureError) as caught:
            list(training_loader(data, cfg, torch.device("cpu"), 0))
        errors.append((type(caught.value), str(caught.value), caught.value.exit_code))
    assert errors[0] == errors[1] and errors[0][1].startswith(f"{bad}: ") and errors[0][2] == 2
    with pytest.raises(DataError, match=r"w03(\.jpg)?") as caught:  # and the next start refuses it by name
        opened(root)
    assert caught.value.exit_code == 2


def test_case_20_evaluation_sees_16_bits_through_the_window_of_the_training(tmp_path, run, configured, monkeypatch):
    plate = np.clip(RNG.normal(1000, 20, (240, 320)), 0, 4095)
    plate[60:120, 80:160] += 200  # a defect
    pictures = {f"JPEGImages/{s}.jpg": None for s in STEMS}
    pictures |= {f"JPEGImages/{s}{suffix}": cv2.imencode(suffix, plate.astype(np.uint16))[1].tobytes()
                 for s, suffix in zip(STEMS, 6 * (".png", ".tif"))}
    root = voc(tmp_path / "d", pictures=pictures)
    trained = configured("model.window_levels=[900,1300]")
    checkpoint.save(tmp_path / "x.pt", {"classes": ["crack", "porosity"], "config": asdict(trained), "epoch": 0, "step": 0,
                                        "model": build_detector(trained.model, 2).state_dict()})
    contrasts = []

    class Watched(DetectionDataset):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            for row in self.rows:
                image = self.load(0, int(row)).image.astype(float)
                contrasts.append(image[40:50, 50:70].mean() - image[90:, 120:].mean())
            raise Reached

    monkeypatch.setattr(evaluate, "DetectionDataset", Watched)
    with pytest.raises(Reached):
        run(evaluate, root, "task=evaluate", f"checkpoint={tmp_path / 'x.pt'}")
    assert contrasts == pytest.approx([200 * 255 / 400] * 4, abs=8)


def test_case_21_six_kinds_of_channels_make_one_batch(tmp_path, opened):
    rgb = Image.fromarray(PIXELS)
    clear = rgb.convert("RGBA")
    clear.putalpha(0)
    kinds = {"w01": (".png", rgb), "w02": (".png", clear), "w03": (".jpg", rgb.convert("L")), "w04": (".png", rgb.convert("P")),
             "w05": (".png", rgb.convert("1")), "w06": (".png", rgb.convert("LA"))}
    pictures = {f"JPEGImages/{s}.jpg": None for s in kinds}
    for s, (suffix, image) in kinds.items():
        data = io.BytesIO()
        image.save(data, "jpeg" if suffix == ".jpg" else "png")
        pictures[f"JPEGImages/{s}{suffix}"] = data.getvalue()
    pictures["ImageSets/Main/train.txt"] = "\n".join(kinds)
    index = opened(voc(tmp_path / "d", pictures=pictures))
    data = DetectionDataset(index, "train", index.names, ModelConfig(min_size=240, max_size=320))
    batch = collate([data.load(0, int(row)) for row in data.rows])
    assert batch.images.shape == (6, 3, 256, 320) and batch.images.dtype == torch.uint8
    assert torch.equal(batch.images[0], batch.images[1])  # alpha is dropped: a transparent picture and its twin are the same
    assert np.array_equal(batch.images[0, :, :240].permute(1, 2, 0), PIXELS)


def test_case_27_small_boxes_are_told_before_training_with_the_setting_to_change(tmp_path, told_before_training):
    wide = {f"JPEGImages/{s}.jpg": picture(pixels=np.full((200, 1200), 120, np.uint8)) for s in STEMS}
    root = voc(tmp_path / "d", {s: xml(obj(100, 90, 109, 99), head="") for s in STEMS}, wide)
    told = told_before_training(root)
    assert ("boxes-small: 12 of 12 boxes of crack (100%) are below 8 px after resizing to model.min_size=64, model.max_size=96; "
            "raise model.min_size to 720 and model.max_size to 1070, or set model.tiles=") in told


IDS = {"001": "train", "010": "train", "NA": "val", "1e5": "val", "true": "val"}


def test_case_28_names_in_a_table_of_splits_are_text_and_the_table_is_found(tmp_path, opened):
    files = {f"images/{n}.jpg": PICTURE for n in IDS} | {f"annotations/{n}.xml": xml() for n in IDS}
    root = tree(tmp_path / "d", files | {"split.csv": "image_id,split\n" + "".join(f"{n},{s}\n" for n, s in IDS.items())})
    for settings in ({"split_csv": "split.csv"}, {}, {"format": "voc", "split_csv": "split.csv"}):
        index = opened(root, **settings)
        assert {Path(index.path(i)).stem: index.splits[s] for i, s in enumerate(index.split_ids)} == IDS
    assert "split.csv" in said(opened(root), NOTE)[0]
    assert "split.csv: is not used" in said(opened(root, format="voc"), NOTE)[0]
    (root / "other.csv").write_text("image_id,split\n001,train\n")  # which of two, nobody can tell
    assert "split.csv" not in said(opened(root), NOTE)[0] and opened(root).splits == ["test", "train", "val"]


def test_case_32_annotations_one_level_too_high_or_elsewhere(tmp_path, opened):
    root = voc(tmp_path / "d", pictures={"other/z.xml": xml()})
    for place in (".", "./", ""):
        index = opened(root, annotations=place)
        assert index.describe("val") == "4 pictures (0 without defects), 8 boxes: crack 4, porosity 4"
    for missing in ("error", "negative"):
        with pytest.raises(DataError) as caught:
            opened(root, annotations="other", missing=missing)
        assert str(caught.value) == (f"{root}: no annotation for any of 12 pictures; for JPEGImages/w01.jpg a file of the same "
                                     f"name was looked for everywhere below {root}/other; found are other/z.xml")
    with pytest.raises(DataError, match=rf"/ann: no such folder.*a folder below {root}, which holds Annotations, ImageSets"):
        opened(root, annotations="ann")


def test_case_32_labels_in_a_folder_of_another_name_are_read(tmp_path, opened):
    root = yolo(tmp_path / "d")
    (root / "labels").rename(root / "label")
    assert opened(root).describe("train") == "8 pictures (0 without defects), 16 boxes: crack 8, porosity 8"


COLUMNS = "image,x1,y1,x2,y2,class\n"


def table(root):
    return tree(root, {"a.jpg": PICTURE, "b.jpg": PICTURE, "train.csv": f"{COLUMNS}a.jpg,1,2,30,40,crack\n"})


@pytest.mark.parametrize(("write", "file", "text"), [
    (voc, "ImageSets/Main/val.txt", "\n"), (table, "val.csv", COLUMNS),
    (coco, "val/_annotations.coco.json", '{"images": [], "annotations": [], "categories": []}')])
def test_case_32_a_val_split_that_is_there_and_empty_stops_the_run(tmp_path, opened, write, file, text):
    root = write(tmp_path / "d")
    (root / file).write_text(text)
    with pytest.raises(DataError, match=rf"{file}: names no picture for val"):
        opened(root)
    (root / "test").mkdir()
    (root / file).rename(root / file.replace("val", "test"))  # which tools write without need
    assert [f.kind for f in opened(root).findings if f.level == DROPPED] == ["split-missing"]


@pytest.mark.parametrize("args", [
    "task=check dataset.root=../data", "-m task=check dataset.root=../data", "task=check -m dataset.root=../data",
    "task=check dataset.root=../data hydra.job.chdir=true -m"])
def test_case_34_a_relative_path_is_the_shells_and_an_error_shows_it_whole(tmp_path, args):
    (tmp_path / "x").mkdir()
    done = weldtrain(*args.split(), cwd=tmp_path / "x")
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 2 and f"dataset.root={tmp_path}/data: no such folder" in last


@pytest.mark.parametrize(("override", "text"), [
    ("train.learning_rat=0.1", "did you mean 'optimizer.lr'"), ("+train.lrr=0.1", "did you mean 'optimizer.lr'"),
    ("~train.lr", "did you mean 'optimizer.lr'"), ("~trainer.epochs", "trainer.epochs: cannot be deleted")])
def test_case_36_no_sign_before_a_key_makes_a_wrong_one_right(override, text):
    with pytest.raises(ConfigError, match=text):
        overrides.check_override_keys([override])


def test_case_37_an_installed_package_brings_its_configs_and_is_not_written_to(tmp_path):
    root = Path(config.__file__).parents[1]
    assert '"conf" = "weldtrain/conf"' in (root / "pyproject.toml").read_text()  # how hatch makes the wheel
    site = tmp_path / "site with a blank"
    shutil.copytree(root / "weldtrain", site / "weldtrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "conf", site / "weldtrain/conf")
    (tmp_path / "my/experiment").mkdir(parents=True)
    (tmp_path / "my/experiment/mine.yaml").write_text("# @package _global_\ntrainer:\n  epochs: 7\n")
    before = sorted(site.rglob("*"))
    for path in before:
        path.chmod(0o555)
    env = {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
    shown = weldtrain("--help", cwd=tmp_path, **env)
    assert shown.returncode == 0 and b"fasterrcnn_resnet18_fpn" in shown.stdout
    mine = weldtrain("--config-dir", "my", "experiment=mine", "--cfg", "job", "-p", "trainer", cwd=tmp_path, **env)
    assert b"epochs: 7" in mine.stdout and b"hang_s: 900" in mine.stdout, mine.stderr
    assert sorted(site.rglob("*")) == before
    for path in before:
        path.chmod(0o755)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="Linux tells which pages a process has made its own")
def test_case_41_reading_the_whole_index_makes_no_page_of_it_ones_own(tmp_path):
    n = 20_000
    name = b"images/one.jpg"
    arrays = {
        "path_bytes": np.frombuffer(name * n, np.uint8), "path_offsets": np.arange(n + 1) * len(name),
        "sizes": np.full((n, 2), 64, np.int32), "grey": np.ones(n, bool), "split_ids": np.zeros(n, np.uint8),
        "box_offsets": np.arange(n + 1) * 5, "boxes": np.ones((5 * n, 4), np.float32), "name_ids": np.zeros(5 * n, np.int32),
        "flags": np.zeros(5 * n, np.uint8), "lines": np.zeros(5 * n, np.int32)}
    header = {"root": str(tmp_path), "stamp": "", "format": "voc", "names": ["crack"], "splits": ["train"], "classes": [],
              "findings": []}
    index_module.write_index(tmp_path / "large.idx", header, arrays)
    code = """if True:
        import sys
        from weldtrain.data.index import AnnotationIndex
        index = AnnotationIndex(sys.argv[1])
        objects = len(index.__dict__)
        for row in range(len(index)):
            index.path(row), index.boxes[index.box_rows(row)], index.ignored(index.box_rows(row))
        parts = open("/proc/self/smaps").read().split("large.idx")[1:]
        own = [int(line.split()[1]) for part in parts for line in part.splitlines()[:20] if line.startswith("Anonymous")]
        print(len(own), sum(own), len(index.__dict__) - objects)"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "large.idx"], capture_output=True, text=True, timeout=60)
    maps, copied_kb, new = map(int, done.stdout.split())
    assert maps >= 1 and copied_kb == 0 and new == 0


def test_case_46_a_copy_elsewhere_another_list_of_classes_and_a_forced_scan_are_seen(tmp_path, opened, monkeypatch):
    root = yolo(tmp_path / "d")
    (root / "data.yaml").rename(tmp_path / "kept.yaml")
    first = opened(root, classes=["crack", "porosity"])
    assert opened(root, classes=["crack", "pore"]).names == ["crack", "pore"] and first.names == ["crack", "porosity"]
    shutil.copytree(root, tmp_path / "copy")
    copy = opened(tmp_path / "copy", classes=["crack", "porosity"])
    assert copy.root == tmp_path / "copy" and copy.file != first.file
    monkeypatch.setattr(index_module, "stamp", lambda _: first.stamp)  # a file system on which no change shows
    for label in (root / "labels").rglob("*.txt"):
        label.write_text("1 .5 .5 .2 .2\n")
    assert len(opened(root, classes=["crack", "porosity"]).boxes) == 24
    assert len(opened(root, classes=["crack", "porosity"], rescan=True).boxes) == 12
