"""The article's layout as real tools and people write it: every oddity is read right or refused by name."""

import hashlib
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weldtrain.config import DatasetConfig
from weldtrain.data.indexing import open_index
from weldtrain.errors import DataError
from weldtrain.formats import open_reader
from weldtrain.formats.record import DIFFICULT, DROPPED, ERROR, NOTE, Box, Finding, Size
from weldtrain.formats.voc import read_voc


def obj(name="crack", box=(10, 20, 50, 60), more=""):
    x1, y1, x2, y2 = box
    return (f"<object><name>{name}</name>{more}<bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin>"
            f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>\n")


def voc(*objects, head=""):
    return f"{head}<annotation>\n<filename>elsewhere.jpg</filename><path>C:\\me\\x.jpg</path>\n{''.join(objects)}</annotation>"


def folder(root: Path, pictures: dict[str, str | bytes | None], split=None) -> DatasetConfig:
    """A welding_v2 folder: picture file name -> its XML (None: no file). All are in train unless `split` is the CSV."""
    (root / "images").mkdir(parents=True)
    (root / "annotations").mkdir()
    for name, xml in pictures.items():
        picture = root / "images" / name
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (320, 240)).save(picture, {"jfif": "jpeg", "tif": "tiff", "jpg": "jpeg"}.get(
            name.rpartition(".")[2].lower(), name.rpartition(".")[2].lower()))
        if xml is not None:
            target = root / "annotations" / (name.rpartition(".")[0] + ".xml")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(xml if isinstance(xml, bytes) else xml.encode())
    ids = split or "image_id,split\n" + "".join(f"{n.rpartition('.')[0]},train\n" for n in pictures)
    (root / "train_val_test_split.csv").write_text(ids, "utf-8")
    return layout(root)


def layout(root: Path) -> DatasetConfig:
    return DatasetConfig(format="welding_v2", root=str(root), images="images", annotations="annotations",
                         split_csv="train_val_test_split.csv")


def read(cfg):
    reader = open_reader(cfg)
    return {r.image.removeprefix("images/"): r for r in map(reader.read, range(len(reader.images)))}


def splits(cfg):
    reader = open_reader(cfg)
    return {image.removeprefix("images/"): split for image, split in zip(reader.images, reader.splits)}


def xml_file(tmp_path, text):
    path = tmp_path / "a.xml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def boxes_in(path):
    """The boxes of a file in which nothing is wrong."""
    items = list(read_voc(path, "a.xml"))
    assert not [i for i in items if isinstance(i, Finding)]
    return [i for i in items if isinstance(i, Box)]


def fault_of(path):
    """Place and text of the one error of a file, which names its own kind and a way out."""
    (finding,) = [i for i in read_voc(path, "a.xml") if isinstance(i, Finding)]
    assert (finding.level, finding.file) == (ERROR, "a.xml") and finding.kind and finding.fix
    return f"{finding.where()}: {finding.text}"


def test_floats_blanks_and_exponents_are_kept(tmp_path):
    box = boxes_in(xml_file(tmp_path, voc(obj(box=(" 12 ", "45.70000076293945", "1e2", "90")))))[0]
    assert box.corners == (12.0, 45.70000076293945, 100.0, 90.0)


@pytest.mark.parametrize("value", ["abc", "", "1_0", "0x10", "1,5"])
def test_what_is_no_number_names_file_line_and_tag_and_stops_the_run(tmp_path, cache, value):
    text = voc(obj(), obj(box=(10, 20, value, 60)), obj("slag"))
    path = xml_file(tmp_path, text)
    assert fault_of(path) == f"a.xml:4: <xmax> holds '{value}'"
    assert [i.name for i in read_voc(path, "a.xml") if isinstance(i, Box)] == ["crack", "slag"]
    with pytest.raises(DataError, match=rf"annotations/a\.xml:4: <xmax> holds '{value}'"):
        open_index(folder(tmp_path / "d", {"a.jpg": text}), cache)


