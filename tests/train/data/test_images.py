"""Image folders and the many kinds of image files."""

import io
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from train.data import ImageFolder
from train.data.images import (
    IMAGE_SUFFIXES,
    FolderDataset,
    check_labels,
    class_files,
    decode,
    image_files,
    listed,
    read_image,
)
from train.data.stream import DamagedExample

# orientation -> where the stored upper left corner stands in the upright image: (bottom, right)
CORNERS = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}


def folder(path: Path, **options: object) -> ImageFolder:
    return ImageFolder.model_validate({"name": "image_folder", "path": str(path), "image_size": 16, **options})


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_k1_exif_orientation_is_applied(suffix: str, tmp_path: Path) -> None:
    pixels = np.zeros((32, 48, 3), dtype=np.uint8)
    pixels[:16, :24] = 255  # upper left
    exif = Image.Exif()
    for orientation, (bottom, right) in CORNERS.items():
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(tmp_path / f"turned.{suffix}", exif=exif)
        image = read_image(tmp_path / f"turned.{suffix}")
        assert image.size == ((32, 48) if orientation >= 5 else (48, 32))  # (width, height)
        quarters = np.asarray(image)[..., 0].reshape(2, image.height // 2, 2, image.width // 2).mean(axis=(1, 3))
        assert quarters.argmax() == 2 * bottom + right, orientation
        assert np.abs(np.sort(quarters.ravel()) - [0, 0, 0, 255]).max() < 5


def test_k1_orientation_of_grey_and_transparent_images(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for mode in ("L", "LA", "P", "RGBA", "1", "I;16"):
        stored = Image.new("L", (7, 3))
        stored.putpixel((0, 0), 255)  # upper left, which belongs to the upper right
        image = stored.convert(mode) if mode != "I;16" else Image.fromarray(np.asarray(stored).astype(np.uint16) * 257)
        image.save(tmp_path / "turned.png", exif=exif)
        pixels = np.asarray(read_image(tmp_path / "turned.png"))
        assert pixels.shape == (7, 3, 3), mode
        assert np.argwhere(pixels[..., 0] == 255).tolist() == [[0, 2]], mode


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0rubbish", b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x05\x01\x12\0\x03", b"Exif\0\0II*\0\xff\xff\xff\xff"]
)
def test_k1_broken_exif_turns_nothing_and_says_nothing(exif: bytes, tmp_path: Path) -> None:
    Image.new("RGB", (7, 3), (10, 200, 30)).save(tmp_path / "image.jpg", exif=exif)
    assert read_image(tmp_path / "image.jpg").size == (7, 3)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_k1_unknown_orientation_turns_nothing(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (7, 3)).save(tmp_path / "image.jpg", exif=exif)
    assert read_image(tmp_path / "image.jpg").size == (7, 3)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I;16B", "I", "F", "YCbCr", "LAB"]
)
def test_k4_every_mode_of_a_file_becomes_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("image.png" if mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else "image.tif")
    level = 255 if mode == "1" else 100
    if mode.startswith(("I", "F")):
        types = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4", "F": "<f4"}
        Image.fromarray(np.full((4, 5), level * 257, dtype=types[mode])).save(path)
    elif mode == "LAB":
        Image.new("LAB", (5, 4), (107, 128, 128)).save(path)  # L of 42 % is a grey of 100
    else:
        grey = Image.new("L", (5, 4), level)
        (grey if mode == "P" else grey.convert("RGB")).convert(mode).save(path)
    with Image.open(path) as stored:
        assert stored.mode == mode
    image = read_image(path)
    pixels = np.asarray(image)
    assert image.mode == "RGB"
    assert pixels.shape == (4, 5, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - level).max() <= 1


@pytest.mark.parametrize("mode", ["La", "PA", "RGBa", "RGBX", "HSV"])
def test_k4_every_mode_of_a_decoded_image_becomes_rgb(mode: str) -> None:
    if mode == "La":
        image = Image.new("LA", (5, 4), (100, 255))
    else:
        image = Image.new("RGBA" if mode in ("RGBa", "PA") else "RGB", (5, 4), (100, 100, 100))
    pixels = np.asarray(decode(image.convert(mode), (255, 255, 255)))
    assert pixels.shape == (4, 5, 3)
    assert np.abs(pixels.astype(int) - 100).max() <= 1


