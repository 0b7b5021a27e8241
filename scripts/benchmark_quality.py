"""What a detector from scratch is worth after so many minutes: weldtrain's against torchvision's reference recipe.

    python scripts/benchmark_quality.py --data ../shared/data/neu_det [--epochs 8] [--seed 0]

Both have the same pictures at the same size, backbone, classes, threads, precision and wall clock, one after the other, and are
judged by the same measure on the same validation split. The reference is torchvision's detection script at its own settings,
for as many epochs as fit: SGD of 0.02 for 16 pictures a step, batches of 2, a warm-up of 1000 steps, steps down at 16 and 22 of
26 epochs, horizontal flips, the full pyramid and box head. weldtrain is `experiment=neu_det`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from weldtrain.config import DatasetConfig, EvaluateConfig, ModelConfig
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.engine.device import autocast_dtype, choose_device
from weldtrain.metrics.detection import evaluate_detections
from weldtrain.metrics.matching import Boxes, match

SIZE = 256
BATCH = 2
SGD_PER_PICTURE = 0.02 / 16
JUDGING = EvaluateConfig()


class Pictures(Dataset):
    """As the reference has them: floats of a picture's own size, flipped half of the time, boxes and labels."""

    def __init__(self, dataset: DetectionDataset, flip: bool) -> None:
        self.dataset, self.flip = dataset, flip

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        index, row = self.dataset.index, int(self.dataset.rows[i])
        rgb = np.repeat(index.picture(row), 3 if index.grey[row] else 1, axis=2)
        image = torch.from_numpy(rgb).permute(2, 0, 1).float() / 255
        at = index.box_rows(row)
        kept = ~index.ignored(at)
        boxes = torch.from_numpy(index.boxes[at][kept].copy())
        if self.flip and torch.rand(()) < 0.5:
            image, boxes = image.flip(2), boxes[:, [2, 1, 0, 3]] * torch.tensor([-1.0, 1, -1, 1])
            boxes[:, [0, 2]] += image.shape[2]
        return image, {"boxes": boxes, "labels": torch.from_numpy(self.dataset.labels_of(at)[kept])}, i


def reference(root: Path, minutes: float, seed: int, cache_dir: Path) -> dict[str, float]:
    """Trains torchvision's way for so many minutes; returns its metrics."""
    torch.manual_seed(seed)
    index = open_index(DatasetConfig(format="voc", root=str(root), one_based=True), cache_dir)
    classes = list(index.class_names(None))
    size = ModelConfig(min_size=SIZE, max_size=SIZE)
    train, val = (DetectionDataset(index, split, classes, size) for split in ("train", "val"))
    device = choose_device("auto")
    dtype = autocast_dtype("auto", device)
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=torch.nn.BatchNorm2d)
    model = FasterRCNN(backbone, len(classes) + 1, min_size=SIZE, max_size=SIZE, box_score_thresh=JUDGING.score_thresh,
                       box_detections_per_img=JUDGING.max_detections).to(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], SGD_PER_PICTURE * BATCH, momentum=0.9,
                                weight_decay=1e-4)
    loader = DataLoader(Pictures(train, flip=True), BATCH, shuffle=True, drop_last=True, num_workers=1, collate_fn=list)
    started, step, pictures = time.monotonic(), 0, 0
    left = 60 * minutes
    model.train()
    while left > 0:
        for batch in loader:
            done = 1 - left / (60 * minutes)
            factor = min(1.0, (step + 1) / 1000) * 0.1 ** sum(done > mark for mark in (16 / 26, 22 / 26))
            for group in optimizer.param_groups:
                group["lr"] = SGD_PER_PICTURE * BATCH * factor
            images = [image.to(device) for image, *_ in batch]
            targets = [{k: v.to(device) for k, v in target.items()} for _, target, _ in batch]
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = sum(model(images, targets).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, pictures = step + 1, pictures + len(batch)
            left = 60 * minutes - (time.monotonic() - started)
            if left <= 0:
                break
    minutes = (time.monotonic() - started) / 60
    return {"pictures": pictures, "minutes": minutes} | judged(model.eval(), val, classes, device, dtype)


@torch.inference_mode()
def judged(model: FasterRCNN, val: DetectionDataset, classes: list[str], device: torch.device, dtype) -> dict[str, float]:
    truth, found = [], []
    index = val.index
    for image, _, i in Pictures(val, flip=False):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            out = {name: value.float().cpu().numpy() for name, value in model([image.to(device)])[0].items()}
        found.append((np.full(len(out["scores"]), i), out["boxes"], out["labels"].astype(np.int64), out["scores"]))
        at = index.box_rows(int(val.rows[i]))
        truth.append((np.full(at.stop - at.start, i), index.boxes[at], val.labels_of(at), index.ignored(at)))
    image, boxes, labels, scores = map(np.concatenate, zip(*found))
    truth_image, truth_boxes, truth_labels, ignore = map(np.concatenate, zip(*truth))
    there = Boxes(image=truth_image, boxes=truth_boxes, labels=truth_labels, ignore=ignore)
    called = Boxes(image=image, boxes=boxes, labels=labels, scores=scores)
    metrics = evaluate_detections(
        there, called, match(called, there), pictures=len(val), classes=classes, max_detections=JUDGING.max_detections,
        false_call_score=JUDGING.false_call_score)
    return {name: metrics[name] for name in ("map_50", "map")}


def ours(root: Path, seed: int, place: Path, epochs: int) -> dict[str, float]:
    """Trains `experiment=neu_det`, whose schedule is so many epochs; returns its metrics and the minutes it took."""
    done = subprocess.run(
        [sys.executable, "-m", "weldtrain", "experiment=neu_det", f"dataset.root={root}", f"trainer.epochs={epochs}",
         f"trainer.eval_every={epochs}", f"seed={seed}", f"output_dir={place / 'outputs'}", f"cache_dir={place / 'cache'}"],
        capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    summary = json.loads(next((place / "outputs").glob("**/summary.json")).read_text())
    config = yaml.safe_load((Path(summary["run_dir"]) / "config.yaml").read_text())
    pictures = summary["steps"] * config["loader"]["batch_size"]
    return {"pictures": pictures, "minutes": summary["train_s"] / 60, "map_50": summary["map_50"], "map": summary["map"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8, help="of weldtrain; the reference gets the minutes that they take")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        mine = ours(args.data.resolve(), args.seed, place, args.epochs)
        theirs = reference(args.data.resolve(), mine["minutes"], args.seed, place / "cache")
    for name, result in (("weldtrain", mine), ("torchvision's reference", theirs)):
        print(f"{name:24} AP50 {result['map_50']:.3f}  AP {result['map']:.3f}  {result['minutes']:.1f} min, "
              f"{result['pictures']} pictures")


if __name__ == "__main__":
    main()