@pytest.mark.parametrize("value", ["nan", "inf", "-Infinity"])
def test_a_box_that_is_not_finite_is_dropped_by_name_and_line(tmp_path, value):
    record = read(folder(tmp_path, {"a.jpg": voc(obj("slag"), obj(box=(10, 20, value, 60)))}))["a.jpg"]
    assert record.names == ["slag"]
    (finding,) = record.findings
    assert (finding.level, finding.where()) == (DROPPED, "annotations/a.xml:4") and "object 2 (crack)" in finding.text


@pytest.mark.parametrize(("encoding", "declared", "bom"), [
    ("gbk", "GBK", b""), ("gb18030", "gb2312", b""), ("utf-8", "utf-8", b"\xef\xbb\xbf"), ("utf-16", "utf-16", b""),
    ("latin-1", "iso-8859-1", b"")])
def test_every_declared_encoding_is_read(tmp_path, encoding, declared, bom):
    name = "裂纹" if encoding != "latin-1" else "Lötfehler"
    text = voc(obj(name), head=f'<?xml version="1.0" encoding="{declared}"?>\n')
    assert boxes_in(xml_file(tmp_path, bom + text.encode(encoding)))[0].name == name


def test_a_wrongly_declared_encoding_says_so(tmp_path):
    text = voc(obj("裂纹"), head='<?xml version="1.0" encoding="utf-8"?>\n')
    assert "does not hold the encoding it declares" in fault_of(xml_file(tmp_path, text.encode("gbk")))


def test_entities_are_refused_and_never_opened(tmp_path):
    (tmp_path / "secret").write_text("TOP SECRET")
    external = f'<!DOCTYPE a [<!ENTITY x SYSTEM "file://{tmp_path}/secret">]>\n' + voc(obj("&x;"))
    layers = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
    bomb = f'<!DOCTYPE a [<!ENTITY l0 "lol">{layers}]>\n' + voc(obj("&l9;"))
    for text in (external, bomb):
        path = xml_file(tmp_path, text)
        assert "SECRET" not in fault_of(path) and "lollol" not in fault_of(path)
        assert all(isinstance(i, Finding) for i in read_voc(path, "a.xml"))
    plain = '<!DOCTYPE annotation>\n' + voc(obj())
    assert len(boxes_in(xml_file(tmp_path, plain))) == 1


@pytest.mark.parametrize(("text", "what"), [
    ("", "is empty"), ("   ", "is empty"), ("<annotation><object>", r":1: is not well-formed"), ("not xml", "is not well-formed"),
    ("\x00\x01", "is not well-formed"), ("<svg/>", "no Pascal VOC annotation: its root is <svg>"),
    (f"<annotation>{' ' * (33 << 20)}</annotation>", "larger than 32 MB")], ids=range(7))
def test_broken_files_are_named_and_stop_the_run(tmp_path, cache, text, what):
    assert re.search(what, fault_of(xml_file(tmp_path, text)))
    with pytest.raises(DataError, match=rf"annotations/b\.xml.*{what}"):
        open_index(folder(tmp_path / "d", {"a.jpg": voc(obj()), "b.jpg": text}), cache)


def test_a_lost_file_and_all_broken_ones_are_told_together(tmp_path, cache):
    cfg = folder(tmp_path, {f"{i}.jpg": "<annotation" if i % 2 else voc(obj()) for i in range(6)})
    with pytest.raises(DataError, match=r"/1\.xml:1: .*\(and annotations/3\.xml:1, annotations/5\.xml:1: 3 of this kind\)"):
        open_index(cfg, cache)
    index = open_index(cfg, cache, refuse=False)
    assert len(index) == 6 and len(index.boxes) == 3
    assert [f.file for f in index.findings if f.level == ERROR] == [f"annotations/{i}.xml" for i in (1, 3, 5)]
    assert fault_of(tmp_path / "none.xml").startswith("a.xml: cannot be read (No such file")


