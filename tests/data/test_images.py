"""Every kind of picture becomes the same three upright 8-bit channels, or is refused by name."""

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from weldtrain.data.images import read_image, target_size
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
