"""What tiles are for: pores of 9 px and cracks of up to 1200 px on strips, learnt whole and in tiles, in as many steps.

    python scripts/benchmark_tiles.py [steps]
Draws the strips, trains both, prints AP50 by class, and time and memory of predicting one strip of 12000 x 2000.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np

SIZE = (3000, 500)
PORE_GREY = 112  # amid 140, noise of 14
MODEL = ["model=fasterrcnn_resnet18_fpn", "optimizer=adamw", "model.min_size=256", "model.max_size=1024", "device=auto"]


def strip(rng: np.random.Generator, size: tuple[int, int], pores: int, cracks: int) -> tuple[np.ndarray, list[tuple]]:
    """Noise as of a film, with round pores and thin wandering cracks; boxes x1, y1, x2, y2, class."""
    width, height = size
    image = cv2.resize(rng.normal(140, 12, (height // 8, width // 8)).astype(np.float32), size, interpolation=cv2.INTER_CUBIC)
    boxes = []
    for _ in range(pores):
        x, y = rng.integers(20, width - 20), rng.integers(20, height - 20)
        cv2.circle(image, (int(x), int(y)), 4, PORE_GREY, -1, cv2.LINE_AA)
        boxes.append((x - 4, y - 4, x + 5, y + 5, "pore"))
    for _ in range(cracks):
        length = int(rng.uniform(150, 1200))
        xs = np.arange(0, length, 12) + rng.integers(20, width - length - 20)
        ys = np.cumsum(rng.normal(0, 4, len(xs)))
        ys += rng.uniform(40 - ys.min(), height - 40 - ys.max()) if np.ptp(ys) < height - 80 else 40 - ys.min()
        path = np.stack([xs, ys], 1).astype(np.int32)
        cv2.polylines(image, [path], False, 70, 3, cv2.LINE_AA)
        boxes.append((*(path.min(0) - 2), *(path.max(0) + 3), "crack"))
    image += rng.normal(0, 8, image.shape)
    return np.clip(image, 0, 255).astype(np.uint8), boxes


def draw(root: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["image,x1,y1,x2,y2,class,split"]
    for split, count in (("train", 24), ("val", 8)):
        for i in range(count):
            name = f"{split}{i}.png"
            image, boxes = strip(rng, SIZE, pores=12, cracks=2)
            cv2.imwrite(str(root / name), image)
            lines += [",".join(map(str, (name, *box, split))) for box in boxes]
    (root / "boxes.csv").write_text("\n".join([*lines, ""]))


def weldtrain(place: Path, *overrides: str) -> tuple[dict, float]:
    """Runs it; its summary, and the most memory that its process took, in MB."""
    done = subprocess.run(["/usr/bin/env", sys.executable, "-c", MEASURED, *overrides, f"output_dir={place}"],
                          capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    newest = max(place.glob("*/*/summary.json"), key=lambda file: file.stat().st_mtime)
    return json.loads(newest.read_text()), float(done.stdout.splitlines()[-1])


MEASURED = """
import atexit, resource
from weldtrain.__main__ import main
atexit.register(lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True))
main()
"""


def main() -> None:
    steps = sys.argv[1] if len(sys.argv) > 1 else "400"
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        data = place / "strips"
        data.mkdir()
        draw(data)
        checkpoints = {}
        for what, tiles in (("whole", "null"), ("tiles", "auto")):
            summary, _ = weldtrain(
                place / what, "dataset=csv", f"dataset.root={data}", f"cache_dir={place / 'cache'}", *MODEL,
                f"model.tiles={tiles}", "loader.sampling=balanced", f"loader.batch_size={8 if tiles == 'auto' else 4}",
                f"trainer.max_steps={steps}", "trainer.epochs=1000", "trainer.eval_every=1000")
            checkpoints[what] = summary["checkpoint"]
            ap = ", ".join(f"{name} {value:.3f}" for name, value in summary["per_class_ap_50"].items())
            print(f"{what}: AP50 {summary['map_50']:.3f} ({ap}), {summary['steps']} steps in {summary['train_s']:.0f} s",
                  flush=True)
        large = place / "large"
        large.mkdir()
        image, boxes = strip(np.random.default_rng(1), (12000, 2000), pores=60, cracks=6)
        cv2.imwrite(str(large / "strip.png"), image)
        summary, megabytes = weldtrain(place / "predicted", "task=predict", f"checkpoint={checkpoints['tiles']}",
                                       f"predict.source={large}", f"cache_dir={place / 'cache'}")
        print(f"12000 x 2000: {len(boxes)} defects there, found {summary['found']}; {megabytes:.0f} MB at most")


if __name__ == "__main__":
    main()