def test_only_direct_children_count_in_any_order(tmp_path):
    part = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
    text = ("<annotation><object>" + part + "<bndbox><ymax>60</ymax><xmax>50</xmax><ymin>20</ymin><xmin>10</xmin></bndbox>"
            "<difficult>1</difficult><name> slag </name></object></annotation>")
    (box,) = boxes_in(xml_file(tmp_path, text))
    assert (box.corners, box.name, box.flags) == ((10, 20, 50, 60), "slag", DIFFICULT)


def test_boxes_are_clipped_and_empty_ones_dropped_with_their_line(tmp_path):
    cfg = folder(tmp_path, {"a.jpg": voc(obj(box=(-5, -5, 20, 20)), obj(box=(100, 10, 100, 50)), obj(box=(100, 10, 100.2, 50)),
                                         obj(box=(90, 10, 50, 50)), obj(box=(400, 10, 500, 50)), obj(box=(300, 200, 999, 999)))})
    record = read(cfg)["a.jpg"]
    assert record.boxes.tolist() == [[0, 0, 20, 20], [300, 200, 320, 240]] and record.boxes.dtype == np.float32
    assert [f.where() for f in record.findings] == [f"annotations/a.xml:{line}" for line in (4, 5, 6, 7)]
    assert all(f.level == DROPPED and "crack" in f.text for f in record.findings)


def test_pictures_are_found_by_id_whatever_they_are_called(tmp_path):
    names = ["001.jpg", "010.JPG", "NA.Jpeg", "1e5.PNG", "true.tif", "w.v1.003.jpg", "a_jpg.rf.12.jpg", "mit leer zeichen.bmp",
             "焊缝.webp", "sub/deep/x.jfif"]
    records = read(folder(tmp_path, {n: voc(obj()) for n in names}))
    assert sorted(records) == sorted(names) and all(len(r.names) == 1 for r in records.values())


def test_ids_may_carry_extension_path_case_or_blanks(tmp_path):
    csv = "image_id,split\nw02.jpg,train\n./w01,train\n  W03  ,val\nsub\\w04.PNG,val\n"
    cfg = folder(tmp_path, {n: voc(obj()) for n in ("w01.jpg", "w02.jpg", "w03.jpg", "sub/w04.png")}, csv)
    assert splits(cfg) == {"w01.jpg": "train", "w02.jpg": "train", "w03.jpg": "val", "sub/w04.png": "val"}
    assert all(len(r.names) == 1 for r in read(cfg).values())


def test_two_pictures_of_one_name_are_named_both(tmp_path, cache):
    cfg = folder(tmp_path, {"a.jpg": voc(), "a.png": voc()}, "image_id,split\na,train\n")
    with pytest.raises(DataError, match=r"csv:2: 'a' may mean images/a\.jpg or images/a\.png"):
        open_index(cfg, cache)


def test_all_lost_pictures_are_listed_together_and_nothing_outside_is_read(tmp_path, cache):
    Image.new("RGB", (9, 9)).save(tmp_path / "out.jpg")
    cfg = folder(tmp_path / "root", {"a.jpg": voc()}, "image_id,split\na,train\nb,train\n../../out,val\n/etc/passwd,val\n")
    name = "train_val_test_split.csv"
    with pytest.raises(DataError, match=rf"{name}:3: no picture for 'b'.*and {name}:4, {name}:5: 3 of this kind"):
        open_index(cfg, cache)
    reader = open_reader(cfg)
    lost = [f for f in reader.findings if f.level == ERROR]
    assert [(f.line, f.text.split("'")[1]) for f in lost] == [(3, "b"), (4, "../../out"), (5, "/etc/passwd")]
    assert reader.images == ["images/a.jpg"]


@pytest.mark.parametrize(("missing", "count", "level"), [("negative", 3, NOTE), ("skip", 2, DROPPED)])
def test_missing_annotations_follow_the_option_and_are_counted(tmp_path, cache, missing, count, level):
    cfg = folder(tmp_path, {"a.jpg": voc(obj()), "b.jpg": voc(), "c.jpg": None})
    with pytest.raises(DataError, match=r"images/c\.jpg: no annotation in annotations; .*dataset\.missing"):
        open_index(cfg, cache)
    cfg.missing = missing
    records = read(cfg)
    assert len(records) == count and records["b.jpg"].boxes.shape == (0, 4)
    (finding,) = [f for f in open_index(cfg, cache).findings if f.kind == "annotation-missing"]
    assert (finding.level, finding.file) == (level, "images/c.jpg") and "no annotation: " in finding.text


