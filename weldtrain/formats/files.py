"""Folder: every data file below a root, listed once. Names in annotations are looked up in that list and nowhere else,
so that none leads outside it; and a digest of the state of all of them.
"""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import heapq
import os
import struct
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from weldtrain.errors import DataError
from weldtrain.formats.pictures import IMAGE_SUFFIXES

DATA_SUFFIXES = (*IMAGE_SUFFIXES, ".xml", ".txt", ".json", ".csv", ".yaml", ".yml", ".names", ".labels", ".data")
MAX_TEXT_BYTES = 32 * 2**20
# Pictures, but none that is read here: to be named rather than passed over.
_OTHER_PICTURES = (".gif", ".heic", ".heif", ".avif", ".dcm", ".dicom", ".raw", ".nef", ".cr2", ".dng", ".psd", ".svg",
                   ".jp2", ".j2k", ".exr", ".hdr", ".pgm", ".ppm", ".pbm", ".mp4", ".avi", ".mov", ".mkv")


_MANY = 500


class Folder:
    """Paths are relative to the root, with `/`, sorted. Dot-files, `__MACOSX` and what the system leaves are no data."""

    def __init__(self, root: Path, images: str | None = None) -> None:
        """Pictures are those below `images`, a folder below the root. Raises DataError if a folder cannot be listed."""
        self.root = root
        names = list_files(root)
        self.names = [n for n in names if n.lower().endswith(DATA_SUFFIXES)]
        self.strange = Counter(s for n in names if (s := _suffix(n)) in _OTHER_PICTURES)
        # The folder that holds all the others, as archives often unpack; "" where that is the root.
        first, last = (n.split("/")[:-1] for n in (self.names[0], self.names[-1])) if self.names else ([], [])
        self.top = "/".join(first[: _common(first, last)])
        self.loose: list[tuple[str, str]] = []  # names that `find` knew by their last part alone, and their pictures
        self.narrow(self.folder(images, "images") if images and path_parts(images) else "")

    def narrow(self, images: str) -> None:
        """Takes only the pictures below a folder."""
        self.images = images
        self.pictures = self.ending(IMAGE_SUFFIXES, images)
        self._by_stem = _grouped(self.pictures)

    def path(self, name: str) -> Path:
        return self.root / name

    def places(self, name: str) -> tuple[str, ...]:
        """Where a file or folder of a fixed name may lie: at the root, or in the one folder that holds all others."""
        return (name, f"{self.top}/{name}".rstrip("/")) if self.top else (name,)

    def ending(self, suffixes: tuple[str, ...], below: str = "") -> list[str]:
        """The files with one of these suffixes, in any case, below a folder."""
        start = f"{below}/" if below else ""
        return [n for n in self.names if n.startswith(start) and n.lower().endswith(suffixes)]

    def chosen(self, wanted: str | None, suffixes: tuple[str, ...]) -> list[str]:
        """The files with a suffix that `wanted` names: a file, a pattern such as `*_train.json`, a folder, or all if null."""
        files = self.ending(suffixes)
        if wanted is None:
            return files
        pattern = folded("/".join(path_parts(wanted)))
        matching = [n for n in files if fnmatch.fnmatchcase(folded(n), pattern)]
        return matching or self.ending(suffixes, self.folder(wanted, "annotations"))

    def folder(self, name: str, which: str) -> str:
        """`name` as the listing spells it, "" for the root. Raises DataError if no data file lies below it."""
        if os.path.normpath(name) == ".":
            return ""
        if found := self.has_folder("/".join(path_parts(name))):
            return found
        near = ", ".join(sorted({n.split("/")[0] for n in self.names if "/" in n})) or "no folder at all"
        raise DataError("no such folder, or no data in it", self.root / name,
                        f"set dataset.{which} to a folder below {self.root}, which holds {near}")

    def has_folder(self, name: str) -> str:
        """A folder of that name as the listing spells it, or "" where no data file lies below it."""
        for same in (str, folded):  # `Images` and `images` may be two folders
            for place in self.places(name):
                wanted = same(f"{place}/")
                for n in self.names:
                    if same(n).startswith(wanted):
                        return _first(n, wanted.count("/"))
        return ""

    def find(self, reference: str, near: str = "") -> list[str]:
        """The pictures that a name in an annotation or list may mean: none, one, or several equally likely.

        `001`, `001.jpg`, `sub/001`, `./001.JPG`, `C:\\data\\sub\\001.jpg`, dots in the stem: letter case, blanks
        around, a missing extension and folders above the root do not matter. Of pictures of one name, the one
        that shares most of its folders with the reference is meant, then the one nearest to the folder `near`.
        """
        parts = path_parts(reference)
        if not parts:
            return []
        name, stem = folded(parts[-1]), folded(_stem(parts[-1]))
        alike = self._by_stem.get(stem, [])
        found = [p for p in alike if name == folded(p.rpartition("/")[2])] or self._by_stem.get(name, [])
        if not found and _suffix(name) in IMAGE_SUFFIXES:  # a picture that was converted keeps its stem
            found = alike
        whole = "/".join(parts)
        if len(found) > 1 and (alone := [p for p in found if p in (whole, f"{self.images}/{whole}")]):
            found = alone
        if len(found) > 1:
            closest = max(_closeness(p, parts, near) for p in found)
            best = [p for p in found if _closeness(p, parts, near) == closest]
        else:
            best = found
        if not best:
            return []
        tail = _common(reversed([folded(p) for p in parts[:-1]]), reversed([folded(p) for p in best[0].split("/")[:-1]]))
        whole = tail in (len(parts) - 1, best[0].count("/"))
        if not whole and len(found) > 1:  # which one, nobody can tell
            return []
        if not whole or (_suffix(name) in IMAGE_SUFFIXES and _suffix(name) != _suffix(best[0])):
            self.loose.append((reference, best[0]))
        return best

    def pair(self, pictures: Iterable[str], annotations: Sequence[str]) -> tuple[dict[str, str], list[tuple[str, list[str]]]]:
        """Picture -> the nearest annotation file of its stem, and the names for which several are equally near.

        Near is the same folder, or one whose path differs least: `train/labels` for `train/images`. An annotation
        belongs to the picture it is nearest to, so that equal names in two folders do not take each other's.
        """
        by_stem = _grouped(annotations)
        wanting: dict[str, list[str]] = {}
        for picture in pictures:
            wanting.setdefault(folded(_stem(picture.rpartition("/")[2])), []).append(picture)
        pairs: dict[str, str] = {}
        unclear: list[tuple[str, list[str]]] = []
        for stem, group in wanting.items():
            offers = by_stem.get(stem, [])
            if len(group) > _MANY:  # one name in every folder: only its own folder's can be meant
                beside = {a.rpartition("/")[0]: a for a in offers}
                own = ((p, p.rpartition("/")[0]) for p in group)
                pairs |= {p: beside[f] for p, f in own if f in beside}
                continue
            near = {(p, a): _nearness(p, a) for p in group for a in offers}
            best = {a: max(near[p, a] for p in group) for a in offers}
            for annotation in offers:
                owners = [p for p in group if near[p, annotation] == best[annotation]]
                if len(owners) > 1:
                    unclear.append((annotation, owners))
            for picture in group:
                won = [a for a in offers if near[picture, a] == best[a]]
                nearest = [a for a in won if near[picture, a] == max(near[picture, b] for b in won)]
                if len(nearest) > 1:
                    unclear.append((picture, nearest))
                if nearest:
                    pairs[picture] = nearest[0]
        return pairs, unclear


