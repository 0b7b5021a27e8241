"""RoIAlign for training on a CPU: torchvision's values, at a fraction of its time.

A bin is a weighted sum of pixels, so pooling is one sparse matrix times the feature map's pixels, and the gradient its
transpose times the bins'. Both are `embedding_bag`, which is vectorised, runs on every core and adds in a fixed order;
torchvision's runs on one core, a number at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torchvision import ops
from torchvision.ops.poolers import _convert_to_roi_format, _filter_input, _multiscale_roi_align, _setup_scales


class MultiScaleRoIAlign(ops.MultiScaleRoIAlign):
    """torchvision's (He et al. 2017, sec. 3; levels by Lin et al. 2017, eq. 1), computed here for a fixed sampling ratio on
    a CPU; all else, also tracing and compiling, is left to torchvision."""

    def forward(
        self, x: dict[str, torch.Tensor], boxes: list[torch.Tensor], image_shapes: list[tuple[int, int]]
    ) -> torch.Tensor:
        """Features [B,C,H,W] by level and boxes [n,4] of each picture in its px to [N,C,*output_size] in the features' type;
        positions and sums are in fp32 whatever that is."""
        features = _filter_input(x, self.featmap_names)
        if self.scales is None or self.map_levels is None:
            self.scales, self.map_levels = _setup_scales(
                features, image_shapes, self.canonical_scale, self.canonical_level
            )
        if not torch.jit.is_scripting() and self.sampling_ratio > 0 and _eager_on_cpu(features):
            return self._pool(features, boxes)
        return _multiscale_roi_align(
            features, boxes, self.output_size, self.sampling_ratio, self.scales, self.map_levels
        )

    def _pool(self, features: list[torch.Tensor], boxes: list[torch.Tensor]) -> torch.Tensor:
        levels = self.map_levels(boxes).numpy()
        order = levels.argsort(kind="stable")  # one level after the other, so that each level's RoIs are a slice
        levels = levels[order]
        rois = _convert_to_roi_format(boxes).detach().float().numpy()[order]
        rois[:, 1:] *= np.array(self.scales, np.float32)[levels, None]
        sizes = np.array([f.shape[2:] for f in features], np.int32)[levels]
        ends = np.bincount(levels, minlength=len(features)).cumsum()[:-1]
        samples = zip(*(np.split(a, ends) for a in (order, *_samples(rois, sizes, self.output_size, self.sampling_ratio))))
        return _WeightedSums.apply(list(samples), self.output_size, *features)


def _eager_on_cpu(features: list[torch.Tensor]) -> bool:
    traced = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return not traced and all(f.device.type == "cpu" and f.dtype == features[0].dtype for f in features)


# The indices are numpy's: each of torch's operations has its threads wait for each other, and on cores that the loader's
# workers keep busy those many short waits took longer than all the sums.


def _samples(rois: np.ndarray, sizes: np.ndarray, output_size: tuple[int, int], ratio: int) -> tuple[np.ndarray, np.ndarray]:
    """The pixels that each bin sums, int32 [N,bins,k] into a level's [B*H*W], and their weights, float32 of that shape.

    `rois` float32 [N,5] are picture, x1, y1, x2, y2 in the level's px; `sizes` int32 [N,2] the level's H, W.
    """
    height, width = sizes[:, :1], sizes[:, 1:]
    y, weights_y = _along(rois[:, 2:3], rois[:, 4:5], height, output_size[0], ratio)
    x, weights_x = _along(rois[:, 1:2], rois[:, 3:4], width, output_size[1], ratio)
    rows = ((rois[:, :1].astype(np.int32) * height)[..., None] + y) * width[..., None]
    shape = len(rois), output_size[0] * output_size[1], 4 * ratio**2
    pixels = rows[:, :, None, :, None] + x[:, None, :, None, :]
    weights = weights_y[:, :, None, :, None] * weights_x[:, None, :, None, :]
    return pixels.reshape(shape), weights.reshape(shape)


def _along(
    start: np.ndarray, end: np.ndarray, limit: np.ndarray, bins: int, ratio: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions int32 [N,bins,2*ratio] and weights float32 of the samples along one axis: linear between two neighbours,
    with torchvision's borders. `start`, `end` and `limit`, the number of pixels, are [N,1]."""
    size = np.maximum(end - start, 1) / bins
    sample = np.arange(bins * ratio, dtype=np.float32)  # all in fp32 and in torchvision's order: positions round as its do
    at = start + sample // ratio * size + (sample % ratio + 0.5) * size / ratio
    limit = limit.astype(np.float32)
    inside = (at >= -1) & (at <= limit)  # beyond, a sample is zero
    at = at.clip(0, limit - 1)
    low = np.floor(at)
    share = at - low
    positions = np.stack([low, np.minimum(low + 1, limit - 1)], 2).astype(np.int32)
    weights = np.stack([1 - share, share], 2) * inside[..., None] / ratio
    shape = len(start), bins, 2 * ratio
    return positions.reshape(shape), weights.reshape(shape)


class _WeightedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, samples, output_size, *features):
        """`samples` are for each of the features the rows of its RoIs in the output int64 [n], and their pixels and weights
        [n,bins,k]."""
        ctx.samples, ctx.shapes = samples, [f.shape for f in features]
        bins = output_size[0] * output_size[1]
        out = features[0].new_empty(sum(len(rois) for rois, *_ in samples), features[0].shape[1], bins)
        for (rois, pixels, weights), feature in zip(samples, features):
            if len(rois):
                starts = np.arange(0, pixels.size, pixels.shape[2])
                pooled = _weighted_sums(_rows(feature), pixels.ravel(), weights.ravel(), starts)
                out[torch.from_numpy(rois)] = pooled.view(len(rois), bins, -1).transpose(1, 2)
        return out.unflatten(2, output_size)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        bins = grad.shape[2] * grad.shape[3]
        grad = _rows(grad)
        grads = []
        for (rois, pixels, weights), (b, c, h, w) in zip(ctx.samples, ctx.shapes):
            # Sorted by pixel, each pixel's bins are a bag in turn: nothing is added to one place by two threads.
            by_pixel = pixels.ravel().argsort()
            in_bag = np.bincount(pixels.ravel(), minlength=b * h * w)
            rows = (rois[:, None] * bins + np.arange(bins)).ravel()[by_pixel // pixels.shape[2]]
            sums = _weighted_sums(grad, rows, weights.ravel()[by_pixel], in_bag.cumsum() - in_bag)
            grads.append(sums.view(b, h, w, c).permute(0, 3, 1, 2))
        return None, None, *grads


def _rows(maps: torch.Tensor) -> torch.Tensor:
    """[B,C,H,W] as one row of C for each pixel: a view where memory is channels-last."""
    return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])


def _weighted_sums(rows: torch.Tensor, index: np.ndarray, weight: np.ndarray, starts: np.ndarray) -> torch.Tensor:
    """For each of `starts`, the sum of weight * rows[index] from there to the next one, in the type of `rows`."""
    weight = torch.from_numpy(weight)
    if weight.dtype != rows.dtype:
        # embedding_bag wants one type, and adds in fp32: a weight in two halves of 8 bits each keeps what bf16 would round off.
        high = weight.to(rows.dtype)
        weight = torch.stack([high, (weight - high).to(rows.dtype)], 1).flatten()
        index, starts = index.repeat(2), starts * 2
    index, starts = torch.from_numpy(index), torch.from_numpy(starts.astype(index.dtype))
    return nn.functional.embedding_bag(index, rows, starts, mode="sum", per_sample_weights=weight)
