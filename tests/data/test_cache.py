"""The picture cache gives what decoding would, whoever filled it, however it ended and whatever happened to its file; it takes
no more than it may, and where it takes nothing it says why."""

import contextlib
import errno
import gc
import logging
import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from weldtrain.config import LoaderConfig
from weldtrain.data import cache as cache_module
from weldtrain.data.cache import PictureCache, open_cache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.loader import training_loader
from weldtrain.errors import ConfigError

FORK = multiprocessing.get_context("fork")
DISK = LoaderConfig(cache="disk", batch_size=4, drop_last=False, num_workers=2, timeout_s=20)
linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux shares memory without a file")


class Counted(DetectionDataset):
    """Notes what is decoded."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.decodes = []

    def decoded(self, row, *args):
        self.decodes.append(row)
        return super().decoded(row, *args)


@pytest.fixture
def cached(kinds, tmp_path):
    """`cached(cache="ram")`: a dataset with a cache, and what was said of it. Same settings, same file."""

    def make(cfg=DISK, *, passes=2, model=(), cache_dir=tmp_path / "cache", **settings):
        data = kinds(Counted, model=model)
        data.cache, data.why = open_cache(
            replace(cfg, **settings), data.index, data.sizes, data.window, cache_dir, rows=data.rows, passes=passes, workers=2,
            decoded=super(Counted, data).decoded)
        return data

    make.folder = tmp_path / "cache" / "pictures"
    return make


def pictures(data):
    """Every picture at the model's scale, by row."""
    batch = data.fetch([(0, row, 0) for row in data.rows.tolist()])
    return {row: image[:, :h, :w].clone() for row, image, (h, w)
            in zip(batch.image_ids.tolist(), batch.images, batch.image_sizes.tolist())}


def right(data):
    """Whether every picture is what decoding it afresh gives."""
    found, data.cache, cache = pictures(data), None, data.cache
    fresh, data.cache = pictures(data), cache
    data.decodes.clear()
    return found.keys() == fresh.keys() and all(torch.equal(found[row], fresh[row]) for row in fresh)


def filled(data):
    for row in data.rows.tolist():
        if data.cache.get(row) is None:
            data.cache.put(row, DetectionDataset.decoded(data, row))
    return data


def forked(work, *args):
    """Runs `work` in a process of its own; returns its exit code, -9 for one that killed itself, None if it hangs."""
    process = FORK.Process(target=work, args=args)
    process.start()
    process.join(20)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


@pytest.mark.parametrize("settings", [{"cache": "disk"}, pytest.param({"cache": "ram"}, marks=linux), {"cache": "auto"}],
                         ids=lambda v: v["cache"])
def test_a_kept_picture_is_what_decoding_gives_and_is_decoded_once(cached, settings):
    data = cached(**settings)
    for _ in range(3):
        pictures(data)
    assert sorted(data.decodes) == data.rows.tolist() and all(row in data.cache for row in data.rows.tolist())
    assert right(data)
    for row in data.rows.tolist():
        width, height = data.sizes[row].tolist()
        kept = data.cache.get(row)
        assert kept.shape == (height, width, 1 if data.index.grey[row] else 3) and not kept.flags.writeable
    batch = data.fetch([(0, int(data.rows[0]), 0)])
    assert dict(zip(("read", "decode", "resize", "cache"), batch.work_s[0]))["read"] == 0 < batch.work_s[0, 3]


def test_a_cache_of_an_earlier_run_is_used(cached):
    filled(cached())
    again = cached()
    assert again.cache.file.parent == cached.folder and "needs 0 MB" in again.why and "first epoch" not in again.why
    assert right(again)
    pictures(again)
    assert again.decodes == []


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_what_is_missing_of_an_earlier_run_is_added(cached, encoding):
    data = cached(cache_encoding=encoding)
    some = data.rows[::3].tolist()
    for row in some:
        data.cache.put(row, data.decoded(row))
    again = cached(cache_encoding=encoding)
    assert "of the first epoch" in again.why
    pictures(again)
    assert sorted(again.decodes) == sorted(set(data.rows.tolist()) - set(some))


