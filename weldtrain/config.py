"""The schema of every key: type and range.

Hydra composes `conf/` onto these dataclasses, so a wrong type or key fails at composition; `validation` then checks the rest.
The reason for a default stands beside it in `conf/`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from weldtrain.errors import ConfigError

# In a wheel the configs lie inside the package, in a checkout beside it.
CONF_DIR = next(p for p in (Path(__file__).parent / "conf", Path(__file__).parents[1] / "conf") if p.is_dir())
GROUPS = ("task", "dataset", "loader", "augment", "model", "optimizer", "scheduler", "trainer", "sweep", "experiment")


def key(default: Any, **limits: Any) -> Any:
    """A field with limits: `ge gt le lt` for numbers (each item of a list), `choices` for text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=limits)
    return field(default=default, metadata=limits)


@dataclass
class SyntheticConfig:
    train: int = key(240, ge=1)
    val: int = key(60, ge=1)
    test: int = key(60, ge=0)
    size_px: int = key(256, ge=128, le=2048)
    seed: int = key(0, ge=0)


@dataclass
class SplitConfig:
    make: str = key("missing", choices=("missing", "always", "never"))
    val: float = key(0.15, gt=0, lt=1)
    test: float = key(0.15, ge=0, lt=1)
    seed: int = key(0, ge=0)
    group: str | None = "auto"


@dataclass
class DatasetConfig:
    format: str = key("synthetic", choices=("synthetic", "welding_v2", "voc", "yolo", "coco", "csv", "auto"))
    root: str | None = None
    classes: list[str] | None = None
    images: str | None = None
    annotations: str | None = None
    split_csv: str | None = None
    split: SplitConfig = field(default_factory=SplitConfig)
    missing: str = key("error", choices=("error", "negative", "skip"))
    bad_images: str = key("raise", choices=("raise", "skip"))
    max_megapixels: float = key(200.0, gt=0)
    difficult: str = key("ignore", choices=("ignore", "use"))
    one_based: bool = False
    strict: bool = False
    rescan: bool = False
    leak: str = key("warn", choices=("warn", "error"))
    mm_per_pixel: int | float | str | None = key(None, gt=0)
    picture_csv: str | None = None
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)


@dataclass
class LoaderConfig:
    batch_size: int | str = key(8, ge=1, choices=("auto",))
    workers: str = key("auto", choices=("auto", "thread", "process"))
    num_workers: int | str = key("auto", ge=0, le=512, choices=("auto",))
    pin_memory: bool | str = key("auto", choices=("auto",))
    persistent_workers: bool = True
    prefetch_factor: int | str = key("auto", ge=1, choices=("auto",))
    drop_last: bool = True
    timeout_s: float = key(60.0, ge=0)
    multiprocessing_context: str | None = key(None, choices=("fork", "spawn", "forkserver"))
    shuffle: bool = True
    sampling: str = key("uniform", choices=("uniform", "repeat_factor", "balanced"))
    repeat_threshold: float = key(0.2, gt=0, le=1)
    group_by_aspect: bool = False
    cache: str = key("auto", choices=("auto", "none", "ram", "disk"))
    cache_encoding: str = key("raw", choices=("raw", "jpeg"))
    cache_budget_gb: float = key(50.0, gt=0)
    tuned: bool = False


@dataclass
class AugmentConfig:
    hflip: float = key(0.0, ge=0, le=1)
    vflip: float = key(0.0, ge=0, le=1)
    quarter_turns: float = key(0.0, ge=0, le=1)
    rotate_deg: float = key(0.0, ge=0, le=30)
    scale: float = key(0.0, ge=0, le=1)
    translate: float = key(0.0, ge=0, le=0.5)
    brightness: float = key(0.0, ge=0, lt=1)
    contrast: float = key(0.0, ge=0, lt=1)
    gamma: float = key(0.0, ge=0, le=2)
    window: float = key(0.0, ge=0, lt=0.5)
    blur: float = key(0.0, ge=0, le=5)
    noise: float = key(0.0, ge=0, le=0.15)
    mosaic: float = key(0.0, ge=0, le=1)
    copy_paste: float = key(0.0, ge=0, le=1)
    min_visible: float = key(0.4, ge=0, lt=1)