@pytest.mark.parametrize("mode", ["CMYK", "RGB", "L"])
def test_k4_jpegs_of_every_kind(mode: str, tmp_path: Path) -> None:
    """CMYK is stored inverted in JPEGs, as Adobe does it; a reader that forgets this shows the negative."""
    image = Image.new("RGB", (16, 16), (200, 60, 40)).convert(mode)
    image.save(tmp_path / "image.jpg", quality=98)  # RGB is stored as YCbCr
    assert (b"Adobe" in (tmp_path / "image.jpg").read_bytes()) == (mode == "CMYK")
    pixels = np.asarray(read_image(tmp_path / "image.jpg")).astype(int)
    assert np.abs(pixels - np.asarray(image.convert("RGB")).astype(int)).max() <= 6


def test_k4_transparency_is_composed_on_the_stated_background(tmp_path: Path) -> None:
    Image.new("RGBA", (3, 2), (200, 100, 0, 128)).save(tmp_path / "half.png")
    pixels = np.asarray(read_image(tmp_path / "half.png", background=(0, 200, 100)))
    assert np.abs(pixels.astype(int) - np.array([100, 150, 50])).max() <= 1
    Image.new("LA", (3, 2), (7, 0)).save(tmp_path / "clear.png")
    assert np.asarray(read_image(tmp_path / "clear.png")).min() == 255  # white unless told otherwise
    premultiplied = decode(Image.new("RGBA", (3, 2), (200, 100, 0, 128)).convert("RGBa"), (0, 200, 100))
    assert np.abs(np.asarray(premultiplied).astype(int) - np.array([100, 150, 50])).max() <= 2


def transparent_image(mode: str) -> Image.Image:
    """Left half a colour, right half a colour that is declared transparent."""
    levels = np.tile([255] * 3 + [0] * 3 if mode == "1" else [100] * 3 + [30] * 3, (4, 1))
    if mode == "I;16":
        return Image.fromarray((levels * 257).astype(np.uint16))
    return Image.fromarray(levels.astype(np.uint8)).convert(mode)


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "I;16", "1"])
def test_k4_a_transparent_colour_is_background(mode: str, tmp_path: Path) -> None:
    transparent = {"P": 30, "L": 30, "RGB": (30, 30, 30), "I;16": 30 * 257, "1": 0}[mode]
    image = transparent_image(mode)
    image.save(tmp_path / "image.png", transparency=transparent)
    with Image.open(tmp_path / "image.png") as stored:
        assert "transparency" in stored.info
    pixels = np.asarray(read_image(tmp_path / "image.png", background=(1, 2, 3))).astype(int)
    assert np.abs(pixels[:, :3] - (255 if mode == "1" else 100)).max() <= 1
    assert (pixels[:, 3:] == [1, 2, 3]).all()


def test_k4_palette_with_a_transparency_of_bytes(tmp_path: Path) -> None:
    """Of which Pillow warns."""
    image = transparent_image("P")
    image.save(tmp_path / "image.png", transparency=bytes([255] * 30 + [0] + [255] * 225))
    pixels = np.asarray(read_image(tmp_path / "image.png", background=(1, 2, 3)))
    assert (pixels[:, 3:] == [1, 2, 3]).all()
    assert (pixels[:, :3] == 100).all()


def test_k4_the_first_of_several_images(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (6, 5), colour) for colour in ((200, 0, 0), (0, 200, 0))]
    for suffix in ("gif", "tif", "webp", "png"):
        path = tmp_path / f"image.{suffix}"
        frames[0].save(path, save_all=True, append_images=frames[1:])
        pixels = np.asarray(read_image(path)).astype(int)
        assert np.abs(pixels - [200, 0, 0]).max() <= 4, suffix


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<f4"])
def test_k4_deep_grey_is_scaled_and_not_clipped(dtype: str, tmp_path: Path) -> None:
    levels = np.linspace(0, 65535, 256).round()
    Image.fromarray(np.tile(levels, (2, 1)).astype(dtype)).save(tmp_path / "image.tif")
    pixels = np.asarray(read_image(tmp_path / "image.tif"))
    assert pixels[0, :, 0].tolist() == list(range(256))


def test_k4_floats_up_to_one_and_missing_values(tmp_path: Path) -> None:
    levels = np.array([[0.0, 0.5, 1.0, np.nan]], dtype=np.float32)
    Image.fromarray(levels).save(tmp_path / "image.tif")
    assert np.asarray(read_image(tmp_path / "image.tif"))[0, :, 0].tolist() == [0, 128, 255, 0]