def half_and_die(fd, part, place, pwrite=os.pwrite):
    pwrite(fd, part[: len(part) // 2], place)
    os.kill(os.getpid(), signal.SIGKILL)


def fill_and_die(data, at, encoding):
    """Puts so many pictures and kills itself; at a fraction, in the middle of writing one."""
    data = data(cache_encoding=encoding)
    for i, row in enumerate(data.rows.tolist()):
        picture = DetectionDataset.decoded(data, row)
        if i == int(at):
            if at % 1:
                os.pwrite = half_and_die
                data.cache.put(row, picture)
            os.kill(os.getpid(), signal.SIGKILL)
        data.cache.put(row, picture)


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
@pytest.mark.parametrize("at", [0, 0.5, 1, 4.5, 9])
def test_a_run_that_is_killed_leaves_a_sound_cache(cached, at, encoding):
    assert forked(fill_and_die, cached, at, encoding) == -signal.SIGKILL
    data = cached(cache_encoding=encoding)
    found = pictures(data)
    assert sorted(data.decodes) == data.rows.tolist()[int(at) :]
    again = pictures(data)
    assert len(data.decodes) == 10 - int(at) and all(torch.equal(found[row], again[row]) for row in found)
    assert encoding == "jpeg" or right(data)


def fill_one_after_the_other(cached):
    for side in range(40, 300):
        filled(cached(model={"min_size": side, "max_size": 400}))


def test_a_run_that_is_killed_at_any_moment_leaves_a_sound_cache(cached):
    for wait_s in np.random.default_rng(0).uniform(0.03, 0.1, 6):
        process = FORK.Process(target=fill_one_after_the_other, args=(cached,))
        process.start()
        time.sleep(wait_s)
        process.kill()
        process.join()
        begun = len(list(cached.folder.glob("*.pix")))
        assert all(right(cached(model={"min_size": 40 + i, "max_size": 400})) for i in range(max(0, begun - 2), begun))


def fill_at_once(cached, begin, encoding):
    data = cached(cache_encoding=encoding)
    begin.wait(10)
    found = pictures(data)
    assert encoding == "jpeg" or right(data)
    assert all(torch.equal(found[row], picture) for row, picture in pictures(data).items())


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_many_processes_may_fill_one_cache_at_once(cached, encoding):
    begin = FORK.Barrier(4)
    processes = [FORK.Process(target=fill_at_once, args=(cached, begin, encoding)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * 4 and len(list(cached.folder.iterdir())) == 1
    data = cached(cache_encoding=encoding)
    pictures(data)
    assert data.decodes == [] and (encoding == "jpeg" or right(data))


def test_a_second_run_does_not_wait_for_the_first(cached):
    first = filled(cached())
    assert forked(lambda: right(cached()) or os._exit(3)) == 0
    assert right(first)


def changed(change):
    """Damage to all of a cache's file, as bytes."""
    def damage(file):
        data = bytearray(file.read_bytes())
        change(data)
        file.write_bytes(data)

    return damage


def flipped(at, bit=0x40):
    def flip(data):
        data[at] ^= bit

    return changed(flip)


FIRST = mmap.PAGESIZE  # where the first picture is; before it stand three numbers of 32 bits for each: checksum, boot, length


DAMAGES = {  # and how many of ten pictures are lost
    "cut": (lambda file: os.truncate(file, file.stat().st_size * 2 // 3), 10),
    "emptied": (lambda file: os.truncate(file, 0), 10),
    "zeroed": (changed(lambda data: data.__setitem__(slice(None), bytes(len(data)))), 10),
    "entries without pixels": (changed(lambda data: data.__setitem__(slice(FIRST, None), bytes(len(data) - FIRST))), 10),
    "pixels without entries": (changed(lambda data: data.__setitem__(slice(FIRST), bytes(FIRST))), 10),
    "noise": (changed(lambda data: data.__setitem__(slice(None), np.random.default_rng(0).bytes(len(data)))), 10),
    "a bit of a picture": (flipped(FIRST + 700, 1), 1),
    "a checksum": (flipped(3 * 12), 1),
    "a boot": (flipped(3 * 12 + 4), 0),
    "a length": (flipped(3 * 12 + 8), 1),
    "a huge length": (flipped(3 * 12 + 11), 1),
}


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_crash_did_to_the_file_is_decoded_anew(cached, monkeypatch, damage, encoding):
    """After the machine was started again: what the disk then holds of entries and pictures may be anything."""
    damage, lost = DAMAGES[damage]
    before = filled(cached(cache_encoding=encoding))
    sound, file = pictures(before), before.cache.file
    del before
    damage(file)
    for boot, anew in ((1, lost), (1, 0), (2, 0)):
        monkeypatch.setattr(cache_module, "boot_id", lambda boot=boot: boot)
        data = cached(cache_encoding=encoding)
        found = pictures(data)
        assert all(torch.equal(found[row], sound[row]) for row in sound) and len(data.decodes) == anew
        del data


def test_entries_of_another_boot_are_believed_after_their_checksum_and_then_at_once(cached, monkeypatch):
    filled(cached())
    summed = []
    crc32 = cache_module.zlib.crc32
    monkeypatch.setattr(cache_module, "boot_id", lambda: 12345)
    data = cached()
    monkeypatch.setattr(cache_module.zlib, "crc32", lambda part, *rest: summed.append(len(part)) or crc32(part, *rest))
    pictures(data), pictures(data)
    assert data.decodes == [] and len(summed) == 10


def test_an_edited_picture_is_never_stale(cached, kinds):
    first = filled(cached())
    path = kinds.root / "images" / "d.png"
    old = pictures(first)[3]
    inverted = 255 - cv2.imread(str(path))
    cv2.imwrite(str(path), inverted)  # of the same size
    edited = cached()
    assert edited.cache.file != first.cache.file and right(edited)
    assert not torch.equal(pictures(edited)[3], old)
    times = path.stat()
    time.sleep(0.01)
    path.write_bytes(cv2.imencode(".png", 255 - inverted)[1].tobytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as copies that keep times do
    assert cached().cache.file not in (first.cache.file, edited.cache.file) and torch.equal(pictures(cached())[3], old)


def test_every_way_to_see_a_picture_has_its_own_file(cached):
    ways = [cached(model=model, cache_encoding=encoding) for model in (
        {}, {"min_size": 30}, {"max_size": 50}, {"window_percentiles": [1, 99]}, {"window_levels": [0, 4095]})
        for encoding in ("raw", "jpeg")]
    assert len({data.cache.file for data in ways}) == len(ways)
    assert all(right(filled(data)) for data in ways[::2])
    assert cached().cache.file == ways[0].cache.file


def test_edited_labels_keep_the_cache(cached, kinds, plates):
    file = filled(cached()).cache.file
    (kinds.root / "annotations" / "b.xml").write_text(f"<annotation>{plates.crack()}{plates.crack((3, 3, 9, 9))}</annotation>")
    data = cached()
    batch = data.fetch([(0, 1, 0)])
    assert len(batch.boxes) == 2 and data.cache.file == file and data.decodes == []


def test_nothing_is_written_below_the_data(cached, kinds):
    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [kinds.root, *kinds.root.rglob("*")]}

    before = state()
    for settings in ({}, {"cache": "auto"}, {"cache_encoding": "jpeg"}):
        filled(cached(**settings))
    assert state() == before


@linux
def test_a_cache_in_memory_leaves_no_file_and_ends_with_its_run(cached):
    data = filled(cached(cache="ram"))
    files = len(os.listdir("/proc/self/fd"))
    assert not list(cached.folder.iterdir()) and right(data)
    del data
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < files


@pytest.mark.parametrize("side", [30, 150])
def test_jpeg_encoded_pictures_are_the_same_at_every_pass_and_close_to_raw(cached, side):
    model = {"min_size": side, "max_size": 333}
    data, raw = cached(cache_encoding="jpeg", model=model), cached(cache="none", model=model)
    first, second, exact = pictures(data), pictures(data), pictures(raw)
    again = pictures(cached(cache_encoding="jpeg", model=model))
    assert len(data.decodes) == 10
    for row, picture in exact.items():
        assert torch.equal(first[row], second[row]) and torch.equal(first[row], again[row])
        if side == 150 and data.index.path(row) in ("images/b.jpg", "images/g.jpg", "images/h.jpg"):  # the others are noise
            assert (first[row].int() - picture.int()).abs().float().mean() < 2


def test_jpeg_encoded_pictures_take_less_room(cached):
    taken = [filled(cached(cache_encoding=encoding, model={"min_size": 150, "max_size": 333})).cache.file.stat().st_blocks
             for encoding in ("raw", "jpeg")]
    assert taken[1] < 0.7 * taken[0]  # noise as it mostly is


def epochs_through(data, cfg, epochs=3):
    with contextlib.closing(training_loader(data, cfg, torch.device("cpu"), 0, epochs)) as loader:
        return [image.clone() for epoch in range(epochs) for batch in loader for image in batch.images]


def run_on_a_full_disk(cached, cfg, share, log):
    """Trains while files may only grow to a share of the cache's size."""
    logging.getLogger("weldtrain.data.cache").addHandler(logging.FileHandler(log))
    data = cached(cfg)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(data.cache.file.stat().st_size * share), resource.RLIM_INFINITY))
    images = epochs_through(data, cfg)
    data.cache = None
    assert all(torch.equal(a, b) for a, b in zip(images, epochs_through(data, cfg), strict=True))


@pytest.mark.parametrize("change", [
    {"num_workers": 0}, {"num_workers": 4, "batch_size": 2}, {"workers": "process", "num_workers": 1, "batch_size": 1},
], ids=["main", "threads", "process"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_on_a_full_disk_training_goes_on_and_it_is_said_once(cached, tmp_path, change, share):
    assert forked(run_on_a_full_disk, cached, replace(DISK, shuffle=False, **change), share, tmp_path / "log") == 0
    (said,) = (tmp_path / "log").read_text().splitlines()
    assert "takes no more (File too large): the rest is decoded each time" in said and str(cached.folder) in said
    kept = cached()
    pictures(kept)
    assert 0 < len(kept.decodes) < 10 and right(kept)


def test_threads_that_meet_a_full_disk_together_say_it_once(cached, monkeypatch, caplog):
    data, together = cached(), threading.Barrier(4)

    def full(*_):
        together.wait(5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module.os, "pwrite", full)
    made = {row: data.decoded(row) for row in data.rows[:4].tolist()}
    with ThreadPoolExecutor(4) as pool:
        given = list(pool.map(data.cache.put, made, made.values()))
    assert all(np.array_equal(a, b) for a, b in zip(given, made.values()))
    assert [message for message in caplog.messages if "takes no more (No space left" in message] == caplog.messages[-1:]


def fill_until_the_disk_is_full(folder, spare):
    """Another program leaves so many pages when the first picture comes."""
    sizes, grey = np.full((40, 2), 64), np.ones(40, bool)  # each of one page
    cache = PictureCache(folder / "a.pix", sizes, grey, "raw")
    (folder / "other").write_bytes(bytes(4096 * max(0, os.statvfs(folder).f_bavail - spare)))
    given = [cache.put(row, np.full((64, 64, 1), row, np.uint8)) for row in range(40)]
    assert all((picture == row).all() for row, picture in enumerate(given))
    kept = [row for row in range(40) if row in cache]
    assert len(kept) <= spare and all((cache.get(row) == row).all() for row in kept)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small file system needs root")
def test_no_moment_at_which_a_disk_fills_ends_the_run(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this sandbox may not mount")
    try:
        for spare in (0, 1, 2, 3, 10):
            assert forked(fill_until_the_disk_is_full, tmp_path, spare) == 0, spare
            for file in tmp_path.iterdir():
                file.unlink()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_cache_is_for_what_is_read_twice(cached, passes):
    data = cached(cache="auto", passes=passes)
    assert (data.cache is None) == (passes == 1)
    if passes == 1:
        assert data.why == "loader.cache=auto: off, each picture is read once" and not cached.folder.exists()
    assert cached(cache="disk", passes=1).cache is not None  # as was asked
    none = cached(cache="none")
    assert none.cache is None and none.why == "loader.cache=none: off"


def room(monkeypatch, disk, memory):
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": int(disk)}))
    monkeypatch.setattr(cache_module, "memory_available", lambda: int(memory))


KB, MB, GB = 2**10, 2**20, 2**30
HUGE = {"min_size": 4000, "max_size": 4000}  # about 210 MB in all


def test_where_it_does_not_fit_auto_says_off_and_by_name_it_is_an_error_with_figures(cached, monkeypatch):
    for disk, memory, budget in ((100 * MB, 90 * MB, 50), (900 * GB, 900 * GB, 0.1)):
        room(monkeypatch, disk, memory)
        settings = {"model": HUGE, "cache_budget_gb": budget}
        data = cached(cache="auto", **settings)
        needs = data.why.split("needs ")[1].split(" MB")[0]
        assert data.cache is None and data.why.startswith("loader.cache=auto: off, needs ") and 150 < int(needs) < 400
        free = "100 MB free in" if budget == 50 else "900.0 GB free in"
        assert free in data.why and "at most 50% is taken unasked" in data.why
        assert data.why.endswith(f"loader.cache_budget_gb={budget}")
        for place, figure in (("disk", free), ("ram", "90 MB of free memory" if budget == 50 else "900.0 GB of free memory")):
            with pytest.raises(ConfigError) as caught:
                cached(cache=place, **settings)
            text = str(caught.value)
            assert caught.value.exit_code == 2 and text.startswith(f"loader.cache={place}: needs {needs} MB; {figure}")
            assert f"loader.cache_budget_gb={budget}; raise the budget" in text
    assert not list(cached.folder.glob("*"))


@linux
def test_auto_takes_the_disk_then_memory_and_of_each_at_most_half(cached, monkeypatch):
    needed = filled(cached()).cache.file.stat().st_size
    for file in cached.folder.iterdir():
        file.unlink()

    def chosen(disk, memory):
        room(monkeypatch, disk, memory)
        data = cached(cache="auto")
        return data.why.split()[1] if data.cache is None or right(data) else "wrong"

    assert chosen(10 * needed, 10 * needed) == "disk," and len(list(cached.folder.iterdir())) == 1
    assert chosen(0, 0) == "disk,"  # what is there already needs no room
    next(cached.folder.iterdir()).unlink()
    assert chosen(needed, 10 * needed) == "ram," and not list(cached.folder.iterdir())
    assert chosen(needed, needed) == "off,"
    room(monkeypatch, 1.1 * needed, 0)
    assert cached(cache="disk").cache is not None  # who asks for it may have all


def test_the_least_used_closed_caches_make_room_and_open_ones_never(cached):
    files = {}
    for age, side in enumerate((50, 60, 70, 80)):
        data = filled(cached(model={"min_size": side, "max_size": 400}))
        files[side] = data.cache.file
        os.utime(data.cache.file, ns=(10**18, 10**18 + (4 - age) * 10**15))  # the last made is the least used
        del data
    in_use = cached(model={"min_size": 80, "max_size": 400})
    gc.collect()
    taken = {side: file.stat().st_blocks * 512 for side, file in files.items()}

    def left(budget):
        data = cached(model={"min_size": 90, "max_size": 400}, cache_budget_gb=budget / GB)
        needs = int((data.sizes.prod(1) * np.where(data.index.grey, 1, 3)).sum())
        assert data.cache.file.exists()
        return [side for side, file in files.items() if file.exists()], needs

    kept, needs = left(10 * GB)
    assert kept == [50, 60, 70, 80]
    assert left(needs + taken[50] + taken[60] + taken[80] + KB)[0] == [50, 60, 80]
    assert left(needs + taken[50] + taken[80] + KB)[0] == [50, 80]
    assert left(needs + KB)[0] == [80]
    assert right(in_use)
    del in_use
    gc.collect()
    assert left(needs + KB)[0] == []


def test_what_cannot_be_decoded_is_named_and_never_kept(cached, kinds, torn_png):
    data = cached()
    bad = kinds.root / "images" / "d.png"
    bad.write_bytes(torn_png)
    for _ in range(2):
        with pytest.raises(Exception, match=r"d\.png"):
            pictures(data)
    assert 3 not in data.cache and data.cache.get(3) is None


def test_kept_pictures_and_the_index_are_the_users_own(cached):
    data = filled(cached())
    files = [*cached.folder.iterdir(), data.index.file]
    assert len(files) > 1 and {file.stat().st_mode & 0o777 for file in files} == {0o600}
