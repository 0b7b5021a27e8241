"""task=check: says what is there and what is wrong, changes nothing, and its exit code can be trusted."""

import csv
import hashlib
import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from weldtrain.errors import DataError
from weldtrain.tasks import check
from weldtrain.telemetry.record import RunRecord

RNG = np.random.default_rng(2)


def texture(size=(64, 48)):
    return Image.fromarray(RNG.integers(0, 255, (6, 8), np.uint8)).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def yolo(tmp_path):
    """24 pictures of two classes with their own splits; two of them defect-free."""
    root = tmp_path / "mine"
    for i in range(24):
        split = ("train", "val")[i % 4 == 0]
        for kind in ("images", "labels"):
            (root / split / kind).mkdir(parents=True, exist_ok=True)
        texture().save(root / split / "images" / f"{i}.png")
        (root / split / "labels" / f"{i}.txt").write_text("" if i in (3, 8) else f"{i % 2} .5 .5 .5 .5\n")
    (root / "data.yaml").write_text("train: train/images\nval: val/images\nnames: [crack, pore]\n")
    return root


@pytest.fixture
def checked(configured, tmp_path, capsys):
    """`checked(root, "dataset.strict=true")`: the run directory, the rows of findings.csv, what was printed."""
    count = iter(range(100))

    def run(root, *overrides):
        cfg = configured("task=check", "dataset=auto", f"dataset.root={root}", "dataset.classes=null",
                         f"cache_dir={tmp_path / 'cache'}", *overrides)
        folder = tmp_path / f"run{next(count)}"
        error = None
        try:
            with RunRecord(folder, {}) as record:
                check.run(cfg, record)
        except DataError as e:
            error = e
        with open(folder / "findings.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return folder, rows, capsys.readouterr().out, error

    return run


def kinds(rows):
    return {row["kind"] for row in rows}


def state(root):
    return {p: (p.stat().st_mtime_ns, hashlib.sha1(p.read_bytes()).digest() if p.is_file() else b"") for p in root.rglob("*")}


def test_sound_data_is_usable_counted_and_untouched(yolo, checked):
    before = state(yolo)
    folder, rows, out, error = checked(yolo)
    assert error is None and state(yolo) == before
    for row, train, val in (("pictures", 18, 6), ("defect-free", 1, 1), ("boxes", 17, 5)):
        assert re.search(rf"{row} *│ *{train} *│ *{val} *│", out)
    assert {row["level"] for row in rows} == {"note"} and "recognised" in kinds(rows)
    page = (folder / "report.html").read_text("utf-8")
    assert "Usable." in page and not re.search(r'(src|href)="(?!data:)', page)


def test_everything_wrong_is_listed_at_once_with_its_line_and_the_data_is_refused(yolo, checked):
    (yolo / "train/labels/1.txt").write_text("7 .5 .5 .5 .5\n0 .5 .5 nan .5\n")
    (yolo / "train/labels/2.txt").write_text("0 .5 .5 .5 .5 .9\n")
    whole = (yolo / "train/images/5.png").read_bytes()
    (yolo / "train/images/5.png").write_bytes(whole[:-60] + bytes(20) + whole[-40:])
    (yolo / "val/images/4.png").write_bytes(b"")
    (yolo / "val/labels/12.txt").unlink()
    _, rows, out, error = checked(yolo)
    found = {(row["level"], row["kind"], row["file"], row["line"]) for row in rows}
    assert {("error", "class-number", "train/labels/1.txt", "1"), ("dropped", "box-not-finite", "train/labels/1.txt", "2"),
            ("error", "row-six-columns", "train/labels/2.txt", "1"), ("error", "picture-bad", "train/images/5.png", "0"),
            ("error", "picture-bad", "val/images/4.png", "0"), ("error", "annotation-missing", "val/images/12.png", "0")} <= found
    assert error.exit_code == 2 and "5 findings must be mended" in str(error)
    assert "train/labels/1.txt:1" in out


def test_bad_pictures_are_left_out_where_that_is_asked_for(yolo, checked):
    (yolo / "val/images/4.png").write_bytes(b"")
    assert checked(yolo)[3] is not None
    _, rows, _, error = checked(yolo, "dataset.bad_images=skip")
    assert error is None
    assert [(r["level"], r["file"]) for r in rows if r["kind"] == "picture-bad"] == [("dropped", "val/images/4.png")]
    assert checked(yolo, "dataset.bad_images=skip", "dataset.strict=true")[3] is not None


def test_the_same_data_gives_the_same_file_of_findings_wherever_it_lies(yolo, checked, tmp_path):
    (yolo / "train/labels/1.txt").write_text("7 .5 .5 .5 .5\n")
    shutil.copy(yolo / "train/images/2.png", yolo / "val/images/0.png")
    shutil.copytree(yolo, tmp_path / "elsewhere" / "copy")
    first, again, moved = (checked(r)[0] / "findings.csv" for r in (yolo, yolo, tmp_path / "elsewhere" / "copy"))
    assert first.read_bytes() == again.read_bytes() == moved.read_bytes()
    assert str(tmp_path).encode() not in first.read_bytes()


def test_a_picture_in_two_splits_is_shown_and_refused_if_wanted(yolo, checked):
    shutil.copy(yolo / "train/images/2.png", yolo / "val/images/0.png")
    folder, rows, _, error = checked(yolo)
    (leak,) = [row for row in rows if row["kind"] == "leak-twin"]
    assert (leak["level"], leak["file"]) == ("note", "val/images/0.png") and "train/images/2.png" in leak["text"]
    page = (folder / "report.html").read_text("utf-8")
    assert "1 of 6 val pictures (17%) are the same or nearly the same as one in train" in page
    assert error is None and checked(yolo, "dataset.leak=error")[3] is not None


def test_names_of_classes_are_compared_with_those_that_were_asked_for(yolo, checked):
    _, rows, _, error = checked(yolo, "dataset.classes=[crack,pores]")
    assert [(r["text"], r["fix"]) for r in rows if r["kind"] == "class-unknown"] == [
        ("class 'pore' (11 boxes) is not in dataset.classes", "did you mean 'pores'?")]
    assert error is not None
    (yolo / "data.yaml").write_text("train: train/images\nval: val/images\nnames: [slag, crack, Crack]\n")
    for i in range(24):
        label = next(yolo.glob(f"*/labels/{i}.txt"))
        label.write_text(label.read_text().replace("1 ", "2 ").replace("0 ", "1 ", 1) if i % 2 == 0 else "2 .5 .5 .5 .5\n")
    texts = {r["kind"]: r["text"] for r in checked(yolo)[1]}
    assert "differs from" in texts["class-alike"] and "do the numbers count from 1?" in texts["class-unused"]


def test_a_class_that_train_or_val_lacks_is_told(yolo, checked):
    for label in (yolo / "val/labels").iterdir():
        label.write_text(label.read_text().replace("1 ", "0 "))
    texts = [r["text"] for r in checked(yolo)[1] if r["kind"] == "class-absent"]
    assert texts == [] or all("in val: its AP cannot be told" in t for t in texts)
    for label in (yolo / "train/labels").iterdir():
        label.write_text("0 .5 .5 .5 .5\n")
    (yolo / "val/labels/0.txt").write_text("1 .5 .5 .5 .5\n")
    texts = [r["text"] for r in checked(yolo)[1] if r["kind"] == "class-absent"]
    assert texts == ["class 'pore' (1 boxes) has none in train: it cannot be learned"]


def test_an_empty_split_makes_data_unusable(yolo, checked):
    shutil.rmtree(yolo / "val")
    (yolo / "data.yaml").write_text("train: train/images\nnames: [crack, pore]\n")
    _, rows, _, error = checked(yolo, "dataset.split.make=never")
    assert "split-empty" in kinds(rows) and error.exit_code == 2
    _, rows, _, error = checked(yolo)
    assert error is None and "split-made" in kinds(rows)


def test_names_from_data_are_no_markup(yolo, checked):
    evil = "<script>alert(1)</script>"
    (yolo / "data.yaml").write_text(f"train: train/images\nval: val/images\nnames: ['{evil}', '\"><img src=x onerror=y>']\n")
    os.rename(yolo / "train/images/2.png", yolo / "train/images/<i>&'2.png")
    os.rename(yolo / "train/labels/2.txt", yolo / "train/labels/<i>&'2.txt")
    (yolo / "train/labels/<i>&'2.txt").write_text("0 .5 .5 nan .5\n")
    folder, _, _, error = checked(yolo)
    page = (folder / "report.html").read_text("utf-8")
    assert error is None and not any(raw in page for raw in ("<script", "<img src=x", "<i>"))
    assert "&lt;script&gt;alert(1)" in page and "Content-Security-Policy" in page


def test_sixteen_bit_and_grey_pictures_are_shown(tmp_path, checked):
    root = tmp_path / "plates"
    root.mkdir()
    for i in range(8):
        plate = np.asarray(texture(), np.uint16) * 16
        Image.fromarray(plate).save(root / f"{i}.png")
        (root / f"{i}.txt").write_text("0 .5 .5 .5 .5\n")
    (root / "classes.txt").write_text("pore\n")
    folder, _, _, error = checked(root)
    assert error is None and "8 of 8 pictures have one channel" in (folder / "report.html").read_text("utf-8")


def test_coordinates_that_count_from_one_are_suspected(tmp_path, checked):
    root = tmp_path / "voc"
    root.mkdir()
    for i in range(12):
        texture().save(root / f"{i}.png")
        (root / f"{i}.xml").write_text("<annotation><object><name>pore</name><bndbox><xmin>1</xmin><ymin>1</ymin>"
                                       f"<xmax>64</xmax><ymax>{30 + i}</ymax></bndbox></object></annotation>")
    assert "coordinates-from-1" in kinds(checked(root)[1])
    assert "coordinates-from-1" not in kinds(checked(root, "dataset.one_based=true")[1])


def test_real_data_is_read_as_its_readme_says(real_data, checked):
    _, rows, out, error = checked(real_data / "workpiece_crack_yolo")
    assert error is None
    assert re.search(r"pictures *│ *60 *│ *16 *│ *2 *│", out) and re.search(r"crack *│ *57 *│ *16 *│ *2 *│", out)
    assert len([r for r in rows if r["kind"] == "leak-twin" and r["file"].startswith("val/")]) == 16
    _, rows, _, error = checked(real_data / "workpiece_crack_yolo", "dataset.split.make=always")
    assert error is None and not [r for r in rows if r["kind"] == "leak-source"]


def test_a_synthetic_set_can_be_checked_as_well(configured, tmp_path, capsys):
    cfg = configured("task=check")
    with RunRecord(tmp_path / "run", {}) as record:
        check.run(cfg, record)
    assert record.summary["usable"] and record.summary["pictures"] == 12


def test_what_a_decoder_complains_of_is_told_with_the_pictures_name(yolo, checked):
    noise = Image.fromarray(RNG.integers(0, 255, (120, 160, 3), np.uint8))
    for i in (1, 2, 3):
        (yolo / f"train/images/{i}.png").unlink()
        noise.save(yolo / f"train/images/{i}.jpg")
    data = bytearray((yolo / "train/images/2.jpg").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    (yolo / "train/images/2.jpg").write_bytes(data)
    _, rows, _, error = checked(yolo)
    (row,) = [r for r in rows if r["kind"] == "picture-complaint"]
    assert row["file"] == "train/images/2.jpg" and "Corrupt JPEG data" in row["text"] and error is None
