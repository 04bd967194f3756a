"""Image folders and the many kinds of image files."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from train.data import ImageFolder
from train.data.images import class_names, image_files, read_image


def folder(path: Path, **options: object) -> ImageFolder:
    return ImageFolder.model_validate({"name": "image_folder", "path": str(path), "image_size": 16, **options})


def test_k1_exif_orientation_is_applied(tmp_path: Path) -> None:
    pixels = np.zeros((20, 30, 3), dtype=np.uint8)
    pixels[:10, :15] = 255  # upper left
    exif = Image.Exif()
    expected = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}
    for orientation, (bottom, right) in expected.items():
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
        image = read_image(tmp_path / "turned.png")
        assert image.size == ((20, 30) if orientation >= 5 else (30, 20))  # (width, height)
        quarters = np.asarray(image)[..., 0].reshape(2, image.height // 2, 2, image.width // 2).mean(axis=(1, 3))
        assert quarters.argmax() == 2 * bottom + right, orientation
        assert np.sort(quarters.ravel()).tolist() == [0, 0, 0, 255]


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "P+transparency", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr"]
)
def test_k4_every_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    grey = Image.new("L", (5, 4), 100)
    path = tmp_path / ("image.tif" if mode in ("CMYK", "F", "I", "YCbCr") else "image.png")
    if mode == "P+transparency":
        image = grey.convert("P")
        image.info["transparency"] = 100
        image.save(path, transparency=100)
        expected = 255  # the background shines through
    elif mode in ("I;16", "I"):
        Image.fromarray(np.full((4, 5), 100 * 257, dtype=np.uint16 if mode == "I;16" else np.int32)).save(path)
        expected = 100
    else:
        grey.convert(mode).save(path)
        expected = 255 if mode == "1" and np.asarray(grey.convert("1")).all() else 100
    image = read_image(path)
    pixels = np.asarray(image)
    assert image.mode == "RGB"
    assert pixels.shape == (4, 5, 3)
    assert pixels.dtype == np.uint8
    if mode != "1":
        assert np.abs(pixels.astype(int) - expected).max() <= 1


def test_k4_transparency_is_composed_on_the_stated_background(tmp_path: Path) -> None:
    Image.new("RGBA", (3, 2), (200, 100, 0, 128)).save(tmp_path / "half.png")
    pixels = np.asarray(read_image(tmp_path / "half.png", background=(0, 200, 100)))
    assert np.abs(pixels.astype(int) - np.array([100, 150, 50])).max() <= 1
    Image.new("LA", (3, 2), (7, 0)).save(tmp_path / "clear.png")
    assert np.asarray(read_image(tmp_path / "clear.png")).min() == 255  # white unless told otherwise


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


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'train'}: no such folder")):
        folder(tmp_path).load(seed=0)
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="no class folder with images"):
        folder(tmp_path).load(seed=0)
    assert image_files(tmp_path) == []


def test_damaged_files_are_named(tmp_path: Path) -> None:
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:900])
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").write_bytes(b"")
    for name in ("cut.png", "text.jpg", "empty.jpg"):
        with pytest.raises(ValueError, match=f"{name}: no readable image"):
            read_image(tmp_path / name)


def test_training_images_are_cropped_and_test_images_are_not_random(image_folders: Path) -> None:
    images = folder(image_folders, image_size=16).load(seed=0)
    image, label = images.train[0]
    assert image.shape == (3, 16, 16)
    assert image.dtype == torch.float32
    assert label == 0
    assert torch.equal(images.test[1][0], images.test[1][0])
    assert class_names(image_folders / "val") == ("a", "c")
