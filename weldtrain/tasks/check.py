"""task=check: reads everything, changes nothing, and says what is wrong, where, and what to do. Exit 2 if data is unusable."""

from __future__ import annotations

import csv
import functools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from weldtrain.config import Config
from weldtrain.data import audit
from weldtrain.data.audit import Survival, Twin
from weldtrain.data.images import Window
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.indexing import open_index
from weldtrain.data.tiles import tiled
from weldtrain.errors import DataError, PictureError, one_line
from weldtrain.formats.record import DECISIONS, DROPPED, ERROR, NOTE, Finding, by_kind
from weldtrain.telemetry import report
from weldtrain.telemetry.console import followed, table
from weldtrain.telemetry.record import RunRecord

log = logging.getLogger(__name__)

_LEVELS = (ERROR, DROPPED, NOTE)
_SHOWN_PAIRS, _SHOWN_SOURCES, _SHOWN_FINDINGS, _SHOWN_CLASSES, _SHOWN_BOXES = 12, 40, 1000, 40, 8
_KEPT_DETAILS = 8192  # of 16 KB each
_BINS_PX = 2.0 ** np.arange(1, 11, 0.5)


def run(cfg: Config, record: RunRecord) -> None:
    """Writes report.html and findings.csv. Raises DataError if the data cannot be trained on as it is."""
    index = open_index(cfg.dataset, cfg.cache_dir, refuse=False)
    window = Window.of(cfg.model)
    thumbs = np.zeros((len(index), audit.THUMB_PX, audit.THUMB_PX), np.uint8)
    findings = list(index.findings)
    for look in followed(audit.look_at_all(index, window), len(index), "reading every picture"):
        path = index.path(look.row)
        if look.error is not None:
            findings.append(Finding(ERROR, "picture-bad", path, 0, look.error.args[0], look.error.args[2]))
        else:
            thumbs[look.row] = look.thumb
            if look.complaint:
                findings.append(Finding(NOTE, "picture-complaint", path, 0, f"is decoded, but its decoder says: {look.complaint}",
                                        "look at it: is part of it grey or shifted?"))
    leak_level = ERROR if cfg.dataset.leak == "error" else NOTE
    detail = functools.lru_cache(_KEPT_DETAILS)(functools.partial(audit.thumbnail, index, window=window, side_px=audit.DETAIL_PX))
    across, within = (find(thumbs, index, detail) for find in (audit.twins_across, audit.twins_within))
    sources = audit.sources_across([index.path(i) for i in range(len(index))], index.split_names())
    survived = audit.survival(tiled(index, cfg.model), cfg.model)
    findings += audit.label_findings(index, cfg)
    findings += audit.leak_findings(index, across, within, sources, leak_level)
    findings += audit.survival_findings(survived, cfg.model)
    if cfg.dataset.strict:
        findings = [f._replace(level=ERROR) if f.level == DROPPED else f for f in findings]
    # By place and not by level, so that two versions of a data set can be compared line by line.
    findings.sort(key=lambda f: (f.file, f.line, f.kind, f.text))
    levels = Counter(f.level for f in findings)

    write_findings(record.dir / "findings.csv", findings)
    headings, rows = _counts(index)
    write_report(record.dir / "report.html", index, cfg, window, findings, survived, across, sources, (headings, rows))
    for f in findings:
        if f.kind in DECISIONS:
            log.info(one_line(f.text))
    table(f"{len(index)} pictures in {index.root}", headings, rows)
    table(f"boxes at model.min_size={cfg.model.min_size}, model.max_size={cfg.model.max_size}",
          ("class", "boxes", "5 % below", "half below", f"under {audit.limit_px(cfg.model):g} px"),
          [(s.name, len(s.sizes_px), *(f"{np.quantile(s.sizes_px, q):.0f} px" for q in (0.05, 0.5)), f"{s.below:.0%}")
           for s in survived])
    kinds = _kinds(findings)
    if lost := index.dropped_boxes():
        print(lost)
    print(f"{len(findings)} findings" + (", the first of each kind:" if kinds else ""))
    for k in kinds:
        print(f"  {k['level']} {k['kind']}" + f" ({k['count']} of them)" * (k["count"] > 1),
              one_line(f"{k['where']}: {k['text']}".removeprefix(": ")), *([f"→ {k['fix']}"] if k["fix"] else []), sep="\n      ")
    record.summary |= {
        "usable": not levels[ERROR], "pictures": len(index), "boxes": len(index.boxes), "classes": index.names,
        "splits": dict(zip(headings[1:], rows[0][1:])), "findings": {level: levels[level] for level in _LEVELS},
        "kinds": {k["kind"]: k["count"] for k in kinds}, "twins_across_splits": len(across),
    }
    log.info("report:   %s\nfindings: %s", record.dir / "report.html", record.dir / "findings.csv")
    if levels[ERROR]:
        # One that has a place is more likely the cause of what has none, such as that nothing is left.
        first = min((f for f in findings if f.level == ERROR), key=lambda f: not f.file)
        what = f"{levels[ERROR]} findings must be mended first, such as {first.where() or first.kind}: {first.text}"
        raise DataError(f"not usable: {what}", index.root, first.fix)
    log.info("usable%s", "".join(f"; but {line}" for line in audit.leak_shares(index, across)))


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """CSV with a line a finding; holds no time and no absolute path, so that equal data gives an equal file."""
    with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Finding._fields)
        writer.writerows(findings)


