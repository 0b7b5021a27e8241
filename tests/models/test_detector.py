"""The detector: torchvision's own numbers on the same pixels, torchvision's names, every model builds and learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_area, box_iou

from weldtrain.config import ModelConfig
from weldtrain.data.batch import IGNORED, Sample, collate
from weldtrain.errors import ConfigError
from weldtrain.models.detector import PictureSampler, build_detector
from weldtrain.models.weights import load_weights

SMALL = ModelConfig(backbone="resnet18", min_size=64, max_size=128, pyramid_channels=32, box_head_width=32)


def batch(sizes=((64, 96), (96, 64)), boxes=2):
    rng = np.random.default_rng(0)
    corners = np.array([[5, 5, 30, 20], [20, 30, 50, 60]], np.float32)[:boxes]
    made = collate([Sample(rng.integers(0, 255, (*size, 3), np.uint8), corners, np.arange(1, boxes + 1), i, size)
                    for i, size in enumerate(sizes)])
    # torchvision's memory order: another one sums in another order, and a tie between proposals may then fall otherwise.
    made.images = made.images.contiguous()
    return made


def torchvision_twin(detector, cfg):
    """torchvision's FasterRCNN around the same layers: all else is its own, and its transform resizes nothing."""
    twin = FasterRCNN(detector.backbone, num_classes=None, min_size=cfg.min_size, max_size=cfg.max_size,
                      rpn_anchor_generator=detector.rpn.anchor_generator, rpn_head=detector.rpn.head,
                      box_roi_pool=detector.roi_heads.box_roi_pool,  # its own adds in another order
                      box_head=detector.roi_heads.box_head, box_predictor=detector.roi_heads.box_predictor,
                      box_score_thresh=0.01, box_detections_per_img=20)
    assert type(twin.rpn) is not type(detector.rpn) and type(twin.roi_heads) is not type(detector.roi_heads)
    twin.rpn.fg_bg_sampler, twin.roi_heads.fg_bg_sampler = detector.rpn.fg_bg_sampler, detector.roi_heads.fg_bg_sampler
    return twin


@pytest.fixture
def pair():
    torch.manual_seed(0)
    detector = build_detector(SMALL, 2)
    return detector, torchvision_twin(detector, SMALL)


def as_torchvision(b):
    pictures = [image[:, :h, :w].float() / 255 for image, (h, w) in zip(b.images, b.image_sizes.tolist())]
    return pictures, b.targets()


@pytest.mark.parametrize("boxes", [0, 1, 2])
def test_the_same_losses_as_torchvision(pair, boxes):
    detector, twin = pair
    b = batch(boxes=boxes)
    pictures, targets = as_torchvision(b)
    ours = detector(b)
    theirs = twin(pictures, targets)
    assert {f"loss_{name}" for name in ours} == set(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[f"loss_{name}"], rtol=1e-6, atol=1e-7)


def test_a_batchs_loss_is_the_mean_of_its_pictures(pair):
    """Whatever is taught of each: so neither the batch, accumulation nor ranks change what is learnt."""
    detector, _ = pair
    detector.backbone.eval()  # statistics of a batch are another matter
    pictures = [Sample(np.random.default_rng(i).integers(0, 255, (64, 96, 3), np.uint8), boxes, labels, i, (64, 96))
                for i, (boxes, labels) in enumerate([
                    (np.array([[5, 5, 30, 20], [40, 10, 60, 60]], np.float32), np.array([1, 2])),
                    (np.zeros((0, 4), np.float32), np.zeros(0, np.int64)),
                    (np.array([[0, 0, 96, 64]], np.float32), np.array([IGNORED]))])]
    together = detector(collate(pictures))
    apart = [detector(collate([picture])) for picture in pictures]
    for name, value in together.items():
        torch.testing.assert_close(value, torch.stack([losses[name] for losses in apart]).mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_what_is_taught_of_a_picture_hangs_on_its_seed_alone(dtype):
    labels = [torch.randint(-1, 2, (500,)).to(dtype), torch.zeros(40, dtype=dtype), torch.full((30,), -1, dtype=dtype)]
    sampler = PictureSampler(64, 0.25)
    sampler.seeds = [1, 2, 3]
    positive, negative = sampler(labels)
    for p, n, of_picture in zip(positive, negative, labels):
        assert (of_picture[p] > 0).all() and (of_picture[n] == 0).all()
    assert [int(p.sum()) for p in positive] == [16, 0, 0] and [int(n.sum()) for n in negative] == [48, 40, 0]
    torch.manual_seed(0)
    sampler.seeds = [1]
    assert torch.equal(sampler(labels[:1])[0][0], positive[0])
    sampler.seeds = [9]
    assert not torch.equal(sampler(labels[:1])[0][0], positive[0])


def test_the_same_detections_as_torchvision(pair):
    detector, twin = pair
    detector.eval(), twin.eval()
    detector.limit_detections(0.01, 20)
    b = batch()
    with torch.inference_mode():
        for ours, theirs in zip(detector(b), twin(as_torchvision(b)[0])):
            assert len(ours["scores"]) > 0
            for name in ("boxes", "labels", "scores"):
                torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5)
            assert ours["labels"].min() >= 1