def read_text(path: Path) -> str:
    """A small text file, UTF-8 or UTF-16 with its mark. Raises DataError for anything else."""
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise DataError(f"is larger than {MAX_TEXT_BYTES >> 20} MB", path, "this is no file of annotations")
        return path.read_text(encoding_of(path))
    except UnicodeError as e:
        raise DataError(f"is not in {encoding_of(path)} encoding ({getattr(e, 'reason', e)})", path, "save it as UTF-8") from None
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror})", path, "restore the file or its permissions") from None


def as_number(text: str) -> float | None:
    """The number that a text in a file is, nan and inf included; None if it is none."""
    try:
        return float(text) if "_" not in text else None  # float() takes 1_0 for 10
    except ValueError:
        return None


def first_line(path: Path) -> str:
    """The first line that is not blank, of a text of any length; its beginning if it is very long. Raises OSError."""
    with open(path, "rb") as file:
        start = file.read(64 * 1024)
    return start.decode(encoding_of(path), "replace").strip().split("\n", 1)[0].strip()


def encoding_of(path: Path) -> str:
    """The encoding that a file's byte-order mark tells, else UTF-8. Raises OSError."""
    with open(path, "rb") as file:
        start = file.read(2)
    return "utf-16" if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def stamp_files(paths: Iterable[Path]) -> str:
    """A digest of the names and states of files and of all data files that folders hold, however deep.

    A state is size, modification and change time, and inode: the change time cannot be set back, so an edit that
    keeps size and date is seen. Costs one stat a file.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(os.fsencode(path) + b"\0")
        if path.is_dir():
            found = sorted((name, state_of(entry)) for name, entry in _walk(str(path)) if name.lower().endswith(DATA_SUFFIXES))
            digest.update(os.fsencode("\0".join(name for name, _ in found)))
            digest.update(b"".join(status for _, status in found))
        elif path.exists():
            digest.update(state_of(path))
    return digest.hexdigest()


def list_files(folder: Path) -> list[str]:
    """Every file under `folder` that may be data, as a relative path with `/`, sorted."""
    return sorted(name for name, _ in _walk(str(folder)))


def state_of(file: os.DirEntry[str] | Path) -> bytes:
    """Size, times of change and inode of a file, in 32 bytes: zeros for what is not there."""
    try:
        st = file.stat()
    except OSError:  # a link that leads nowhere is a state too
        return bytes(32)
    return struct.pack("<4Q", st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino)


def _walk(root: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Files below `root` with their relative paths, and links that lead nowhere. Links to folders are followed, but each
    folder is entered once, by its own name if it has one here; dot-files, `__MACOSX`, pipes and devices are no data."""
    entered: set[str] = set()
    folders, links = [("", root)], []
    while folders or links:
        prefix, folder = folders.pop() if folders else heapq.heappop(links)
        real = os.path.realpath(folder)
        if real in entered:
            continue
        entered.add(real)
        try:
            with os.scandir(folder) as entries:
                found = [e for e in entries if not e.name.startswith(".") and e.name != "__MACOSX"]
        except OSError as e:
            raise DataError(f"the folder cannot be listed ({e.strerror})", folder, "give yourself the right to read it") from None
        for entry in found:
            if _is(entry, "is_dir"):
                below = (f"{prefix}{entry.name}/", entry.path)
                heapq.heappush(links, below) if entry.is_symlink() else folders.append(below)
            elif _is(entry, "is_file") or (entry.is_symlink() and not os.path.exists(entry.path)):
                yield prefix + entry.name, entry


