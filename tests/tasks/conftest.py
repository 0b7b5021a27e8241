"""Detectors that were never trained, as checkpoints: they find a little of everything everywhere."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from weldtrain.data.synthetic import CLASSES
from weldtrain.engine import checkpoint
from weldtrain.models.detector import build_detector


@pytest.fixture
def guessing(configured, tmp_path):
    """`guessing("model.tiles=100", metrics={…})`: the path of a checkpoint in fp32."""

    def make(*overrides, metrics=None, trained_px=(128, 128), **more):
        cfg = configured("trainer.precision=fp32", *overrides)
        torch.manual_seed(0)
        model = build_detector(cfg.model, len(CLASSES))
        with torch.no_grad():
            model.roi_heads.box_predictor.cls_score.weight.mul_(30)  # scores apart from each other
            for parameter in model.rpn.head.parameters():
                parameter.mul_(5)
        file = tmp_path / "guessing.pt"
        checkpoint.save(file, {"model": model.state_dict(), "classes": list(CLASSES), "config": asdict(replace(cfg)), "epoch": 1,
                               "batch": 0, "step": 7, "metrics": metrics, "trained_px": list(trained_px), **more})
        return str(file)

    return make