@dataclass
class ModelConfig:
    backbone: str = key("resnet50", choices=("resnet18", "resnet34", "resnet50", "resnet101", "mobilenet_v3_large"))
    head: str = key("two_mlp", choices=("two_mlp", "four_conv_one_fc"))
    weights: str | None = None
    norm: str = key("auto", choices=("auto", "batch", "frozen", "group", "sync"))
    trainable_layers: int | None = key(None, ge=0, le=6)
    min_size: int = key(800, ge=32)
    max_size: int = key(1333, ge=32)
    tiles: int | str | None = key(None, ge=32, choices=("auto",))
    tile_overlap: float = key(0.2, ge=0, le=0.5)
    window_percentiles: list[float] = key([0.1, 99.9], ge=0, le=100)
    window_levels: list[float] | None = key(None, ge=0, le=65535)
    pyramid_channels: int = key(256, ge=16)
    box_head_width: int = key(1024, ge=16)
    anchor_sizes: list[float] = key([32.0, 64.0, 128.0, 256.0, 512.0], gt=0)
    anchor_ratios: list[float] = key([0.5, 1.0, 2.0], gt=0)
    roi_sampling_ratio: int = key(2, ge=1)
    rpn_batch_per_image: int = key(256, ge=2)
    rpn_pre_nms_top_n_train: int = key(2000, ge=1)
    rpn_pre_nms_top_n_test: int = key(1000, ge=1)
    rpn_post_nms_top_n_train: int = key(2000, ge=1)
    rpn_post_nms_top_n_test: int = key(1000, ge=1)
    rpn_nms_thresh: float = key(0.7, gt=0, le=1)
    box_batch_per_image: int = key(512, ge=2)
    box_positive_fraction: float = key(0.25, gt=0, lt=1)
    box_nms_thresh: float = key(0.5, gt=0, le=1)


@dataclass
class OptimizerConfig:
    name: str = key("sgd", choices=("sgd", "adamw"))
    lr: float = key(0.01, gt=0)
    momentum: float = key(0.9, ge=0, lt=1)
    weight_decay: float = key(1e-4, ge=0)
    norm_weight_decay: float = key(0.0, ge=0)
    backbone_lr: float = key(1.0, gt=0, le=1)
    pictures_per_lr: int | None = key(None, ge=1)


@dataclass
class SchedulerConfig:
    name: str = key("cosine", choices=("constant", "cosine", "multistep", "onecycle"))
    warmup: float = key(0.05, ge=0, lt=1)
    warmup_steps: int | None = key(None, ge=0)
    milestones: list[float] = key([0.67, 0.89], gt=0, lt=1)
    gamma: float = key(0.1, gt=0, lt=1)
    final: float = key(0.01, ge=0, le=1)


@dataclass
class TrainerConfig:
    epochs: int = key(26, ge=1)
    max_steps: int | None = key(None, ge=1)
    precision: str = key("auto", choices=("auto", "fp32", "bf16", "fp16"))
    accumulate: int = key(1, ge=1)
    grad_clip: float | None = key(10.0, gt=0)
    ema: float | None = key(None, gt=0, lt=1)
    non_finite: str = key("stop", choices=("stop", "skip"))
    skip_at_most: int = key(10, ge=1)
    eval_every: int = key(1, ge=1)
    patience: int | None = key(None, ge=1)
    log: list[str] = key(["tensorboard", "jsonl"], choices=("tensorboard", "jsonl", "mlflow", "wandb"))
    log_every: int | str = key("auto", ge=1, choices=("auto",))
    save_every: int | None = key(None, ge=1)
    keep_best: int = key(1, ge=1)
    keep_every: int | None = key(None, ge=1)
    hang_s: float | None = key(900.0, gt=0)
    stop_signal: str | None = key(None, choices=("USR1", "USR2", "HUP"))
    compile: bool = False
    profile: list[int] | None = key(None, ge=1)
    deterministic: bool = False
    cpu_threads: int | None = key(None, ge=1)


@dataclass
class EvaluateConfig:
    split: str = "val"
    predictions: str | None = None
    batch_size: int = key(8, ge=1)
    score_thresh: float = key(0.01, ge=0, lt=1)
    max_detections: int = key(100, ge=1)
    false_call_score: float = key(0.5, ge=0, le=1)
    tiles: int | str = key("model", ge=32, choices=("model", "auto", "none"))
    operating_point: str = key("missed", choices=("missed", "f1", "false_calls", "cost"))
    at_most_missed: float = key(0.02, gt=0, lt=1)
    confidence: float = key(0.95, ge=0.5, lt=1)
    false_calls_per_picture: float = key(0.1, ge=0)
    cost_of_a_miss: float = key(10.0, gt=0)
    choose_on: str = "val"
    size: str = key("longer_side", choices=("longer_side", "diagonal", "area_root"))
    pod_link: str = key("logit", choices=("logit", "probit"))
    pod_scale: str = key("log", choices=("log", "linear"))
    slice_by: list[str] = key([])
    bootstrap: int = key(1000, ge=0)


@dataclass
class PredictConfig:
    source: str | None = None
    batch_size: int = key(8, ge=1)
    threshold: float | None = key(None, ge=0, le=1)
    max_detections: int = key(100, ge=1)
    tiles: int | str = key("auto", ge=32, choices=("model", "auto", "none"))
    save: list[str] = key(["pictures", "json", "csv"], choices=("pictures", "json", "csv", "voc", "yolo"))


@dataclass
class DoctorConfig:
    budget_s: float = key(60.0, ge=4)


@dataclass
class SweepConfig:
    objective: str = "val/map_50"


