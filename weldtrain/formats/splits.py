"""Which picture belongs to which part of the data: from a CSV, from lists, from folder names, or made here."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from weldtrain.config import SplitConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder, encoding_of, first_line, read_text
from weldtrain.formats.record import DROPPED, ERROR, NOTE, ONE_SPLIT, Finding

_NAMED = re.compile(r"(train|val|valid|validation|test)(?:ing)?(?:[-_]?\d{4})?", re.IGNORECASE)
# What tools append to the name of a picture of which they made a copy, and how frames of a film are numbered.
_COPY = re.compile(r"([._]rf[._]|_)[0-9a-f]{32}$", re.IGNORECASE)
_SUFFIX_IN_NAME = re.compile(r"[._](jpe?g|png|bmp|tiff?|webp)$", re.IGNORECASE)
_FRAME = re.compile(r"(.*(?:mp4|avi|mov|mkv|wmv|webm|vid|video|clip|frames?)[-_ .]*)\d+$", re.IGNORECASE)
_SAME = {"valid": "val", "validation": "val"}


def split_name(text: str) -> str:
    """train, val or test for what tools write: `Valid`, `training`, `val2017`. Any other name stays, in lower case."""
    match = _NAMED.fullmatch(text.strip())
    name = match[1].lower() if match else text.strip().lower()
    return _SAME.get(name, name)


def split_of_path(path: str) -> str:
    """The one split that a path names as a folder or as a word of its file name; "" if none or several."""
    *folders, file = path.split("/")
    found = {split_name(f) for f in folders if _NAMED.fullmatch(f)}
    if not found:
        found = {split_name(word) for word in re.split(r"[^A-Za-z0-9]+", file.rpartition(".")[0]) if _NAMED.fullmatch(word)}
    return found.pop() if len(found) == 1 else ""


def source_of(path: str) -> str:
    """What a picture is a frame or a copy of, as far as its name tells: `a/film_mp4` for `a/train/film_mp4-12.jpg` and
    `weld` for `weld_jpg.rf.<hash>.jpg`. Else its own path without suffix."""
    *folders, name = path.rpartition(".")[0].split("/")
    source = name
    for ending in (_COPY, _SUFFIX_IN_NAME, _SUFFIX_IN_NAME):  # Roboflow repeats the suffix: x_jpeg_jpg.rf.<hash>
        source = ending.sub("", source)
    if match := _FRAME.match(source):
        source = match[1].rstrip("-_ .")
    if source == name:
        return path.rpartition(".")[0]
    return "/".join([*(f for f in folders if not _NAMED.fullmatch(f) and f.lower() != "images"), source])


def own_splits(folder: Folder, split_csv: str | None) -> tuple[dict[str, str] | None, str, list[Finding]]:
    """Picture -> split as the folder itself says, where it says so, and in which words.

    In this order: `split_csv`; lists in ImageSets/Main or beside the data named train.txt, val.txt, …; folders named
    train, val, … in the path of every picture.
    """
    if split_csv is not None:
        path = folder.path(split_csv)
        listed, findings = read_split_csv(path)
        splits, more = _resolved(folder, ((name, split, line, split_csv) for name, (split, line) in listed.items()))
        return splits, split_csv, [f._replace(file=split_csv) for f in findings] + more
    for place in ("ImageSets/Main", "ImageSets", "splits", ""):
        places = [p.lower() for p in folder.places(place)]
        here = {n: n.rpartition("/")[2][:-4] for n in folder.ending((".txt",)) if n.rpartition("/")[0].lower() in places}
        lists = {n: split_name(stem) for n, stem in here.items() if _NAMED.fullmatch(stem)}
        if "train" not in lists.values():
            whole = {n: "train" for n, stem in here.items() if stem.lower() == "trainval"}
            # VOC's trainval is both; where it has a val list beside it, the rest of it trains.
            splits, findings = read_lists(folder, whole.items())
            if splits:
                listed, more = read_lists(folder, lists.items())
                return splits | listed, " and ".join([*whole, *lists]), findings + more
        if "train" in lists.values():
            splits, findings = read_lists(folder, lists.items())
            told = {f.file for f in findings}
            findings += [empty_split(n, split) for n, split in lists.items() if split not in splits.values() and n not in told]
            return splits, " and ".join(lists), findings
    by_folder = {p: split_of_path(f"{p.rpartition('/')[0]}/") for p in folder.pictures}
    if by_folder and all(by_folder.values()):
        return by_folder, "the folders' names", []
    return None, "", []


def empty_split(
    file: str, split: str, text: str = "",
    fix: str = "complete it, or take it away: where the data has no val split, dataset.split makes one",
) -> Finding:
    """The finding on what stands for a split and names no picture. Tools write it for test also where there is none."""
    return Finding(DROPPED if split == "test" else ERROR, "split-missing", file, 0, text or f"names no picture for {split}", fix)


def read_lists(folder: Folder, lists: Iterable[tuple[str, str]]) -> tuple[dict[str, str], list[Finding]]:
    """Picture -> split of text files with one picture a line, as `(file, split)`. VOC's trailing ` 1` and ` -1` are no name."""
    entries, findings = [], []
    for file, split in lists:
        try:
            lines = read_text(folder.path(file)).splitlines()
        except DataError as e:
            findings.append(Finding(ERROR, "list-unreadable", file, 0, *e.args[::2]))
            continue
        entries += [(line.strip(), split, number, file) for number, line in enumerate(lines, 1) if line.strip()]
    splits, more = _resolved(folder, entries)
    return splits, findings + more


