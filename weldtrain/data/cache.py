"""PictureCache: pictures at the model's scale in one memory-mapped file, each written when it is first decoded.

A picture's entry appears only after its pixels, so a run that is killed leaves a sound cache, and any number of workers,
ranks and runs may fill one together: they write equal bytes to equal places. What was written before the machine last started
is believed only after its checksum.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from weldtrain.config import LoaderConfig
from weldtrain.data import images
from weldtrain.data.images import Window
from weldtrain.data.index import AnnotationIndex
from weldtrain.errors import ConfigError
from weldtrain.formats.files import state_of
from weldtrain.locks import lock
from weldtrain.telemetry.machine import boot_id, memory_available

log = logging.getLogger(__name__)

JPEG_QUALITY = 95
# Of what is free, a cache takes at most so much unasked: the rest belongs to checkpoints, other programs and the model.
UNASKED_SHARE = 0.5
_PAGE = mmap.PAGESIZE
_CRC, _BOOT, _LENGTH = range(3)  # columns of an entry


class PictureCache:
    """Get and put of uint8 [h,w,C] by row of the index. Safe for many threads and processes."""

    def __init__(self, file: str | os.PathLike[str], sizes: np.ndarray, grey: np.ndarray, encoding: str) -> None:
        """Opens the file, or makes it: entries uint32 [n,3] of checksum, boot and length, then a place for each picture.

        sizes int [n,2] width, height in px; grey bool [n], whether of one channel. Raises OSError.
        """
        self.file, self._sizes, self._grey, self.encoding = Path(file), sizes, grey, encoding
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)  # pictures may be confidential
        weakref.finalize(self, os.close, self._fd)
        nbytes = sizes.prod(1) * np.where(grey, 1, 3)
        first = _pages(len(sizes) * 12)
        self._places = first + np.concatenate([[0], np.cumsum(_pages(nbytes))])
        os.utime(self._fd)  # the last use, by which caches are given up
        alone = lock(self._fd, exclusive=True, wait=False)
        if not alone:  # in use, or just being made
            lock(self._fd, exclusive=False)
        if os.fstat(self._fd).st_size != self._places[-1]:
            os.ftruncate(self._fd, 0)
            # The entries take their room now, since they are written through the map, and on a full disk that is a SIGBUS;
            # the places of pictures are a hole until they come.
            _write(self._fd, memoryview(bytes(int(first))), 0)
            os.ftruncate(self._fd, int(self._places[-1]))
        lock(self._fd, exclusive=False)  # kept as long as it is in use, so that no other run removes it
        self._map = mmap.mmap(self._fd, int(self._places[-1]))
        self._entries = np.frombuffer(self._map, np.uint32, 3 * len(sizes)).reshape(-1, 3)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._boot = boot_id()
        self._full, self._telling = False, threading.Lock()

    @classmethod
    def in_memory(cls, sizes: np.ndarray, grey: np.ndarray, encoding: str) -> PictureCache:
        """One that lives as long as this object and is shared with worker processes. Linux only."""
        fd = os.memfd_create("weldtrain")
        cache = cls(f"/proc/self/fd/{fd}", sizes, grey, encoding)
        os.close(fd)
        cache.file = Path(f"/proc/{os.getpid()}/fd/{cache._fd}")  # by which a spawned worker finds it
        return cache

    def __reduce__(self) -> tuple:
        return PictureCache, (self.file, self._sizes, self._grey, self.encoding)

    def __contains__(self, row: int) -> bool:
        return self._entries[row, _LENGTH] > 0

    def get(self, row: int) -> np.ndarray | None:
        """The picture, read-only, or None if it is not there."""
        crc, boot, length = self._entries[row].tolist()
        if not length:
            return None
        start = int(self._places[row])
        data = self._bytes[start : start + length]
        if boot != self._boot:
            if zlib.crc32(data) != crc:
                return None
            self._entries[row, _BOOT] = self._boot
        picture = data.reshape(self._shape(row)) if self.encoding == "raw" else self._decoded(data, row)
        picture.flags.writeable = False
        return picture

    def put(self, row: int, picture: np.ndarray) -> np.ndarray:
        """Keeps a picture; returns it as `get` will, which for encoded ones is not quite the same."""
        data = memoryview(np.ascontiguousarray(picture)).cast("B")
        if self.encoding == "jpeg":
            shown = picture if picture.shape[2] == 1 else cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)
            coded = cv2.imencode(".jpg", shown, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1]
            data, picture = memoryview(coded).cast("B"), self._decoded(coded, row)
        if not self._full and len(data) <= self._places[row + 1] - self._places[row]:
            try:
                _write(self._fd, data, int(self._places[row]))
            except OSError as e:
                with self._telling:  # several threads may meet it at once
                    told, self._full = self._full, True
                if not told:
                    log.warning("the picture cache %s takes no more (%s): the rest is decoded each time", self.file, e.strerror)
            else:
                self._entries[row, :2] = zlib.crc32(data), self._boot
                self._entries[row, _LENGTH] = len(data)
        return picture

    def _shape(self, row: int) -> tuple[int, int, int]:
        width, height = self._sizes[row].tolist()
        return height, width, 1 if self._grey[row] else 3

    def _decoded(self, data: np.ndarray, row: int) -> np.ndarray:
        kind = cv2.IMREAD_GRAYSCALE if self._grey[row] else cv2.IMREAD_COLOR_RGB
        return cv2.imdecode(data, kind).reshape(self._shape(row))


def open_cache(
    cfg: LoaderConfig, index: AnnotationIndex, sizes: np.ndarray, window: Window, cache_dir: str | os.PathLike[str], *,
    rows: np.ndarray, passes: int, workers: int, decoded: Callable[[int], object],
) -> tuple[PictureCache | None, str]:
    """The cache that `loader.cache` asks for, or None, and why: with what it needs and how long filling takes.

    `sizes` are the index's at the model's scale; `rows` are those that will be read, `passes` times; `decoded` makes one
    of them, to be timed. Raises ConfigError where what was asked for by name does not fit.
    """
    asked = f"loader.cache={cfg.cache}"
    if cfg.cache == "none" or (cfg.cache == "auto" and passes < 2):
        return None, f"{asked}: " + ("off" if cfg.cache == "none" else "off, each picture is read once")
    folder = Path(cache_dir) / "pictures"
    file = folder / f"{_key(index, sizes, window, cfg.cache_encoding)}.pix"
    present = _present(file, len(index))[rows]
    nbytes = sizes[rows].prod(1) * np.where(index.grey[rows], 1, 3) * (1 if cfg.cache_encoding == "raw" else 0.2)
    missing = int(nbytes[~present].sum())
    budget = int(cfg.cache_budget_gb * 2**30)
    places = {
        "disk": _free(folder, file) if hasattr(os, "pwrite") else (0, "on a system without pwrite"),
        "ram": (memory_available() if hasattr(os, "memfd_create") else 0, "of free memory"),
    }
    share = UNASKED_SHARE if cfg.cache == "auto" else 1.0
    need = {"disk": missing, "ram": int(nbytes.sum())}
    fits = [place for place, (free, _) in places.items() if need[place] <= min(budget, share * free)]
    place = next((p for p in fits if cfg.cache in ("auto", p)), None)
    if place is None:
        of = "disk" if cfg.cache == "auto" else cfg.cache
        free, where = places[of]
        unasked = f", of which at most {share:.0%} is taken unasked" * (share < 1)
        short = (f"needs {_size(need[of])}; {_size(free)} {where}{unasked}"
                 f"; loader.cache_budget_gb={cfg.cache_budget_gb:g}")
        if cfg.cache == "auto":
            return None, f"{asked}: off, {short}"
        raise ConfigError(short, asked, "raise the budget, set cache_dir to a larger disk, lower model.min_size, or set none")
    absent = rows[~present] if place == "disk" else rows
    seconds = _seconds(absent, decoded, workers) if len(absent) else 0.0
    quote = f"{asked}: {place}, needs {_size(need[place])}" + f" and {_duration(seconds)} of the first epoch" * (seconds > 0)
    try:
        if place == "ram":
            return PictureCache.in_memory(sizes, index.grey, cfg.cache_encoding), quote
        _make_room(folder, file, budget - int(nbytes.sum()), missing)
        return PictureCache(file, sizes, index.grey, cfg.cache_encoding), quote
    except OSError as e:  # another user's file, a file system that cannot map
        if cfg.cache == "auto":
            return None, f"{asked}: off, {e.filename or folder}: {e.strerror}"
        raise ConfigError(f"{e.filename or folder}: {e.strerror}", asked, "set cache_dir to a folder of your own, or none") from e


def _key(index: AnnotationIndex, sizes: np.ndarray, window: Window, encoding: str) -> str:
    """Of the state of every picture, of all that decides about a pixel, and of the code and library that make it."""
    digest = hashlib.blake2b(digest_size=12)
    rule = {"window": window, "encoding": encoding, "quality": JPEG_QUALITY, "opencv": cv2.__version__}
    digest.update(json.dumps(rule, sort_keys=True).encode())
    digest.update(Path(images.__file__).read_bytes())
    digest.update(np.ascontiguousarray(sizes))
    digest.update(index.grey.tobytes())
    if index.whole is not index:
        digest.update(np.ascontiguousarray(index.windows))
    for row in range(len(index.whole)):
        path = index.whole.path(row)
        digest.update(path.encode("utf-8", "surrogateescape") + state_of(index.root / path))
    return digest.hexdigest()


def _present(file: Path, count: int) -> np.ndarray:
    """bool [count]: what a cache file holds already."""
    try:
        entries = np.fromfile(file, np.uint32, 3 * count)
    except OSError:
        entries = np.zeros(0)
    return entries.reshape(-1, 3)[:, _LENGTH] > 0 if len(entries) == 3 * count else np.zeros(count, bool)


def _seconds(rows: np.ndarray, decoded: Callable[[int], object], workers: int) -> float:
    """How long `workers` take to decode `rows`, from the median of a few."""
    taken = []
    for row in rows[np.linspace(0, len(rows) - 1, min(len(rows), 5)).astype(int)]:
        start = time.perf_counter()
        try:
            decoded(int(row))
        except Exception:  # whatever is wrong with it is said when it is read in earnest
            continue
        taken.append(time.perf_counter() - start)
    return float(np.median(taken)) * len(rows) / max(workers, 1) if taken else 0.0


def _free(folder: Path, keep: Path) -> tuple[int, str]:
    """Bytes that a cache could take there, other caches given up for it, and where that is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free + sum(map(_taken, _others(folder, keep))), f"free in {folder}"
    except OSError as e:
        return 0, f"free in {folder} ({e.strerror})"


def _others(folder: Path, keep: Path) -> list[Path]:
    """The other caches, the longest unused first."""
    return sorted((f for f in folder.glob("*.pix") if f != keep), key=lambda f: f.stat().st_mtime)


def _taken(file: Path) -> int:
    return file.stat().st_blocks * 512


def _make_room(folder: Path, keep: Path, allowed: int, needed: int) -> None:
    """Removes caches that no run has open, the longest unused first, until all but `keep` take at most `allowed` bytes and
    `needed` are free."""
    others = _others(folder, keep)
    taken = sum(map(_taken, others))
    for file in others:
        if taken <= max(allowed, 0) and shutil.disk_usage(folder).free >= needed:
            return
        fd = os.open(file, os.O_RDWR)
        try:
            if lock(fd, exclusive=True, wait=False):
                taken -= _taken(file)
                file.unlink()
                log.info("removed %s, pictures of other data or at another scale, for loader.cache_budget_gb", file)
        finally:
            os.close(fd)


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _pages(nbytes):
    return -(-nbytes // _PAGE) * _PAGE


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MB"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
