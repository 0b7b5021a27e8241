"""The verdict: which stage is to blame, what share of the limit is reached, and what to change."""

from __future__ import annotations

from dataclasses import dataclass

from weldtrain.data.batch import STAGES
from weldtrain.engine.ledger import BETWEEN, Ledger
from weldtrain.engine.step import STEP_STAGES
from weldtrain.engine.tuning import ENOUGH, Setting
from weldtrain.telemetry.charts import short

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


# Two looks at the same step that differ by more than this differ by more than noise.
_UNSTEADY = 1.4


def disturbed(before_per_s: float, trained_per_s: float, after_per_s: float) -> str:
    """Why the measurements are not to be believed, "" if they are: the model alone ran at one rate before training was
    measured and at another after it, or training was faster than either."""
    slow, fast = sorted((before_per_s, after_per_s))
    if fast <= _UNSTEADY * slow and trained_per_s <= _UNSTEADY * fast:
        return ""
    return (f"Other programs disturbed this measurement, and its settings are not kept: the model alone ran at "
            f"{short(before_per_s)} images/s, then training at {short(trained_per_s)}, then the model alone at "
            f"{short(after_per_s)}. End them and measure again.")


def judge(
    ledger: Ledger, between_ms: float | None, loader_per_s: float, model_per_s: float, trained_per_s: float, gain: float,
    best: Setting, now: Setting, why_no_cache: str = "",
) -> Verdict:
    """From the ledger of the present setting, `between_ms` per picture if its workers are processes, the rates in images per
    second of its loader alone, of the model alone and of both together, and how many times as fast the best setting is."""
    share = min(1.0, trained_per_s / model_per_s)
    costs = {stage: ledger.ms[stage] for stage in STAGES}
    if now.workers == "process" and now.num_workers and between_ms is not None:
        costs[BETWEEN] = between_ms
    slowest = max(costs, key=lambda stage: costs[stage])
    both = (f"Training runs at {short(trained_per_s)} images/s; the model alone could do {short(model_per_s)} "
            f"({share:.0%} of the limit).")
    changes = [f"loader.{name}={getattr(best, name)}" for name in ("workers", "num_workers", "prefetch_factor")
               if getattr(best, name) != getattr(now, name)]
    if best.cache and not now.cache:
        changes.insert(0, "loader.cache=auto")
    if loader_per_s >= model_per_s and (share >= ENOUGH or (1 - ENOUGH) * loader_per_s >= model_per_s):
        stage = max(STEP_STAGES, key=lambda s: ledger.ms[s])
        part = ledger.ms[stage] / ledger.step_ms
        return Verdict(stage, "model", share, f"{both} The model is the limit, {_WORDS[stage]} above all ({part:.0%} of a step). "
                       f"The loader alone gives {short(loader_per_s)}: stop tuning it.")
    if loader_per_s >= model_per_s:
        stage = max(STEP_STAGES, key=lambda s: ledger.ms[s])
        limit = (f"The model is the limit, {_WORDS[stage]} above all; loading takes the processor from it, "
                 f"{_WORDS[slowest]} above all ({short(costs[slowest])} ms a picture).")
        limited_by = "model"
    else:
        stage, limited_by = slowest, "loader"
        limit = (f"The loader is the limit, {_WORDS[stage]} above all ({short(costs[stage])} ms, "
                 f"{costs[stage] / sum(costs.values()):.0%} of a picture's way).")
    if share >= ENOUGH:
        advice = "Nothing is worth changing."
    elif gain > 1.05 and changes:
        advice = (f"Set {' '.join(changes)}: predicted {short(gain)} times the rate. "
                  "Your next run does so by itself for what is auto.")
    else:
        advice = " ".join(filter(None, [_REMEDIES.get(slowest, "No setting of the loader is faster: smaller source files or more "
                                                      "cores would help."), why_no_cache]))
    return Verdict(stage, limited_by, share, f"{both} {limit} {advice}")


_REMEDIES = {
    "read": "Move the data to a faster disk.",
    "augment": "Set augment=light, or lower the probabilities of mosaic, copy_paste and the warps.",
    "cache": "Memory is the limit: a smaller model.min_size would help.",
}
