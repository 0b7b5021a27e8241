"""Batches by threads: in order, drafted once, never written to while held; and every thread ends, whatever happens."""

import contextlib
import itertools
import random
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch

from weldtrain.config import AugmentConfig, LoaderConfig, ModelConfig
from weldtrain.data import images as images_module
from weldtrain.data import threads as threads_module
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.loader import training_loader
from weldtrain.data.synthetic import CLASSES
from weldtrain.data.threads import Buffers
from weldtrain.errors import PictureError, TrainingError

THREADS = LoaderConfig(batch_size=2, workers="thread", num_workers=4, prefetch_factor=1, drop_last=False)


class Observed(DetectionDataset):
    """Notes what is drafted and decoded; decoding takes `delay_s` or as long as `delays_s` says of a row; some rows fail."""

    def __init__(self, index):
        super().__init__(index, "train", CLASSES, ModelConfig(min_size=96, max_size=96), augment=AugmentConfig(hflip=0.5))
        self.drafts, self.decodes, self.delay_s, self.delays_s, self.errors = [], [], 0.0, {}, {}

    def draft(self, *args):
        draft = super().draft(*args)
        self.drafts.append(weakref.ref(draft.batch))
        return draft

    def decoded(self, row, *args):
        self.decodes.append(row)
        time.sleep(self.delays_s.get(row, self.delay_s))
        if row in self.errors:
            raise self.errors[row]
        return super().decoded(row, *args)

    def alive(self):
        return sum(batch() is not None for batch in self.drafts)


@pytest.fixture
def data(index):
    return Observed(index)


@pytest.fixture
def load(data):
    """`load(num_workers=2, epochs=3)`: a loader over `data`, closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        def make(epochs=None, **settings):
            loader = training_loader(data, replace(THREADS, **settings), torch.device("cpu"), 0, epochs)
            stack.callback(loader.close)
            return loader

        yield make
    assert not loader_threads()


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("weldtrain-loader")]


def run(loader, epochs):
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        yield from loader


def soon(condition, within_s=5.0):
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_batches_come_in_order_however_long_each_picture_takes(data, load):
    draw = random.Random(1)
    for threads, prefetch in ((1, 1), (3, 2), (4, 4)):
        data.delays_s = {row: draw.random() * 0.01 for row in data.rows.tolist()}
        loader = load(num_workers=threads, prefetch_factor=prefetch)
        expected = [[row for _, row, _ in batch] for epoch in range(3) for batch in loader.order.batches(epoch)]
        assert [batch.image_ids.tolist() for batch in run(loader, 3)] == expected


def test_all_threads_work_on_the_first_batch_first(data, load):
    """8 pictures of 0.1 s by 4 threads take 0.2 s, and so does the first batch."""
    data.delay_s = 0.1
    loader = load(batch_size=8)
    loader.plan = replace(loader.plan, num_workers=4)
    start = time.monotonic()
    next(iter(loader))
    assert time.monotonic() - start < 0.5


def test_every_batch_is_drafted_once_and_every_picture_decoded_once(data, load):
    """A thread that comes late to a batch, because its picture took long, leaves it alone."""
    data.delays_s = {int(data.rows[0]): 0.03}
    assert len(list(run(load(batch_size=1, num_workers=2, prefetch_factor=2, epochs=5), 5))) == 40
    assert len(data.drafts) == len(data.decodes) == 40


def test_the_next_epoch_is_begun_before_it_is_asked_for_and_none_after_the_last(data, load):
    loader = load(epochs=2, num_workers=2, prefetch_factor=2)
    assert loader.ready is None
    assert len(list(loader)) == 4
    assert soon(lambda: loader.ready == 2) and len(data.drafts) > 4
    assert len(list(loader)) == 4 and loader.ready == 0
    assert len(data.drafts) == 8 and sorted(data.decodes) == sorted(2 * data.rows.tolist())


def test_without_persistent_workers_nothing_outlives_the_epoch(data, load):
    loader = load(persistent_workers=False)
    for _ in loader:
        assert len(loader_threads()) == 4
    assert not loader_threads() and soon(lambda: data.alive() <= 1) and len(data.drafts) == 4


def test_held_batches_are_never_written_to_and_dropped_ones_are_used_again(data, load):
    held, places = [], []
    for i, batch in enumerate(run(load(prefetch_factor=2), 20)):
        copy = batch.memory.clone()
        places.append(batch.memory.data_ptr())
        if i % 5 == 0:
            held.append((batch.memory, copy))
        elif i % 5 == 1:  # of some only a part is kept
            view = batch.images[1, :, 3:50]
            held.append((view, view.clone()))
        elif i % 5 == 2 and len(batch.boxes):
            held.append((batch.targets()[0]["boxes"].numpy(), batch.targets()[0]["boxes"].clone().numpy()))
    assert len(held) > 32 and all((now == then).all() for now, then in held)
    assert len(set(places)) < len(places)


def test_memory_is_given_out_again_only_once_nothing_refers_to_it():
    buffers = Buffers(2)
    first = buffers(1000)
    place = first.data_ptr()
    assert first.shape == (1000,) and first.dtype == torch.uint8
    part = first[100:200].view(torch.float32).view(5, 5).numpy()[1:]
    del first
    other = buffers(1000)
    assert other.data_ptr() != place
    del part
    smaller = buffers(900)
    assert smaller.data_ptr() == place and smaller.shape == (900,)
    del smaller
    assert buffers(5000).shape == (5000,)  # one that is too small is let go


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 1), (2, 2), (4, 1)])
def test_no_more_batches_are_alive_than_are_asked_for(data, load, threads, prefetch):
    """Those ahead, the one in hand, and the one before it until it is let go."""
    most = 0
    for _ in run(load(num_workers=threads, prefetch_factor=prefetch), 10):
        time.sleep(0.003)
        most = max(most, data.alive())
    assert prefetch <= most <= prefetch + 2  # however many threads fill them


def test_a_break_or_a_close_ends_the_threads_after_the_picture_that_each_is_at(data, load):
    data.delay_s = 0.1
    loader = load(batch_size=4, num_workers=1, prefetch_factor=2)
    for _ in loader:
        assert soon(lambda: len(data.decodes) == 5)  # the thread is at the next batch
        break
    assert not loader_threads()
    begun = len(data.decodes)
    assert begun <= 4 + 2
    time.sleep(0.15)
    assert len(data.decodes) == begun
    start = time.monotonic()
    batches = iter(loader)
    next(batches)
    took, start = time.monotonic() - start, time.monotonic()
    assert soon(lambda: len(data.decodes) > begun + 4)
    loader.close()
    assert not loader_threads() and time.monotonic() - start < 0.9 * took
    loader.close()


def test_a_loader_that_was_closed_starts_anew(data, load):
    loader = load()
    whole = [batch.image_ids.tolist() for batch in run(loader, 2)]
    loader.close()
    assert [batch.image_ids.tolist() for batch in run(loader, 2)] == whole
    for _ in run(loader, 1):
        break
    assert not loader_threads()
    loader.set_epoch(1, start=2)
    assert [batch.image_ids.tolist() for batch in loader] == whole[6:]


class Stubborn(Exception):
    """One that does not pickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(("error", "kind", "text"), [
    (PictureError("is cut off", "x.jpg", "copy it"), PictureError, "x.jpg: is cut off; copy it"),
    (RuntimeError("CUDA is not for workers"), RuntimeError, "CUDA is not for workers"),
    (ValueError("no"), ValueError, "no"),
    (Stubborn(1, 2), RuntimeError, "Stubborn: 1 and 2")])
