"""Checks on a CUDA device what a CPU cannot: copies, overlap, precision, clocks, a short training run. Under 6 minutes.

    python scripts/gpu_check.py
Prints one line a check and exits 1 if any failed, 2 where there is no CUDA device.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torchvision.ops import box_iou

from weldtrain.config import DatasetConfig, LoaderConfig, ModelConfig, OptimizerConfig, SyntheticConfig
from weldtrain.data.batch import Batch
from weldtrain.data.cache import PictureCache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index, synthetic_root
from weldtrain.data.loader import Loader, training_loader
from weldtrain.engine.bench import idle_step
from weldtrain.engine.prefetch import device_batches
from weldtrain.engine.rates import measure, step_rate
from weldtrain.engine.step import TrainingStep
from weldtrain.models.detector import build_detector
from weldtrain.telemetry.clock import StepClock
from weldtrain.telemetry.machine import MachineCounters, usable_cores

CHECKS: list[Callable[[Path], str]] = []


def check(function: Callable[[Path], str]) -> Callable[[Path], str]:
    CHECKS.append(function)
    return function


def batches(folder: Path, count: int = 2, **settings) -> tuple[DetectionDataset, Loader, torch.device]:
    device = torch.device("cuda", 0)
    cfg = DatasetConfig(synthetic=SyntheticConfig(train=64, val=16, test=0))
    index = open_index(cfg, folder)
    dataset = DetectionDataset(index, "train", index.names, ModelConfig(min_size=512, max_size=512))
    return dataset, training_loader(dataset, LoaderConfig(num_workers=count, timeout_s=60, **settings), device, 0), device


@check
def pinned_batches_arrive_unchanged(folder: Path) -> str:
    """Also while the memory of earlier ones is used again: no copy may still be on its way from it."""
    for workers in ("thread", "process"):
        _, loader, device = batches(folder, workers=workers)
        assert loader.plan.pin_memory, "pin_memory=auto is off"
        _, plain, _ = batches(folder, 0)
        for epoch in range(6):
            loader.set_epoch(epoch)
            plain.set_epoch(epoch)
            arrived = list(device_batches(loader, device, StepClock(device)))  # as fast as they come
            for there, here in zip(arrived, plain):
                assert isinstance(here, Batch) and there.images.is_cuda and there.images.dtype == torch.uint8
                assert torch.equal(there.images.cpu(), here.images) and torch.equal(there.boxes.cpu(), here.boxes), workers
                assert not there.image_sizes.is_cuda
        loader.close()
    return "pixels and boxes equal to those of the main process, from threads and from processes"


@check
def a_batch_moves_in_one_asynchronous_copy(folder: Path) -> str:
    _, loader, device = batches(folder, batch_size=64)
    batch = next(iter(loader))
    assert batch.memory.is_pinned(), "threads fill pageable memory"
    large = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        batch.to(device, non_blocking=True)
        torch.cuda.synchronize()
    copies = [e for e in profile.events() if "HtoD" in e.name]
    assert len(copies) == 1, f"{len(copies)} copies"
    start = time.perf_counter()
    large.to(device, non_blocking=True)
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    assert queued < 0.5 * whole, "the host waits for the copy"
    return f"{batch.memory.nbytes / 2**20:.1f} MB in one copy; {large.nbytes / 1e9 / whole:.1f} GB/s"


@check
def the_loader_keeps_the_gpu_busy(folder: Path) -> str:
    """A step with the loader against the same step on one batch that stays on the device."""
    dataset, loader, device = batches(folder, 4, batch_size=16)
    dataset.cache = PictureCache.in_memory(dataset.sizes, dataset.index.grey, "raw")
    torch.manual_seed(0)
    model = build_detector(ModelConfig(backbone="resnet50", min_size=512, max_size=512), 4).to(device)
    step = idle_step(model, OptimizerConfig(), device, torch.bfloat16)
    alone = step_rate(step, next(iter(loader)).to(device), 10).mean
    rate = measure(loader, device, 15, usable_cores(), step, lambda: MachineCounters(device).read()["system/gpu_util_pct"])
    assert rate.mean > alone / 1.05, f"{rate.mean:.0f} of {alone:.0f} images/s, {rate.data_wait_pct:.1f} % waiting"
    return f"{rate.mean:.0f} of {alone:.0f} images/s, GPU {rate.gpu_pct:.0f} %, {rate.data_wait_pct:.1f} % waiting"


@check
def the_doctor_runs(folder: Path) -> str:
    command = [sys.executable, "-m", "weldtrain", "task=doctor", "experiment=quickstart", "device=cuda", "doctor.budget_s=30",
               f"cache_dir={folder}", f"output_dir={folder}/doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(next((folder / "doctor").glob("**/doctor.json")).read_text())
    assert "host to device, pinned" in result["ceilings"]
    for ledger in result["ledger"].values():
        assert ledger["ms"]["rest"] <= 0.05 * ledger["wall_ms"], ledger
    return result["verdict"]["sentence"]


@check
def a_copy_overlaps_with_computing(folder: Path) -> str:
    device = torch.device("cuda", 0)
    host = torch.empty(256 * 2**20, dtype=torch.uint8, pin_memory=True)
    square = torch.randn(6000, 6000, device=device)
    side = torch.cuda.Stream(device)

    def timed(copy: bool, compute: bool) -> float:
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        if copy:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host.to(device, non_blocking=True)
        if compute:
            for _ in range(10):
                square @ square
        torch.cuda.current_stream().wait_stream(side)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    for _ in range(3):
        timed(True, True)
    alone, other, both = timed(True, False), timed(False, True), timed(True, True)
    assert both < 0.9 * (alone + other), f"copy {alone:.1f} + compute {other:.1f} ms, together {both:.1f} ms"
    return f"copy {alone:.1f} ms, compute {other:.1f} ms, together {both:.1f} ms"


@check
def detections_agree_with_the_cpu(folder: Path) -> str:
    _, loader, device = batches(folder, 0)
    torch.manual_seed(0)
    model = build_detector(ModelConfig(backbone="resnet18", min_size=512, max_size=512), 4).eval()
    model.limit_detections(0.05, 20)
    batch = next(iter(loader))
    with torch.inference_mode():
        here = model.backbone(model.normalise(batch.images, batch.image_sizes.tolist()))
        model.to(device)
        moved = batch.to(device)
        there = model.backbone(model.normalise(moved.images, moved.image_sizes.tolist()))
    worst = max(float((there[k].cpu() - here[k]).abs().max() / here[k].abs().max()) for k in here)
    assert worst < 1e-2, f"features differ by {worst:.1e}"
    return f"features within {worst:.1e} of the CPU's"


@check
def counters_see_the_gpu(folder: Path) -> str:
    values = MachineCounters(torch.device("cuda", 0)).read()
    assert values["system/gpu_mem_mb"] > 0
    return f"{values['system/gpu_mem_mb']:.0f} MB, {values['system/gpu_util_pct']:.0f} %"


@check
def training_runs_in_every_precision(folder: Path) -> str:
    rates = []
    for precision in ("bf16", "fp16", "fp32"):
        command = [sys.executable, "-m", "weldtrain", "experiment=quickstart", "device=cuda", "trainer.epochs=2",
                   "trainer.log_every=20", "dataset.synthetic.train=128", f"trainer.precision={precision}",
                   f"cache_dir={folder}", f"output_dir={folder}/{precision}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        summary = json.loads(next((folder / precision).glob("**/summary.json")).read_text())
        lines = next((folder / precision).glob("**/metrics.jsonl")).read_text()
        assert "system/gpu_util_pct" in lines and "loader/h2d_ms" in lines
        rates.append(f"{precision} {summary['images_per_s']:.0f} images/s, {summary['data_wait_pct']:.0f} % waiting")
    return "; ".join(rates)


@check
def predictions_agree_with_the_cpu(folder: Path) -> str:
    """Whole and in tiles, in fp32: of scores well above the threshold of 0.3 each has its like, to 0.05 and an IoU of 0.9."""
    checkpoint, told = next((folder / "fp32").glob("**/best.pt")), []
    pictures = synthetic_root(SyntheticConfig(train=64, val=16, test=0), folder) / "images"
    for tiles in ("none", "160"):
        found = {}
        for device in ("cuda", "cpu"):
            place = folder / f"predicted-{tiles}-{device}"
            command = [sys.executable, "-m", "weldtrain", "task=predict", f"checkpoint={checkpoint}",
                       f"predict.source={pictures}", f"device={device}", f"predict.tiles={tiles}", "predict.threshold=0.3",
                       "predict.save=[json]",
                       f"output_dir={place}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr[-2000:]
            found[device] = json.loads(next(place.glob("**/predictions.json")).read_text())
        for one, other in (("cuda", "cpu"), ("cpu", "cuda")):
            for a in found[one]:
                x, y, w, h = a["bbox"]
                box = torch.tensor([[x, y, x + w, y + h]])
                like = [b for b in found[other] if (b["file_name"], b["category_id"]) == (a["file_name"], a["category_id"])
                        and abs(a["score"] - b["score"]) < 0.05]
                boxes = torch.tensor([[b["bbox"][0], b["bbox"][1], b["bbox"][0] + b["bbox"][2], b["bbox"][1] + b["bbox"][3]]
                                      for b in like]).reshape(-1, 4)
                assert a["score"] < 0.35 or (box_iou(box, boxes) > 0.9).any(), (one, tiles, a)
        told.append(f"{len(found['cuda'])} findings, tiles {tiles}")
    return "; ".join(told)


@check
def the_step_is_faster_than_torchvisions(folder: Path) -> str:
    command = [sys.executable, str(Path(__file__).with_name("benchmark_step.py")), "--rounds", "3", "--batch", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    ratios = [float(r) for r in re.findall(r"ms: ([0-9.]+) times", done.stdout)]
    assert min(ratios) >= 1.5, done.stdout
    return " ".join(done.stdout.split())


@check
def a_gradient_that_is_not_finite_leaves_the_weights_alone(folder: Path) -> str:
    device = torch.device("cuda", 0)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = torch.nn.Linear(3, 1).to(device)
        step = TrainingStep(model, kind(model.parameters(), 0.1, fused=True), device, None)
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.tensor([[1.0, 2.0, float("inf")]], device=device)).sum().backward()
        step.update()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())), kind
    return "SGD and AdamW, without waiting for the device"


@check
def a_compiled_backbone_computes_the_same(folder: Path) -> str:
    torch.manual_seed(0)
    model = build_detector(ModelConfig(backbone="resnet18", min_size=256, max_size=256), 4).cuda().eval()
    images = torch.randn(2, 3, 256, 256, device="cuda")
    with torch.inference_mode():
        plain = model.backbone(images)
        names = set(model.state_dict())
        model.backbone.compile()
        compiled = model.backbone(images)
    worst = max(float((compiled[k] - plain[k]).abs().max() / plain[k].abs().max()) for k in plain)
    assert worst < 1e-2 and set(model.state_dict()) == names
    return f"within {worst:.1e}"


@check
def a_run_that_is_stopped_goes_on(folder: Path) -> str:
    """And the batch that fills the memory is found."""
    command = [sys.executable, "-m", "weldtrain", "experiment=quickstart", "device=cuda", "dataset.synthetic.train=64",
               "dataset.synthetic.val=16", "dataset.synthetic.test=0", "loader.batch_size=auto", "loader.drop_last=false",
               "trainer.epochs=40", "trainer.eval_every=40", "trainer.save_every=5", "trainer.ema=0.99", f"cache_dir={folder}",
               f"output_dir={folder}/stopped", "resume=auto"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + 60
    while not list((folder / "stopped").glob("**/last.pt")) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 143, said[-2000:]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "resumed from" in done.stderr, done.stderr[-2000:]
    assert len(list((folder / "stopped").glob("*/*"))) == 1
    batch = next(line for line in done.stderr.splitlines() if "loader.batch_size=auto" in line)
    return f"143, then 0; {batch}"


def main() -> int:
    if not torch.cuda.is_available():
        print(f"no CUDA device (torch {torch.__version__})")
        return 2
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        synthetic_root(SyntheticConfig(train=64, val=16, test=0), folder)
        for function in CHECKS:
            try:
                print(f"ok    {function.__name__}: {function(Path(folder))}", flush=True)
            except Exception:
                failed += 1
                print(f"FAIL  {function.__name__}\n{traceback.format_exc()}", flush=True)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
