"""The index always equals a fresh scan, survives damage and races, and costs its readers nothing."""

import io
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from weldtrain.config import DatasetConfig, SplitConfig, SyntheticConfig
from weldtrain.data import indexing as index_module
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.indexing import build, open_index
from weldtrain.data.synthetic import CLASSES
from weldtrain.errors import DataError
from weldtrain.formats import open_reader
from weldtrain.formats.record import DIFFICULT, DROPPED, ERROR, NOTE

ARTICLE = {"format": "welding_v2", "images": "images", "annotations": "annotations", "split_csv": "train_val_test_split.csv"}


@pytest.fixture
def own(welds, tmp_path):
    """A copy of the welds that a test may change."""
    shutil.copytree(welds, tmp_path / "own")
    return tmp_path / "own", DatasetConfig(root=str(tmp_path / "own"), **ARTICLE), tmp_path / "cache"


def content(index):
    return [(index.path(i), index.sizes[i].tolist(), bool(index.grey[i]), index.splits[index.split_ids[i]],
             index.boxes[index.box_rows(i)].tolist(), [index.names[k] for k in index.name_ids[index.box_rows(i)]],
             index.flags[index.box_rows(i)].tolist(), index.lines[index.box_rows(i)].tolist()) for i in range(len(index))]


def fresh(cfg):
    reader = open_reader(cfg)
    records = map(reader.read, range(len(reader.images)))
    return [(r.image, list(r.header[:2]), r.header.grey, split, r.boxes.tolist(), r.names, r.flags.tolist(), r.lines.tolist())
            for r, split in zip(records, reader.splits)]


def test_it_holds_what_the_reader_reads_and_then_parses_nothing(own, monkeypatch):
    _, cfg, cache = own
    assert content(open_index(cfg, cache)) == fresh(cfg)
    monkeypatch.setattr(index_module, "build", None)
    assert content(open_index(cfg, cache)) == fresh(cfg)


def edit(root):
    path = root / "annotations/0001.xml"
    text = path.read_text()
    if "<xmin>" not in text:
        path = next(p for p in sorted((root / "annotations").iterdir()) if "<xmin>" in p.read_text())
        text = path.read_text()
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    at = text.index("<xmin>") + 6
    path.write_text(text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :])
    os.utime(path, ns=times)  # same length, same date: only the change time tells


def swap(root):
    a, b = root / "images/0001.jpg", root / "images/0002.jpg"
    a.rename(root / "t"), b.rename(a), (root / "t").rename(b)


def remove(root):
    csv = root / "train_val_test_split.csv"
    csv.write_text("".join(line for line in csv.read_text().splitlines(True) if not line.startswith("0003")))


def add(root):
    shutil.copy(root / "images/0001.jpg", root / "images/new.jpg")
    shutil.copy(root / "annotations/0001.xml", root / "annotations/new.xml")
    with open(root / "train_val_test_split.csv", "a") as f:
        f.write("new,train\n")


@pytest.mark.parametrize("change", [edit, swap, remove, add])
def test_every_change_of_the_data_is_seen(own, change):
    root, cfg, cache = own
    before = open_index(cfg, cache)
    change(root)
    after = open_index(cfg, cache)
    assert content(after) == fresh(cfg) and after.stamp != before.stamp
    assert len(content(before)) == len(before)  # a reader of the older index keeps it


@pytest.mark.parametrize("damage", [lambda b: b[:-7], lambda b: b[:20], lambda b: b"", lambda b: b[:-9] + b"x" + b[-8:],
                                    lambda b: b"other" + b])
def test_a_damaged_index_is_rebuilt(own, damage):
    _, cfg, cache = own
    file = open_index(cfg, cache).file
    file.write_bytes(damage(file.read_bytes()))
    assert content(open_index(cfg, cache)) == fresh(cfg)
    assert len(list(file.parent.iterdir())) == 1