def _resolved(folder: Folder, entries: Iterable[tuple[str, str, int, str]]) -> tuple[dict[str, str], list[Finding]]:
    splits: dict[str, tuple[str, str]] = {}
    findings = []
    for name, split, line, file in entries:
        found = folder.find(name, file.rpartition("/")[0]) or folder.find(re.sub(r"\s+(-1|0|1)$", "", name))
        if not found:
            where = f" below {folder.images}" if folder.images else ""
            findings.append(Finding(ERROR, "picture-missing", file, line, f"no picture for '{name}'{where}",
                                    "restore it, or take the line out; set dataset.images if pictures lie elsewhere"))
        elif len(found) > 1:
            findings.append(Finding(ERROR, "picture-unclear", file, line, f"'{name}' may mean {' or '.join(found)}",
                                    "write the path with its extension, or remove one of the two"))
        else:
            earlier = splits.setdefault(found[0], (split, f"{file}:{line}"))
            if earlier[0] != split:
                findings.append(Finding(ERROR, "split-twice", file, line,
                                        f"{found[0]} is in {split} here and in {earlier[0]} at {earlier[1]}",
                                        ONE_SPLIT))
            elif earlier[1] != f"{file}:{line}":
                findings.append(Finding(NOTE, "listed-twice", file, line,
                                        f"'{name}' stands at {earlier[1]} already: counted once"))
    return {picture: split for picture, (split, _) in splits.items()}, findings