def test_k4_dark_grey_of_16_bits_stays_dark(tmp_path: Path) -> None:
    for name in ("image.png", "image.pgm"):
        Image.fromarray(np.full((2, 3), 200, dtype=np.uint16)).save(tmp_path / name)
        assert np.asarray(read_image(tmp_path / name)).max() <= 1, name


def test_a_colour_profile_and_comments_do_no_harm(tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.new("RGB", (5, 4), (1, 2, 3)).save(tmp_path / "image.png", icc_profile=profile)
    assert np.asarray(read_image(tmp_path / "image.png"))[0, 0].tolist() == [1, 2, 3]


def test_k5_validation_is_read_with_the_training_map(image_folders: Path) -> None:
    images = folder(image_folders).load(seed=0)
    assert images.classes == ("a", "b", "c")
    assert sorted({images.test[i][1] for i in range(len(images.test))}) == [0, 2]  # type: ignore[arg-type]
    for i in range(len(images.test)):  # type: ignore[arg-type]
        image, label = images.test[i]
        assert image.mean(dim=(1, 2)).argmax() == label  # the colour of class c is blue


def test_k5_unknown_class_is_an_error(image_folders: Path) -> None:
    (image_folders / "val" / "c").rename(image_folders / "val" / "cc")
    with pytest.raises(ValueError, match=r"class 'cc' is not among the training classes a, b, c; did you mean c\?"):
        folder(image_folders).load(seed=0)


def test_k5_names_that_differ_in_case_are_two_classes(image_folders: Path) -> None:
    (image_folders / "train" / "A").mkdir()
    Image.new("RGB", (4, 4)).save(image_folders / "train" / "A" / "0.png")
    images = folder(image_folders).load(seed=0)
    assert images.classes == ("A", "a", "b", "c")
    assert images.test[0][1] == 1


def test_k6_hidden_and_empty_folders_are_no_classes(image_folders: Path) -> None:
    for split in ("train", "val"):
        (image_folders / split / ".ipynb_checkpoints").mkdir()
        Image.new("RGB", (4, 4)).save(image_folders / split / ".ipynb_checkpoints" / "a.png")
        (image_folders / split / "__empty").mkdir()
    (image_folders / "train" / "a" / "._0.png").write_bytes(b"resource fork")
    (image_folders / "train" / "a" / ".ipynb_checkpoints").mkdir()
    Image.new("RGB", (4, 4)).save(image_folders / "train" / "a" / ".ipynb_checkpoints" / "0-checkpoint.png")
    images = folder(image_folders).load(seed=0)
    assert images.classes == ("a", "b", "c")
    assert len(images.train) == 12  # type: ignore[arg-type]


def test_other_files_are_passed_over(image_folders: Path) -> None:
    (image_folders / "train" / "a" / "notes.txt").write_text("no image")
    (image_folders / "train" / "a" / "Thumbs.db").write_bytes(b"no image")
    (image_folders / "train" / "list.csv").write_text("no folder")
    Image.new("RGB", (4, 4)).save(image_folders / "train" / "a" / "UPPER.JPG")
    assert len(folder(image_folders).load(seed=0).train) == 13  # type: ignore[arg-type]


def test_links_are_followed_and_not_in_circles(image_folders: Path, tmp_path: Path) -> None:
    (image_folders / "elsewhere").mkdir()
    Image.new("RGB", (4, 4)).save(image_folders / "elsewhere" / "0.png")
    (image_folders / "train" / "d").symlink_to(image_folders / "elsewhere")
    (image_folders / "train" / "a" / "deeper").mkdir()
    Image.new("RGB", (4, 4)).save(image_folders / "train" / "a" / "deeper" / "0.png")
    (image_folders / "train" / "a" / "deeper" / "back").symlink_to(image_folders / "train" / "a")
    files = {
        name: [os.path.relpath(path, image_folders / "train") for path in paths]
        for name, paths in class_files(image_folders / "train").items()
    }
    assert files["d"] == ["d/0.png"]
    assert files["a"] == ["a/0.png", "a/1.png", "a/2.png", "a/3.png", "a/deeper/0.png"]


def test_a_folder_that_cannot_be_read_is_named(image_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        ValueError, match=re.escape(f"{image_folders / 'train' / 'b'}: no readable folder (Permission denied)")
    ):
        folder(image_folders).load(seed=0)


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_every_suffix_is_read(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"image{suffix}"
    Image.new("1" if suffix == ".pbm" else "L" if suffix == ".pgm" else "RGB", (16, 16), "white").save(path)
    assert image_files(tmp_path) == [str(path)]
    assert np.asarray(read_image(path)).min() > 250


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'train'}: no such folder")):
        folder(tmp_path).load(seed=0)
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="no class folder with images"):
        folder(tmp_path).load(seed=0)
    assert image_files(tmp_path) == []


