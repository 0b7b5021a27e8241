"""The machine as a container sees it: its limits bind, its page cache is free, and nothing is assumed where it says nothing."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from weldtrain.telemetry import machine

GB = 2**30


@pytest.fixture
def cgroup(monkeypatch):
    """`cgroup(**{"cpu.max": "200000 100000"})`: the files of a control group, and a machine of 16 cores and 64 GB free."""

    def fake(**files):
        monkeypatch.setattr(machine, "_cgroup", lambda name: files.get(name, ""))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 64 * GB}))
    fake()
    return fake


@pytest.mark.parametrize(("quota", "cores"), [
    ("", 16), ("max 100000", 16), ("400000 100000", 4), ("150000 50000", 3), ("20000 100000", 1), ("1 100000", 1),
    ("9900000 100000", 16)])
def test_cores_are_what_the_container_may_use(cgroup, quota, cores):
    cgroup(**{"cpu.max": quota})
    assert machine.usable_cores() == cores


def test_cores_are_those_of_this_process_where_nothing_limits_them(cgroup, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.usable_cores() == 1


STAT = "anon 3221225472\nfile_mapped 7\nfile {}\nkernel 12"


@pytest.mark.parametrize(("limit", "used", "cached", "free"), [
    ("", "", 0, 64), ("max", str(3 * GB), 0, 64), (str(8 * GB), str(3 * GB), 0, 5), (str(8 * GB), str(7 * GB), 4 * GB, 5),
    (str(8 * GB), str(9 * GB), 0, 0), (str(900 * GB), str(3 * GB), 0, 64)])
def test_memory_is_what_the_container_may_take(cgroup, limit, used, cached, free):
    cgroup(**{"memory.max": limit, "memory.current": used, "memory.stat": STAT.format(cached)})
    assert machine.memory_available() == free * GB


def test_a_boot_has_one_number_of_32_bits():
    assert machine.boot_id() == machine.boot_id() and 0 <= machine.boot_id() < 2**32


def test_this_machine_answers():
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    assert 0 < machine.memory_available() <= psutil.virtual_memory().total


@pytest.mark.alone
def test_workers_are_counted_by_what_they_compute():
    counters, over = machine.MachineCounters(torch.device("cpu")), threading.Event()

    def busy():
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy, name="weldtrain-loader-0")
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    thread.start()
    try:
        counters.read()
        time.sleep(0.5)
        values = counters.read()
    finally:
        over.set()
        child.kill()
        child.wait()
        thread.join()
    assert 40 < values["system/workers_cpu_pct"] < 230 and values["system/workers_rss_mb"] > 1
    assert 0 < values["system/cpu_pct"] <= 100 and values["system/page_tables_mb"] > 0.1


class Counters:
    """In the place of the machine's: 1, 2, 3, …"""

    readings = 0

    def read(self):
        self.readings += 1
        return {"system/cpu_pct": float(self.readings), "system/rss_mb": float(self.readings)}


def sampled(counters, until, **settings):
    sampler = machine.Sampler(counters, **settings)
    deadline = time.monotonic() + 20
    while counters.readings < until and time.monotonic() < deadline:
        time.sleep(0.01)
    return sampler


def test_samples_become_a_mean_of_shares_and_the_largest_of_sizes():
    sampler = sampled(Counters(), until=3, every_s=0.02, share=1.0)
    sampler.close()
    last = sampler._samples[-1]["system/rss_mb"]
    assert sampler.read() == {"system/cpu_pct": pytest.approx((1 + last) / 2), "system/rss_mb": last}
    assert sampler.read() == {"system/cpu_pct": last, "system/rss_mb": last}  # nothing new was seen


def test_a_run_of_a_moment_has_its_counters_too():
    sampler = machine.Sampler(Counters())
    assert sampler.read() == {"system/cpu_pct": 1.0, "system/rss_mb": 1.0}
    sampler.close()


def test_the_thread_takes_no_more_of_a_core_than_its_share():
    class Dear(Counters):
        def read(self):
            end = time.thread_time() + 0.02
            while time.thread_time() < end:
                pass
            return super().read()

    counters, start = Dear(), time.perf_counter()
    sampler = sampled(counters, until=5, every_s=0.0, share=0.1)
    sampler.close()
    # Each reading waits until all before it are paid for: five at a tenth of a core take four times 0.2 s at least.
    assert counters.readings == 5 and time.perf_counter() - start > 0.8