def test_parallel_building_gives_the_same(own, monkeypatch):
    _, cfg, _ = own
    header, arrays = build(open_reader(cfg))
    monkeypatch.setattr(index_module, "_PARALLEL_FROM", 1)
    monkeypatch.setattr(index_module, "_CHUNK", 3)
    other_header, other = build(open_reader(cfg))
    assert header == other_header and all(np.array_equal(arrays[k], other[k]) for k in arrays)


def test_builds_at_the_same_time_are_safe(own):
    _, cfg, cache = own
    with ThreadPoolExecutor(4) as pool:
        indexes = list(pool.map(lambda _: content(open_index(cfg, cache)), range(8)))
    assert all(i == fresh(cfg) for i in indexes)


def test_it_travels_by_name_and_is_read_only(index):
    payload = pickle.dumps(index)
    assert len(payload) < 500 and content(pickle.loads(payload)) == content(index)
    with pytest.raises(ValueError, match="read-only"):
        index.boxes[0] = 0
    assert not (index.boxes.flags.owndata or index.sizes.flags.owndata)


def test_classes_order_labels_and_unknown_names_are_refused_with_the_nearest(index):
    order = list(reversed(CLASSES))
    labels = index.labels(order)
    assert [order[v - 1] for v in labels] == index.names and labels.min() >= 1
    with pytest.raises(DataError, match=r", line \d+: class 'porosity' is not in .*did you mean 'porosty'"):
        index.labels(["crack", "incomplete_fusion", "porosty", "slag"])


def test_splits_partition_the_rows_and_an_absent_one_is_named(index):
    rows = np.concatenate([index.rows(s) for s in index.splits])
    assert sorted(rows) == list(range(len(index)))
    with pytest.raises(DataError, match=r"no picture in split 'test'.*train, val"):
        index.rows("test")


def test_nothing_is_written_below_the_root(own):
    root, cfg, cache = own
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    open_index(cfg, cache)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


def test_a_cache_that_cannot_be_written_is_named(own, tmp_path):
    _, cfg, _ = own
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cache_dir"):
        open_index(cfg, tmp_path / "file" / "below")


def test_the_drawn_set_is_made_once(tmp_path):
    drawn = SyntheticConfig(train=3, val=2, test=0, size_px=128)
    cfg = DatasetConfig(**ARTICLE | {"format": "synthetic"}, synthetic=drawn)
    first = open_index(cfg, tmp_path)
    assert len(first.rows("train")) == 3 and open_index(cfg, tmp_path).file == first.file
    assert len(list((tmp_path / "synthetic").iterdir())) == 1


def test_reading_needs_no_torch():
    code = "import sys, weldtrain.__main__, weldtrain.data.index; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_index_file_of_another_kind_is_a_value_error(tmp_path):
    (tmp_path / "x.idx").write_bytes(b"something else entirely, long enough to hold a header")
    with pytest.raises(ValueError, match="not an index"):
        AnnotationIndex(tmp_path / "x.idx")