def read_split_csv(path: Path) -> tuple[dict[str, tuple[str, int]], list[Finding]]:
    """`image_id -> (split, line)` of a CSV with the columns image_id and split, in the file's order.

    Accepts `,`, `;` or a tab, a byte-order mark, any line ends, blanks around values. Ids stay as they are written:
    `001`, `NA` and `1e5` survive. Raises DataError with file and line.
    """
    if not path.is_file():
        raise DataError("no such split file", path, "name it with dataset.split_csv=NAME")
    table = read_table(path, "expected lines such as 001,train")
    for column in ("image_id", "split"):
        if column not in table.columns:
            raise DataError(f"has no column '{column}' (found: {', '.join(table.columns)})", f"{path}:1",
                            "the first line must be image_id,split")
    splits: dict[str, tuple[str, int]] = {}
    findings = []
    for line, (image_id, split) in enumerate(zip(table["image_id"], table["split"]), 2):
        if not image_id and not split:
            continue
        split = split_name(split)
        if not image_id or not split:
            raise DataError("a line without image_id or split", f"{path}:{line}", "expected a line such as 001,train")
        earlier = splits.setdefault(image_id, (split, line))
        if earlier[0] != split:
            raise DataError(f"'{image_id}' is in {split} here and in {earlier[0]} on line {earlier[1]}", f"{path}:{line}",
                            ONE_SPLIT)
        if earlier[1] != line:
            findings.append(Finding(NOTE, "listed-twice", path.name, line,
                                    f"'{image_id}' stands on line {earlier[1]} already: counted once"))
    if not splits:
        raise DataError("lists no picture", path, "expected lines such as 001,train")
    return splits, findings


def names_splits(path: Path) -> bool:
    """Whether a CSV has the columns image_id and split."""
    try:
        columns = re.split("[,;\t]", first_line(path).lower())
    except OSError:
        return False
    return {"image_id", "split"} <= {c.strip(' "') for c in columns}


def read_table(path: Path, fix: str, header: int | None = 0, rows: int | None = None) -> pd.DataFrame:
    """A CSV as text, blanks around values gone, columns in lower case; with a header row i is line i+2 of the file.

    Raises DataError for what is no table.
    """
    try:
        head = first_line(path)
        separator = max(",;\t", key=head.count)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # pandas would cut longer lines off
            # Skipped blank lines would shift line numbers, so they are kept.
            table = pd.read_csv(path, sep=separator, dtype=str, header=header, nrows=rows, keep_default_na=False, na_filter=False,
                                encoding=encoding_of(path), skip_blank_lines=False, index_col=False)
    except UnicodeError as e:
        raise DataError(f"is not in {encoding_of(path)} encoding ({getattr(e, 'reason', e)})", path, "save it as UTF-8") from None
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror})", path, "restore the file or its permissions") from None
    except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError, ValueError, OverflowError) as e:
        raise DataError(f"is no table of columns ({e})", path, fix) from None
    table.columns = [str(c).strip().lower() for c in table.columns]
    return table.apply(lambda column: column.str.strip())


def settle_splits(
    images: Sequence[str], given: Sequence[str], has_class: np.ndarray, cfg: SplitConfig
) -> tuple[list[str], list[Finding]]:
    """The split of every picture: as the data gives it, else made here as `dataset.split` says. "" means unused.

    has_class bool [n, classes]: which classes a picture shows. Raises DataError where there is no split and none
    may be made.
    """
    splits = list(given)
    findings = [Finding(NOTE, "split-odd", "", 0, f"split '{name}' is none of train, val and test: used where a key names it")
                for name in sorted(set(splits) - {"", "train", "val", "test"})]
    known = set(splits) - {""}
    if not images:
        return [], findings
    if cfg.make == "always" or (cfg.make == "missing" and not known):
        pool, shares = range(len(images)), {"val": cfg.val, "test": cfg.test}
    elif cfg.make == "missing" and "train" in known and "val" not in known:
        pool, shares = [i for i, split in enumerate(splits) if split == "train"], {"val": cfg.val}
    elif known:
        pool, shares = [], {}
    else:
        raise DataError("the data names no splits", "dataset.split.make", "set it to missing, or give dataset.split_csv")
    if len(pool):
        wanted = {"train", *(s for s in shares if shares[s])}
        made = make_splits([images[i] for i in pool], has_class[list(pool)], shares, cfg.seed, cfg.group)
        if cfg.group == "auto" and not wanted <= set(made) and len(pool) >= len(wanted):
            made = make_splits([images[i] for i in pool], has_class[list(pool)], shares, cfg.seed)
            findings.append(Finding(NOTE, "split-leaks", "", 0, "by their names all pictures are frames or copies of too few "
                                    "sources to split between: split one by one, so val may look better than it is",
                                    "give dataset.split_csv, or a dataset.split.group that tells the parts apart"))
        if cfg.group not in (None, "auto"):
            matched = sum(re.search(cfg.group, images[i]) is not None for i in pool)
            if matched < len(pool):
                findings.append(Finding(NOTE, "group-unmatched", "", 0,
                                        f"dataset.split.group matches {matched} of {len(pool)} paths",
                                        "the others stand each for itself"))
        for i, split in zip(pool, made):
            splits[i] = split
        counts = Counter(made)
        why = "made anew" if cfg.make == "always" else "no split in the data" if not known else "no val split in the data"
        findings.append(Finding(NOTE, "split-made", "", 0, f"{why}: by seed {cfg.seed}, "
                                + ", ".join(f"{counts[s]} {s}" for s in ("train", *shares)) + " pictures"))
    unused = [image for image, split in zip(images, splits) if not split]
    findings += [Finding(DROPPED, "picture-unlisted", image, 0, "is in no split: not used") for image in unused]
    return splits, findings


