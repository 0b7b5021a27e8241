"""Weights to start from: ImageNet (backbone), COCO (whole detector), or a file; with a report of what matched."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torchvision.models import get_model_weights

from weldtrain.config import ModelConfig
from weldtrain.errors import ConfigError, reason
from weldtrain.models.detector import Detector

log = logging.getLogger(__name__)

COCO = {
    ("resnet50", "two_mlp"): "fasterrcnn_resnet50_fpn",
    ("resnet50", "four_conv_one_fc"): "fasterrcnn_resnet50_fpn_v2",
    ("mobilenet_v3_large", "two_mlp"): "fasterrcnn_mobilenet_v3_large_fpn",
}
# The last layer of the box head knows COCO's 91 classes: it starts anew, whatever its size.
_CLASS_LAYER = "roi_heads.box_predictor."


def load_weights(model: Detector, cfg: ModelConfig, classes: Sequence[str] = ()) -> torch.Tensor | None:
    """Starts `model`, of these classes, from `cfg.weights`; null leaves it as it is. Returns the identities of the pictures that
    a checkpoint of weldtrain was trained on. Raises ConfigError with the way out."""
    if cfg.weights is None:
        return None
    state, about = _state(cfg)
    state, theirs = _prefixed(state), about.get("classes", ())
    others = bool(theirs) and list(theirs) != list(classes)
    if others:
        log.info("model.weights=%s knows %s: the class layer starts anew", cfg.weights, ", ".join(theirs))
    if cfg.weights == "coco" or others:
        state = {name: value for name, value in state.items() if not name.startswith(_CLASS_LAYER)}
    own = model.state_dict()
    fitting = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        raise ConfigError("none of its tensors fits this model", f"model.weights={cfg.weights}",
                          f"it was saved from another architecture than model.backbone={cfg.backbone}")
    missing = sorted({".".join(name.split(".")[:2]) for name in own if name not in fitting})
    model.load_state_dict(fitting, strict=False)
    log.info("model.weights=%s: %d of %d tensors%s", cfg.weights, len(fitting), len(own),
             f"; from scratch: {', '.join(missing)}" if missing else "")
    return about.get("trained_on")


def _state(cfg: ModelConfig) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """The weights, and all that a checkpoint of weldtrain says beside them."""
    if cfg.weights in ("imagenet", "coco"):
        return _downloaded(cfg), {}
    path = Path(cfg.weights).expanduser()
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError("no such file", f"model.weights={cfg.weights}", "give null, imagenet, coco or a file") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, KeyError, ValueError) as e:
        raise ConfigError(f"cannot be loaded ({reason(e)})", path, "it must be a state dict saved by torch") from e
    state = loaded.get("ema") or loaded.get("model", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise ConfigError("holds no state dict", path, "it must map parameter names to tensors")
    return state, loaded if state is not loaded else {}


def _downloaded(cfg: ModelConfig) -> dict[str, torch.Tensor]:
    name = cfg.backbone
    if cfg.weights == "coco":
        name = COCO.get((cfg.backbone, cfg.head))
        if name is None:
            known = ", ".join(sorted(COCO.values()))
            raise ConfigError(f"torchvision has none for {cfg.backbone}", "model.weights=coco", f"it has them for {known}")
    entry = get_model_weights(name)
    weights = entry.COCO_V1 if cfg.weights == "coco" else entry.IMAGENET1K_V1
    try:
        return weights.get_state_dict(progress=False, check_hash=True)
    except (URLError, OSError, RuntimeError) as e:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise ConfigError(
            f"{weights.url} cannot be fetched ({e})", f"model.weights={cfg.weights}",
            f"download it elsewhere and put it into {folder}, or give the file as model.weights=PATH, or null",
        ) from e


def _prefixed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A bare backbone's names as they stand in the detector."""
    if any(name.startswith("backbone.") for name in state):
        return state
    return {"backbone.body." + name.removeprefix("features."): value for name, value in state.items()}
