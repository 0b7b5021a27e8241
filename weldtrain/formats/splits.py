"""Split files: which picture belongs to which part of the data. Ids are text, never numbers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pandas as pd

from weldtrain.errors import DataError
from weldtrain.formats.record import Finding

_SAME = {"valid": "val", "validation": "val", "training": "train", "testing": "test"}


def read_split_csv(path: Path) -> tuple[dict[str, tuple[str, int]], list[Finding]]:
    """`image_id -> (split, line)` of a CSV with the columns image_id and split, in the file's order.

    Accepts `,`, `;` or a tab, a byte-order mark, any line ends, blanks around values. Ids stay as they are written:
    `001`, `NA` and `1e5` survive. Raises DataError with file and line.
    """
    text = _decode(path)
    header = text.split("\n", 1)[0]
    separator = max(",;\t", key=header.count)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # pandas would cut longer lines off
            # Skipped blank lines would shift line numbers, so they are kept and dropped below.
            table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, na_filter=False,
                                encoding=_encoding(path), skip_blank_lines=False, index_col=False)
    except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError) as e:
        raise DataError(f"is no table of columns ({e})", path, "expected lines such as 001,train") from None
    table.columns = [str(c).strip().lower() for c in table.columns]
    for column in ("image_id", "split"):
        if column not in table.columns:
            raise DataError(f"has no column '{column}' (found: {', '.join(table.columns)})", f"{path}:1",
                            "the first line must be image_id,split")
    splits: dict[str, tuple[str, int]] = {}
    findings = []
    for line, (image_id, split) in enumerate(zip(table["image_id"].str.strip(), table["split"].str.strip().str.lower()), 2):
        if not image_id and not split:
            continue
        split = _SAME.get(split, split)
        if not image_id or not split:
            raise DataError("a line without image_id or split", f"{path}:{line}", "expected a line such as 001,train")
        earlier = splits.setdefault(image_id, (split, line))
        if earlier[0] != split:
            raise DataError(f"'{image_id}' is in {split} here and in {earlier[0]} on line {earlier[1]}", f"{path}:{line}",
                            "a picture belongs to one split, else the detector is judged on what it has seen")
        if earlier[1] != line:
            findings.append(Finding(path.name, line, f"'{image_id}' stands on line {earlier[1]} already: counted once"))
    return splits, findings


def _encoding(path: Path) -> str:
    with open(path, "rb") as f:
        start = f.read(2)
    return "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def _decode(path: Path) -> str:
    try:
        return path.read_text(_encoding(path))
    except FileNotFoundError:
        raise DataError("no such split file", path, "name it with dataset.split_csv=NAME") from None
    except UnicodeError as e:
        raise DataError(f"is not in {_encoding(path)} encoding ({e.reason} at byte {e.start})", path,
                        "save it as UTF-8") from None
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror})", path) from None
