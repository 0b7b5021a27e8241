"""Broken files of every format, found by hypothesis: a record, a finding or a DataError, and every box inside its picture."""

import json
from xml.sax.saxutils import escape

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats import open_reader
from weldtrain.formats.record import DROPPED, ERROR, MIN_SIDE_PX, NOTE, Finding

FUZZ = settings(max_examples=80, deadline=None, derandomize=True)
PICTURES = {"a.jpg": (64, 48), "b.png": (40, 90)}

# What breaks readers: odd numbers, markup out of place, other alphabets, control characters.
NUMBERS = ["0", "-1", "1.0", "0.5", "47.9", "1e999", "-1e308", "nan", "inf", "-inf", "1_0", "9" * 400, "0x10", "1e-320"]
TOKENS = [*NUMBERS, "", "None", "true", "a", "a.jpg", "../a", "C:\\a.jpg", "crack", "裂", "\ufeff", "\x00", "\x1b", "\u2028",
          "\r", "\n", "\t", " ", ",", ";", "'", '"', '"""', "#", ": ", "- ", "&a ", "*a", "!!python/object:os.system ",
          "[", "]", "{", "}", "<", ">", "&", "&x;", "<!--", "]]>", "<?xml", "</annotation>", "\ud7ff"]
corner = st.sampled_from(NUMBERS) | st.floats(-99, 199).map(str)
token = st.sampled_from(TOKENS) | st.floats().map(str) | st.integers(-3, 100).map(str) | st.text(max_size=4)
raw = st.binary(max_size=80) | st.text(max_size=80).map(lambda t: t.encode("utf-8", "replace"))


def mutated(*documents: str):
    """Bytes of one of the documents after a few cuts, repetitions and insertions, in some encoding."""
    edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), token, st.integers(0, 3)), max_size=5)

    def edit(text: str, changes, encoding: str) -> bytes:
        for where, length, inserted, repeat in changes:
            at = int(where * len(text))
            text = text[:at] + inserted + text[at : at + length] * repeat + text[at + length :]
        return text.encode(encoding, "replace")

    encodings = st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "gbk"])
    return st.builds(edit, st.sampled_from(documents), edits, encodings) | raw


@pytest.fixture(scope="module")
def survives(tmp_path_factory):
    """Reads the two pictures with these files beside them, and checks all that comes of it."""
    root = tmp_path_factory.mktemp("fuzz")
    for name, size in PICTURES.items():
        Image.new("RGB", size).save(root / name)

    def check(fmt: str, files: dict[str, bytes], **options) -> None:
        for old in root.iterdir():
            if old.name not in (*PICTURES, *files):
                old.unlink()
        for name, data in files.items():
            (root / name).write_bytes(data)
        try:
            reader = open_reader(DatasetConfig(format=fmt, root=str(root), **options))
            records = [reader.read(i) for i in range(len(reader.images))]
        except DataError as e:
            assert "\n" not in str(e) and len(str(e)) < 3000
            return
        for finding in (*reader.findings, *(f for r in records for f in r.findings)):
            assert isinstance(finding, Finding) and finding.level in (ERROR, DROPPED, NOTE) and finding.text and finding.line >= 0
        for record in records:
            boxes, (width, height) = record.boxes, PICTURES[record.image]
            assert boxes.dtype == np.float32 and boxes.shape == (len(record.names), 4) and np.isfinite(boxes).all()
            assert (boxes >= 0).all() and (boxes <= [width, height, width, height]).all()
            assert (boxes[:, 2:] - boxes[:, :2] >= MIN_SIDE_PX - 1e-4).all()
            assert len(record.flags) == len(record.lines) == len(boxes) and all(isinstance(n, str) and n for n in record.names)

    return check


def obj(name="crack", box=(1, 2, 30, 40), tags=("xmin", "ymin", "xmax", "ymax")):
    return f"<object><name>{name}</name><bndbox>{''.join(f'<{t}>{v}</{t}>' for t, v in zip(tags, box))}</bndbox></object>"


XML = ('<?xml version="1.0" encoding="utf-8"?>\n<annotation><size><width>64</width><height>48</height></size>'
       + obj() + obj("裂") + "</annotation>")


@FUZZ
@given(mutated(XML, XML.replace("utf-8", "utf-16"), "<!DOCTYPE a [<!ENTITY x 'y'>]>" + XML[38:]), mutated(XML))
def test_xml(survives, one, two):
    survives("voc", {"a.xml": one, "b.xml": two})


@FUZZ
@given(st.lists(st.tuples(token, st.lists(corner | token, min_size=4, max_size=4)), max_size=4),
       st.sampled_from(["xmin", "ymax", "name", "bndbox"]))
def test_xml_of_odd_values(survives, objects, tag):
    text = "<annotation>" + "".join(obj(escape(n), map(escape, v)) for n, v in objects) + "</annotation>"
    data, more = (t.encode("utf-8", "replace") for t in (text, text.replace(f"<{tag}>", f"<{tag}/><{tag}>")))
    survives("voc", {"a.xml": data, "b.xml": more}, one_based=True)


share = st.floats(-0.5, 2.1).map(str) | st.sampled_from(NUMBERS)
row = st.lists(token, max_size=12) | st.tuples(st.sampled_from(["0", "1", "2", "1.0"]), *[share] * 4) | st.tuples(
    st.just("1"), *[share] * 8)


