"""Images with boxes as examples: how files of every kind are read, batched, drawn and handed to workers."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tests.train.data.coco_folder import PLAIN, box, coco, content, image, load, write_split
from train.config import load_config
from train.data.images import UPRIGHT
from train.data.stream import CountedDraws, DamagedExample, Drawn, TrainingBatches, evaluation_batches
from train.schema import ConfigError

QUARTERS = {
    2: 255,
    3: 160,
    1: 90,
    0: 20,
}  # what the corners of `corners` are filled with, row by row from the upper left


def corners(height: int = 20, width: int = 32) -> Image.Image:
    """Four grey quarters, each of another brightness."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    for number, value in enumerate(QUARTERS.values()):
        y, x = divmod(number, 2)
        pixels[y * height // 2 : (y + 1) * height // 2, x * width // 2 : (x + 1) * width // 2] = value
    return Image.fromarray(pixels)


def brightness(pixels: torch.Tensor, target: dict[str, torch.Tensor]) -> list[float]:
    """The mean grey within each box."""
    return [pixels[:, y1:y2, x1:x2].mean().item() * 255 for x1, y1, x2, y2 in target["boxes"].int().tolist()]


def turned_folder(folder: Path, orientation: int, kind: str, upright: bool) -> Any:
    """A photograph that its EXIF data turns, and the brightest quarter of it annotated, once upright or as it is stored."""
    exif = Image.Exif()
    exif[274] = orientation
    stored = corners()
    options = {"quality": 100} if kind in ("jpg", "webp") else {}
    shown = stored.transpose(UPRIGHT[orientation]) if upright and orientation in UPRIGHT else stored
    grey = np.asarray(shown)[..., 0]
    y, x = (int(places[0]) for places in np.nonzero(grey == 255))
    height, width = grey.shape
    entry = {"id": 1, "file_name": f"1.{kind}", "height": height, "width": width}
    given = content([entry], [box(1, 1, [x, y, width // 2, height // 2])])
    write_split(folder, "train", given)
    write_split(folder, "val", PLAIN)
    stored.save(folder / "train2017" / f"1.{kind}", exif=exif, **options)
    return coco(folder)


@pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_k1_photographs_are_turned_upright_with_their_boxes(tmp_path: Path, orientation: int, kind: str) -> None:
    data = turned_folder(tmp_path, orientation, kind, upright=True).load(seed=0)
    pixels, target = data.train[0]
    assert pixels.shape == ((3, 32, 20) if orientation > 4 else (3, 20, 32))
    assert brightness(pixels, target)[0] == pytest.approx(255, abs=3)
    assert data.left_out == {}


@pytest.mark.parametrize("kind", ["jpg", "png", "tif"])
@pytest.mark.parametrize("orientation", range(5, 9))
def test_boxes_for_the_pixels_as_stored_leave_them_so(tmp_path: Path, orientation: int, kind: str) -> None:
    options = turned_folder(tmp_path, orientation, kind, upright=False)
    data = options.load(seed=0)
    pixels, target = data.train[0]
    assert pixels.shape == (3, 20, 32)
    assert brightness(pixels, target)[0] == pytest.approx(255, abs=3)
    assert [(count, "EXIF" in reason) for reason, count in data.left_out.items()] == [(1, True)]


def test_k1_the_orientation_of_a_png_may_stand_behind_its_pixels(tmp_path: Path) -> None:
    options = turned_folder(tmp_path, 6, "png", upright=True)
    path = tmp_path / "train2017" / "1.png"
    head, _, rest = path.read_bytes().partition(b"\x89PNG\r\n\x1a\n")[2].partition(b"IDAT")
    assert b"eXIf" in head
    start = head.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(head[start : start + 4], "big")
    pixels, last = (b"IDAT" + rest)[:-12], rest[-12:]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head[:start] + head[end:] + pixels + head[start:end] + last)
    with Image.open(path) as opened:
        assert "exif" not in opened.info
    data = options.load(seed=0)
    assert data.left_out == {}
    assert data.train[0][0].shape == (3, 32, 20)
    assert brightness(*data.train[0])[0] == pytest.approx(255, abs=3)


@pytest.mark.parametrize("kind", ["jpg", "tif"])
def test_a_photograph_of_neither_size_is_damaged(tmp_path: Path, kind: str) -> None:
    turned_folder(tmp_path, 6, kind, upright=True)
    entry = {"id": 1, "file_name": f"1.{kind}", "height": 31, "width": 20}
    write_split(tmp_path, "train", content([entry, image(2)], []))
    with pytest.warns(UserWarning, match="no training object"):
        data = coco(tmp_path).load(seed=0)
    sizes = "20 pixels wide and 32 high .32 and 20 as stored., its annotations say 20 and 31"
    with pytest.raises(DamagedExample, match=f"1.{kind}: no readable image .it is {sizes}"):
        data.train[0]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "RGB"])
def test_k4_every_kind_of_pixels_becomes_three_colours(tmp_path: Path, mode: str) -> None:
    write_split(tmp_path, "train", PLAIN)
    write_split(tmp_path, "val", PLAIN)
    kind = "tif" if mode == "CMYK" else "png"
    path = tmp_path / "train2017" / "7.png"
    drawn = Image.fromarray(np.full((40, 60), 200 * 257, dtype=np.uint16)) if mode == "I;16" else None
    if mode in ("LA", "RGBA"):  # half of it can be seen through
        drawn = Image.new(mode, (60, 40), (*((200,) * (len(mode) - 1)), 0))
    (drawn or Image.new("RGB", (60, 40), (200, 200, 200)).convert(mode)).save(path, kind.replace("tif", "tiff"))
    pixels, target = coco(tmp_path, background=[0, 0, 255]).load(seed=0).train[0]
    assert (pixels.shape, pixels.dtype) == ((3, 40, 60), torch.float32)
    expected = {"1": None, "LA": [0, 0, 1], "RGBA": [0, 0, 1]}.get(mode, [200 / 255] * 3)
    if expected:
        assert pixels.mean(dim=(1, 2)).tolist() == pytest.approx(expected, abs=0.01)
    assert target["boxes"].tolist() == [[5, 6, 25, 16]]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 9), (9, 1), (37, 101)])
