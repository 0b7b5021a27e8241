"""Every kind of picture becomes upright 8-bit RGB or grey, as its header said, or is refused by name."""

import subprocess
import sys

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image, ImageOps
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from weldtrain.config import ModelConfig
from weldtrain.data.images import (
    Window,
    _percentiles,
    decode,
    read_bytes,
    read_image,
    reduction,
    resize,
    target_size,
    target_sizes,
)
from weldtrain.errors import PictureError
from weldtrain.formats.pictures import picture_header

RNG = np.random.default_rng(0)
SMOOTH = cv2.resize(RNG.integers(0, 255, (6, 8, 3), np.uint8), (80, 60), interpolation=cv2.INTER_CUBIC)


def saved(tmp_path, image, name, **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
@pytest.mark.parametrize(("mode", "wanted"), [("RGB", None), ("L", None), ("RGB", (160, 120)), ("L", (80, 60))])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_jpeg_whose_end_comes_too_early_is_refused(tmp_path, mode, wanted, kept, turn):
    image = Image.fromarray(RNG.integers(0, 255, (240, 320, 3), np.uint8)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = turn
    path = saved(tmp_path, image, "a.jpg", quality=90, exif=exif)
    whole = path.read_bytes()
    begin = whole.index(b"\xff\xda")
    path.write_bytes(whole[: begin + int(kept * (len(whole) - begin))] + b"\xff\xd9")
    size = size_of(path)
    wanted = wanted and wanted[:: 1 if size[0] > size[1] else -1]
    with pytest.raises(PictureError, match=r"a\.jpg: is cut off: its lower part is missing"):
        decode(read_bytes(path), path, size, mode == "L", wanted=wanted)


@pytest.mark.parametrize("more", [b"", b"\xff\xd8\xff\xd9"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_may_be_grey_at_its_end(tmp_path, mode, more):
    pixels = RNG.integers(0, 255, (240, 320, 3), np.uint8)
    pixels[100:] = 128
    path = saved(tmp_path, Image.fromarray(pixels).convert(mode), "a.jpg", quality=90)
    path.write_bytes(path.read_bytes() + more)
    assert (read_as_told(path)[120:] == 128).all()


def size_of(path):
    return picture_header(path, 200)[:2]


def read_as_told(path):
    """As the data set reads it: by what the header says."""
    header = picture_header(path, 200)
    return read_image(path, header[:2], header.grey)


@pytest.mark.parametrize(("mode", "name"), [
    ("RGB", "a.png"), ("L", "a.png"), ("P", "a.png"), ("1", "a.png"), ("LA", "a.png"), ("RGBA", "a.png"), ("RGB", "a.bmp"),
    ("L", "a.bmp"), ("RGB", "a.tif"), ("L", "a.tif"), ("RGB", "a.webp")])
def test_every_mode_gives_the_colours_that_pillow_sees(tmp_path, mode, name):
    image = Image.fromarray(SMOOTH).convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(RNG.integers(0, 255, (60, 80), np.uint8)))
    path = saved(tmp_path, image, name, **({"lossless": True} if name.endswith("webp") else {}))
    out = read_as_told(path)
    assert out.dtype == np.uint8 and out.shape == (60, 80, 1 if mode in ("L", "1") else 3)
    np.testing.assert_array_equal(out + np.zeros(3, np.uint8), np.array(image.convert("RGB")))
    np.testing.assert_array_equal(read_image(path) + np.zeros(3, np.uint8), np.array(image.convert("RGB")))


def test_transparent_pixels_keep_their_colour(tmp_path):
    rgba = np.dstack([SMOOTH, np.zeros((60, 80), np.uint8)])
    np.testing.assert_array_equal(read_image(saved(tmp_path, Image.fromarray(rgba), "a.png")), SMOOTH)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_are_close_to_pillow(tmp_path, mode):
    path = saved(tmp_path, Image.fromarray(SMOOTH).convert(mode), "a.jpg", quality=95)
    out = read_as_told(path)
    assert out.shape[2] == (1 if mode == "L" else 3)
    difference = out.astype(int) - np.array(Image.open(path).convert("RGB"))
    assert np.abs(difference).mean() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_exif_turns_the_picture_upright_or_it_is_refused_never_silently_wrong(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {} if suffix == "png" else {"quality": 98}
    path = saved(tmp_path, Image.fromarray(SMOOTH), f"a.{suffix}", exif=exif.tobytes(), **options)
    upright = np.array(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    try:
        out = read_as_told(path)
    except PictureError as error:
        assert suffix != "jpg" and "save it upright" in str(error)
    else:
        assert out.shape == upright.shape
        assert np.abs(out.astype(int) - upright).mean() < 6


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_a_12_bit_radiograph_keeps_its_contrast(tmp_path, name):
    plate = np.full((60, 80), 1000, np.uint16)
    plate[:, 40:] = 3000
    plate[20:40, 10:30] = 1200
    cv2.imwrite(str(tmp_path / name), plate)
    out = read_as_told(tmp_path / name)
    assert out.dtype == np.uint8 and out.shape == (60, 80, 1) and out.min() == 0 and out.max() == 255
    assert out[30, 20, 0] - out[5, 5, 0] == pytest.approx(255 * 200 / 2000, abs=2)
    cv2.imwrite(str(tmp_path / "flat.png"), np.full((6, 8), 1000, np.uint16))
    assert len(np.unique(read_image(tmp_path / "flat.png"))) == 1


def whole(tmp_path):
    return saved(tmp_path, Image.fromarray(RNG.integers(0, 255, (240, 320, 3), np.uint8)), "w.jpg").read_bytes()


@pytest.mark.parametrize("share", [0.95, 0.5, 0.1])
def test_a_truncated_jpeg_is_named(tmp_path, share):
    data = whole(tmp_path)
    (tmp_path / "bad.jpg").write_bytes(data[: int(len(data) * share)])
    for reader in (read_image, size_of):
        with pytest.raises(PictureError, match=r"bad\.jpg.*(cut off|cannot be read)"):
            reader(tmp_path / "bad.jpg")


@pytest.mark.parametrize("reader", [read_image, size_of])
@pytest.mark.parametrize(("name", "text"), [("empty.jpg", "empty"), ("page.jpg", "HTML"), ("folder.jpg", "folder"),
                                            ("broken.jpg", "broken.jpg"), ("noise.png", "noise.png")])
def test_what_is_no_picture_says_what_it_is(tmp_path, reader, name, text):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "page.jpg").write_text("<!DOCTYPE html><title>404</title>")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "broken.jpg").symlink_to(tmp_path / "gone.jpg")
    (tmp_path / "noise.png").write_bytes(RNG.bytes(500))
    with pytest.raises(PictureError, match=text):
        reader(tmp_path / name)


@pytest.mark.parametrize("reader", [read_image, size_of])
def test_float_pictures_are_refused(tmp_path, reader):
    cv2.imwrite(str(tmp_path / "f.tif"), RNG.random((8, 8)).astype(np.float32))
    with pytest.raises(PictureError, match=r"f\.tif: has float.*(16 bit|16 bits)"):
        reader(tmp_path / "f.tif")


@pytest.mark.parametrize(("width", "height", "text"), [
    (12000, 2, "12000x2, a strip"), (2, 12000, "2x12000, a strip"), (1500, 1400, "1500x1400, larger than 2 megapixels")])
def test_strips_and_giants_are_refused_by_their_header(tmp_path, width, height, text):
    path = saved(tmp_path, Image.new("L", (width, height)), "a.png")
    with pytest.raises(PictureError, match=rf"a\.png: is {text}"):
        picture_header(path, 2)


def test_a_picture_that_changed_size_is_refused(tmp_path):
    path = saved(tmp_path, Image.fromarray(SMOOTH), "a.png")
    with pytest.raises(PictureError, match="decodes to 80x60, its header says 60x80"):
        read_image(path, (60, 80))


def test_the_scale_is_torchvisions():
    transform = GeneralizedRCNNTransform(200, 333, [0.0] * 3, [1.0] * 3)
    import torch

    for _ in range(30):
        w, h = (int(v) for v in RNG.integers(20, 900, 2))
        resized, _ = transform.resize(torch.zeros(3, h, w))
        ours = target_size(w, h, 200, 333)
        # torchvision multiplies in float32: a product that is whole may fall just below it.
        assert np.abs(np.subtract(ours, (resized.shape[2], resized.shape[1]))).max() <= 1
    assert target_size(12000, 2, 800, 1333)[1] == 1


@pytest.mark.parametrize("share", [0.95, 0.5, 0.1])
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "bmp", "webp"])
def test_a_cut_file_of_any_kind_is_refused_also_with_a_whole_preview_inside(tmp_path, suffix, share):
    path = saved(tmp_path, Image.fromarray(RNG.integers(0, 255, (120, 160, 3), np.uint8)), f"a.{suffix}")
    data = path.read_bytes()
    if suffix == "jpg":
        preview = b"Exif\0\0" + saved(tmp_path, Image.fromarray(SMOOTH), "preview.jpg").read_bytes()
        data = data[:2] + b"\xff\xe1" + (len(preview) + 2).to_bytes(2, "big") + preview + data[2:]
        path.write_bytes(data)
        assert read_image(path).shape == (120, 160, 3)
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(PictureError, match=rf"a\.{suffix}"):
        read_image(path)


def test_what_cameras_append_to_a_jpeg_does_no_harm(tmp_path):
    path = saved(tmp_path, Image.fromarray(SMOOTH), "a.jpg")
    before = read_image(path)
    path.write_bytes(path.read_bytes() + RNG.bytes(5000))
    np.testing.assert_array_equal(read_image(path), before)


def test_of_several_pages_the_first_is_the_picture(tmp_path):
    pages = [Image.fromarray(SMOOTH), Image.fromarray(SMOOTH[::-1, ::-1, ::-1].copy()).resize((20, 10))]
    path = saved(tmp_path, pages[0], "a.tif", save_all=True, append_images=pages[1:])
    np.testing.assert_array_equal(read_as_told(path), SMOOTH)
    assert picture_header(path, 200) == (80, 60, False, 2)


def test_a_header_that_claims_billions_of_pixels_costs_no_memory(tmp_path, broken):
    (tmp_path / "huge.png").write_bytes(broken["huge.png"][0])
    code = ("import resource, sys; from pathlib import Path; from weldtrain.errors import PictureError\n"
            "from weldtrain.data.images import read_image; from weldtrain.formats.pictures import picture_header\n"
            "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
            "for reader in (read_image, lambda p: picture_header(p, 200), lambda p: print(picture_header(p, 2000))):\n"
            "    try: reader(Path(sys.argv[1]))\n"
            "    except PictureError as error: print(error)\n")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "huge.png"], capture_output=True, text=True, timeout=60)
    refused, too_large, header = done.stdout.splitlines()
    assert "huge.png: cannot be read" in refused and "huge.png: is 40000x40000, larger than 200 megapixels" in too_large
    assert header == "Header(width=40000, height=40000, grey=False, pages=1)"  # as it says, but nothing is decoded for that


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_a_16_bit_picture_is_upright_or_refused(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    plate = np.full((60, 80), 1000, np.uint16)
    plate[:10, :20] = 3000
    path = saved(tmp_path, Image.fromarray(plate), f"a.{suffix}", exif=exif if suffix == "tif" else exif.tobytes())
    try:
        out = read_as_told(path)
    except PictureError as error:
        assert "save it upright" in str(error)
    else:
        upright = np.rot90(plate, {3: 2, 6: -1}[orientation]) == 3000  # Pillow turns a 16-bit TIFF twice
        np.testing.assert_array_equal(out == 255, upright[:, :, None])


@pytest.mark.parametrize("value", [0, 1, 255, 4095, 65535])
def test_a_flat_16_bit_plate_is_flat(tmp_path, value):
    cv2.imwrite(str(tmp_path / "a.png"), np.full((6, 8), value, np.uint16))
    assert len(np.unique(read_image(tmp_path / "a.png"))) == 1


def test_the_16_bit_window_keeps_the_order_of_greys(tmp_path):
    ramp = np.arange(60 * 80, dtype=np.uint16).reshape(60, 80) * 13
    cv2.imwrite(str(tmp_path / "a.tif"), ramp)
    out = read_image(tmp_path / "a.tif")[..., 0].ravel().astype(int)
    assert (np.diff(out) >= 0).all() and len(np.unique(out)) == 256


def test_resizing_to_the_same_size_is_free_and_a_drawn_box_lands_where_its_numbers_do():
    assert resize(SMOOTH, (80, 60)) is SMOOTH
    for _ in range(25):
        (width, height), (new_width, new_height) = RNG.integers(60, 400, 2), RNG.integers(60, 400, 2)
        x1, y1 = int(RNG.integers(0, width // 2)), int(RNG.integers(0, height // 2))
        x2, y2 = int(RNG.integers(x1 + 20, width)), int(RNG.integers(y1 + 20, height))
        image = np.zeros((height, width, 3), np.uint8)
        image[y1:y2, x1:x2] = 255
        out = resize(image, (int(new_width), int(new_height)))
        assert out.shape == (new_height, new_width, 3) and out.dtype == np.uint8
        rows, columns = np.nonzero(out[..., 0] > 127)
        found = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        scale = np.array([new_width / width, new_height / height] * 2)
        # An edge may fall within one pixel of either picture.
        assert (np.abs(found - np.array([x1, y1, x2, y2]) * scale) <= np.maximum(1, 0.5 * scale) + 0.01).all()


def test_no_target_exceeds_its_bounds():
    for width, height in RNG.integers(1, 6000, (500, 2)).tolist():
        new = target_size(width, height, 200, 333)
        assert 1 <= min(new) <= 200 and max(new) <= 333
        # One of the two bounds is met, to a pixel: nothing is shrunk more than it must be.
        assert min(new) >= 199 or max(new) >= 332
        assert target_size(height, width, 200, 333) == new[::-1]


@pytest.mark.parametrize(("suffix", "dtype"), [
    *((suffix, np.uint8) for suffix in ("png", "tif", "bmp", "jpg", "webp")), ("png", np.uint16), ("tif", np.uint16)])
def test_header_and_pixels_agree_on_what_is_grey(tmp_path, suffix, dtype):
    for image in (SMOOTH[..., 0], SMOOTH):
        path = tmp_path / f"a.{suffix}"
        cv2.imwrite(str(path), image.astype(dtype) * (1 if dtype == np.uint8 else 16))
        grey = picture_header(path, 200).grey
        assert grey == (image.ndim == 2 and suffix != "webp")  # WebP has no grey
        assert read_as_told(path).shape[2] == read_image(path).shape[2] == (1 if grey else 3)
        np.testing.assert_array_equal(read_as_told(path), read_image(path))


def test_fixed_levels_show_the_same_grey_in_every_picture(tmp_path):
    window = Window(levels=(0, 4095))
    for low, high in ((0, 4095), (1000, 3000), (5, 9), (4000, 65535)):
        plate = np.linspace(low, high, 60 * 80).astype(np.uint16).reshape(60, 80)
        cv2.imwrite(str(tmp_path / "a.png"), plate)
        out = read_image(tmp_path / "a.png", (80, 60), True, window)
        exact = np.clip(plate.astype(float), 0, 4095) * 255 / 4095
        assert out.shape == (60, 80, 1) and np.abs(out[..., 0] - exact).max() <= 0.51


@pytest.mark.parametrize("share", [0.1, 5.0, 20.0])
def test_percentiles_spread_all_but_the_tails_over_all_greys(share):
    plate = RNG.permutation(np.arange(60 * 80, dtype=np.uint16) * 3 + 2000).reshape(60, 80, 1)
    out = Window(percentiles=(share, 100 - share)).apply(plate).ravel()
    tail = plate.size * share / 100
    # Besides the tail, half a grey's worth of the rest rounds to an end.
    assert [(out == end).sum() - tail for end in (0, 255)] == pytest.approx([plate.size / 510] * 2, abs=plate.size / 255)
    assert (np.diff(out[np.argsort(plate.ravel())].astype(int)) >= 0).all() and len(np.unique(out)) == 256


def test_a_window_comes_from_the_model_and_colour_keeps_its_ratios(tmp_path):
    assert Window.of(ModelConfig()) == Window() == ((0.1, 99.9), None)
    assert Window.of(ModelConfig(window_percentiles=[1, 99], window_levels=[10, 20])) == ((1, 99), (10, 20))
    plate = RNG.integers(0, 4096, (60, 80, 3)).astype(np.uint16)
    cv2.imwrite(str(tmp_path / "a.tif"), plate[..., ::-1])
    out = read_image(tmp_path / "a.tif", (80, 60), False, Window(levels=(0, 4095)))
    assert np.abs(out - plate * (255 / 4095)).max() <= 0.51


def test_8_bits_are_left_alone_by_every_window(tmp_path):
    path = saved(tmp_path, Image.fromarray(SMOOTH[..., 0]), "a.png")
    np.testing.assert_array_equal(read_image(path, window=Window(levels=(100, 120)))[..., 0], SMOOTH[..., 0])


@pytest.mark.parametrize("channels", [1, 3])
def test_resizing_keeps_the_channels(channels):
    image = SMOOTH[..., :channels]
    for size in ((40, 30), (160, 90), (80, 60)):
        out = resize(image, size)
        assert out.shape == (size[1], size[0], channels)
        np.testing.assert_array_equal(out[..., 0], resize(SMOOTH, size)[..., 0])


SIDES = st.integers(1, 9000)
SIZES = st.tuples(SIDES, SIDES)


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=30), st.integers(32, 2000), st.integers(0, 1500))
def test_the_scale_of_many_pictures_is_that_of_each(sizes, min_size, more):
    found = target_sizes(np.array(sizes, np.int32), min_size, min_size + more)
    assert found.dtype == np.int64 and [tuple(size) for size in found.tolist()] == [
        target_size(*size, min_size, min_size + more) for size in sizes]


@settings(deadline=None)
@given(SIZES, SIZES)
def test_a_reduction_is_the_largest_that_does_not_fall_below_what_is_wanted(size, wanted):
    def enough(k):
        covered = [k * -(-side // k) for side in size]  # what the reduced picture stands for
        return all(c // k >= least and (c - side) * least / side <= 0.5 for c, side, least in zip(covered, size, wanted))

    k = reduction(size, wanted)
    assert k in (1, 2, 4, 8) and (k == 1 or enough(k)) and (k == 8 or not enough(2 * k))


def smooth_jpeg(tmp_path, mode, orientation, width, height):
    """A picture that is stored as `orientation` says."""
    few = np.random.default_rng(width).integers(0, 255, (5, 6, 3), np.uint8)
    smooth = Image.fromarray(cv2.resize(few, (width, height), interpolation=cv2.INTER_CUBIC)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(tmp_path, smooth, "a.jpg", exif=exif.tobytes(), quality=98)


def averaged(path, k):
    """Means of k x k pixels of a JPEG, its edge repeated, as a viewer shows it: from Pillow."""
    with Image.open(path) as stored:
        pixels = np.array(stored.convert("L" if stored.mode == "L" else "RGB"), np.float64)
        orientation = stored.getexif()[0x0112]
    height, width = pixels.shape[:2]
    pixels = np.pad(pixels.reshape(height, width, -1), ((0, -height % k), (0, -width % k), (0, 0)), "edge")
    means = pixels.reshape(pixels.shape[0] // k, k, pixels.shape[1] // k, k, -1).mean((1, 3))
    turned = Image.fromarray(np.rint(means).astype(np.uint8).squeeze())
    turned.getexif()[0x0112] = orientation
    upright = np.array(ImageOps.exif_transpose(turned))
    return upright.reshape(*upright.shape[:2], -1)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_reduced_jpeg_is_the_whole_one_averaged(tmp_path, mode, orientation):
    for width, height in ((320, 240), (321, 247), (193, 407)):
        path = smooth_jpeg(tmp_path, mode, orientation, width, height)
        data, (*size, grey, _) = read_bytes(path), picture_header(path, 200)
        for k in (1, 2, 4, 8):
            small = tuple(-(-side // k) for side in size)
            out = decode(data, path, tuple(size), grey, None, tuple(int(0.53 * side / k) for side in size))
            assert (out.shape[1], out.shape[0], out.shape[2]) == (*small, 1 if mode == "L" else 3) and out.dtype == np.uint8
            # OpenCV turns CMYK into RGB by integers.
            assert np.abs(out - averaged(path, k).astype(float)).mean() < (3 if mode == "CMYK" else 1)
            larger = decode(data, path, tuple(size), grey, None, (small[0] + 1, 1))
            assert larger.shape[1] == max(-(-size[0] // reduction(tuple(size), (small[0] + 1, 1))), small[0])


def test_a_drawn_box_lands_where_its_numbers_do_also_when_reduced(tmp_path):
    rng = np.random.default_rng(3)
    for k in (2, 4, 8) * 8:
        width, height = rng.integers(200, 900, 2).tolist()
        x1, y1 = int(rng.integers(0, width // 2)), int(rng.integers(0, height // 2))
        x2, y2 = int(rng.integers(x1 + 60, width)), int(rng.integers(y1 + 60, height))
        image = np.zeros((height, width), np.uint8)
        image[y1:y2, x1:x2] = 255
        wanted = tuple(int(side / k * rng.uniform(0.6, 1)) for side in (width, height))
        data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 98])[1]
        shown = resize(decode(data, tmp_path, (width, height), True, None, wanted), wanted)[..., 0] > 127
        rows, columns = np.nonzero(shown)
        found = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        # Half a pixel of rounding, and what the last reduced pixel stands for beyond the edge.
        assert np.abs(found - np.array([x1, y1, x2, y2]) * np.tile(np.divide(wanted, (width, height)), 2)).max() < 1.5


def test_only_jpegs_are_reduced(tmp_path):
    for suffix in ("png", "tif", "bmp", "webp"):
        path = saved(tmp_path, Image.fromarray(SMOOTH), f"a.{suffix}", **({"lossless": True} if suffix == "webp" else {}))
        np.testing.assert_array_equal(decode(read_bytes(path), path, (80, 60), False, None, (10, 7)), SMOOTH)
    cv2.imwrite(str(tmp_path / "deep.png"), RNG.integers(0, 4096, (60, 80)).astype(np.uint16))
    assert decode(read_bytes(tmp_path / "deep.png"), tmp_path, (80, 60), True, None, (10, 7)).shape == (60, 80, 1)


@pytest.mark.parametrize("wanted", [(320, 240), (160, 120), (80, 60), (40, 30)])
@pytest.mark.parametrize("grey", [True, False])
def test_a_jpeg_replaced_by_one_of_another_size_is_named_also_when_reduced(tmp_path, wanted, grey):
    path = saved(tmp_path, Image.new("L" if grey else "RGB", (336, 240)), "a.jpg")
    with pytest.raises(PictureError, match=r"a\.jpg: decodes to 336x240, its header says 320x240"):
        decode(read_bytes(path), path, (320, 240), grey, None, wanted)
    turned = saved(tmp_path, Image.new("L" if grey else "RGB", (240, 320)), "a.jpg")
    with pytest.raises(PictureError, match="decodes to 240x320, its header says 320x240"):
        decode(read_bytes(turned), path, (320, 240), grey, None, wanted)


@settings(max_examples=200, deadline=None)
@given(arrays(np.uint16, array_shapes(min_dims=1, max_dims=3, max_side=40)),
       st.tuples(st.floats(0, 100), st.floats(0, 100)).map(sorted))
def test_percentiles_from_counts_are_numpys(image, shares):
    np.testing.assert_allclose(_percentiles(image, tuple(shares)), np.percentile(image, shares), rtol=1e-9, atol=1e-6)


def test_percentiles_of_a_large_picture_are_numpys():
    plate = np.clip(RNG.normal(30000, 9000, (600, 800)), 0, 65535).astype(np.uint16)
    for shares in ((0.1, 99.9), (0, 100), (50, 50.001)):
        np.testing.assert_allclose(_percentiles(plate, shares), np.percentile(plate, shares), rtol=1e-9)
