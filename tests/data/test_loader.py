"""The loader: same pixels, boxes and order however it is run; errors as they were; options dropped where they do not apply."""

import contextlib
import errno
import hashlib
import itertools
import os
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import cv2
import numpy as np
import psutil
import pytest
import torch

from weldtrain.config import AugmentConfig, LoaderConfig, ModelConfig
from weldtrain.data import loader as loader_module
from weldtrain.data import processes as processes_module
from weldtrain.data.buffers import SharedBuffers
from weldtrain.data.cache import open_cache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import evaluation_loader, plan, training_loader
from weldtrain.data.processes import Processes
from weldtrain.data.synthetic import CLASSES
from weldtrain.errors import ConfigError, DataError, PictureError, TrainingError

CPU = torch.device("cpu")
LIGHT = AugmentConfig(hflip=0.5, vflip=0.5, brightness=0.2, contrast=0.2)
SIMPLE = LoaderConfig(batch_size=2, num_workers=0, drop_last=False, cache="none", timeout_s=30)
SCALE = ModelConfig(min_size=96, max_size=96)
EPOCHS = 2


def dataset(index, seed=0, **more):
    return DetectionDataset(index, "train", CLASSES, SCALE, **({"augment": LIGHT, "seed": seed} | more))


def samples(batch):
    """Of each picture of a batch its key's row and a digest of its pixels in RGB, boxes, labels and sizes."""
    for i, (row, (height, width)) in enumerate(zip(batch.image_ids.tolist(), batch.image_sizes.tolist())):
        own = batch.batch_index == i
        whole = (batch.images[i, :, :height, :width].expand(3, -1, -1).contiguous(), batch.boxes[own], batch.labels[own],
                 batch.image_sizes[i], batch.original_sizes[i])
        assert not batch.images[i, :, height:].any() and not batch.images[i, :, :, width:].any()
        yield row, hashlib.sha1(b"".join(part.numpy().tobytes() for part in whole)).hexdigest()


def told(loader, epochs=range(EPOCHS)):
    """What a loader gives in some epochs: for each, in order, `samples` of its batches."""
    given = []
    with contextlib.closing(loader):
        for epoch in epochs:
            loader.set_epoch(epoch)
            given.append([sample for batch in loader for sample in samples(batch)])
    return given


def loaded(data, cfg, epochs=None):
    return training_loader(data, cfg, CPU, data.seed, epochs)


@pytest.fixture
def full(configured):
    return configured("augment=full").augment


def process(workers, **more):
    return {"workers": "process", "num_workers": workers, **more}


@pytest.mark.parametrize("change", [
    {"num_workers": 1},
    {"num_workers": 4},
    {"num_workers": 4, "prefetch_factor": 1, "persistent_workers": False},
    {"num_workers": 2, "batch_size": 8},
    {"batch_size": 8},
    {"batch_size": 3, "persistent_workers": False},
    process(1), process(4, prefetch_factor=1), process(2, persistent_workers=False), process(2, batch_size=8),
    process(1, multiprocessing_context="spawn"), process(1, multiprocessing_context="forkserver"),
    {"num_workers": 2, "cache": "ram"}, {"num_workers": 2, "cache": "disk"}, {"cache": "ram"}, {"cache": "disk", "batch_size": 8},
    process(2, cache="ram"), process(2, cache="disk"), process(4, cache="disk", batch_size=3),
    process(1, cache="ram", multiprocessing_context="spawn"), process(1, cache="disk", multiprocessing_context="forkserver"),
], ids=lambda change: "-".join(f"{v}" if isinstance(v, str) else f"{k}={v}" for k, v in change.items()))
def test_samples_and_order_do_not_depend_on_how_they_are_loaded(kinds, full, tmp_path, change):
    settled = {"augment": full, "seed": 3}
    expected = told(loaded(kinds(**settled), SIMPLE))
    assert len({digest for epoch in expected for _, digest in epoch}) == 10 * EPOCHS
    cfg = replace(SIMPLE, **change)
    for _ in range(2 if cfg.cache == "disk" else 1):  # the second time from what the first has kept
        data = kinds(**settled)
        data.cache, _ = open_cache(cfg, data.index, data.sizes, data.window, tmp_path, rows=data.rows, passes=2, workers=1,
                                   decoded=data.decoded)
        assert (data.cache is None) == (cfg.cache == "none")
        assert told(loaded(data, cfg)) == expected


