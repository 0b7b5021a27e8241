"""The training step against torchvision's reference step: the same model, weights, pictures, precision and threads, in turn.

    python scripts/benchmark_step.py [--model resnet50] [--size 800] [--batch 2] [--rounds 5] [--precision bf16]

The reference is what torchvision's detection scripts do: pictures as a list of float tensors, the model's own transform, SGD,
the loss looked at on the host in every step. Ratios are medians over rounds; above 1 weldtrain is faster.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from weldtrain.config import ModelConfig, OptimizerConfig
from weldtrain.data.batch import Batch, Sample, collate
from weldtrain.engine.device import choose_device, wait_for
from weldtrain.engine.optim import build_optimizer
from weldtrain.engine.step import TrainingStep
from weldtrain.models.detector import build_detector

CLASSES = 4


def pictures(size: int, count: int) -> Batch:
    """Noise with five boxes each: as many as a weld picture has."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(count):
        corner = rng.uniform(0, 0.7 * size, (5, 2))
        boxes = np.hstack([corner, corner + rng.uniform(0.05 * size, 0.3 * size, (5, 2))]).astype(np.float32)
        image = rng.integers(0, 256, (size, size, 3), np.uint8)
        samples.append(Sample(image, boxes, rng.integers(1, CLASSES + 1, 5), i, (size, size)))
    return collate(samples)


def reference(cfg: ModelConfig, batch: Batch, device: torch.device, dtype: torch.dtype | None) -> tuple[Callable[[], None], dict]:
    """torchvision's step on these pictures, and its weights."""
    backbone = resnet_fpn_backbone(backbone_name=cfg.backbone, weights=None, trainable_layers=5, norm_layer=torch.nn.BatchNorm2d)
    model = FasterRCNN(backbone, CLASSES + 1, min_size=cfg.min_size, max_size=cfg.max_size).to(device).train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    images = [image.float().div(255).contiguous() for image in batch.images]
    targets = [{name: value for name, value in t.items() if name != "ignored"} for t in batch.targets()]

    def step() -> None:
        on_device = [image.to(device) for image in images]
        wanted = [{name: value.to(device) for name, value in t.items()} for t in targets]
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            losses = sum(model(on_device, wanted).values())
        assert math.isfinite(losses.item())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        schedule.step()

    return step, weights


def ours(
    cfg: ModelConfig, batch: Batch, weights: dict, device: torch.device, dtype: torch.dtype | None
) -> Callable[[], None]:
    """weldtrain's step on the same."""
    model = build_detector(cfg, CLASSES)
    model.load_state_dict(weights)
    model = model.to(device, memory_format=torch.channels_last).train()
    train_step = TrainingStep(model, build_optimizer(model, OptimizerConfig(name="sgd", lr=1e-12)), device, dtype, 10.0)

    def step() -> None:
        train_step.add(batch.to(device))
        train_step.update()

    return step


def seconds(step: Callable[[], None], device: torch.device, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        step()
    wait_for(device)
    return (time.perf_counter() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=("resnet18", "resnet34", "resnet50", "resnet101"))
    parser.add_argument("--size", type=int, default=800, help="px, of square pictures")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precision", nargs="*", default=["bf16", "fp32"], choices=("bf16", "fp32"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = choose_device("auto")
    times = 20 if device.type == "cuda" else 1
    cfg = ModelConfig(backbone=args.model, min_size=args.size, max_size=args.size)
    batch = pictures(args.size, args.batch)
    print(f"{args.model} FPN on {device}, {args.batch} pictures of {args.size} px, {args.threads} threads, {args.rounds} rounds")
    for precision in args.precision:
        dtype = torch.bfloat16 if precision == "bf16" else None
        torch.manual_seed(0)
        theirs, weights = reference(cfg, batch, device, dtype)
        mine = ours(cfg, batch, weights, device, dtype)
        taken: list[tuple[float, float]] = []
        for k in range(args.rounds + 1):
            pair = seconds(theirs, device, times), seconds(mine, device, times)
            taken += [pair] * (k > 0)
        reference_s, ours_s = np.median(taken, axis=0)
        ratios = [a / b for a, b in taken]
        print(f"  {precision}: torchvision {1e3 * reference_s:.0f} ms, weldtrain {1e3 * ours_s:.0f} ms: "
              f"{np.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
