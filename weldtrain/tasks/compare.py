"""task=compare: the runs of a sweep, or of any folder, in one table: the best, whether beyond the noise, and by which key."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from weldtrain.config import GROUPS, Config, flat
from weldtrain.errors import DataError, one_line
from weldtrain.metrics.comparison import Group, group, importance, is_minimised, objective_of, ties
from weldtrain.telemetry import report
from weldtrain.telemetry.charts import bar_rows, parallel_axes
from weldtrain.telemetry.console import figure, table
from weldtrain.telemetry.record import FINISHED, SUMMARY, RunRecord

# Keys that say where a run is and not what it does.
_PLACES = ("output_dir", "cache_dir", "resume", "checkpoint", "task", "runs")
_SEED = "seed"
_AXES = 8
_COLUMNS = 5  # of keys on the screen, those that explain most; the files have all


@dataclass
class Run:
    """`keys` are its settings by dotted key, those asked for where it failed before all were known; `choices` are by group."""

    dir: Path
    status: str
    error: str
    objective: float | None
    summary: Mapping[str, Any]
    keys: dict[str, Any]
    choices: Mapping[str, str]


def run(cfg: Config, record: RunRecord) -> None:
    """Compares the runs below `runs`. Raises DataError if there are none."""
    compare(Path(cfg.runs), cfg.sweep.objective, record.dir)
    record.summary |= {"runs": cfg.runs}


def compare(folder: Path, objective: str, place: Path | None = None) -> None:
    """Prints the table of the training runs below `folder`, and writes sweep.csv and sweep.html into `place`, by default there.
    Raises DataError if there are no runs."""
    runs = [found for file in sorted(folder.glob(f"**/{SUMMARY}")) if (found := _run(file, objective))]
    if not runs:
        raise DataError("no training run with a summary.json in it", folder, "give the directory of a sweep, or output_dir")
    varied = _by_choice(runs, _varied(runs))
    sign = -1.0 if is_minimised(objective) else 1.0
    values = [math.nan if r.objective is None else sign * r.objective for r in runs]
    names = [key for key in varied if key != _SEED]
    settings = [tuple(_shown(r.keys.get(key)) for key in names) for r in runs]
    groups = group(settings, values)
    tied = ties(groups, values)
    weights = importance({key: [r.keys.get(key) for r in runs] for key in names}, values)
    order = sorted(range(len(runs)), key=lambda i: -values[i] if math.isfinite(values[i]) else math.inf)

    rows = [_row(runs[i], varied, folder) for i in order]
    told = [key for key in varied if key == _SEED or key in list(weights)[:_COLUMNS]]
    table(f"{len(runs)} runs by {objective}", ("run", *_brief(told), objective, "images/s", "s", "status"),
          [(r["run"], *(_shown(r[key]) for key in told), r["objective"], r["images_per_s"], r["train_s"], r["status"])
           for r in rows])
    together = [(*settings[g.members[0]], len(g.members), _interval(g, sign), "a tie" if tie and g is not groups[0] else "")
                for g, tie in zip(groups, tied)] if any(len(g.members) > 1 for g in groups) else []
    if together:
        table("seeds together", (*_brief(names), "seeds", f"{objective}, 95 % interval", ""), together)
    verdict = _verdict(runs, groups, tied, names, objective, sign)
    for r in rows:
        if r["error"]:
            print(f"run {r['run']}: {r['error']}")
    print(verdict)

    place = place or folder
    with open(place / "sweep.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["run", *varied, "objective", "images_per_s", "train_s", "status", "error", "dir"])
        writer.writeheader()
        writer.writerows(rows)
    axes = list(weights)[: _AXES - 1]
    report.render(
        "sweep.html", place / "sweep.html", title="weldtrain: sweep", folder=str(folder), objective=objective, verdict=verdict,
        rows=rows, varied=varied, together=together, names=names,
        bars=bar_rows({key: 100 * share for key, share in weights.items()}) if weights else [],
        axes=parallel_axes([*axes, objective], [[*(runs[i].keys.get(key) for key in axes), runs[i].objective]
                                                for i in reversed(order) if runs[i].objective is not None]),
    )
    print(f"table:  {place / 'sweep.csv'}\nreport: {place / 'sweep.html'}")


def _run(file: Path, objective: str) -> Run | None:
    try:
        summary = json.loads(file.read_text("utf-8"))
        config = file.with_name("config.yaml")
        keys = flat(yaml.safe_load(config.read_text("utf-8"))) if config.exists() else {}
        task, status = keys.get("task", "train"), summary.get("status")
        figures = [summary.get(name) for name in ("images_per_s", "train_s")]
        if not all(value is None or isinstance(value, (int, float)) or value in ("nan", "inf") for value in figures):
            raise ValueError("has text where a number belongs")
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as e:
        print(f"{file.parent}: left out, since its summary.json or config.yaml cannot be read ({one_line(str(e))[:100]})",
              file=sys.stderr)
        return None
    if task != "train" or status is None:
        return None
    return Run(file.parent, status, summary.get("error", ""), objective_of(summary, objective) if status in FINISHED else None,
               summary, keys or _asked_for(file.parent), _choices(file.parent))


def _choices(run_dir: Path) -> Mapping[str, str]:
    """What was chosen in each group of the configuration; nothing where Hydra left no word of it."""
    try:
        text = (run_dir / ".hydra" / "hydra.yaml").read_text("utf-8")
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["hydra"]["runtime"]["choices"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return {}


def _asked_for(run_dir: Path) -> dict[str, Any]:
    """The overrides of a job that was refused before its settings were complete."""
    try:
        overrides = yaml.safe_load((run_dir / ".hydra" / "overrides.yaml").read_text("utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return {key.lstrip("+"): yaml.safe_load(value) for key, _, value in (o.partition("=") for o in overrides)}


def _varied(runs: list[Run]) -> list[str]:
    """The keys in which the runs differ."""
    complete = [r.keys for r in runs if "task" in r.keys] or [r.keys for r in runs]
    keys = dict.fromkeys(key for known in complete for key in known if key not in _PLACES)
    found = [key for key in keys if len({str(known.get(key)) for known in complete}) > 1]
    asked = {key for r in runs if "task" not in r.keys for key in r.keys if key in keys}
    return found + [key for key in keys if key in asked - set(found) and
                    len({str(r.keys[key]) for r in runs if key in r.keys}) > 1]


def _by_choice(runs: list[Run], varied: list[str]) -> list[str]:
    """`varied`, where all keys that the choice in a group decides, such as augment.*, have become that one."""
    for name in GROUPS:
        chosen = [str(r.choices.get(name)) for r in runs]
        decided = [key for key in varied if key.startswith(f"{name}.")
                   and len({(c, str(r.keys[key])) for c, r in zip(chosen, runs) if key in r.keys}) <= len(set(chosen))]
        if decided and len(set(chosen)) > 1:
            varied = [name if key == decided[0] else key for key in varied if key not in decided[1:]]
            for r, choice in zip(runs, chosen):
                r.keys[name] = choice
    return varied


def _brief(keys: list[str]) -> list[str]:
    """Their last parts, where these tell them apart: a screen is narrow."""
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last)]


def _row(run: Run, varied: list[str], folder: Path) -> dict[str, Any]:
    rate, seconds = run.summary.get("images_per_s"), run.summary.get("train_s")
    return {
        "run": str(run.dir.relative_to(folder)), **{key: run.keys.get(key, "") for key in varied},
        "objective": figure(run.objective),
        "images_per_s": "n/a" if rate is None else f"{float(rate):.1f}",
        "train_s": "n/a" if seconds is None else f"{float(seconds):.0f}",
        "status": run.status, "error": run.error, "dir": str(run.dir),
    }


def _interval(g: Group, sign: float) -> str:
    return f"{sign * g.mean:.3f}" + (f" ± {g.half_width:.3f}" if g.half_width is not None else "")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _verdict(runs: list[Run], groups: list[Group], tied: list[bool | None], names: list[str], objective: str,
             sign: float) -> str:
    if not groups:
        return "No run has a result."
    best = groups[0]
    first = runs[best.members[0]]
    what = ", ".join(f"{key}={_shown(first.keys.get(key))}" for key in names)
    text = f"Best by {objective}: {what} ({_interval(best, sign)})." if names else (
        f"{objective} of settings that differ in no more than the seed: {_interval(best, sign)}.")
    equals = sum(bool(tie) for tie in tied[1:])
    if equals:
        text += f" Its lead over {equals} other{'s' if equals > 1 else ''} is within the noise of the seeds: a tie."
    elif tied[-1] is None and len(groups) > 1:
        text += " How much of its lead is noise is not known: repeat with seed=1,2,3."
    failed = sum(r.status not in FINISHED for r in runs)
    return text + (f" {failed} of {len(runs)} runs have no result." if failed else "")
