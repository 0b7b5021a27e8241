"""Every kind of picture becomes the same three upright 8-bit channels, or is refused by name."""

import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from weldtrain.data.images import read_image, resize, target_size
from weldtrain.errors import DataError
from weldtrain.formats.record import picture_size

RNG = np.random.default_rng(0)
SMOOTH = cv2.resize(RNG.integers(0, 255, (6, 8, 3), np.uint8), (80, 60), interpolation=cv2.INTER_CUBIC)


def saved(tmp_path, image, name, **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


@pytest.mark.parametrize(("mode", "name"), [
    ("RGB", "a.png"), ("L", "a.png"), ("P", "a.png"), ("1", "a.png"), ("LA", "a.png"), ("RGBA", "a.png"), ("RGB", "a.bmp"),
    ("RGB", "a.tif"), ("L", "a.tif"), ("RGB", "a.webp")])
def test_every_mode_gives_the_colours_that_pillow_sees(tmp_path, mode, name):
    image = Image.fromarray(SMOOTH).convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(RNG.integers(0, 255, (60, 80), np.uint8)))
    path = saved(tmp_path, image, name, **({"lossless": True} if name.endswith("webp") else {}))
    out = read_image(path, picture_size(path))
    assert out.dtype == np.uint8 and out.shape == (60, 80, 3)
    np.testing.assert_array_equal(out, np.array(image.convert("RGB")))


def test_transparent_pixels_keep_their_colour(tmp_path):
    rgba = np.dstack([SMOOTH, np.zeros((60, 80), np.uint8)])
    np.testing.assert_array_equal(read_image(saved(tmp_path, Image.fromarray(rgba), "a.png")), SMOOTH)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_are_close_to_pillow(tmp_path, mode):
    path = saved(tmp_path, Image.fromarray(SMOOTH).convert(mode), "a.jpg", quality=95)
    difference = read_image(path).astype(int) - np.array(Image.open(path).convert("RGB"))
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
        out = read_image(path, picture_size(path))
    except DataError as error:
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
    out = read_image(tmp_path / name)
    assert out.dtype == np.uint8 and out.min() == 0 and out.max() == 255
    assert out[30, 20, 0] - out[5, 5, 0] == pytest.approx(255 * 200 / 2000, abs=2)
    cv2.imwrite(str(tmp_path / "flat.png"), np.full((6, 8), 1000, np.uint16))
    assert len(np.unique(read_image(tmp_path / "flat.png"))) == 1


def whole(tmp_path):
    return saved(tmp_path, Image.fromarray(RNG.integers(0, 255, (240, 320, 3), np.uint8)), "w.jpg").read_bytes()


@pytest.mark.parametrize("share", [0.95, 0.5, 0.1])
def test_a_truncated_jpeg_is_named(tmp_path, share):
    data = whole(tmp_path)
    (tmp_path / "bad.jpg").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError, match=r"bad\.jpg.*(cut off|cannot be read)"):
        read_image(tmp_path / "bad.jpg")


@pytest.mark.parametrize("reader", [read_image, picture_size])
@pytest.mark.parametrize(("name", "text"), [("empty.jpg", "empty"), ("page.jpg", "HTML"), ("folder.jpg", "folder"),
                                            ("broken.jpg", "broken.jpg"), ("noise.png", "noise.png")])
def test_what_is_no_picture_says_what_it_is(tmp_path, reader, name, text):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "page.jpg").write_text("<!DOCTYPE html><title>404</title>")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "broken.jpg").symlink_to(tmp_path / "gone.jpg")
    (tmp_path / "noise.png").write_bytes(RNG.bytes(500))
    with pytest.raises(DataError, match=text):
        reader(tmp_path / name)


def test_float_pictures_are_refused(tmp_path):
    cv2.imwrite(str(tmp_path / "f.tif"), RNG.random((8, 8)).astype(np.float32))
    with pytest.raises(DataError, match=r"f\.tif"):
        read_image(tmp_path / "f.tif")


def test_a_picture_that_changed_size_is_refused(tmp_path):
    path = saved(tmp_path, Image.fromarray(SMOOTH), "a.png")
    with pytest.raises(DataError, match="decodes to 80x60, its header says 60x80"):
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
    with pytest.raises(DataError, match=rf"a\.{suffix}"):
        read_image(path)


def test_what_cameras_append_to_a_jpeg_does_no_harm(tmp_path):
    path = saved(tmp_path, Image.fromarray(SMOOTH), "a.jpg")
    before = read_image(path)
    path.write_bytes(path.read_bytes() + RNG.bytes(5000))
    np.testing.assert_array_equal(read_image(path), before)


def test_of_several_pages_the_first_is_the_picture(tmp_path):
    pages = [Image.fromarray(SMOOTH), Image.fromarray(SMOOTH[::-1, ::-1, ::-1].copy()).resize((20, 10))]
    path = saved(tmp_path, pages[0], "a.tif", save_all=True, append_images=pages[1:])
    np.testing.assert_array_equal(read_image(path, picture_size(path)), SMOOTH)


def test_a_header_that_claims_billions_of_pixels_costs_no_memory(tmp_path):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    for reader in (read_image, picture_size):
        with pytest.raises(DataError, match=r"huge\.png"):
            reader(tmp_path / "huge.png")


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_a_16_bit_picture_is_upright_or_refused(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    plate = np.full((60, 80), 1000, np.uint16)
    plate[:10, :20] = 3000
    path = saved(tmp_path, Image.fromarray(plate), f"a.{suffix}", exif=exif if suffix == "tif" else exif.tobytes())
    try:
        out = read_image(path, picture_size(path))
    except DataError as error:
        assert "save it upright" in str(error)
    else:
        upright = np.rot90(plate, {3: 2, 6: -1}[orientation]) == 3000  # Pillow turns a 16-bit TIFF twice
        np.testing.assert_array_equal(out == 255, np.dstack([upright] * 3))


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