def test_a_failure_keeps_type_text_and_traceback_and_ends_the_threads(data, load, error, kind, text):
    data.errors = {int(data.rows[5]): error}
    loader = load(shuffle=False)
    seen = []
    with pytest.raises(kind) as caught:
        for batch in loader:
            seen += batch.image_ids.tolist()
    assert type(caught.value) is kind and str(caught.value) == text
    assert seen == data.rows[:4].tolist() and not loader_threads()
    assert "in a loader worker" in str(caught.value.__cause__) and "in decoded" in str(caught.value.__cause__)
    data.errors.clear()
    assert len(list(run(loader, 1))) == 4


def test_of_several_failures_the_first_in_order_is_told(data, load):
    rows = data.rows.tolist()
    data.errors = {row: PictureError(f"is picture {i}", "x.jpg") for i, row in enumerate(rows) if i in (2, 3, 5, 7)}
    data.delays_s = {rows[2]: 0.06, rows[3]: 0.03}  # the later ones fail before it
    for batch_size in (2, 4, 8):
        with pytest.raises(PictureError, match="is picture 2"):
            list(load(shuffle=False, batch_size=batch_size))


@pytest.fixture
def hanging(monkeypatch, data):
    """`hanging(row)`: from now on reading that picture takes for ever."""
    release = threading.Event()
    reading = images_module.read_bytes
    monkeypatch.setattr(threads_module, "_STOP_WAIT_S", 0.1)

    def hang(*rows):
        files = {data.index.root / data.index.path(row) for row in rows}

        def read(path):
            if path in files:
                release.wait(30)
            return reading(path)

        monkeypatch.setattr(images_module, "read_bytes", read)

    yield hang
    release.set()
    assert soon(lambda: not loader_threads())


@pytest.mark.parametrize("threads", [1, 4])
def test_a_read_that_hangs_ends_the_run_and_is_named(data, load, hanging, threads):
    rows = data.rows.tolist()
    hanging(rows[4])
    start = time.monotonic()
    seen = 0
    with pytest.raises(TrainingError) as caught:
        for batch in load(shuffle=False, num_workers=threads, timeout_s=0.8):
            seen += len(batch)
    assert seen == 4 and time.monotonic() - start < 4
    assert f"no batch came from the workers within 0.8 s while at {data.index.path(rows[4])} (" in str(caught.value)
    assert str(caught.value).startswith("loader.timeout_s: ")


def test_all_reads_that_hang_are_named(data, load, hanging):
    rows = data.rows.tolist()
    hanging(rows[0], rows[1])
    with pytest.raises(TrainingError) as caught:
        next(iter(load(shuffle=False, timeout_s=0.8)))
    assert {data.index.path(row) for row in rows if data.index.path(row) in str(caught.value)} == {
        data.index.path(row) for row in rows[:2]}


def test_many_loaders_at_once_keep_to_their_own(index):
    """Training and validation run over one index, and each has its threads."""
    loaders = [training_loader(Observed(index), replace(THREADS, num_workers=2), torch.device("cpu"), seed) for seed in range(3)]
    with contextlib.ExitStack() as stack:
        for loader in loaders:
            stack.callback(loader.close)
        turns = [[batch.image_ids.tolist() for batch in batches] for batches in zip(*(run(loader, 2) for loader in loaders))]
    orders = [itertools.chain(*(loader.order.batches(epoch) for epoch in range(2))) for loader in loaders]
    assert turns == [[[row for _, row, _ in batch] for batch in batches] for batches in zip(*orders)]
    assert not loader_threads()