def _is(entry: os.DirEntry[str], kind: str) -> bool:
    try:
        return getattr(entry, kind)()
    except OSError:  # a link to itself
        return False


def path_parts(reference: str) -> list[str]:
    """The components of a path as any system writes it, without drive, root and dots."""
    return [p for p in reference.strip().replace("\\", "/").split("/") if p not in ("", ".", "..") and not p.endswith(":")]


def _first(path: str, count: int) -> str:
    """The first components of a path; by their number, since two spellings of one name may differ in length."""
    return "/".join(path.split("/")[:count])


def folded(name: str) -> str:
    """What is equal on some file system: letter case, and how accents are composed."""
    return (name if name.isascii() else unicodedata.normalize("NFC", name)).casefold()


def _stem(name: str) -> str:
    stem, dot, _ = name.rpartition(".")
    return stem if dot else name


def _suffix(name: str) -> str:
    dot = name.rfind(".")
    return name[dot:].lower() if dot >= 0 else ""


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(folded(_stem(name.rpartition("/")[2])), []).append(name)
    return groups


def _common(a: Iterable[str], b: Iterable[str]) -> int:
    """How many items two sequences share at their beginning."""
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


def _closeness(path: str, parts: Sequence[str], near: str) -> tuple:
    own = path.split("/")
    tail = _common(reversed([folded(p) for p in parts[:-1]]), reversed([folded(p) for p in own[:-1]]))
    exact = own[-1] == parts[-1] or _stem(own[-1]) == parts[-1]
    return tail, tail == len(own) - 1, exact, _common(own[:-1], near.split("/"))


def _nearness(picture: str, annotation: str) -> int:
    a, b = picture.split("/")[:-1], annotation.split("/")[:-1]
    if a == b:
        return len(a) + 1
    if "images" in a and "labels" in b and [("labels" if p == "images" else p) for p in a] == b:
        return len(a) + 2  # where YOLO's tools look first
    head = _common(a, b)
    return head + min(_common(reversed(a), reversed(b)), min(len(a), len(b)) - head)