def test_odd_sizes(tmp_path: Path, height: int, width: int) -> None:
    given = content(
        [image(1, height, width)],
        [box(1, 1, [0, 0, width, height], segmentation=[[0, 0, width, 0, width, height, 0, height]])],
    )
    data = load(tmp_path, given, given, masks=True, horizontal_flip=1.0)
    for dataset in (data.train, data.test):
        pixels, target = dataset[0]
        assert pixels.shape == (3, height, width)
        assert target["boxes"].tolist() == [[0, 0, width, height]]
        assert target["masks"].shape == (1, height, width)
        assert target["masks"].all()
        pixels += 1  # nobody else's memory
    assert data.train.aspect_ratios.tolist() == [height / width]


def test_a_thousand_boxes_of_one_pixel(tmp_path: Path) -> None:
    annotations = [
        box(id, 1, [id % 60, id // 60, 1, 1], 1 + id % 2, segmentation={"size": [40, 60], "counts": counts_at(id)})
        for id in range(1, 1001)
    ]
    given = content([image(1)], annotations)
    data = load(tmp_path, given, given, masks=True, horizontal_flip=1.0, vertical_flip=1.0)
    _, target = data.train[0]
    assert target["boxes"].shape == (1000, 4)
    assert target["labels"].tolist() == [1 + id % 2 for id in range(1, 1001)]
    assert torch.equal(target["masks"].sum(dim=(1, 2)), torch.ones(1000, dtype=torch.int64))
    for one, mask in zip(target["boxes"].int().tolist(), target["masks"], strict=True):
        assert mask[one[1] : one[3], one[0] : one[2]].all()


def counts_at(id: int) -> list[int]:
    before = (id % 60) * 40 + id // 60
    return [before, 1, 40 * 60 - before - 1]


def test_batches_are_lists(tmp_path: Path) -> None:
    data = load(tmp_path)
    images, targets = data.train.collate([data.train[0], data.train[1]])
    assert [tuple(one.shape) for one in images] == [(3, 40, 60), (3, 30, 50)]
    assert [target["image_id"].item() for target in targets] == [0, 1]
    indices, (images, targets) = next(evaluation_batches(data.test, 2, 0))
    assert (indices, len(images), len(targets)) == ([0, 1], 2, 2)


def test_indices_from_the_end_and_beyond(tmp_path: Path) -> None:
    data = load(tmp_path)
    assert data.test[-1][1]["image_id"].item() == 1
    with pytest.raises(IndexError):
        data.test[2]


def seen(batch: Any) -> list[Any]:
    images, targets = batch
    return [
        (one.sum().item(), target["image_id"].item(), target["boxes"].tolist())
        for one, target in zip(images, targets, strict=True)
    ]


def test_j6_draws_follow_the_seed_and_not_the_workers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = content(
        [image(id) for id in range(5)],
        [box(id, id % 5, [*rng.integers(0, 30, 2).tolist(), 9, 9]) for id in range(1, 30)],
    )

    def noise(height: int, width: int) -> np.ndarray:
        return rng.integers(0, 255, (height, width, 3), dtype=np.uint8)

    write_split(tmp_path, "train", given, noise)
    write_split(tmp_path, "val", PLAIN)
    options = {"scale": [0.5, 2.0], "crop_size": [30, 41], "rotate90": 0.5, "color_jitter": 0.4}
    data = coco(tmp_path, **(options | {"horizontal_flip": 0.5})).load(seed=0)

    def run(seed: int, num_workers: int) -> list[Any]:
        with TrainingBatches(data.train, CountedDraws(5, 3, 5, seed), num_workers, False) as batches:
            return [seen(next(batches)) for _ in range(5)]

    first = run(0, 0)
    assert run(0, 2) == first
    assert run(1, 0) != first
    flat = [example for batch in first for example in batch]
    assert len({example[0] for example in flat}) == len(flat) == 15  # three epochs, and nothing is drawn twice
    drawn = Drawn(data.train, 0)
    state = torch.get_rng_state()
    assert seen([[part] for part in drawn[0, 2][0]]) == seen([[part] for part in drawn[0, 2][0]])
    assert torch.equal(torch.get_rng_state(), state)
    test = [seen([[part] for part in data.test[0]]) for _ in range(2)]
    assert test[0] == test[1]


def test_damaged_examples_are_passed_over_in_training(tmp_path: Path) -> None:
    load(tmp_path)
    (tmp_path / "train2017" / "7.png").write_bytes(b"\x89PNG nothing")
    data = coco(tmp_path).load(seed=0)
    with (
        TrainingBatches(data.train, CountedDraws(2, 2, 1, 0), 0, False, data.max_damaged) as batches,
        pytest.warns(UserWarning, match=r"7.png: no readable image .*passed over, 1 of 10 allowed"),
    ):
        _, targets = next(batches)
    assert [target["image_id"].item() for target in targets] == [1, 1]


def test_a_data_set_goes_to_workers_that_are_started_anew(tmp_path: Path) -> None:
    data = load(tmp_path, scale=[0.9, 1.1], color_jitter=0.1)
    again = pickle.loads(pickle.dumps(data.train))
    torch.manual_seed(0)
    expected = data.train[1][1]["boxes"]
    torch.manual_seed(0)
    assert torch.equal(again[1][1]["boxes"], expected)
    assert len(list(DataLoader(again, batch_size=2, collate_fn=again.collate))) == 1


def test_a_background_is_a_colour() -> None:
    with pytest.raises(ConfigError, match=r"data.background: \[0, 0, 256\]: red, green and blue must lie in 0..255"):
        load_config("detect/digits", ["data.background=[0,0,256]"])
