"""RoIAlign on a CPU: torchvision's values and gradients for any boxes, memory order and type."""

import pytest
import torch
import torchvision

from weldtrain.models.roi_align import MultiScaleRoIAlign

SHAPES = [(96, 128), (64, 120)]
EDGES = torch.tensor([
    [0, 0, 128, 96],  # all of it
    [3, 4, 3, 4],  # nothing
    [10, 10, 10.2, 90],  # a line: as wide as a pixel of its level
    [126.5, 94.5, 128, 96],  # the far corner, whose last samples lie beyond the map
    [-40, -30, 20, 10],  # partly, and below wholly outside
    [120, 90, 300, 200],
    [-50, -60, -20, -10],
    [400, 400, 500, 500],
    [-4, -4, 4, 4],  # samples at -1 and between -1 and 0
])


def feature_maps(channels=5, levels=4, dtype=torch.float32, memory_format=torch.contiguous_format):
    torch.manual_seed(channels)
    maps = {str(k): torch.randn(2, channels, 24 >> k, 32 >> k) for k in range(levels)}
    return {k: m.to(dtype).to(memory_format=memory_format).requires_grad_() for k, m in maps.items()}


def random_boxes(n, seed):
    g = torch.Generator().manual_seed(seed)
    size = torch.exp(torch.rand(n, 2, generator=g) * 7 - 1.5)  # 0.2 to 245 px
    corner = torch.rand(n, 2, generator=g) * 160 - 30
    return torch.cat([corner, corner + size], 1)


def pooled(kind, maps, boxes, ratio=2, output_size=7, autocast=False):
    """Output, and the gradients of the maps for random ones of the output."""
    pool = kind(list(maps), output_size, ratio)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = pool(maps, boxes, SHAPES)
    torch.manual_seed(0)
    return out, torch.autograd.grad(out, list(maps.values()), torch.randn(out.shape).to(out.dtype))


def assert_same(maps, boxes, rtol=2e-5, **settings):
    ours, our_grads = pooled(MultiScaleRoIAlign, maps, boxes, **settings)
    theirs, their_grads = pooled(torchvision.ops.MultiScaleRoIAlign, maps, boxes, **settings)
    for a, b in zip((ours, *our_grads), (theirs, *their_grads)):
        assert a.dtype == b.dtype and a.shape == b.shape
        atol = rtol * b.abs().max().item() if b.numel() else 0
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
    return ours


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_torchvisions_values_for_any_boxes(seed, ratio):
    assert_same(feature_maps(), [random_boxes(60, seed), random_boxes(7 * seed, seed + 100)], ratio=ratio)


def test_torchvisions_values_at_the_edges():
    out = assert_same(feature_maps(), [EDGES, EDGES.flip(0)])
    assert not out[6].any() and not out[7].any()  # wholly outside: zero


@pytest.mark.parametrize("counts", [(0, 0), (0, 3), (3, 0)])
def test_pictures_without_boxes(counts):
    out = assert_same(feature_maps(), [random_boxes(n, 0) for n in counts])
    assert out.shape == (sum(counts), 5, 7, 7)


def test_levels_without_boxes_get_zero_gradients():
    _, grads = pooled(MultiScaleRoIAlign, feature_maps(), [torch.tensor([[8.0, 8, 16, 16]]), torch.zeros(0, 4)])
    assert grads[0].any() and not any(g.any() for g in grads[1:])


@pytest.mark.parametrize("channels", [1, 13, 64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_any_channels_in_any_memory_order(channels, memory_format):
    assert_same(feature_maps(channels, memory_format=memory_format), [random_boxes(20, 1), EDGES])


@pytest.mark.parametrize(("levels", "output_size"), [(1, 7), (3, (3, 5)), (4, 14)])
def test_any_levels_and_output_sizes(levels, output_size):
    assert_same(feature_maps(levels=levels), [random_boxes(20, 2), EDGES], output_size=output_size)


def test_bf16_is_as_close_to_the_truth_as_torchvisions():
    maps = feature_maps(16, dtype=torch.bfloat16)
    exact_maps = {k: m.detach().float().requires_grad_() for k, m in maps.items()}
    boxes = [random_boxes(100, 3).bfloat16(), EDGES.bfloat16()]  # autocast makes the RPN's proposals bf16 too
    ours, our_grads = pooled(MultiScaleRoIAlign, maps, boxes, autocast=True)
    theirs, their_grads = pooled(torchvision.ops.MultiScaleRoIAlign, maps, boxes, autocast=True)
    exact = torchvision.ops.MultiScaleRoIAlign(list(maps), 7, 2)(exact_maps, [b.float() for b in boxes], SHAPES)
    torch.manual_seed(0)
    exact_grads = torch.autograd.grad(exact, list(exact_maps.values()), torch.randn(exact.shape).bfloat16().float())
    for a, b, truth in zip((ours, *our_grads), (theirs, *their_grads), (exact, *exact_grads)):
        assert a.dtype == b.dtype == torch.bfloat16
        mine, its = (a - truth).abs(), (b - truth).abs()
        assert mine.mean() <= 1.01 * its.mean() and mine.max() <= 1.1 * its.max()


def test_the_same_bits_every_time():
    maps, boxes = feature_maps(64), [random_boxes(300, 4), random_boxes(300, 5)]
    first, first_grads = pooled(MultiScaleRoIAlign, maps, boxes)
    for _ in range(3):
        again, grads = pooled(MultiScaleRoIAlign, maps, boxes)
        assert all(torch.equal(a, b) for a, b in zip((first, *first_grads), (again, *grads)))


def test_without_gradients_and_with_some_levels_frozen():
    maps, boxes = feature_maps(), [random_boxes(20, 6), EDGES]
    expected, grads = pooled(torchvision.ops.MultiScaleRoIAlign, maps, boxes)
    pool = MultiScaleRoIAlign(list(maps), 7, 2)
    with torch.inference_mode():
        torch.testing.assert_close(pool(maps, boxes, SHAPES), expected)
    for k in ("0", "2"):
        maps[k].requires_grad_(False)
    torch.manual_seed(0)
    out = pool(maps, boxes, SHAPES)
    out.backward(torch.randn(out.shape))
    assert maps["0"].grad is None
    torch.testing.assert_close(maps["1"].grad, grads[1], rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore")  # that tracing and scripting age
def test_adaptive_sampling_tracing_and_scripting_are_torchvisions():
    assert_same(feature_maps(), [random_boxes(9, 7), EDGES], ratio=0)
    maps, boxes = {k: m.detach() for k, m in feature_maps().items()}, [random_boxes(9, 7), EDGES]
    pool = MultiScaleRoIAlign(list(maps), 7, 2)
    expected = pool(maps, boxes, SHAPES)
    torch.testing.assert_close(torch.jit.script(pool)(maps, boxes, SHAPES), expected)

    def traced(*tensors):
        return pool(dict(zip(maps, tensors)), list(tensors[4:]), SHAPES)

    graph = torch.jit.trace(traced, (*maps.values(), *boxes), check_trace=False).inlined_graph
    assert "torchvision::roi_align" in str(graph)