@pytest.mark.parametrize("settings", [{"sampling": "repeat_factor", "repeat_threshold": 0.9}, {"sampling": "balanced"},
                                      {"group_by_aspect": True}], ids=lambda v: "-".join(map(str, v.values())))
def test_no_sampling_depends_on_the_workers(kinds, full, settings):
    cfg = replace(SIMPLE, **settings)
    expected = told(loaded(kinds(augment=full), cfg))
    for change in ({"num_workers": 4}, process(2)):
        assert told(loaded(kinds(augment=full), replace(cfg, **change))) == expected


def test_a_picture_that_comes_again_in_an_epoch_is_augmented_anew(kinds, full):
    (epoch,) = told(loaded(kinds(augment=full), replace(SIMPLE, sampling="balanced")), range(1))
    rows = [row for row, _ in epoch]
    assert max(map(rows.count, rows)) > 1 and len(set(epoch)) == len(epoch) == 10


def test_samples_and_order_depend_on_epoch_and_seed(index):
    def seen(seed):
        return told(loaded(dataset(index, seed), SIMPLE))

    first, second = seen(0)
    rows = sorted(index.rows("train").tolist())
    assert [row for row, _ in first] != [row for row, _ in second]
    assert sorted(row for row, _ in first) == sorted(row for row, _ in second) == rows
    assert all(dict(first)[row] != dict(second)[row] for row in rows)
    (other, _) = seen(1)
    assert [row for row, _ in other] != [row for row, _ in first] and all(dict(other)[row] != dict(first)[row] for row in rows)


@pytest.mark.parametrize("change", [{}, {"num_workers": 3}, {"num_workers": 2, "persistent_workers": False}, process(2)],
                         ids=["main", "threads", "threads of one epoch", "processes"])
def test_an_epoch_begun_in_the_middle_or_left_early_is_the_same(kinds, change):
    straight = told(loaded(kinds(augment=LIGHT), SIMPLE), range(4))
    loader = loaded(kinds(augment=LIGHT), replace(SIMPLE, **change), epochs=4)
    size = SIMPLE.batch_size
    with contextlib.closing(loader):
        for epoch, start in ((1, 2), (2, 0), (3, 4), (0, 1), (1, 5), (2, 0)):
            loader.set_epoch(epoch, start)
            assert [s for batch in loader for s in samples(batch)] == straight[epoch][start * size :]
        for epoch, stop in ((1, 2), (2, 1), (2, 5), (3, 3)):  # stopped after so many batches
            loader.set_epoch(epoch)
            seen = []
            for batch in loader:
                seen += samples(batch)
                if len(seen) == stop * size:
                    break
            assert seen == straight[epoch][: stop * size]
        loader.set_epoch(0)
        assert [s for batch in loader for s in samples(batch)] == straight[0]


@pytest.mark.parametrize("change", [{"num_workers": 2}, process(1)], ids=["threads", "processes"])
def test_more_epochs_than_were_announced_are_loaded_as_well(kinds, change):
    expected = told(loaded(kinds(augment=LIGHT), SIMPLE), range(3))
    assert told(loaded(kinds(augment=LIGHT), replace(SIMPLE, **change), epochs=1), range(3)) == expected


@pytest.mark.parametrize("change", [{}, {"num_workers": 3}, process(2)], ids=["main", "threads", "processes"])
def test_evaluation_sees_every_picture_once_in_path_order_and_drops_none(index, change):
    loader = evaluation_loader(dataset(index, augment=None), replace(SIMPLE, drop_last=True, **change), 3, CPU)
    for _ in range(2):
        rows = torch.cat([b.image_ids for b in loader]).tolist()
        assert rows == index.rows("train").tolist()
    assert [index.path(r) for r in rows] == sorted(index.path(r) for r in rows)