def test_annotations_in_the_wrong_place_stop_the_run_whatever_the_option(tmp_path, cache):
    cfg = folder(tmp_path, {"a.jpg": None, "b.jpg": None})
    (tmp_path / "annotations/other.xml").write_text(voc())
    for cfg.missing in ("negative", "skip"):
        with pytest.raises(DataError, match=r"no annotation for any of 2 pictures; for images/a\.jpg .*annotations/other\.xml"):
            open_index(cfg, cache)
    (tmp_path / "annotations/other.xml").unlink()
    with pytest.raises(DataError, match=r"annotations: no such folder, or no data in it"):
        open_reader(cfg)
    (tmp_path / "annotations/other.xml").write_text(voc())
    cfg.annotations = "labels"
    with pytest.raises(DataError, match=r"labels: no such folder.*holds annotations, images"):
        open_reader(cfg)


def test_the_same_records_whatever_the_order_of_lines(tmp_path):
    pictures = {f"{i}.jpg": voc(obj(box=(i, i, 50 + i, 60))) for i in range(5)}
    one = read(folder(tmp_path / "one", pictures))
    lines = "".join(f"{i},train\n" for i in (3, 1, 4, 0, 2))
    two = read(folder(tmp_path / "two", pictures, "image_id,split\n" + lines))
    assert list(one) == list(two) and all((one[n].boxes == two[n].boxes).all() for n in one)


def test_dot_files_and_unlisted_pictures_are_not_used(tmp_path):
    cfg = folder(tmp_path, {"a.jpg": voc(obj()), "b.jpg": voc(obj())}, "image_id,split\na,train\n")
    (tmp_path / "images" / "._a.jpg").write_bytes(b"mac")
    (tmp_path / "images" / "Thumbs.db").write_bytes(b"win")
    reader = open_reader(cfg)
    assert reader.images == ["images/a.jpg"]
    assert [(f.level, f.file) for f in reader.findings] == [(NOTE, "images/b.jpg"), (NOTE, "annotations/b.xml")]
    assert "1 pictures are not in train_val_test_split.csv" in reader.findings[0].text


def test_links_are_followed_and_circles_are_not(tmp_path):
    real = folder(tmp_path / "real", {"a.jpg": voc(obj())})
    root = tmp_path / "linked"
    root.mkdir()
    for part in ("images", "annotations", "train_val_test_split.csv"):
        os.symlink(tmp_path / "real" / part, root / part)
    os.symlink(".", tmp_path / "real" / "images" / "loop")
    assert list(read(layout(root))) == list(read(real)) == ["a.jpg"]


def test_reading_changes_nothing(tmp_path):
    cfg = folder(tmp_path, {"a.jpg": voc(obj())})

    def state():
        return {p: (p.stat().st_mtime_ns, hashlib.sha1(p.read_bytes()).digest() if p.is_file() else b"")
                for p in tmp_path.rglob("*")}

    before = state()
    read(cfg)
    assert state() == before


def test_real_welds_have_the_counts_of_their_readme(real_data):
    cfg = layout(real_data / "welding_v2_real")
    records = read(cfg)
    assert len(records) == 140 and sum(len(r.names) for r in records.values()) == 487
    assert Counter(splits(cfg).values()) == {"train": 84, "val": 28, "test": 28}
    assert not [f for r in records.values() for f in r.findings if f.level != NOTE]


@pytest.mark.parametrize(("size", "noted"), [
    ("<size><width>0</width><height>0</height></size>", False), ("", False), ("<size/>", False),
    ("<size><width>x</width><height>nan</height></size>", False), ("<size><width>320</width><height>240</height></size>", False),
    ("<size><width>240</width><height>320</height></size>", True), ("<size><width>64</width><height>48</height></size>", True)])
