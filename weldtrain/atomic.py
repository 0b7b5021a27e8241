"""Files that appear whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

DRAFTS = ".*.draft"  # what a process that was killed may leave


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def whole(path: Path, mode: str = "w", *, sync: bool = False, private: bool = False) -> Iterator[IO]:
    """A file to write, text in UTF-8 or with `wb` bytes, whose folder is made; it takes its place at `path` at the end, with
    `sync` once it is on the disk, or never if something is raised. A `private` one no other user reads. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{secrets.token_hex(8)}.draft")  # not of the name, which may be as long as names can be
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with open(draft, mode.replace("w", "x"), **text, opener=_for_the_owner if private else None) as out:
            yield out
            if sync:
                out.flush()
                os.fsync(out.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