@dataclass
class Config:
    task: str = "train"
    seed: int = key(0, ge=0, lt=2**63)
    device: str = key("auto", choices=("auto", "cuda", "cpu", "mps"))
    output_dir: str = "outputs"
    cache_dir: str = "~/.cache/weldtrain"
    checkpoint: str | None = None
    resume: str | None = None
    runs: str | None = None
    run: str | None = None
    error: str | None = None
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


# What other trainers call a key, so that a habit finds its way.
ELSEWHERE = {
    "learning_rate": "optimizer.lr", "lr0": "optimizer.lr", "batch": "loader.batch_size", "workers": "loader.num_workers",
    "imgsz": "model.min_size", "image_size": "model.min_size", "amp": "trainer.precision", "data": "dataset.root",
    "dataset.path": "dataset.root", "max_iter": "trainer.max_steps", "warmup_steps": "scheduler.warmup",
    "dataset.ann_dir": "dataset.annotations", "dataset.data_dir": "dataset.root", "dataset.val_split": "dataset.split.val",
    "seed_everything": "seed", "conf": "predict.threshold", "source": "predict.source",
    "images_dir": "predict.source", "predict.conf": "predict.threshold",
}
PATH_KEYS = ("output_dir", "cache_dir", "checkpoint", "resume", "runs", "run", "dataset.root", "predict.source",
             "evaluate.predictions")
AUTO = "auto"  # of `resume`: the newest run there is
TEXT_KEYS = ("dataset.images", "dataset.annotations", "dataset.split_csv", "dataset.split.group", "dataset.picture_csv")


def run_stamp() -> str:
    """The name of a run directory: when it began, and what tells it from another of the same second."""
    return f"{time.strftime('%Y-%m-%d_%H%M%S')}_{secrets.token_hex(3)}"


def register(stamp: str | None = None) -> None:
    """Makes the schema known to Hydra, and the `stamp` that names the run's directory. May be called again."""
    from hydra.core.config_store import ConfigStore

    global _stamp
    _stamp = stamp
    ConfigStore.instance().store(name="schema", node=Config)


_stamp: str | None = None
# Here, so that they are known in any process to which a launcher sends a job. Cached per run, and Hydra hands that cache to each
# job of a sweep: one name for the whole of it.
OmegaConf.register_new_resolver("weldtrain.run_name", lambda task, experiment: experiment or task, replace=True, use_cache=True)
OmegaConf.register_new_resolver("weldtrain.run_stamp", lambda: _stamp or run_stamp(), replace=True, use_cache=True)


def schema_keys() -> dict[str, dataclasses.Field]:
    """Every dotted key with its field, groups such as `trainer` included."""
    return dict(_walk(Config, ""))


def _walk(node: type, prefix: str) -> Iterator[tuple[str, dataclasses.Field]]:
    for f in dataclasses.fields(node):
        yield prefix + f.name, f
        if dataclasses.is_dataclass(f.default_factory):
            yield from _walk(f.default_factory, f"{prefix}{f.name}.")


def unknown_key(name: str, known: Sequence[str] = ()) -> ConfigError:
    """The error for a key that is not in the schema, with the nearest one that is."""
    near = nearest(name, known or [*schema_keys(), *GROUPS])
    return ConfigError("no such key", name, f"did you mean '{near}'?" if near else "see `weldtrain --cfg job`")


def takes(name: str) -> str:
    """What kind of value a key takes, in words."""
    f = schema_keys()[name]
    choices = f.metadata.get("choices", ())
    kinds = [kind for kind in f.type.split(" | ") if not (choices and kind == "str")]
    return " or ".join([_KINDS.get(kind, kind) for kind in kinds] + list(choices))


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null",
          "list[str]": "a list such as [a,b]", "list[float]": "a list such as [0.1,2]", "list[int]": "a list such as [1,2]"}


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known key that a mistyped one most likely meant: its last part counts, then its group."""
    group, _, last = name.rpartition(".")
    targets = {k: k for k in known} | ({k: v for k, v in ELSEWHERE.items() if v in known})

    def likeness(candidate: str) -> float:
        same_group = candidate.rpartition(".")[0] == group
        return difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio() + 0.1 * same_group

    best = max(targets, key=likeness)
    return targets[best] if likeness(best) > 0.65 else None


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value of a nested configuration by its dotted key."""
    items: dict[str, Any] = {}
    for name, value in tree.items():
        items |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return items


def section(saved: dict[str, Any], name: str) -> Any:
    """One group of a configuration that a checkpoint holds, as its dataclass."""
    schema = schema_keys()[name].default_factory
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), saved[name]))


def absolute(path: str, cwd: str | os.PathLike[str]) -> str:
    """`path` with `~` and `$NAME` expanded, taken from `cwd` where it is relative."""
    return os.path.normpath(os.path.join(cwd, os.path.expanduser(os.path.expandvars(path))))