def make_splits(
    images: Sequence[str], has_class: np.ndarray, shares: dict[str, float], seed: int, group: str | None = None
) -> list[str]:
    """A split for each picture: `shares` of them by name, the rest train. A function of the names and `seed`, not of order.

    Every class, and the defect-free pictures, are spread in the same shares as far as groups allow: the rarest
    first, each to the split that lacks it most (iterative stratification: Sechidis, Tsoumakas and Vlahavas, 2011).
    Pictures for whose path the regular expression `group` matches the same text stay together; with `auto`, frames of
    one film and copies of one picture, as names tell.
    """
    keys = [group_key(image, group) for image in images]
    order = {key: i for i, key in enumerate(sorted(set(keys), key=lambda k: hashlib.blake2b(f"{seed}\0{k}".encode(
        "utf-8", "surrogateescape"), digest_size=8).digest()))}
    member = np.array([order[k] for k in keys])
    shown = np.concatenate([has_class, ~has_class.any(1, keepdims=True)], 1)  # the last: defect-free
    counts = np.zeros((len(order), shown.shape[1]))
    np.add.at(counts, member, shown)
    sizes = np.bincount(member, minlength=len(order)).astype(float)

    names = ["train", *shares]
    share = np.array([1 - sum(shares.values()), *shares.values()])
    lacking = share[:, None] * counts.sum(0)  # pictures of each class that each split is still to get
    room = share * len(images)
    chosen = np.full(len(order), -1)
    left = counts.sum(0)
    while (chosen < 0).any():
        rarest = int(np.where(left > 0, left, np.inf).argmin())
        for g in np.flatnonzero((chosen < 0) & (counts[:, rarest] > 0)):
            best = np.lexsort((-room, -lacking[:, rarest]))[0]
            chosen[g] = best
            lacking[best] -= counts[g]
            room[best] -= sizes[g]
            left -= counts[g]
    # With few pictures a share may come to less than one, and a run needs something in each split.
    spare = np.where(counts > 0, counts.sum(0), np.inf).min(1)  # high where all that a group shows is shown often
    for s in range(1, len(names)):
        given = np.bincount(chosen, minlength=len(names))
        if share[s] > 0 and not given[s] and given.max() > 1:
            ready = np.flatnonzero(chosen == given.argmax())
            chosen[ready[np.lexsort((-spare[ready], sizes[ready]))[0]]] = s
    return [names[s] for s in chosen[member]]


def group_key(image: str, group: str | None) -> str:
    """What tells the group of a picture, by dataset.split.group; the picture itself where it is in none."""
    if group == "auto":
        return source_of(image)
    match = re.search(group, image) if group else None
    if match is None:
        return image
    return "\0".join(text or "" for text in match.groups()) if match.groups() else match[0]