def test_no_flipped_bit_goes_unseen(own):
    """Whatever byte of the head is hit, the file is refused as damaged, never read differently."""
    _, cfg, cache = own
    file = open_index(cfg, cache).file
    data = file.read_bytes()
    head = data.index(b"}\0") + 1  # zeros up to the arrays follow
    for at in [*range(head), *range(-(-head // 64) * 64, len(data), 7)]:
        with open(file, "r+b") as f:
            f.seek(at)
            f.write(bytes([data[at] ^ 0x41]))
            f.flush()
            with pytest.raises(ValueError):
                AnnotationIndex(file)
            f.seek(at)
            f.write(data[at : at + 1])
    assert content(AnnotationIndex(file)) == fresh(cfg)


def test_a_lost_annotation_is_seen(own):
    root, cfg, cache = own
    open_index(cfg, cache)
    (root / "annotations/0002.xml").unlink()
    with pytest.raises(DataError, match=r"images/0002\.jpg: no annotation in annotations"):
        open_index(cfg, cache)


_BUILD = """
import sys
from weldtrain.config import DatasetConfig
from weldtrain.data.indexing import open_index
sys.stdin.readline()
index = open_index(DatasetConfig(format="welding_v2", root=sys.argv[1], images="images", annotations="annotations",
                                 split_csv="train_val_test_split.csv"), sys.argv[2])
print(len(index), index.boxes.sum())
"""


def test_two_programs_may_build_it_at_once(own):
    root, cfg, cache = own
    command = [sys.executable, "-c", _BUILD, str(root), str(cache)]
    jobs = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    said = [job.communicate(timeout=60)[0] for job in jobs]
    index = open_index(cfg, cache)
    assert said == [f"{len(index)} {index.boxes.sum()}\n"] * 2
    assert [p.name for p in index.file.parent.iterdir()] == [index.file.name]


def test_a_spawned_process_maps_the_same_file(index):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(AnnotationIndex.path, index, 3).result(60) == index.path(3)


def test_defect_free_pictures_and_any_name_survive(tmp_path):
    # A folder from a system of another encoding: its bytes are no UTF-8.
    folder = os.fsdecode(b"bilder \xe9")
    for part in (folder, "annotations"):
        (tmp_path / "d" / part).mkdir(parents=True)
    for name in ("裂纹 1", "plain"):
        cv2.imencode(".png", np.zeros((24, 32), np.uint8))[1].tofile(str(tmp_path / "d" / folder / f"{name}.png"))
        (tmp_path / "d/annotations" / f"{name}.xml").write_text("<annotation/>")
    (tmp_path / "d/s.csv").write_text("image_id,split\n裂纹 1,train\nplain,train\n", "utf-8")
    cfg = DatasetConfig(root=str(tmp_path / "d"), split=SplitConfig(make="never"),
                        **ARTICLE | {"images": folder, "split_csv": "s.csv"})
    index = open_index(cfg, tmp_path / "cache")
    assert [index.path(i) for i in range(2)] == [f"{folder}/plain.png", f"{folder}/裂纹 1.png"]
    assert all((index.root / index.path(i)).is_file() for i in range(2))
    assert index.boxes.shape == (0, 4) and index.labels([]).shape == (0,) and content(index) == fresh(cfg)
    assert "2 pictures (2 without defects), 0 boxes" in index.describe("train")


def hurt(cfg, pictures):
    """Adds test pictures to a data set of `plates`, each with an annotation: None is a link that leads nowhere."""
    root = Path(cfg.root)
    for name, data in pictures.items():
        if data is None:
            (root / "images" / name).symlink_to(root / "nowhere.jpg")
        else:
            (root / "images" / name).write_bytes(data)
        (root / "annotations" / f"{Path(name).stem}.xml").write_text("<annotation/>")
    with open(root / "s.csv", "a") as csv:
        csv.writelines(f"{name},test\n" for name in pictures)
    (root / "images" / "c.jpg").mkdir()  # a folder is no picture, whatever it is called


@pytest.mark.parametrize("cut", ["cut95.jpg", "cut50.jpg", "cut10.jpg"])
def test_all_bad_pictures_are_named_at_once_before_any_training(plates, cache, broken, cut):
    cfg = plates({"a.png": None, "z.jpg": None})
    bad = {name: what for name, what in broken.items() if name == cut or not name.startswith("cut")}
    hurt(cfg, {name: data for name, (data, _) in bad.items()})
    with pytest.raises(DataError, match=r"images/cut\d\d\.jpg: .*: 7 of this kind\).*dataset\.bad_images=skip") as caught:
        open_index(cfg, cache)
    assert all(f"images/{name}" in str(caught.value) for name in bad) and "c.jpg" not in str(caught.value)
    index = open_index(cfg, cache, refuse=False)
    findings = {f.file.removeprefix("images/"): f for f in index.findings if f.kind == "picture-bad"}
    assert findings.keys() == bad.keys() and {f.level for f in findings.values()} == {ERROR}
    assert all(re.search(bad[name][1], f.text) for name, f in findings.items())
    assert [index.path(i) for i in range(len(index))] == ["images/a.png", "images/z.jpg"]


def test_bad_pictures_are_skipped_counted_and_the_rest_is_the_same_however_it_is_built(
        plates, tmp_path, broken, torn_png, monkeypatch):
    good = {f"{letter}.png": None for letter in "adgkqux"}  # between the bad ones
    cfg = plates(good, bad_images="skip")
    alone = content(open_index(cfg, tmp_path / "alone"))
    hurt(cfg, {name: data for name, (data, _) in broken.items()} | {"torn.png": torn_png})
    index = open_index(cfg, tmp_path / "cache")
    assert content(index) == alone and len(alone) == 7
    left_out = [f for f in index.findings if f.kind == "picture-bad"]
    assert [f.file for f in left_out] == sorted(f"images/{name}" for name in [*broken, "torn.png"])
    assert all(f.level == DROPPED and f.text.endswith(": left out") for f in left_out)
    header, arrays = build(open_reader(cfg))
    for limit in ("_PARALLEL_FROM", "_PARALLEL_DECODING_FROM"):
        monkeypatch.setattr(index_module, limit, 1)
    monkeypatch.setattr(index_module, "_CHUNK", 3)
    other_header, other = build(open_reader(cfg))
    assert header == other_header and all(np.array_equal(arrays[k], other[k]) for k in arrays)


def test_a_picture_torn_inside_is_found_by_skip_while_raise_reads_headers_alone(plates, cache, torn_png):
    cfg = plates({"a.png": None, "torn.png": torn_png})
    assert len(open_index(cfg, cache)) == 2
    cfg.bad_images = "skip"
    index = open_index(cfg, cache)
    assert [index.path(i) for i in range(len(index))] == ["images/a.png"]
    (finding,) = [f for f in index.findings if f.level == DROPPED]
    assert finding.file == "images/torn.png" and "damaged" in finding.text


@pytest.mark.parametrize("make", ["missing", "never", "always"])
@pytest.mark.parametrize("bad_images", ["raise", "skip"])
def test_where_no_picture_is_left_the_run_ends_with_that(plates, cache, bad_images, make):
    cfg = plates({"a.jpg": b"", "b.jpg": b""}, bad_images=bad_images, split=SplitConfig(make=make))
    text = "no picture is left" if bad_images == "skip" else r"images/a\.jpg: is empty \(0 bytes\) \(and images/b\.jpg: 2"
    with pytest.raises(DataError, match=text):
        open_index(cfg, cache)
    assert len(open_index(cfg, cache, refuse=False)) == 0


def test_a_second_page_is_noted(plates, cache):
    book = io.BytesIO()
    Image.new("L", (64, 48)).save(book, "tiff", save_all=True, append_images=[Image.new("L", (9, 9))])
    index = open_index(plates({"a.tif": book.getvalue(), "b.tif": None}), cache)
    (note,) = index.findings
    assert (note.level, note.file) == (NOTE, "images/a.tif") and "2 pages: the first is used" in note.text
    assert index.sizes.tolist() == [[64, 48], [64, 48]] and index.grey.tolist() == [True, False]


@pytest.mark.parametrize("box", [(20, 10, 20, 30), (90, 10, 120, 30), (10, "nan", 30, 20)])
def test_strict_refuses_what_would_be_dropped(plates, cache, box):
    cfg = plates({"a.png": None}, {"a": plates.crack() + plates.crack(box, "slag")})
    index = open_index(cfg, cache)
    assert index.names == ["crack"] and [f.where() for f in index.findings] == ["annotations/a.xml:3"]
    cfg.strict = True
    with pytest.raises(DataError, match=r"annotations/a\.xml:3: dataset\.strict: object 2 \(slag\) .*: dropped"):
        open_index(cfg, cache)
    assert open_index(cfg, cache, refuse=False).file == index.file  # one index for both


def test_strict_refuses_also_pictures_left_out_and_nothing_that_is_only_odd(plates, cache, torn_png):
    size = "<size><width>9</width><height>9</height></size>"
    cfg = plates({"a.png": None}, {"a": size + plates.crack()}, strict=True)
    assert [f.level for f in open_index(cfg, cache).findings] == [NOTE]
    cfg = plates({"a.png": None, "torn.png": torn_png}, strict=True, bad_images="skip")
    with pytest.raises(DataError, match=r"images/torn\.png: dataset\.strict: .*left out"):
        open_index(cfg, cache)


def test_difficult_objects_are_ignored_unless_they_are_to_be_used(plates, cache):
    cfg = plates({"a.png": None}, {"a": plates.crack(more="<difficult>1</difficult>") + plates.crack((1, 1, 9, 9), "slag")})
    index = open_index(cfg, cache)
    assert index.flags.tolist() == [DIFFICULT, 0] and index.ignored(slice(None)).tolist() == [True, False]
    cfg.difficult = "use"
    used = open_index(cfg, cache)
    assert used.flags.tolist() == [0, 0] and not used.ignored(np.arange(2)).any()
    assert used.boxes.tolist() == index.boxes.tolist()


def test_one_based_shifts_the_upper_left_corner_alone(plates, cache):
    cfg = plates({"a.png": None}, {"a": plates.crack((1, 1, 64, 48)) + plates.crack((5, 7, 20, 30))})
    assert open_index(cfg, cache).boxes.tolist() == [[1, 1, 64, 48], [5, 7, 20, 30]]
    cfg.one_based = True
    assert open_index(cfg, cache).boxes.tolist() == [[0, 0, 64, 48], [4, 6, 20, 30]]


@pytest.mark.parametrize(("width", "height", "kind"), [
    (64, 48, ""), (0, 0, ""), (48, 64, "size-transposed"), (128, 96, "size-differs")])
def test_a_wrong_size_in_the_annotation_is_noted_and_changes_nothing(plates, cache, width, height, kind):
    size = f"<size><width>{width}</width><height>{height}</height></size>"
    index = open_index(plates({"a.png": None}, {"a": size + plates.crack()}), cache)
    assert [(f.level, f.kind, f.where()) for f in index.findings] == [(NOTE, kind, "annotations/a.xml:2")] * bool(kind)
    assert index.sizes.tolist() == [[64, 48]] and index.boxes.tolist() == [[10, 10, 30, 20]]


def test_findings_are_told_by_kind_with_their_number_and_the_first_place(plates, cache, caplog):
    empty = plates.crack((9, 9, 9, 9))
    cfg = plates({f"{i}.png": None for i in range(3)}, {str(i): plates.crack() + empty for i in range(3)})
    open_index(cfg, cache).report_findings()
    line, total = caplog.messages
    assert line.startswith("box-empty: 3 in 3 files, first annotations/0.xml:3: object 2 (crack) [9, 9, 9, 9] encloses nothing")
    assert total == "3 boxes dropped in 3 files"


def test_a_picture_of_which_every_box_is_dropped_is_left_out_and_not_defect_free(plates, cache):
    outside = plates.crack((900, 900, 950, 950))
    cfg = plates({f"{i}.png": None for i in range(4)},
                 {"0": outside, "1": outside + plates.crack(), "2": "", "3": plates.crack()})
    index = open_index(cfg, cache)
    assert [index.path(i) for i in range(len(index))] == [f"images/{i}.png" for i in (1, 2, 3)]
    assert [(f.level, f.file) for f in index.findings if f.kind == "picture-emptied"] == [("dropped", "images/0.png")]
