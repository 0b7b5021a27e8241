"""The index always equals a fresh scan, survives damage and races, and costs its readers nothing."""

import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from weldtrain.config import DatasetConfig, SyntheticConfig
from weldtrain.data import index as index_module
from weldtrain.data.index import AnnotationIndex, build, open_index
from weldtrain.data.synthetic import CLASSES
from weldtrain.errors import DataError
from weldtrain.formats import open_reader


@pytest.fixture
def own(welds, tmp_path):
    """A copy of the welds that a test may change."""
    shutil.copytree(welds, tmp_path / "own")
    return tmp_path / "own", DatasetConfig(format="welding_v2", root=str(tmp_path / "own")), tmp_path / "cache"


def content(index):
    return [(index.path(i), index.sizes[i].tolist(), index.splits[index.split_ids[i]], index.boxes[index.box_rows(i)].tolist(),
             [index.names[k] for k in index.name_ids[index.box_rows(i)]]) for i in range(len(index))]


def fresh(cfg):
    reader = open_reader(cfg)
    records = map(reader.read, range(len(reader.images)))
    return [(r.image, [r.width, r.height], r.split, r.boxes.tolist(), r.names) for r in records]


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
    header, arrays = build(cfg)
    monkeypatch.setattr(index_module, "_PARALLEL_FROM", 1)
    monkeypatch.setattr(index_module, "_CHUNK", 3)
    other_header, other = build(cfg)
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
    cfg = DatasetConfig(synthetic=SyntheticConfig(train=3, val=2, test=0, size_px=128))
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