@FUZZ
@given(st.lists(row, max_size=5), mutated("0 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.9 0.1 0.9 0.5\n"), mutated("crack\nporosity\n"))
def test_yolo_rows(survives, rows, label, classes):
    text = "\n".join(" ".join(r) for r in rows).encode("utf-8", "replace")
    survives("yolo", {"a.txt": text, "b.txt": label, "classes.txt": classes})
    survives("yolo", {"a.txt": text, "b.txt": label, "data.yaml": b"names: [crack, porosity]"})


value = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 99) | st.floats() | token,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["id", "name", "0", "1"]), inner, max_size=3),
    max_leaves=6)
KEYS = ["path", "train", "val", "test", "nc", "names", "kpt_shape"]
YAML = "path: ../data\ntrain: ../train/images\nval: [., a.txt]\nnc: 2\nnames: [crack, porosity]\nkpt_shape: [17, 3]\n"


@FUZZ
@given(st.dictionaries(st.sampled_from(KEYS), value), mutated(YAML))
def test_yolo_yaml(survives, described, text):
    labels = {"a.txt": b"0 .5 .5 .2 .2\n", "b.txt": b""}
    dumped = yaml.safe_dump({"names": ["crack"], **described}).encode("utf-8", "replace")
    for option in ({}, {"classes": ["crack"]}):
        survives("yolo", {**labels, "data.yaml": dumped}, **option)
    survives("auto", {**labels, "data.yaml": text})


number = st.integers(-5, 70) | st.floats(-99, 199) | st.floats() | value
key = st.sampled_from([0, 1, 3]) | value
entry = value | st.fixed_dictionaries({}, optional={
    "id": key, "file_name": st.sampled_from(["a.jpg", "b.png", "x/b.png", "../a.jpg"]) | value,
    "name": st.sampled_from(["crack", "裂"]) | value, "width": number, "height": number})
annotation = value | st.fixed_dictionaries({"image_id": key, "category_id": st.just(3) | key}, optional={
    "id": key, "iscrowd": number, "ignore": number, "bbox": st.lists(number, min_size=4, max_size=4) | value,
    "segmentation": st.lists(st.lists(number, min_size=6, max_size=8), max_size=2) | value})
COCO = json.dumps({"images": [{"id": 1, "file_name": "a.jpg", "width": 64, "height": 48}, {"id": 0, "file_name": "b.png"}],
                   "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 2, 30, 40.5], "iscrowd": 0},
                                   {"id": 1, "image_id": 0, "category_id": 3, "segmentation": [[1, 2, 30, 2, 30, 40]]}],
                   "categories": [{"id": 3, "name": "crack"}]})


@FUZZ
@given(st.fixed_dictionaries({"images": st.lists(entry, max_size=4) | value,
                              "annotations": st.lists(annotation, max_size=4) | value,
                              "categories": st.lists(entry, max_size=4) | value}), mutated(COCO))
def test_coco(survives, content, text):
    survives("coco", {"x.json": text})
    survives("coco", {"x.json": json.dumps(content).encode()})
    for name, sound in json.loads(COCO).items():  # with one part broken, the others are reached
        broken = sound + content[name] if isinstance(content[name], list) else content[name]
        survives("coco", {"x.json": json.dumps({**json.loads(COCO), name: broken}).encode()})


COLUMNS = ["image", "filename", "x1", "y1", "x2", "y2", "class", "xmin", "ymin", "xmax", "ymax", "width", "height", "x", "y",
           "w", "h", "bbox", "split", "id", "label", "difficult"]
TABLE = 'image,x1,y1,x2,y2,class,split\na.jpg,1,2,30,40,crack,train\n"b.png",1.5,2,3e1,40, 裂 ,val\nb,,,,,,val\n'


@FUZZ
@given(st.lists(st.sampled_from(COLUMNS) | token, max_size=8), st.sampled_from(",;\t"), mutated(TABLE),
       st.lists(st.lists(token, max_size=8) | st.tuples(*[corner] * 4, token), max_size=5))
def test_csv(survives, header, separator, text, rows):
    for columns in (header, ["image", "x1", "y1", "x2", "y2", "class"], []):
        lines = [separator.join(r) for r in ([columns] if columns else []) + [["a", *r] for r in rows]]
        survives("csv", {"boxes.csv": "\n".join(lines).encode("utf-8", "replace")}, missing="negative")
    survives("csv", {"boxes.csv": text}, annotations="boxes.csv")


@FUZZ
@given(mutated("image_id,split\na,train\nb,val\n"), mutated("a\nb.png 1\n"), st.sampled_from(["auto", "voc", "welding_v2"]))
def test_lists_of_splits(survives, split_csv, listed, fmt):
    name = "train_val_test_split.csv"
    files = {"a.xml": XML.encode(), "b.xml": XML.encode(), "train.txt": listed, "val.txt": b"b", name: split_csv}
    survives(fmt, files, split_csv=name if fmt == "welding_v2" else None)


@FUZZ
@given(st.fixed_dictionaries({}, optional={
    "a.xml": mutated(XML), "b.txt": mutated("0 .5 .5 .2 .2\n"), "classes.txt": mutated("crack\n"), "data.yaml": mutated(YAML),
    "x.json": mutated(COCO), "boxes.csv": mutated(TABLE)}))
def test_everything_at_once(survives, files):
    survives("auto", files, missing="negative")