@pytest.mark.parametrize("change", [{}, {"num_workers": 2}, process(1)], ids=["main", "threads", "processes"])
def test_loading_leaves_the_random_numbers_of_training_alone(index, change):
    """The detector draws from torch's generator: if the loader did as well, losses would depend on how it is run."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    told(training_loader(dataset(index), replace(SIMPLE, **change), CPU, 0))
    assert torch.equal(torch.get_rng_state(), before)


def cut(index):
    """Cuts one training picture at its middle, after the index was built."""
    bad = index.root / "images" / "0003.jpg"
    bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])
    return bad


def removed(index):
    bad = index.root / "images" / "0005.jpg"
    bad.unlink()
    return bad


@pytest.mark.parametrize(("harm", "text"), [(cut, "cut off"), (removed, "no such picture")])
def test_the_same_error_with_and_without_workers(configured, welds, tmp_path, harm, text):
    shutil.copytree(welds, tmp_path / "welds")
    index = open_index(configured(f"dataset.root={tmp_path / 'welds'}").dataset, tmp_path)
    check_errors(dataset(index), harm(index), text)


def test_a_picture_torn_inside_is_named_by_every_loader(plates, tmp_path, torn_png):
    index = open_index(plates({"a.png": None, "b.png": None, "torn.png": torn_png}), tmp_path)
    check_errors(DetectionDataset(index, "train", ["crack"], SCALE), index.root / "images" / "torn.png", "damaged")


def check_errors(data, bad, text):
    texts, ways = [], ({}, {"num_workers": 2}, process(2), process(1, multiprocessing_context="spawn"))
    for change in ways:
        with pytest.raises(PictureError) as caught:
            list(training_loader(data, replace(SIMPLE, **change), CPU, 0))
        texts.append(str(caught.value))
        assert not change or "in read_bytes" in str(caught.value.__cause__) or "in decode" in str(caught.value.__cause__)
    assert len(set(texts)) == 1 and texts[0].startswith(str(bad)) and text in texts[0]


class Erring(DetectionDataset):
    def decoded(self, row, *args):
        raise RuntimeError("no CUDA here")


@pytest.mark.parametrize("change", [{}, {"num_workers": 2}, process(1)], ids=["main", "threads", "processes"])
def test_an_error_of_the_code_keeps_the_line_that_raised_it(index, change):
    with pytest.raises(RuntimeError, match="no CUDA here") as caught:
        list(training_loader(Erring(index, "train", CLASSES, SCALE), replace(SIMPLE, **change), CPU, 0))
    assert "in decoded" in str(caught.value.__cause__)


class Sending(Erring):
    """Its workers have a thread within torch when they end, as one is that still sends a batch."""

    def work_as(self, worker):
        threading.Thread(target=lambda: [torch.zeros(9) + 1 for _ in itertools.count()], daemon=True).start()
        super().work_as(worker)


@pytest.mark.parametrize("method", torch.multiprocessing.get_all_start_methods())
def test_workers_that_are_sending_when_the_loader_closes_end_quietly(index, capfd, method):
    with pytest.raises(RuntimeError, match="no CUDA here"):
        list(training_loader(Sending(index, "train", CLASSES, SCALE),
                             replace(SIMPLE, **process(2, multiprocessing_context=method)), CPU, 0))
    assert not capfd.readouterr().err


def test_a_worker_that_dies_while_the_loader_closes_does_not_cover_the_error(index, monkeypatch):
    def one_dies(stream):
        monkeypatch.undo()
        os.kill(stream._workers[0].pid, signal.SIGABRT)
        time.sleep(5)  # which torch's error ends

    monkeypatch.setattr(Processes, "_shutdown_workers", one_dies)
    with pytest.raises(RuntimeError, match="no CUDA here"):
        list(training_loader(Erring(index, "train", CLASSES, SCALE), replace(SIMPLE, **process(2)), CPU, 0))


def children():
    """The processes that this one has started and that have not ended."""
    return {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE}


class Sleeper(DetectionDataset):
    def decoded(self, row, *args):
        if row == self.rows[5]:
            time.sleep(30)
        return super().decoded(row, *args)


class Stopped(DetectionDataset):
    def decoded(self, row, *args):
        if row == self.rows[5]:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().decoded(row, *args)


class Suicide(DetectionDataset):
    def decoded(self, row, *args):
        if row == self.rows[5]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decoded(row, *args)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("kind", "text", "key"), [
    (Sleeper, "no batch came from the workers within 2 s while at {} (", "loader.timeout_s: "),
    (Stopped, " is stopped while at {} (", "loader.timeout_s: no batch came from the workers within 2 s: process "),
    (Suicide, "a loader worker died (", "loader.num_workers: ")])
def test_a_worker_that_hangs_or_dies_ends_the_run_with_its_key_and_its_picture(index, kind, text, key, workers):
    before = children()
    stuck = kind(index, "train", CLASSES, SCALE)
    picture = index.path(stuck.rows[5])
    seen = 0
    with pytest.raises(TrainingError) as caught:
        for batch in training_loader(stuck, replace(SIMPLE, shuffle=False, timeout_s=2, **process(workers)), CPU, 0):
            seen += len(batch)
    assert seen <= 4 and str(caught.value).startswith(key) and text.format(picture) in str(caught.value)
    assert f"while at {picture} (" in str(caught.value)
    assert children() <= before


def test_without_memory_or_locks_for_processes_threads_load(kinds, caplog, monkeypatch):
    expected = told(loaded(kinds(), SIMPLE))
    for method in (SharedBuffers, "__init__"), (processes_module._MultiProcessingDataLoaderIter, "__init__"):
        with monkeypatch.context() as patch:
            patch.setattr(*method, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            assert told(loaded(kinds(), replace(SIMPLE, **process(2)))) == expected
        assert "worker processes cannot be started (No space left on device): threads load instead" in caplog.text
        caplog.clear()


def test_batches_of_processes_share_memory_that_is_used_again_and_is_never_short(kinds):
    """Also where the trainer keeps more batches than there are pieces for."""
    expected = told(loaded(kinds(), SIMPLE))
    loader = loaded(kinds(), replace(SIMPLE, **process(1, prefetch_factor=1)), epochs=2)
    with contextlib.closing(loader):
        kept = list(loader)
        assert len(kept) == 5 and len(loader.dataset._shared._pieces[0]) == 3
        assert [sample for batch in kept for sample in samples(batch)] == expected[0]
        assert loader.dataset._shared._taken.all()
        places = {batch.memory.data_ptr() for batch in kept}
        kept.clear()
        loader.set_epoch(1)
        again = []
        for batch in loader:
            again += samples(batch)
            places.add(batch.memory.data_ptr())
        del batch
        assert again == expected[1] and not loader.dataset._shared._taken.any()
        assert len(places) <= 3 + 2 + 5  # the pieces, what was sent byte by byte because none was free, and that anew


def test_a_worker_that_dies_while_the_trainer_computes_is_told_alike(index):
    """Torch notices by a signal, wherever the main thread is then: mostly in a training step."""
    stuck = Suicide(index, "train", CLASSES, SCALE)
    with pytest.raises(TrainingError, match=f"a loader worker died .* while at {index.path(stuck.rows[5])} \\("):
        loader = training_loader(stuck, replace(SIMPLE, shuffle=False, **process(1)), CPU, 0)
        with loader.explained():
            for _ in loader:
                for _ in range(30):
                    time.sleep(0.01)


def test_memory_that_was_full_is_told_where_the_system_counts_its_kills(index, monkeypatch):
    counted = itertools.count()
    monkeypatch.setattr(loader_module, "oom_kills", lambda: next(counted))
    told = r"died \(the system ended it, since memory was full\) while at .*fewer loader.num_workers"
    with pytest.raises(TrainingError, match=told):
        list(training_loader(Suicide(index, "train", CLASSES, SCALE), replace(SIMPLE, shuffle=False, **process(1)), CPU, 0))


def test_the_processes_of_a_loader_end_with_it(index):
    before = children()
    loader = training_loader(dataset(index), replace(SIMPLE, **process(2)), CPU, 0)
    assert len(list(loader)) == 4 and len(children() - before) >= 2  # they go on to the next epoch
    loader.close()
    assert children() <= before
    loader.set_epoch(0)
    for _ in loader:
        break
    assert children() <= before


def test_options_that_do_not_apply_are_dropped():
    settled = plan(LoaderConfig(num_workers=0, persistent_workers=True, prefetch_factor=4, pin_memory=True), CPU, 10, 1000)
    assert (settled.persistent_workers, settled.prefetch_factor, settled.timeout_s, settled.pin_memory) == (False, None, 0, False)
    assert plan(LoaderConfig(workers="process", num_workers=16), CPU, 3, 1000).num_workers == 3
    assert plan(LoaderConfig(workers="process", num_workers="auto"), CPU, 1, 1000).num_workers == 1
    threads = plan(LoaderConfig(workers="thread", num_workers=2, multiprocessing_context="spawn"), CPU, 9, 9)
    assert threads.multiprocessing_context is None and any("multiprocessing_context=spawn: has no" in n for n in threads.notes)


def test_workers_are_threads_unless_a_context_of_processes_is_named():
    assert plan(LoaderConfig(), CPU, 100, 1000).workers == "thread"
    assert plan(LoaderConfig(multiprocessing_context="spawn"), CPU, 100, 1000).workers == "process"
    assert plan(LoaderConfig(workers="process"), CPU, 100, 1000).workers == "process"


@pytest.mark.parametrize("cores", [1, 4, 64])
def test_the_number_of_workers_follows_the_cores(monkeypatch, cores):
    monkeypatch.setattr(loader_module, "usable_cores", lambda: cores)
    threads, processes = (plan(LoaderConfig(workers=kind), CPU, 1000, 1000) for kind in ("thread", "process"))
    assert threads.num_workers == min(cores, 8) and processes.num_workers == min(max(cores - 1, 1), 8)
    for settled in (threads, processes):
        assert any(f"num_workers=auto: {settled.num_workers} of kind {settled.workers}" in note for note in settled.notes)
    crowded = plan(LoaderConfig(num_workers=cores * 3), CPU, 1000, 1000)
    assert crowded.num_workers == cores * 3 and any(f"on {cores} usable cores" in note for note in crowded.notes)


def test_pinning_follows_the_articles_tree():
    cuda = torch.device("cuda")
    assert plan(LoaderConfig(num_workers=2), cuda, 10, 1000).pin_memory
    assert not plan(LoaderConfig(num_workers=0), cuda, 10, 1000).pin_memory
    assert not plan(LoaderConfig(num_workers=2), cuda, 10, psutil.virtual_memory().total).pin_memory
    assert plan(LoaderConfig(num_workers=0, pin_memory=True), cuda, 10, 1000).pin_memory
    assert not plan(LoaderConfig(num_workers=2), CPU, 10, 1000).pin_memory


@pytest.mark.parametrize(("kind", "bytes_of_batch"), [("thread", 400 << 20), ("process", 200 << 20)])
def test_less_is_in_flight_where_memory_is_small(monkeypatch, kind, bytes_of_batch):
    """Threads fill one batch together, processes one each."""
    monkeypatch.setattr(loader_module, "memory_available", lambda: 4 << 30)
    settled = plan(LoaderConfig(workers=kind, num_workers=2, prefetch_factor=4), CPU, 100, bytes_of_batch)
    assert settled.prefetch_factor == 2
    assert any("4.0 GB of free memory, a batch takes 0." in note and "loader.prefetch_factor=2 instead of 4" in note
               for note in settled.notes)
    assert plan(LoaderConfig(workers=kind, num_workers=2, prefetch_factor=4), CPU, 100, 20 << 20).prefetch_factor == 4


def test_the_limit_of_open_files_is_raised_for_processes():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked = LoaderConfig(num_workers=40)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        plan(replace(asked, workers="thread"), CPU, 1000, 1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        notes = plan(replace(asked, workers="process"), CPU, 1000, 1000).notes
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (40 * 8 + 128, before[1])
        assert any("num_workers=40 may need 448 open files, the limit (ulimit -n) was 300: raised to 448" in n for n in notes)
        plan(replace(asked, workers="process", num_workers=1), CPU, 1000, 1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 448  # never lowered
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_context_that_this_system_lacks_names_its_key(monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ConfigError, match=r"loader\.multiprocessing_context: this system has no 'fork'"):
        plan(LoaderConfig(workers="process", num_workers=2, multiprocessing_context="fork"), CPU, 10, 1000)


def test_too_few_pictures_for_a_batch_names_the_key(index):
    with pytest.raises(DataError, match=r"loader\.batch_size"):
        training_loader(dataset(index), LoaderConfig(batch_size=100, num_workers=0), CPU, 0)


def test_opencv_keeps_to_one_thread():
    assert cv2.getNumThreads() <= 1


def test_defects_stay_where_they_are_when_pictures_are_resized(index):
    row = int(index.rows("train")[np.diff(index.box_offsets)[index.rows("train")].argmax()])
    large, small = (DetectionDataset(index, "train", CLASSES, ModelConfig(min_size=s, max_size=s)).load(0, row)
                    for s in (128, 64))
    assert small.image.shape == (64, 64, 1)  # drawn radiographs are grey
    np.testing.assert_allclose(small.boxes * 2, large.boxes, rtol=1e-6)
    assert small.labels.min() >= 1
