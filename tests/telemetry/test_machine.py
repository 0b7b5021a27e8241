"""The machine as a container sees it: its limits bind, its page cache is free, and nothing is assumed where it says nothing."""

import os

import psutil
import pytest

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
