"""The article's layout as real tools and people write it: every oddity is read right or refused by name."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats import open_reader
from weldtrain.formats.record import DIFFICULT
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
    return DatasetConfig(format="welding_v2", root=str(root))


def read(cfg):
    reader = open_reader(cfg)
    return {r.image.removeprefix("images/"): r for r in map(reader.read, range(len(reader.images)))}


def xml_file(tmp_path, text):
    path = tmp_path / "a.xml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_floats_blanks_and_exponents_are_kept(tmp_path):
    box = read_voc(xml_file(tmp_path, voc(obj(box=(" 12 ", "45.70000076293945", "1e2", "90")))))[0]
    assert box.corners == (12.0, 45.70000076293945, 100.0, 90.0)


@pytest.mark.parametrize("value", ["abc", "", "nan", "inf", "-Infinity", "1_0", "0x10"])
def test_what_is_no_finite_number_names_file_line_and_tag(tmp_path, value):
    path = xml_file(tmp_path, voc(obj(), obj(box=(10, 20, value, 60))))
    with pytest.raises(DataError, match=rf"a\.xml:4: <xmax> holds '{value}'"):
        read_voc(path)


@pytest.mark.parametrize(("encoding", "declared", "bom"), [
    ("gbk", "GBK", b""), ("gb18030", "gb2312", b""), ("utf-8", "utf-8", b"\xef\xbb\xbf"), ("utf-16", "utf-16", b""),
    ("latin-1", "iso-8859-1", b"")])
def test_every_declared_encoding_is_read(tmp_path, encoding, declared, bom):
    name = "裂纹" if encoding != "latin-1" else "Lötfehler"
    text = voc(obj(name), head=f'<?xml version="1.0" encoding="{declared}"?>\n')
    assert read_voc(xml_file(tmp_path, bom + text.encode(encoding)))[0].name == name


def test_a_wrongly_declared_encoding_says_so(tmp_path):
    text = voc(obj("裂纹"), head='<?xml version="1.0" encoding="utf-8"?>\n')
    with pytest.raises(DataError, match=r"a\.xml.*encoding"):
        read_voc(xml_file(tmp_path, text.encode("gbk")))


def test_entities_are_refused_and_never_opened(tmp_path):
    (tmp_path / "secret").write_text("TOP SECRET")
    external = f'<!DOCTYPE a [<!ENTITY x SYSTEM "file://{tmp_path}/secret">]>\n' + voc(obj("&x;"))
    layers = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
    bomb = f'<!DOCTYPE a [<!ENTITY l0 "lol">{layers}]>\n' + voc(obj("&l9;"))
    for text in (external, bomb):
        with pytest.raises(DataError, match=r"a\.xml") as caught:
            read_voc(xml_file(tmp_path, text))
        assert "SECRET" not in str(caught.value) and "lollol" not in str(caught.value)
    plain = '<!DOCTYPE annotation>\n' + voc(obj())
    assert len(read_voc(xml_file(tmp_path, plain))) == 1


@pytest.mark.parametrize("text", ["", "   ", "<annotation><object>", "not xml", "\x00\x01"])
def test_broken_files_are_named(tmp_path, text):
    with pytest.raises(DataError, match=r"a\.xml"):
        read_voc(xml_file(tmp_path, text))


def test_only_direct_children_count_in_any_order(tmp_path):
    part = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
    text = ("<annotation><object>" + part + "<bndbox><ymax>60</ymax><xmax>50</xmax><ymin>20</ymin><xmin>10</xmin></bndbox>"
            "<difficult>1</difficult><name> slag </name></object></annotation>")
    (box,) = read_voc(xml_file(tmp_path, text))
    assert (box.corners, box.name, box.flags) == ((10, 20, 50, 60), "slag", DIFFICULT)


def test_boxes_are_clipped_and_empty_ones_dropped_with_their_line(tmp_path):
    cfg = folder(tmp_path, {"a.jpg": voc(obj(box=(-5, -5, 20, 20)), obj(box=(100, 10, 100, 50)), obj(box=(100, 10, 100.2, 50)),
                                         obj(box=(90, 10, 50, 50)), obj(box=(400, 10, 500, 50)), obj(box=(300, 200, 999, 999)))})
    record = read(cfg)["a.jpg"]
    assert record.boxes.tolist() == [[0, 0, 20, 20], [300, 200, 320, 240]] and record.boxes.dtype == np.float32
    assert [f.line for f in record.findings] == [4, 5, 6, 7] and all("crack" in f.text for f in record.findings)


def test_pictures_are_found_by_id_whatever_they_are_called(tmp_path):
    names = ["001.jpg", "010.JPG", "NA.Jpeg", "1e5.PNG", "true.tif", "w.v1.003.jpg", "a_jpg.rf.12.jpg", "mit leer zeichen.bmp",
             "焊缝.webp", "sub/deep/x.jfif"]
    records = read(folder(tmp_path, {n: voc(obj()) for n in names}))
    assert sorted(records) == sorted(names) and all(len(r.names) == 1 for r in records.values())


def test_ids_may_carry_extension_path_case_or_blanks(tmp_path):
    csv = "image_id,split\nw02.jpg,train\n./w01,train\n  W03  ,val\nsub\\w04.PNG,val\n"
    records = read(folder(tmp_path, {n: voc(obj()) for n in ("w01.jpg", "w02.jpg", "w03.jpg", "sub/w04.png")}, csv))
    assert {n: r.split for n, r in records.items()} == {
        "w01.jpg": "train", "w02.jpg": "train", "w03.jpg": "val", "sub/w04.png": "val"}


def test_two_pictures_of_one_name_are_named_both(tmp_path):
    cfg = folder(tmp_path, {"a.jpg": voc(), "a.png": voc()}, "image_id,split\na,train\n")
    with pytest.raises(DataError, match=r"csv:2: 'a' may mean a\.jpg or a\.png"):
        open_reader(cfg)


def test_all_lost_pictures_are_listed_together_and_nothing_outside_is_read(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "out.jpg")
    cfg = folder(tmp_path / "root", {"a.jpg": voc()}, "image_id,split\na,train\nb,train\n../../out,val\n/etc/passwd,val\n")
    with pytest.raises(DataError, match=r"'b' \(line 3\), '../../out' \(line 4\), '/etc/passwd' \(line 5\): 3 of 4"):
        open_reader(cfg)


@pytest.mark.parametrize(("missing", "count"), [("negative", 3), ("skip", 2)])
def test_missing_annotations_follow_the_option_and_are_counted(tmp_path, missing, count):
    cfg = folder(tmp_path, {"a.jpg": voc(obj()), "b.jpg": voc(), "c.jpg": None})
    with pytest.raises(DataError, match=r"no annotation file for c\.jpg: 1 of 3.*dataset\.missing"):
        open_reader(cfg)
    cfg.missing = missing
    records = read(cfg)
    assert len(records) == count and records["b.jpg"].boxes.shape == (0, 4)
    assert any("1 pictures have no annotation" in f.text for f in open_reader(cfg).findings)


def test_annotations_in_the_wrong_place_stop_the_run_whatever_the_option(tmp_path):
    cfg = folder(tmp_path, {"a.jpg": None, "b.jpg": None})
    cfg.missing = "negative"
    with pytest.raises(DataError, match=r"no annotation file for a\.jpg, b\.jpg: 2 of 2"):
        open_reader(cfg)
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
    assert reader.images == ["images/a.jpg"] and "1 pictures are in no split" in reader.findings[0].text


def test_links_are_followed_and_circles_are_not(tmp_path):
    real = folder(tmp_path / "real", {"a.jpg": voc(obj())})
    root = tmp_path / "linked"
    root.mkdir()
    for part in ("images", "annotations", "train_val_test_split.csv"):
        os.symlink(tmp_path / "real" / part, root / part)
    os.symlink(".", tmp_path / "real" / "images" / "loop")
    assert list(read(DatasetConfig(format="welding_v2", root=str(root)))) == list(read(real)) == ["a.jpg"]


def test_reading_changes_nothing(tmp_path):
    cfg = folder(tmp_path, {"a.jpg": voc(obj())})

    def state():
        return {p: (p.stat().st_mtime_ns, hashlib.sha1(p.read_bytes()).digest() if p.is_file() else b"")
                for p in tmp_path.rglob("*")}

    before = state()
    read(cfg)
    assert state() == before


def test_real_welds_have_the_counts_of_their_readme(real_data):
    records = read(DatasetConfig(format="welding_v2", root=str(real_data / "welding_v2_real")))
    assert len(records) == 140 and sum(len(r.names) for r in records.values()) == 487
    assert [sum(r.split == s for r in records.values()) for s in ("train", "val", "test")] == [84, 28, 28]


@pytest.mark.parametrize("size", ["<size><width>0</width><height>0</height></size>", "", "<size/>",
                                  "<size><width>240</width><height>320</height></size>"])
def test_the_size_in_the_xml_is_never_used(tmp_path, size):
    record = read(folder(tmp_path, {"a.jpg": voc(size, obj(box=(1, 2, 310, 230)))}))["a.jpg"]
    assert (record.width, record.height) == (320, 240) and record.boxes.tolist() == [[1, 2, 310, 230]]


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
        with pytest.raises(DataError, match=r"a\.xml") as caught:
            read_voc(xml_file(tmp_path, text))
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("difficult", ["1", " 1 ", "true", "True"])
def test_difficult_is_kept_as_a_flag(tmp_path, difficult):
    boxes = read_voc(xml_file(tmp_path, voc(obj(more=f"<difficult>{difficult}</difficult>"), obj(more="<difficult>0</difficult>"),
                                            obj())))
    assert [b.flags for b in boxes] == [DIFFICULT, 0, 0]


@pytest.mark.parametrize(("text", "what"), [
    (voc("<object><bndbox/></object>"), r"a\.xml:3: object 1 has no <name>"),
    (voc(obj(), "<object><name>slag</name></object>"), r"a\.xml:4: object 2 \(slag\) has no <bndbox>"),
    (voc("<object><name>slag</name><bndbox><xmin>1</xmin></bndbox></object>"), r"a\.xml:3: <bndbox> has no <ymin>")])
def test_what_an_object_lacks_is_named_with_its_line(tmp_path, text, what):
    with pytest.raises(DataError, match=what):
        read_voc(xml_file(tmp_path, text))


def test_a_picture_in_two_splits_under_two_spellings_is_refused(tmp_path):
    cfg = folder(tmp_path, {"a.jpg": voc()}, "image_id,split\na,train\na.jpg,val\n")
    with pytest.raises(DataError, match=r"csv:3: 'a\.jpg' and 'a' are the same picture, in val and train"):
        open_reader(cfg)


def test_the_file_of_an_external_entity_is_not_even_opened(tmp_path):
    (tmp_path / "other").write_text("<unclosed>")  # would break the parse, were it taken in
    text = f'<!DOCTYPE a [<!ENTITY x SYSTEM "file://{tmp_path}/other">]>\n' + voc(obj(), "&x;")
    with pytest.raises(DataError, match=r"a\.xml: declares XML entities"):
        read_voc(xml_file(tmp_path, text))


def test_objects_deeper_down_are_no_annotation(tmp_path):
    assert [b.name for b in read_voc(xml_file(tmp_path, voc("<history>", obj("slag"), "</history>", obj())))] == ["crack"]