def write_report(path: Path, index: AnnotationIndex, cfg: Config, window: Window, findings: Sequence[Finding],
                 survived: Sequence[Survival], across: Sequence[Twin], sources: dict[str, dict[str, list[int]]],
                 counts: tuple[list[str], list[list[Any]]]) -> None:
    """The page of all this, with pictures."""
    split = index.split_names()
    sizes = Counter(f"{w}×{h}" for w, h in index.sizes.tolist())
    levels = Counter(f.level for f in findings)
    report.render(
        "check.html", path, title="weldtrain: data check", root=str(index.root),
        described=" ".join(f.text for f in findings if f.kind in DECISIONS),
        errors=levels[ERROR], others={"dropped": levels[DROPPED], "notes": levels[NOTE]},
        counts={"headings": counts[0], "rows": counts[1]},
        sizes=sizes.most_common(6), more_sizes=max(len(sizes) - 6, 0), grey=int(index.grey.sum()), pictures=len(index),
        kinds=_kinds(findings), model=cfg.model, limit_px=f"{audit.limit_px(cfg.model):g}", charts=[_chart(s) for s in survived],
        leaks=audit.leak_shares(index, across), pairs=[_pair(index, split, t, window) for t in across[:_SHOWN_PAIRS]],
        more_pairs=max(len(across) - _SHOWN_PAIRS, 0),
        sources=[(name, ", ".join(f"{len(rows)} in {s}" for s, rows in sorted(by_split.items())))
               for name, by_split in list(sources.items())[:_SHOWN_SOURCES]],
        examples=[_examples(index, name_id, window) for name_id in range(min(len(index.names), _SHOWN_CLASSES))],
        listed=findings[:_SHOWN_FINDINGS], more_findings=max(len(findings) - _SHOWN_FINDINGS, 0),
    )


def _counts(index: AnnotationIndex) -> tuple[list[str], list[list[Any]]]:
    """Headings and rows of a column for each split: pictures, defect-free ones, boxes, and boxes of each class."""
    usual = ("train", "val", "test")
    splits = sorted(index.splits, key=lambda s: (usual.index(s) if s in usual else len(usual), s))
    columns = [["pictures", "defect-free", "boxes", *index.names]]
    for split in splits:
        per_picture = np.diff(index.box_offsets)[index.split_ids == index.splits.index(split)]
        columns.append([len(per_picture), int((per_picture == 0).sum()), int(per_picture.sum()),
                        *index.boxes_per_name(split).tolist()])
    return ["", *(split or "(none)" for split in splits)], [list(row) for row in zip(*columns)]


def _kinds(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings by kind, the worst first."""
    return [{"level": level, "kind": kind, "count": len(some), "where": some[0].where(), "text": some[0].text,
             "fix": some[0].fix}
            for level in _LEVELS for kind, some in sorted(by_kind(f for f in findings if f.level == level).items())]


def _chart(s: Survival) -> dict[str, Any]:
    """Bars of a histogram over doubling sizes, in the units of the template's drawing."""
    counts = np.histogram(np.clip(s.sizes_px, _BINS_PX[0], _BINS_PX[-1] - 1e-6), _BINS_PX)[0]
    step = 230 / len(counts)
    bars = [{"x": round(i * step + 1, 1), "w": round(step - 2, 1), "h": round(80 * n / counts.max(), 1),
             "low": _BINS_PX[i + 1] <= s.limit_px, "label": f"{_BINS_PX[i]:g}" if i % 4 == 0 else "",
             "title": f"{_BINS_PX[i]:.0f} to {_BINS_PX[i + 1]:.0f} px: {n}"} for i, n in enumerate(counts)]
    return {"name": s.name, "count": len(s.sizes_px), "median": f"{np.median(s.sizes_px):.0f}", "below": f"{s.below:.0%}",
            "advice": s.advice, "bars": bars}


def _pair(index: AnnotationIndex, split: Sequence[str], twin: Twin, window: Window) -> dict[str, Any]:
    left, right = (report.picture(index.picture(row, window), 200) for row in (twin.row, twin.other))
    return {"left": left, "right": right, "split": split[twin.row], "path": index.path(twin.row),
            "other_split": split[twin.other], "other": index.path(twin.other), "correlation": f"{twin.correlation:.2f}"}


def _examples(index: AnnotationIndex, name_id: int, window: Window) -> dict[str, Any]:
    """Some boxes of a class, each cut out with its surroundings."""
    boxes = np.flatnonzero(index.name_ids == name_id)
    crops = []
    for box in boxes[np.unique(np.linspace(0, len(boxes) - 1, _SHOWN_BOXES).astype(int))]:
        row = index.row_of(int(box))
        try:
            image = index.picture(row, window)
        except PictureError:
            continue  # it is among the findings
        x1, y1, x2, y2 = index.boxes[box]
        side = max(2.0 * max(x2 - x1, y2 - y1), 32.0)
        left, top = max(0, int((x1 + x2 - side) / 2)), max(0, int((y1 + y2 - side) / 2))
        crop = image[top : int(top + side), left : int(left + side)]
        crop = np.array(np.broadcast_to(crop, (*crop.shape[:2], 3)))  # in colour, and our own to draw on
        corner, opposite = (int(x1) - left, int(y1) - top), (int(x2) - left, int(y2) - top)
        cv2.rectangle(crop, corner, opposite, (255, 140, 0), max(1, round(side / 110)))
        crops.append({"image": report.picture(crop, 110), "path": index.path(row)})
    return {"name": index.names[name_id], "count": len(boxes), "crops": crops}
