"""task=doctor: where the milliseconds go on this machine with this data and model, what limits it, and what to set."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from weldtrain.config import Config
from weldtrain.data import tuned
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.engine.bench import Bench
from weldtrain.engine.device import autocast_dtype, choose_device, device_name
from weldtrain.engine.fitting import fitting_batch_size
from weldtrain.engine.ledger import BETWEEN, Ledger
from weldtrain.engine.rates import Rate
from weldtrain.engine.tuning import candidates, choose, search
from weldtrain.engine.verdict import disturbed, judge
from weldtrain.models.detector import build_detector
from weldtrain.telemetry import report
from weldtrain.telemetry.charts import bar_rows, line_chart, short
from weldtrain.telemetry.console import table
from weldtrain.telemetry.environment import environment
from weldtrain.telemetry.machine import processor
from weldtrain.telemetry.record import RunRecord

log = logging.getLogger(__name__)

# Shares of doctor.budget_s. The ledger is taken twice and the search has its own starts of workers on top.
_LEDGER, _MODEL, _LOADER, _TRAINING, _SEARCH, _BASELINES = 0.12, 0.08, 0.05, 0.12, 0.4, 0.05


def run(cfg: Config, record: RunRecord) -> float:
    """Writes doctor.json, report.html and the tuned loader settings; returns the share of the limit that training reaches."""
    started, budget_s = time.perf_counter(), cfg.doctor.budget_s
    torch.manual_seed(cfg.seed)
    device = choose_device(cfg.device, cfg.trainer.cpu_threads)
    index = open_index(cfg.dataset, cfg.cache_dir)
    classes = index.class_names(cfg.dataset.classes)
    dataset = DetectionDataset(index, "train", classes, cfg.model, augment=cfg.augment, seed=cfg.seed)
    file = tuned.tuned_file(cfg, index, device_name(device))
    present = tuned.tuned(cfg.loader, file)
    facts = environment(device, index.root, Path(cfg.cache_dir))
    for fact in facts:
        log.info("%s: %s%s", fact.name, fact.value, f". {fact.problem}: {fact.fix}" if fact.problem else "")

    model = build_detector(cfg.model, len(classes)).to(device, memory_format=torch.channels_last)
    if present.batch_size == "auto":
        dtype = autocast_dtype(cfg.trainer.precision, device)
        size, note = fitting_batch_size(model, dataset, cfg.optimizer, device, dtype)
        present = replace(present, batch_size=size)
        log.info(note)
    bench = Bench(cfg, dataset, model, device, present)
    log.info("now: loader.workers=%s, num_workers=%d; %s", bench.now.workers, bench.now.num_workers, bench.why)
    log.info("measuring each stage, the model and the machine")
    ledgers = bench.ledgers(_LEDGER * budget_s)
    loader_rate = bench.rate(bench.now, _LOADER * budget_s, train=False)
    before = bench.model_rate(_MODEL / 2 * budget_s)
    trained = bench.rate(bench.now, _TRAINING * budget_s, train=True)
    after = bench.model_rate(_MODEL / 2 * budget_s)
    model_rate = Rate(before.windows + after.windows)
    doubt = disturbed(before.mean, trained.mean, after.mean)
    if doubt:
        log.warning(doubt)
    ceilings = bench.ceilings(ledgers, model_rate)
    log.info("trying loader settings")
    points = search(candidates(bench.now, bench.cores, bench.cache is not None), bench.rate, _SEARCH * budget_s)
    best = choose(points, enough=2 * model_rate.mean)
    log.info("comparing with other loaders")
    compared = bench.compared(best, model_rate.mean, _BASELINES * budget_s)

    current = ledgers["later epochs" if bench.now.cache else "first epoch"]
    between_ms = ceilings.get(BETWEEN, {}).get("ms")
    now_per_s = next((p.rate.mean for p in points if p.setting == bench.now and p.looks), loader_rate.mean)
    gain = min(best.rate.mean, model_rate.mean) / min(now_per_s, model_rate.mean)
    verdict = judge(current, between_ms, loader_rate.mean, model_rate.mean, trained.mean, gain, best.setting, bench.now,
                    "" if bench.cache else bench.why)
    # Whether a cache fits is decided anew by every run: there may be less room then.
    use_cache = best.setting.cache or bench.cache is None
    settings = replace(present, **best.setting._asdict() | {"cache": "auto" if use_cache else "none"})
    if doubt:
        verdict.sentence = f"{doubt} {verdict.sentence}"
    else:
        tuned.save(file, settings, verdict.sentence)
    result = {
        "verdict": asdict(verdict),
        "environment": [fact._asdict() for fact in facts],
        "ledger": {name: asdict(one) for name, one in ledgers.items()},
        "ceilings": ceilings,
        "rates": {"training": trained.mean, "predicted": bench.predicted(current, model_rate.mean), "loader": loader_rate.mean,
                  "model": model_rate.mean, "data_wait_pct": trained.data_wait_pct},
        "points": [p.described(model_rate.mean) for p in points],
        "compared": compared,
        "tuned": {name: getattr(settings, name) for name in tuned.SETTINGS},
        "tuned_file": None if doubt else str(file),
        "seconds": time.perf_counter() - started,
    }
    record.write("doctor.json", result)
    _print(result, ledgers)
    _write_report(record.dir / "report.html", result, ledgers, str(index.root), bench.total)
    record.summary |= {"verdict": verdict.sentence, "stage": verdict.stage, "limited_by": verdict.limited_by,
                       "share_of_limit": verdict.share, "tuned": result["tuned"]}
    log.info("report: %s", record.dir / "report.html")
    if not doubt:
        log.info("tuned settings: %s\nLater runs on this machine with this data use them for every loader key left at auto; "
                 "delete the file to forget them.", file)
    return verdict.share


def _print(result: dict[str, Any], ledgers: dict[str, Ledger]) -> None:
    stages = list(next(iter(ledgers.values())).ms)
    table("milliseconds per picture, one stage after the other", ("stage", *ledgers),
          [(stage, *(f"{one.ms[stage]:.2f}" for one in ledgers.values())) for stage in stages],
          ("wall clock", *(f"{one.wall_ms:.2f}" for one in ledgers.values())))
    table("what this machine could do at best", ("resource", "images/s"),
          [(name, short(values["images_per_s"])) for name, values in result["ceilings"].items()])
    table("loader settings", ("kind", "workers", "prefetch", "cache", "images/s", "±", "CPU %", "limited by"),
          [(p["workers"], p["num_workers"], p["prefetch_factor"], "yes" if p["cache"] else "no", short(p["images_per_s"]),
            short(p["noise"]), f"{p['cpu_pct']:.0f}", p["problem"] or p["bottleneck"]) for p in result["points"]])
    table("before and after", ("loader", "images/s", "with this model", "an epoch", "device busy"),
          [(c["loader"], c["problem"] or short(c["images_per_s"]), short(c["training_per_s"]), f"{c['epoch_s']:.0f} s",
            f"{c['device_pct']:.0f} %") for c in result["compared"]])
    print(result["verdict"]["sentence"])


def _write_report(path: Path, result: dict[str, Any], ledgers: dict[str, Ledger], root: str, pictures: int) -> None:
    stage = result["verdict"]["stage"]
    report.render(
        "doctor.html", path, title="weldtrain: doctor", root=root, pictures=pictures, processor=processor(), **result,
        ledger_bars={name: bar_rows(one.ms, marked=stage) for name, one in ledgers.items()},
        ceiling_bars=bar_rows({name: values["images_per_s"] for name, values in result["ceilings"].items()}, logarithmic=True),
        chart=line_chart(result["points"], result["rates"]["model"]),
    )
