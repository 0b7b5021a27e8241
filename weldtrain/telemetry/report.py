"""HTML reports: one file that opens without a network. Whatever comes from data is escaped by the template engine."""

from __future__ import annotations

import base64
import os
from typing import Any

import cv2
import jinja2
import numpy as np
from markupsafe import Markup

from weldtrain.telemetry.charts import short


def render(template: str, path: str | os.PathLike[str], **values: Any) -> None:
    """Fills a template of this package and writes it to `path`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("weldtrain.telemetry"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    environment.filters["short"] = short
    with open(path, "w", encoding="utf-8", errors="replace") as file:  # a file name may hold bytes that are no text
        file.write(environment.get_template(template).render(**values))


def picture(image: np.ndarray, height_px: int) -> Markup:
    """A picture uint8 [H,W,3] RGB or [H,W,1] as an inlined JPEG of that height, at most four times as wide."""
    image = image[:, : 4 * image.shape[0]]  # of a strip its beginning
    width = max(1, round(image.shape[1] * height_px / image.shape[0]))
    shrinks = height_px < image.shape[0]
    small = cv2.resize(image, (width, height_px), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    if small.ndim == 3:
        small = cv2.cvtColor(small, cv2.COLOR_RGB2BGR)
    data = base64.b64encode(cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, 82])[1]).decode()
    # Base64 holds nothing that HTML would take for markup.
    return Markup(f'<img alt="" height="{height_px}" width="{width}" src="data:image/jpeg;base64,{data}">')
