"""Faster R-CNN from torchvision's parts, with an input step that takes whole batches instead of single pictures.

Parameter names are torchvision's, so its weights fit. Class 0 is the background, inside only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import get_model
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import FrozenBatchNorm2d, box_area, box_iou

from weldtrain.config import ModelConfig
from weldtrain.data.batch import IGNORED, Batch
from weldtrain.errors import ConfigError
from weldtrain.models.roi_align import MultiScaleRoIAlign

# ImageNet's, in RGB; what torchvision's weights were trained with.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
RESNET_LAYERS = ("layer4", "layer3", "layer2", "layer1", "conv1", "bn1")
_TRAINABLE_WITH_WEIGHTS = 3  # torchvision's default


class Detector(nn.Module):
    """Losses in training, detections in evaluation, from a Batch whose pictures are at the model's scale already."""

    def __init__(self, backbone: BackboneWithFPN, rpn: RegionProposalNetwork, roi_heads: RoIHeads) -> None:
        super().__init__()
        self.backbone, self.rpn, self.roi_heads = backbone, rpn, roi_heads
        # Divisions by a tensor of three: the same rounding as torchvision's own transform.
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1), persistent=False)

    def forward(self, batch: Batch) -> dict[str, torch.Tensor] | list[dict[str, torch.Tensor]]:
        """In training the scalar losses `classifier box_reg objectness rpn_box_reg`; in evaluation for each picture
        `boxes` float32 [n,4] in px of the batch's picture, `labels` int64 [n] from 1, `scores` float32 [n] descending."""
        sizes = [tuple(size) for size in batch.image_sizes.tolist()]
        targets = batch.targets() if self.training else None
        self.rpn.fg_bg_sampler.seeds = self.roi_heads.fg_bg_sampler.seeds = batch.seeds.tolist()
        images = ImageList(self.normalise(batch.images, sizes), sizes)
        features = self.backbone(images.tensors)
        proposals, rpn_losses = self.rpn(images, features, targets)
        detections, box_losses = self.roi_heads(features, proposals, sizes, targets)
        if not self.training:
            return detections
        return {name.removeprefix("loss_"): loss for name, loss in (box_losses | rpn_losses).items()}

    def normalise(self, images: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
        """uint8 [B,3,H,W] or grey [B,1,H,W] to float32 [B,3,H,W] of zero mean and unit variance on ImageNet, zero in the
        padding."""
        out = images.to(torch.float32).div_(255)
        if out.shape[1] == 1:
            out = out.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
        out.sub_(self.mean).div_(self.std)
        for picture, (height, width) in zip(out, sizes):
            picture[:, height:] = 0
            picture[:, :, width:] = 0
        return out

    def limit_detections(self, score_thresh: float, max_detections: int) -> None:
        """What evaluation returns: detections of at least this score, at most so many a picture."""
        self.roi_heads.score_thresh = score_thresh
        self.roi_heads.detections_per_img = max_detections


class PictureSampler:
    """Which anchors or proposals of each picture are taught: as many as torchvision's BalancedPositiveNegativeSampler, drawn
    by the picture's own seed, so that neither the batch, the rank nor what came before decides about them."""

    def __init__(self, per_picture: int, positive_fraction: float) -> None:
        self._per_picture, self._positives = per_picture, int(per_picture * positive_fraction)
        self.seeds: list[int] = []  # of the batch

    def __call__(self, labels: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Masks bool [n] of the positive (label above 0) and negative (0) ones to teach, of each picture."""
        taught = [self._drawn(of_picture, seed) for of_picture, seed in zip(labels, self.seeds)]
        return [positive for positive, _ in taught], [negative for _, negative in taught]

    def _drawn(self, labels: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(labels.device).manual_seed(seed)
        order = torch.randperm(len(labels), generator=generator, device=labels.device)
        labels = labels[order]  # of those in random order, the first ones
        positive, negative = labels > 0, labels == 0
        positive &= positive.cumsum(0) <= self._positives
        negative &= negative.cumsum(0) <= self._per_picture - positive.sum()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return positive[back], negative[back]


class _Rpn(RegionProposalNetwork):
    """torchvision's, except that ignored boxes are taught neither as objects nor as background, and that each picture counts
    the same, however many of its anchors are taught: so a batch's loss is the mean of its parts'."""

    def assign_targets_to_anchors(self, anchors, targets):
        labels, matched = super().assign_targets_to_anchors(anchors, targets)
        for label, boxes, target in zip(labels, anchors, targets):
            _spare(label, boxes, target["ignored"], self.proposal_matcher)
        return labels, matched

    def compute_loss(self, objectness, pred_bbox_deltas, labels, regression_targets):
        positive, negative = self.fg_bg_sampler(labels)
        shares = _shares([p | n for p, n in zip(positive, negative)])
        taught, positive = torch.where(shares > 0)[0], torch.where(torch.cat(positive))[0]
        deltas, wanted = pred_bbox_deltas[positive], torch.cat(regression_targets)[positive]
        of_box = F.smooth_l1_loss(deltas, wanted, beta=1 / 9, reduction="none")
        of_object = F.binary_cross_entropy_with_logits(objectness.flatten()[taught], torch.cat(labels)[taught], reduction="none")
        return (of_object * shares[taught]).sum(), (of_box.sum(1) * shares[positive]).sum()


class _RoiHeads(RoIHeads):
    """torchvision's, with the same exceptions."""

    def forward(self, features, proposals, image_shapes, targets=None):
        if self.training:
            proposals, _, labels, regression_targets = self.select_training_samples(proposals, targets)
        logits, deltas = self.box_predictor(self.box_head(self.box_roi_pool(features, proposals, image_shapes)))
        if not self.training:
            found = self.postprocess_detections(logits, deltas, proposals, image_shapes)
            return [{"boxes": b, "scores": s, "labels": v} for b, s, v in zip(*found)], {}
        shares = _shares([torch.ones_like(of_picture, dtype=torch.bool) for of_picture in labels])
        labels = torch.cat(labels)
        positive = torch.where(labels > 0)[0]
        deltas = deltas.unflatten(1, (-1, 4))[positive, labels[positive]]
        of_box = F.smooth_l1_loss(deltas, torch.cat(regression_targets)[positive], beta=1 / 9, reduction="none")
        of_class = F.cross_entropy(logits, labels, reduction="none")
        return [], {"loss_classifier": (of_class * shares).sum(), "loss_box_reg": (of_box.sum(1) * shares[positive]).sum()}

    def select_training_samples(self, proposals, targets):
        self._ignored = [t["ignored"] for t in targets]  # the next method is not given them
        return super().select_training_samples(proposals, targets)

    def assign_targets_to_proposals(self, proposals, gt_boxes, gt_labels):
        matched, labels = super().assign_targets_to_proposals(proposals, gt_boxes, gt_labels)
        for label, boxes, ignored in zip(labels, proposals, self._ignored):
            _spare(label, boxes, ignored, self.proposal_matcher)
        return matched, labels


def _shares(taught: Sequence[torch.Tensor]) -> torch.Tensor:
    """float32, masks of each picture one after the other: what each of a batch's terms weighs, so that pictures weigh the
    same and all together 1. A picture of which nothing is taught weighs nothing."""
    return torch.cat([of_picture / of_picture.sum().clamp(min=1) for of_picture in taught]) / len(taught)


# Under autocast features and heads are bf16, and torchvision would go on in their type: every anchor, proposal, target and
# detection rounded to 8 bits, which at 800 px is steps of 4.


class _Anchors(AnchorGenerator):
    def set_cell_anchors(self, dtype, device):
        super().set_cell_anchors(torch.float32, device)


class _RpnHead(RPNHead):
    def forward(self, x):
        return tuple([level.float() for level in output] for output in super().forward(x))


class _Predictor(FastRCNNPredictor):
    def forward(self, x):
        return tuple(output.float() for output in super().forward(x))


def _spare(labels: torch.Tensor, boxes: torch.Tensor, ignored: torch.Tensor, matcher: Matcher) -> None:
    """Gives -1, which is never sampled, to the background among `boxes` [n,4] that an ignored box [m,4] claims.

    It claims what would not be background were it a defect, and what lies at least half within it, as COCO counts for
    crowds. What a defect has won stays with it.
    """
    if len(ignored) and len(boxes):
        overlap = box_iou(ignored, boxes)
        areas = box_area(boxes)
        shared = overlap * (areas + box_area(ignored)[:, None]) / (1 + overlap)  # from the definition of IoU
        claimed = (matcher(overlap) != matcher.BELOW_LOW_THRESHOLD) | (shared >= 0.5 * areas).any(0)
        labels.masked_fill_((labels == 0) & claimed, IGNORED)


def build_detector(cfg: ModelConfig, num_classes: int) -> Detector:
    """A detector of `num_classes` defect classes with random weights. Raises ConfigError where sizes do not fit."""
    backbone = _mobilenet(cfg) if cfg.backbone.startswith("mobilenet") else _resnet(cfg)
    anchors = _anchors(cfg)
    per_place = anchors.num_anchors_per_location()[0]
    deep = cfg.head == "four_conv_one_fc"
    channels = backbone.out_channels
    if deep:
        box_head = FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [cfg.box_head_width], norm_layer=_head_norm(cfg))
    else:
        box_head = TwoMLPHead(channels * 7 * 7, cfg.box_head_width)
    rpn = _Rpn(
        anchors,
        _RpnHead(channels, per_place, conv_depth=2 if deep else 1),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=cfg.rpn_batch_per_image,
        positive_fraction=0.5,
        pre_nms_top_n={"training": cfg.rpn_pre_nms_top_n_train, "testing": cfg.rpn_pre_nms_top_n_test},
        post_nms_top_n={"training": cfg.rpn_post_nms_top_n_train, "testing": cfg.rpn_post_nms_top_n_test},
        nms_thresh=cfg.rpn_nms_thresh,
    )
    roi_heads = _RoiHeads(
        MultiScaleRoIAlign(["0", "1", "2", "3"], output_size=7, sampling_ratio=cfg.roi_sampling_ratio),
        box_head,
        _Predictor(cfg.box_head_width, num_classes + 1),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=cfg.box_batch_per_image,
        positive_fraction=cfg.box_positive_fraction,
        bbox_reg_weights=None,
        score_thresh=0.05,
        nms_thresh=cfg.box_nms_thresh,
        detections_per_img=100,
    )
    rpn.fg_bg_sampler = PictureSampler(cfg.rpn_batch_per_image, 0.5)
    roi_heads.fg_bg_sampler = PictureSampler(cfg.box_batch_per_image, cfg.box_positive_fraction)
    return Detector(backbone, rpn, roi_heads)


def _norm(cfg: ModelConfig) -> Callable[[int], nn.Module]:
    if cfg.norm == "group":
        return _group_norm
    # Statistics of a pretrained backbone are better than those of a few pictures a step; v2 was trained without.
    frozen = cfg.norm == "frozen" or (cfg.norm == "auto" and cfg.weights and cfg.head == "two_mlp")
    return FrozenBatchNorm2d if frozen else nn.BatchNorm2d


def _head_norm(cfg: ModelConfig) -> Callable[[int], nn.Module]:
    """Of pyramid and box head, which no weights are frozen with."""
    return _group_norm if cfg.norm == "group" else nn.BatchNorm2d


def _group_norm(channels: int) -> nn.Module:
    """32 groups (Wu and He 2018), or as many as divide the channels."""
    return nn.GroupNorm(math.gcd(32, channels), channels)


def _resnet(cfg: ModelConfig) -> BackboneWithFPN:
    body = get_model(cfg.backbone, weights=None, norm_layer=_norm(cfg))
    trainable = _trainable(cfg, at_most=5)
    kept = RESNET_LAYERS[:trainable] + (("bn1",) if trainable == 5 else ())
    for name, parameter in body.named_parameters():
        if not name.startswith(kept):
            parameter.requires_grad_(False)
    width = body.inplanes // 8
    return BackboneWithFPN(
        body, {f"layer{i}": str(i - 1) for i in range(1, 5)}, [width, 2 * width, 4 * width, 8 * width],
        cfg.pyramid_channels, norm_layer=_head_norm(cfg) if cfg.head == "four_conv_one_fc" else None,
    )


def _mobilenet(cfg: ModelConfig) -> BackboneWithFPN:
    body = get_model(cfg.backbone, weights=None, norm_layer=_norm(cfg)).features
    # A stage begins at each strided block, which torchvision marks, and at both ends.
    stages = [0, *(i for i, block in enumerate(body) if getattr(block, "_is_cn", False)), len(body) - 1]
    trainable = _trainable(cfg, at_most=len(stages))
    first = stages[len(stages) - trainable] if trainable else len(body)
    for block in body[:first]:
        block.requires_grad_(False)
    ends = stages[-2:]
    return BackboneWithFPN(
        body, {str(stage): str(level) for level, stage in enumerate(ends)}, [body[i].out_channels for i in ends],
        cfg.pyramid_channels,
    )


def _trainable(cfg: ModelConfig, at_most: int) -> int:
    if cfg.trainable_layers is None:
        return _TRAINABLE_WITH_WEIGHTS if cfg.weights else at_most
    if cfg.trainable_layers > at_most:
        raise ConfigError(f"{cfg.trainable_layers} is more than {cfg.backbone} has", "model.trainable_layers",
                          f"it must be at most {at_most}")
    if cfg.trainable_layers < at_most and not cfg.weights:
        raise ConfigError(f"{cfg.trainable_layers} would freeze layers that were never trained", "model.trainable_layers",
                          "set model.weights, or leave it null")
    return cfg.trainable_layers


def _anchors(cfg: ModelConfig) -> AnchorGenerator:
    ratios = tuple(cfg.anchor_ratios)
    if cfg.backbone.startswith("mobilenet"):  # two levels and a pooled one, each with all sizes
        return _Anchors((tuple(cfg.anchor_sizes),) * 3, (ratios,) * 3)
    if len(cfg.anchor_sizes) != 5:
        raise ConfigError(f"{len(cfg.anchor_sizes)} sizes for the 5 levels of a ResNet pyramid", "model.anchor_sizes",
                          "give one size in px for each level")
    return _Anchors(tuple((size,) for size in cfg.anchor_sizes), (ratios,) * 5)