def test_the_size_in_the_xml_is_never_used_and_noted_where_it_is_wrong(tmp_path, size, noted):
    record = read(folder(tmp_path, {"a.jpg": voc(size, obj(box=(1, 2, 310, 230)))}))["a.jpg"]
    assert record.header[:2] == (320, 240) and record.boxes.tolist() == [[1, 2, 310, 230]]
    assert [(f.level, f.where()) for f in record.findings] == [(NOTE, "annotations/a.xml:3")] * noted


def test_size_and_boxes_come_in_one_pass(tmp_path):
    size = "<size><width>640</width><height>480</height></size>\n"
    assert [*map(type, read_voc(xml_file(tmp_path, voc(size, obj(), obj())), "a.xml"))] == [Size, Box, Box]


def test_the_suffix_of_an_annotation_is_read_in_any_case(tmp_path):
    cfg = folder(tmp_path, {"a.jpg": voc(obj()), "B.jpg": voc(obj())})
    (tmp_path / "annotations/a.xml").rename(tmp_path / "annotations/a.XML")
    (tmp_path / "annotations/B.xml").rename(tmp_path / "annotations/b.Xml")
    assert [len(r.names) for r in read(cfg).values()] == [1, 1]


def test_an_entity_of_another_file_is_refused_also_where_it_hides(tmp_path):
    (tmp_path / "secret.dtd").write_text('<!ENTITY x "TOP SECRET">')
    parameter = f'<!DOCTYPE a [<!ENTITY % p SYSTEM "file://{tmp_path}/secret.dtd"> %p;]>\n' + voc(obj("&x;"))
    outside = f'<!DOCTYPE a SYSTEM "file://{tmp_path}/secret.dtd">\n' + voc(obj("&x;"))
    for text in (parameter, outside):
        path = xml_file(tmp_path, text)
        assert "SECRET" not in fault_of(path) and all(isinstance(i, Finding) for i in read_voc(path, "a.xml"))


@pytest.mark.parametrize("difficult", ["1", " 1 ", "true", "True"])
def test_difficult_is_kept_as_a_flag(tmp_path, difficult):
    boxes = boxes_in(xml_file(tmp_path, voc(obj(more=f"<difficult>{difficult}</difficult>"), obj(more="<difficult>0</difficult>"),
                                            obj())))
    assert [b.flags for b in boxes] == [DIFFICULT, 0, 0]


@pytest.mark.parametrize(("text", "what"), [
    (voc("<object><bndbox/></object>"), "a.xml:3: object 1 has no <name>"),
    (voc(obj(), "<object><name>slag</name></object>"), "a.xml:4: object 2 (slag) has no <bndbox>"),
    (voc("<object><name>slag</name><bndbox><xmin>1</xmin><xmax>2</xmax><ymax>2</ymax></bndbox></object>"),
     "a.xml:3: <bndbox> of object 1 (slag) has no <ymin>")])
def test_what_an_object_lacks_is_named_with_its_line(tmp_path, text, what):
    assert fault_of(xml_file(tmp_path, text)) == what


def test_a_picture_in_two_splits_under_two_spellings_is_refused(tmp_path, cache):
    cfg = folder(tmp_path, {"a.jpg": voc()}, "image_id,split\na,train\na.jpg,val\n")
    with pytest.raises(DataError, match=r"csv:3: images/a\.jpg is in val here and in train at train_val_test_split\.csv:2"):
        open_index(cfg, cache)


def test_the_file_of_an_external_entity_is_not_even_opened(tmp_path):
    (tmp_path / "other").write_text("<unclosed>")  # would break the parse, were it taken in
    text = f'<!DOCTYPE a [<!ENTITY x SYSTEM "file://{tmp_path}/other">]>\n' + voc(obj(), "&x;")
    assert fault_of(xml_file(tmp_path, text)).startswith("a.xml: declares XML entities")


def test_objects_deeper_down_are_no_annotation(tmp_path):
    assert [b.name for b in boxes_in(xml_file(tmp_path, voc("<history>", obj("slag"), "</history>", obj())))] == ["crack"]
