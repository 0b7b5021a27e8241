"""What TensorBoard shows beside single curves: three boards of charts, a card of what the run is, and settings with results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported at every start, also where only help is wanted
    import numpy as np

# Tags are regular expressions; a chart whose tags a run does not have stays empty.
BOARDS = {
    "learning": {
        "loss": ["Multiline", ["loss/total", "loss/classifier", "loss/box_reg", "loss/objectness", "loss/rpn_box_reg"]],
        "AP": ["Multiline", ["val/map", "val/map_50", "val/map_75"]],
        "AP by class": ["Multiline", [r"val/ap/.*"]],
        "learning rate": ["Multiline", ["optim/lr"]],
        "norm of the gradient": ["Multiline", ["optim/grad_norm"]],
    },
    "loader": {
        "images per second": ["Multiline", ["loader/images_per_s"]],
        "waiting for data, %": ["Multiline", ["loader/data_wait_pct"]],
        "ms per picture by stage": ["Multiline", [r"loader/(read|decode|resize|cache|augment|assemble)_ms"]],
        "ms per step": ["Multiline", ["step/total_ms", "step/compute_ms", "loader/data_wait_ms", "loader/h2d_ms"]],
        "batches that lie ready": ["Multiline", ["loader/queue_depth"]],
    },
    "machine": {
        "processor and GPU, %": ["Multiline", ["system/cpu_pct", "system/workers_cpu_pct", "system/gpu_util_pct"]],
        "memory, MB": ["Multiline", ["system/rss_mb", "system/workers_rss_mb", "system/shm_used_mb", "system/page_tables_mb"]],
        "GPU memory, MB": ["Multiline", ["system/gpu_mem_mb"]],
    },
}


def card(facts: Mapping[str, object]) -> str:
    """A table in Markdown, of which TensorBoard shows no markup that comes from data."""
    def cell(value: object) -> str:
        return " ".join(str(value).split()).replace("|", "\\|")

    return "\n".join(["| | |", "|---|---|", *(f"| {cell(name)} | {cell(value)} |" for name, value in facts.items())])


def picture(tag: str, image: np.ndarray):
    """A summary of uint8 [H,W,3] RGB."""
    import cv2
    from tensorboard.compat.proto.summary_pb2 import Summary

    data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 80])[1].tobytes()
    height, width = image.shape[:2]
    return Summary(value=[Summary.Value(tag=tag, image=Summary.Image(height=height, width=width, colorspace=3,
                                                                     encoded_image_string=data))])


def hparams(settings: Mapping[str, Any], metrics: Mapping[str, float | None]) -> tuple:
    """Summaries for the HPARAMS tab: settings by dotted key, and the metrics by the tags of their curves."""
    from torch.utils.tensorboard.summary import hparams as summaries

    shown = {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in settings.items()}
    return summaries(shown, {tag: value for tag, value in metrics.items() if value is not None})
