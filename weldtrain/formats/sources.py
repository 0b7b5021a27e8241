"""Pictures without annotations: a folder, one picture, a pattern, or a list in a text file."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from weldtrain.config import DatasetConfig, SplitConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import encoding_of, list_files
from weldtrain.formats.pictures import IMAGE_SUFFIXES, Header
from weldtrain.formats.record import ERROR, NOTE, Box, Finding, Reader, Size

SPLIT = "all"  # of which all pictures are
_KEY = "predict.source"
_RUN_FILES, _DRAWN = ("metrics.jsonl", "config.yaml", "run.log"), "pictures"  # of a run directory, and its folder of drawings


class _Root(NamedTuple):
    root: Path

    def path(self, name: str) -> Path:
        return self.root / name


class Pictures(Reader):
    """All pictures that a source names; what it names and is none, or is not there, becomes a finding."""

    def __init__(self, source: str, max_megapixels: float) -> None:
        """Raises DataError where there is no such source, or no picture in it."""
        root, names, findings = _named(source)
        super().__init__(_Root(root), DatasetConfig(root=str(root), split=SplitConfig(make="never"), format="pictures",
                                                    max_megapixels=max_megapixels))
        self.images, self.findings = names, findings
        self.sources, self.splits = [""] * len(names), [SPLIT] * len(names)

    def annotations(self, i: int, header: Header) -> Iterator[Box | Size | Finding]:
        return iter(())


def _named(source: str) -> tuple[Path, list[str], list[Finding]]:
    """The folder that holds all pictures of a source, their paths below it, and what is wrong with the source."""
    path = Path(source)
    if path.is_dir():
        return _below(path)
    if path.suffix.lower() in IMAGE_SUFFIXES and os.path.lexists(path):
        return path.parent, [path.name], []
    if path.suffix.lower() == ".txt" and path.is_file():
        return _listed(path)
    if glob.has_magic(source):
        found = [name for name in glob.glob(source, recursive=True) if os.path.isfile(name)]
        if not any(Path(name).suffix.lower() in IMAGE_SUFFIXES for name in found):
            raise DataError("matches no picture", f"{_KEY}={source}",
                            "check the pattern, and quote it, so that the shell leaves it alone")
        return _without_drawings(*_together(found, ""))
    if path.exists():
        raise DataError("is no picture, folder or list", f"{_KEY}={source}", f"pictures end in {' '.join(IMAGE_SUFFIXES)}")
    raise DataError("is not there", f"{_KEY}={source}", "give a folder, a picture, a pattern such as 'in/*.png', or a list")


def _below(folder: Path) -> tuple[Path, list[str], list[Finding]]:
    names = list_files(folder)
    pictures = [name for name in names if name.lower().endswith(IMAGE_SUFFIXES)]
    others = len(names) - len(pictures)
    findings = [Finding(NOTE, "no-picture", "", 0, f"files that are no pictures: {others}")] if others else []
    if not pictures:
        raise DataError("holds no picture", f"{_KEY}={folder}", f"pictures end in {' '.join(IMAGE_SUFFIXES)}")
    return _without_drawings(folder, pictures, findings)


def _without_drawings(root: Path, pictures: list[str], findings: list[Finding]) -> tuple[Path, list[str], list[Finding]]:
    """What lies in the folder of drawings of a run below `root` was made by weldtrain."""
    folders = {parent for name in pictures for parent in Path(name).parents if parent.name == _DRAWN}
    of_runs = {folder for folder in folders if all((root / folder.parent / file).is_file() for file in _RUN_FILES)}
    kept = [name for name in pictures if of_runs.isdisjoint(Path(name).parents)]
    if len(kept) < len(pictures):
        findings = [*findings, Finding(NOTE, "own-output", "", 0,
                                       f"pictures that weldtrain drew, left out: {len(pictures) - len(kept)}")]
    if not kept:
        raise DataError("holds no picture but those that weldtrain drew", f"{_KEY}={root}",
                        f"give the folder of what they were drawn from, or {root / min(folders)} to take them all the same")
    return root, kept, findings


def _listed(file: Path) -> tuple[Path, list[str], list[Finding]]:
    """A path in each line, from the list's own folder where it is relative."""
    try:
        lines = file.read_text(encoding_of(file)).splitlines()
    except (OSError, UnicodeError) as e:
        raise DataError(f"cannot be read ({e})", file, "save it as UTF-8 text with a path in each line") from None
    entries = [os.path.normpath(os.path.join(file.parent, os.path.expanduser(line.strip()))) for line in lines if line.strip()]
    if not entries:
        raise DataError("names no picture", file, "write a path in each line")
    return _together(entries, str(file))


def _together(entries: Sequence[str], where: str) -> tuple[Path, list[str], list[Finding]]:
    """Paths as names below the folder that they have in common."""
    entries = list(dict.fromkeys(map(os.path.abspath, entries)))
    known = [e for e in entries if Path(e).suffix.lower() in IMAGE_SUFFIXES]
    findings = [Finding(ERROR, "no-picture", e, 0, "is no picture by its name", "take it out of the list")
                for e in entries if e not in set(known)] if where else []
    if not known:
        raise DataError("names no picture", where, f"pictures end in {' '.join(IMAGE_SUFFIXES)}")
    root = os.path.commonpath([os.path.dirname(e) for e in known])
    return Path(root), sorted(os.path.relpath(e, root).replace(os.sep, "/") for e in known), findings