@pytest.mark.parametrize(("ours", "theirs"), [
    (ModelConfig(), "fasterrcnn_resnet50_fpn"),
    (ModelConfig(head="four_conv_one_fc"), "fasterrcnn_resnet50_fpn_v2"),
    (ModelConfig(backbone="mobilenet_v3_large"), "fasterrcnn_mobilenet_v3_large_fpn"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_torchvisions_weights_fit_by_name_and_shape(ours, theirs):
    with torch.device("meta"):
        reference = torchvision.models.get_model(theirs, weights=None, weights_backbone=None)
        detector = build_detector(ours, 90)
    assert ({k: v.shape for k, v in detector.state_dict().items()}
            == {k: v.shape for k, v in reference.state_dict().items()})


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v3_large"])
@pytest.mark.parametrize("boxes", [0, 2])
def test_every_parameter_learns_also_from_defect_free_pictures(backbone, boxes):
    detector = build_detector(replace(SMALL, backbone=backbone), 2)
    losses = detector(batch(boxes=boxes))
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    if not boxes:
        assert losses["box_reg"].item() == losses["rpn_box_reg"].item() == 0
    assert all(p.grad is not None for p in detector.parameters() if p.requires_grad)


def test_from_scratch_nothing_is_frozen_and_with_weights_torchvisions_default_is():
    assert all(p.requires_grad for p in build_detector(SMALL, 2).parameters())
    frozen = {name.split(".")[2] for name, p in build_detector(replace(SMALL, weights="imagenet"), 2).named_parameters()
              if not p.requires_grad}
    assert frozen == {"conv1", "layer1"}
    with pytest.raises(ConfigError, match="trainable_layers"):
        build_detector(replace(SMALL, trainable_layers=2), 2)


def test_anchor_sizes_must_fit_the_pyramid():
    with pytest.raises(ConfigError, match=r"model\.anchor_sizes"):
        build_detector(replace(SMALL, anchor_sizes=[32.0, 64.0]), 2)


def test_weights_from_files(tmp_path):
    """A bare backbone, a whole detector of other classes, and files that are neither."""
    backbone = torchvision.models.resnet18(weights=None)
    torch.save(backbone.state_dict(), tmp_path / "backbone.pt")
    cfg = replace(SMALL, weights=str(tmp_path / "backbone.pt"))
    detector = build_detector(cfg, 2)
    load_weights(detector, cfg)
    assert torch.equal(detector.backbone.body.layer4[1].conv2.weight, backbone.layer4[1].conv2.weight)

    other = build_detector(SMALL, 7)
    torch.save({"model": other.state_dict()}, tmp_path / "other.pt")
    cfg = replace(SMALL, weights=str(tmp_path / "other.pt"))
    detector = build_detector(cfg, 2)
    load_weights(detector, cfg)
    assert torch.equal(detector.roi_heads.box_head.fc6.weight, other.roi_heads.box_head.fc6.weight)
    assert detector.roi_heads.box_predictor.cls_score.weight.shape[0] == 3

    torch.save({"a": torch.zeros(3)}, tmp_path / "alien.pt")
    (tmp_path / "damaged.pt").write_bytes((tmp_path / "backbone.pt").read_bytes()[:2000])
    for name in ("alien.pt", "damaged.pt", "absent.pt"):
        cfg = replace(SMALL, weights=str(tmp_path / name))
        with pytest.raises(ConfigError, match=name):
            load_weights(detector, cfg)


def test_weights_that_cannot_be_fetched_say_where_to_put_them(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def no_network(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    cfg = replace(SMALL, weights="imagenet")
    with pytest.raises(ConfigError, match=f"(?s)model.weights=imagenet.*resnet18.*{tmp_path}.*model.weights=PATH"):
        load_weights(build_detector(cfg, 2), cfg)


def test_coco_weights_of_a_file_in_the_hub_cache_are_used_without_the_class_layer(tmp_path, monkeypatch):
    cfg = ModelConfig(backbone="mobilenet_v3_large", weights="coco")
    saved = build_detector(cfg, 90).state_dict()
    weights = torchvision.models.get_model_weights("fasterrcnn_mobilenet_v3_large_fpn").COCO_V1
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda url, **_: saved)
    monkeypatch.setattr(type(weights), "get_state_dict", lambda self, *a, **k: saved)
    detector = build_detector(cfg, 90)
    before = detector.roi_heads.box_predictor.cls_score.weight.clone()
    load_weights(detector, cfg)
    assert torch.equal(detector.rpn.head.cls_logits.weight, saved["rpn.head.cls_logits.weight"])
    assert torch.equal(detector.roi_heads.box_predictor.cls_score.weight, before)
    with pytest.raises(ConfigError, match="torchvision has none for resnet18"):
        load_weights(build_detector(SMALL, 2), replace(SMALL, weights="coco"))


CLOSE = replace(SMALL, anchor_sizes=[8.0, 16.0, 32.0, 64.0, 128.0], rpn_batch_per_image=10**6, box_batch_per_image=10**6)
DEFECTS = [[5, 5, 30, 20], [60, 40, 80, 60]]
REGIONS = [[40, 20, 96, 64], [0, 30, 12, 40]]  # the first holds the second defect


def marked(defects, regions, pictures=2, size=(64, 96), grey=None):
    """A batch in which every picture has these defects, and these regions to be ignored; `grey` in RGB (False) or as such."""
    rng = np.random.default_rng(0)
    boxes = np.array([*defects, *regions], np.float32).reshape(-1, 4)
    labels = np.array([1] * len(defects) + [IGNORED] * len(regions), np.int64)
    images = rng.integers(0, 255, (pictures, *size, 3)).astype(np.uint8)
    if grey is not None:
        images = images[..., :1] if grey else np.repeat(images[..., :1], 3, axis=3)
    return collate([Sample(image, boxes, labels, i, size) for i, image in enumerate(images)])


def watch(part, name, stages):
    """Notes of one stage and every picture: candidate boxes [n,4], which were taken as objects, which as background."""
    assign, sample, candidates = getattr(part, name), part.fg_bg_sampler, []

    def assigning(boxes, *rest):
        candidates.extend(boxes)
        return assign(boxes, *rest)

    def sampling(labels):
        sample.seeds = sampling.seeds
        objects, background = sample(labels)
        stages.extend(zip(candidates, (mask.bool() for mask in objects), (mask.bool() for mask in background)))
        return objects, background

    setattr(part, name, assigning)
    part.fg_bg_sampler = sampling


def choices(regions):
    """Of both stages and every picture what `watch` notes, whatever the regions from the same weights and draws."""
    torch.manual_seed(0)
    detector, stages = build_detector(CLOSE, 2), []
    watch(detector.rpn, "assign_targets_to_anchors", stages)
    watch(detector.roi_heads, "assign_targets_to_proposals", stages)
    detector(marked(DEFECTS, regions))
    return stages


def test_what_an_ignored_box_claims_is_no_background_and_no_object():
    regions = torch.tensor(REGIONS, dtype=torch.float32)
    for now, without, threshold in zip(choices(REGIONS), choices([]), [0.3, 0.3, 0.5, 0.5], strict=True):
        boxes, objects, background = now
        assert torch.equal(boxes, without[0]) and torch.equal(objects, without[1])  # no defect loses what it has won
        sides = torch.minimum(boxes[:, 2:], regions[:, None, 2:]) - torch.maximum(boxes[:, :2], regions[:, None, :2])
        inside = (sides.clamp(min=0).prod(2) / box_area(boxes)).amax(0)
        overlap = box_iou(regions, boxes).amax(0)
        assert inside[background].max() < 0.5 and overlap[background].max() < threshold
        background_without = without[2]
        lost = background_without & ~background
        assert lost.sum() > 10 and not (background & ~background_without).any()
        assert overlap[lost].min() > 0 and ((inside[lost] >= 0.5) | (overlap[lost] >= threshold)).float().mean() > 0.9
        # Each region has its best anchors, however little they overlap; all else outside it stays background.
        assert background.sum() > 10 and torch.equal(background[inside == 0], background_without[inside == 0])


def test_a_defect_within_an_ignored_region_is_learnt():
    for boxes, objects, _ in choices(REGIONS):
        assert (box_iou(torch.tensor(DEFECTS, dtype=torch.float32), boxes[objects]).amax(1) > 0.4).all()


@pytest.mark.parametrize("head", ["two_mlp", "four_conv_one_fc"])
@pytest.mark.parametrize("regions", [[[0, 0, 96, 64]], [[-50, -50, 500, 500]], REGIONS], ids=["all of it", "beyond it", "parts"])
def test_a_picture_whose_only_boxes_are_ignored_trains(head, regions):
    torch.manual_seed(0)
    detector = build_detector(replace(SMALL, head=head), 2)
    losses = detector(marked([], regions))
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values()) and losses["box_reg"].item() == losses["rpn_box_reg"].item() == 0
    assert all(torch.isfinite(p.grad).all() for p in detector.parameters())
    assert all(torch.isfinite(b).all() for b in detector.buffers())


def test_no_proposal_at_all_is_no_error():
    heads = build_detector(SMALL, 2).roi_heads
    heads._ignored = [torch.tensor([[0.0, 0, 9, 9]])]
    _, labels = heads.assign_targets_to_proposals([torch.zeros(0, 4)], [torch.zeros(0, 4)], [torch.zeros(0, dtype=torch.int64)])
    assert labels[0].shape == (0,)


@pytest.mark.parametrize("training", [True, False])
def test_a_grey_batch_gives_what_its_rgb_gives(training):
    grey, rgb = (marked(DEFECTS, REGIONS, grey=one) for one in (True, False))
    assert (grey.images.shape[1], rgb.images.shape[1]) == (1, 3)
    torch.manual_seed(0)
    detector = build_detector(SMALL, 2).train(training)
    given = []
    for b in (grey, rgb):
        torch.manual_seed(1)
        before = b.images.clone()
        out = detector(b)
        given.append(list(out.values()) if training else [v for found in out for v in found.values()])
        assert torch.equal(b.images, before)
    for ours, theirs in zip(*given, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_boxes_keep_their_digits_in_bf16():
    """torchvision goes on in the type of features and heads, in which a coordinate of 300 px is a multiple of 2."""
    torch.manual_seed(0)
    detector = build_detector(SMALL, 2).eval()
    detector.limit_detections(0.0, 50)
    b = batch(sizes=((320, 320),))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found = detector(b)[0]
        features = list(detector.backbone(b.images / 255).values())
        anchors = detector.rpn.anchor_generator(ImageList(b.images, [(320, 320)]), features)
    assert found["boxes"].dtype == found["scores"].dtype == anchors[0].dtype == torch.float32
    assert not torch.equal(found["boxes"], found["boxes"].bfloat16().float())
    assert not torch.equal(anchors[0], anchors[0].bfloat16().float())
