"""The verdict: which stage is to blame, what share of the limit is reached, and what to change."""

from __future__ import annotations

from dataclasses import dataclass

from weldtrain.data.batch import STAGES
from weldtrain.engine.ledger import STEP_STAGES, Ledger
from weldtrain.engine.tuning import Point, Setting
from weldtrain.telemetry.charts import short

ENOUGH = 0.9  # of the limit, from which on tuning the loader is a waste of time
BETWEEN = "between processes"
_WORDS = {
    "read": "reading files", "decode": "decoding", "resize": "resizing", "cache": "reading the cache", "augment": "augmentation",
    "assemble": "putting batches together", BETWEEN: "sending batches between processes",
    "forward": "its forward pass", "backward": "its backward pass", "optimizer": "its optimiser",
}


@dataclass
class Verdict:
    """`stage` is one of the ledger's names; `share` of the limit is that of training on a batch that never leaves the device."""

    stage: str
    limited_by: str  # loader or model
    share: float
    sentence: str


def judge(
    ledger: Ledger, between_ms: float, loader_per_s: float, model_per_s: float, trained_per_s: float, best: Point, now: Setting
) -> Verdict:
    """From the ledger of the present setting, `between_ms` per picture if its workers are processes, the rates in images per
    second of its loader alone, of the model alone and of both together, and the best setting found."""
    share = min(1.0, trained_per_s / model_per_s)
    costs = {stage: ledger.ms[stage] for stage in STAGES}
    if now.workers == "process" and now.num_workers:
        costs[BETWEEN] = between_ms
    if loader_per_s >= model_per_s:
        stage = max(STEP_STAGES, key=lambda s: ledger.ms[s])
        part = ledger.ms[stage] / ledger.step_ms
        sentence = (f"The model is the limit, {_WORDS[stage]} above all ({part:.0%} of a step): {short(trained_per_s)} of "
                    f"{short(model_per_s)} images/s, {share:.0%} of the limit. "
                    f"The loader could feed {short(loader_per_s / model_per_s)} times as much: stop tuning it.")
        return Verdict(stage, "model", share, sentence)
    stage = max(costs, key=lambda s: costs[s])
    part = costs[stage] / sum(costs.values())
    sentence = (f"The loader is the limit, {_WORDS[stage]} above all ({costs[stage]:.1f} ms, {part:.0%} of a picture's way): "
                f"{short(trained_per_s)} of {short(model_per_s)} images/s, {share:.0%} of the limit.")
    gain = min(best.rate.mean, model_per_s) / min(loader_per_s, model_per_s)
    changes = []
    if best.setting.cache and not now.cache:
        changes.append("loader.cache=auto")
    for name in ("workers", "num_workers", "prefetch_factor"):
        if getattr(best.setting, name) != getattr(now, name):
            changes.append(f"loader.{name}={getattr(best.setting, name)}")
    if share >= ENOUGH:
        sentence += " Stop tuning."
    elif gain > 1.05 and changes:
        sentence += f" Set {' '.join(changes)}, or loader=tuned: predicted {short(gain)} times the rate."
    else:
        sentence += " " + _REMEDIES.get(stage, "No setting of the loader is faster: this machine needs more cores.")
    return Verdict(stage, "loader", share, sentence)


_REMEDIES = {
    "read": "Move the data to a faster disk.",
    "augment": "Set augment=light, or lower the probabilities of mosaic, copy_paste and the warps.",
    "cache": "Memory is the limit: fewer or smaller pictures a step, or more memory channels.",
}