def test_data_without_an_example_are_refused() -> None:
    given = folder(Path("nowhere"))
    empty = FolderDataset(Path("nowhere"), {}, (), given.test_transform(), (0, 0, 0))
    with pytest.raises(ValueError, match=r"data.name = 'image_folder': there is no training example"):
        given.images(empty, empty, ())


def test_a_missing_validation_folder_is_named(image_folders: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{image_folders / 'test'}: no such folder")):
        folder(image_folders, val="test").load(seed=0)


def damaged_files(path: Path) -> list[Path]:
    noise = Image.effect_noise((64, 64), 50)
    contents = {"text.jpg": b"no image", "empty.jpg": b"", "zeros.png": bytes(500), "cut_head.jpg": b"\xff\xd8\xff\xe0"}
    for suffix in ("png", "jpg", "webp", "tif", "gif", "bmp"):
        whole = io.BytesIO()
        noise.save(whole, {"jpg": "jpeg", "tif": "tiff"}.get(suffix, suffix))
        contents[f"cut.{suffix}"] = whole.getvalue()[: len(whole.getvalue()) // 2]
        if suffix == "png":
            contents["flipped.png"] = whole.getvalue()[:600] + b"\xff" * 40 + whole.getvalue()[640:]
    contents["bomb.png"] = png_of_size(50_000, 50_000)
    contents["nothing.png"] = png_of_size(0, 0)
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return [path / name for name in contents] + [path / "missing.jpg"]


def png_of_size(width: int, height: int) -> bytes:
    """The head of a png that claims a size, and hardly any data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def test_damaged_files_are_named_and_nothing_else_is_raised(tmp_path: Path) -> None:
    for path in damaged_files(tmp_path):
        with pytest.raises(DamagedExample, match=f"^{re.escape(str(path))}: no readable image \\(.+\\)$"):
            read_image(path)


def test_chance_damage_raises_nothing_else(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "image"
    outcomes = []
    for kind in ("jpeg", "png", "gif", "bmp", "tiff", "webp", "ppm"):
        whole = io.BytesIO()
        Image.effect_noise((40, 30), 60).save(whole, kind)
        for _ in range(40):
            content = np.frombuffer(whole.getvalue(), dtype=np.uint8).copy()
            places = rng.integers(0, min(len(content), rng.choice([40, 400, 4000])), size=rng.choice([1, 10]))
            content[places] = rng.integers(0, 256, size=len(places))
            path.write_bytes(content.tobytes())
            try:
                outcomes.append(read_image(path).mode)
            except DamagedExample:
                outcomes.append("damaged")
    assert set(outcomes) == {"RGB", "damaged"}


def test_a_damaged_example_of_a_folder_is_named_and_the_others_are_read(image_folders: Path) -> None:
    path = image_folders / "train" / "b" / "2.png"
    path.write_bytes(path.read_bytes()[:50])
    images = folder(image_folders, max_damaged=3).load(seed=0)
    assert images.max_damaged == 3
    with pytest.raises(DamagedExample, match=re.escape(f"{path}: no readable image")):
        images.train[6]
    assert images.train[5][1] == images.train[7][1] == 1


def test_large_images_are_read_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (60, 50)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # warns from here on, refuses twice as many
    assert read_image(tmp_path / "large.png").size == (60, 50)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DamagedExample, match="decompression bomb"):
        read_image(tmp_path / "large.png")


def test_training_images_are_cropped_and_test_images_are_not_random(image_folders: Path) -> None:
    images = folder(image_folders, image_size=(16, 24)).load(seed=0)
    image, label = images.train[0]
    assert image.shape == (3, 16, 24)
    assert (images.height, images.width) == (16, 24)
    assert image.dtype == torch.float32
    assert label == 0
    assert isinstance(label, int)
    assert torch.equal(images.test[1][0], images.test[1][0])


def test_labels_beyond_the_classes_are_refused() -> None:
    check_labels("here", np.array([0, 2, 1]), 3, str)
    with pytest.raises(ValueError, match=r"here: label 3 of 1 must lie in 0..2, the classes there are \(2 of 4"):
        check_labels("here", np.array([0, 3, 1, -1]), 3, str)


def test_long_lists_are_cut() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(i) for i in range(1000)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ... (1000)"
