"""The clock: waiting, copying and computing kept apart, images counted, within 10 % of a stopwatch."""

import time

import pytest
import torch

from weldtrain.telemetry.clock import StepClock


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """Time passes by sleeping alone, so that no busy machine decides."""
    now = [1000.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])


def run(clock, waits, computes, images=4):
    """An epoch; returns the seconds that it took, without its first step."""
    clock.start_epoch()
    for i, (wait_s, compute_s) in enumerate(zip(waits, computes)):
        with clock.wait():
            time.sleep(wait_s)
        with clock.copy():
            pass
        with clock.compute():
            time.sleep(compute_s)
        clock.end_step(images)
        if i == 0:
            start = time.perf_counter()
    return time.perf_counter() - start


@pytest.mark.parametrize(("wait_s", "compute_s", "share"), [(0.03, 0.0, 100), (0.0, 0.03, 0), (0.02, 0.02, 50)])
def test_shares_and_rates(wait_s, compute_s, share):
    clock = StepClock(torch.device("cpu"))
    n = 10
    elapsed = run(clock, [wait_s] * n, [compute_s] * n)
    figures = clock.read()
    assert figures["loader/images_per_s"] == pytest.approx(4 * (n - 1) / elapsed, rel=0.1)
    assert figures["loader/data_wait_pct"] == pytest.approx(share, abs=8)
    parts = figures["loader/data_wait_ms"] + figures["loader/h2d_ms"] + figures["step/compute_ms"]
    assert parts == pytest.approx(figures["step/total_ms"], rel=0.1)


def test_the_first_batch_is_counted_apart():
    clock = StepClock(torch.device("cpu"))
    run(clock, [0.2, 0.0, 0.0], [0.01] * 3)
    assert clock.epoch_starts_s[0] == pytest.approx(0.2, rel=0.2)
    figures = clock.read()
    assert figures["loader/data_wait_ms"] < 5 and figures["step/total_ms"] < 40
    run(clock, [0.05, 0.0], [0.01] * 2)
    assert clock.totals()["loader/epoch_start_s"] == pytest.approx(0.05, rel=0.4)


def test_short_epochs_of_a_slow_loader_are_as_slow_as_a_stopwatch_says():
    clock = StepClock(torch.device("cpu"))
    elapsed = run(clock, [0.3, 0.02], [0.002] * 2)
    start = time.perf_counter()
    for _ in range(8):
        run(clock, [0.02] * 2, [0.002] * 2)
    elapsed += time.perf_counter() - start
    totals = clock.totals()
    assert totals["loader/images_per_s"] == pytest.approx(4 * 17 / elapsed, rel=0.05)
    assert totals["loader/data_wait_pct"] == pytest.approx(91, abs=4)


def test_a_run_of_one_step_is_told_by_that():
    clock = StepClock(torch.device("cpu"))
    run(clock, [0.02], [0.02])
    for figures in (clock.read(), clock.totals()):
        assert figures["loader/images_per_s"] == pytest.approx(4 / 0.04, rel=0.2)
        assert figures["loader/data_wait_pct"] == pytest.approx(50, abs=8)


def test_totals_count_every_interval_once_and_pauses_never():
    clock = StepClock(torch.device("cpu"))
    run(clock, [0.0] * 4, [0.01] * 4)
    clock.read()
    time.sleep(0.2)  # an evaluation
    run(clock, [0.0] * 4, [0.01] * 4, images=2)
    totals = clock.totals()
    assert totals["loader/images_per_s"] == pytest.approx((12 + 8) / 0.07, rel=0.25)


def test_a_resumed_run_is_told_as_a_whole():
    first = StepClock(torch.device("cpu"))
    run(first, [0.02] * 5, [0.02] * 5)
    first.took(4, {"decode": 0.2}, 1)
    unfinished = StepClock(torch.device("cpu"))
    unfinished.restore(first.state())
    assert unfinished.totals() == first.totals()  # nothing was left to do
    again = StepClock(torch.device("cpu"))
    again.restore(first.state())
    run(again, [9.0, 0.0, 0.0], [0.02] * 3)  # workers start once more
    totals = again.totals()
    assert totals["loader/images_per_s"] == pytest.approx(4 * (4 + 2) / (4 * 0.04 + 2 * 0.02))
    assert totals["loader/decode_ms"] == pytest.approx(50) and again.epoch_starts_s == pytest.approx([0.02, 9.0])
