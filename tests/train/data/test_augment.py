"""The transforms: what they draw from, what they do, and that both libraries mean the same."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2

from train.data.images import IMAGENET_MEAN, IMAGENET_STD, Example, ImageData, Images
from train.data.stream import Drawn
from train.schema import validate

LIBRARIES = ["torchvision", "albumentations"]
RECIPES = {
    "plain": {},
    "rand": {"auto_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.5},
    "three": {"auto_augment": "3a", "color_jitter": 0.3},
    "augmix": {"auto_augment": "augmix-m5-w4-d2", "interpolation": "random"},
    "original": {"auto_augment": "original-mstd0.5", "interpolation": "bilinear"},
    "all": {"auto_augment": "rand-n3-tweights", "color_jitter": 0.4, "random_erasing": 1.0, "interpolation": "random"},
}


class Options(ImageData):
    name: str = "options"

    def load(self, seed: int) -> Images:
        raise NotImplementedError


def options(**given: object) -> Options:
    return Options.model_validate({"image_size": (35, 51), **given})


def picture(height: int = 90, width: int = 130) -> Image.Image:
    """Blocks of colours and a slope, so that no two crops are the same."""
    rng = np.random.default_rng(0)
    blocks = np.kron(rng.integers(0, 200, (-(-height // 10), -(-width // 10), 3)), np.ones((10, 10, 1)))[
        :height, :width
    ]
    return Image.fromarray((blocks + np.linspace(0, 50, width)[:, None]).astype(np.uint8))


class Pictures(Dataset[Example]):
    def __init__(self, given: Options):
        self.transform = given.train_transform()

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Example:
        return self.transform(picture()), index


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_j6_a_draw_repeats_and_no_two_are_the_same(library: str, recipe: str) -> None:
    data = Pictures(options(augment=library, crop_scale=(0.2, 0.9), **RECIPES[recipe]))
    data.transform = pickle.loads(pickle.dumps(data.transform))  # as workers get it where they are not forked
    (first, _), _ = Drawn(data, seed=0)[(0, 3)]
    (again, _), _ = Drawn(data, seed=0)[(0, 3)]
    assert first.shape == (3, 35, 51)
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    for seed, draw in ((1, (0, 3)), (0, (1, 3)), (0, (0, 4))):  # another seed, epoch, index
        assert not torch.equal(first, Drawn(data, seed)[draw][0][0])


@pytest.mark.parametrize("library", LIBRARIES)
def test_j6_draws_do_not_depend_on_workers(library: str) -> None:
    def seen(num_workers: int) -> list[torch.Tensor]:
        data = Drawn(Pictures(options(augment=library, **RECIPES["all"])), seed=2)
        batches = [[(epoch, index) for index in (4, 0, 6)] for epoch in range(5)]
        loader = DataLoader(data, batch_sampler=batches, num_workers=num_workers, collate_fn=list)
        return [torch.stack([image for (image, _), _ in batch]) for batch in loader]

    alone, with_workers = seen(0), seen(2)
    assert len(alone) == len(with_workers) == 5
    assert all(torch.equal(a, b) for a, b in zip(alone, with_workers, strict=True))


@pytest.mark.parametrize("library", LIBRARIES)
def test_crop_and_mirror_image_are_drawn_apart(library: str) -> None:
    """A left edge that is darker than the right one is not mirrored; mirror images must be as common among large crops."""
    slope = Image.fromarray(np.tile(np.linspace(0, 255, 97).astype(np.uint8)[None, :, None], (97, 1, 3)))
    transform = options(augment=library, crop_scale=(0.05, 1.0), mean=(0, 0, 0), std=(1, 1, 1)).train_transform()
    torch.manual_seed(0)
    draws = [transform(slope)[0, 17] for _ in range(300)]
    sizes = torch.stack([(draw[-1] - draw[0]).abs() for draw in draws])
    mirrored = torch.stack([draw[-1] < draw[0] for draw in draws]).float()
    for half in (sizes <= sizes.median(), sizes > sizes.median()):
        assert abs(mirrored[half].mean() - 0.5) < 0.15


def test_both_libraries_make_the_same_of_the_same_crop() -> None:
    image = picture(91, 131)
    for interpolation in ("bilinear", "bicubic"):
        whole = {"crop_scale": (1.0, 1.0), "crop_ratio": (131 / 91, 131 / 91), "horizontal_flip": 1.0}
        ours, theirs = (
            options(augment=library, interpolation=interpolation, **whole).train_transform()(image)
            for library in LIBRARIES
        )
        torch.testing.assert_close(ours, theirs)
        plain = options(interpolation=interpolation, crop_fraction=1.0, image_size=(91, 131)).test_transform()(image)
        expected = v2.functional.resize(plain, [35, 51], InterpolationMode(interpolation)).flip(-1)
        assert (ours - expected).abs().mean() < 0.02  # Pillow rounds to 8 bits, torch does not


def test_both_libraries_test_on_the_same_pixels() -> None:
    image = picture()
    for interpolation in ("bilinear", "bicubic", "random"):
        first, second = (
            options(augment=library, interpolation=interpolation).test_transform()(image) for library in LIBRARIES
        )
        assert torch.equal(first, second)


@pytest.mark.parametrize("size", [(300, 400), (400, 300), (257, 311), (33, 47)])
def test_testing_takes_the_centre_as_torchvision_does(size: tuple[int, int]) -> None:
    height, width = size
    rows, columns = np.mgrid[:height, :width]
    slopes = np.stack([255 * rows / height, 255 * columns / width, 127 + 100 * np.sin(columns / width * 6)], axis=-1)
    image = Image.fromarray(slopes.astype(np.uint8))
    ours = options(image_size=112, crop_fraction=0.875, interpolation="bilinear").test_transform()(image)
    steps = [v2.Resize(128), v2.CenterCrop(112), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    theirs = v2.Compose([*steps, v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)])(image)
    assert (ours - theirs).abs().max() < 3 / 255 / min(IMAGENET_STD)


@pytest.mark.parametrize("size", [(1, 1), (1, 700), (700, 1), (3, 2)])
@pytest.mark.parametrize("library", LIBRARIES)
def test_tiny_and_narrow_images(library: str, size: tuple[int, int]) -> None:
    image = picture(*size)
    given = options(augment=library)
    assert given.test_transform()(image).shape == (3, 35, 51)
    assert given.train_transform()(image).shape == (3, 35, 51)


def test_size_is_a_side_or_height_and_width() -> None:
    assert (options(image_size=33).height, options(image_size=33).width) == (33, 33)
    assert (options(image_size=(33, 65)).height, options(image_size=(33, 65)).width) == (33, 65)
    wide = options(image_size=(20, 60), crop_fraction=1.0, mean=(0, 0, 0), std=(1, 1, 1)).test_transform()(
        Image.fromarray(np.repeat(np.arange(60, dtype=np.uint8)[:, None, None], 60, axis=1).repeat(3, axis=2))
    )
    # 60 rows: the middle 20
    assert (wide[0, :, 7] * 255).round().tolist() == list(range(20, 40))


def test_colour_jitter_changes_colours_and_nothing_else() -> None:
    grey = Image.new("RGB", (60, 60), (120, 120, 120))
    for library in LIBRARIES:
        transform = options(augment=library, color_jitter=0.4, mean=(0, 0, 0), std=(1, 1, 1)).train_transform()
        torch.manual_seed(0)
        values = torch.stack([transform(grey) for _ in range(40)])
        assert values.flatten(1).std(dim=1).max() < 1e-6  # one colour each time
        levels = values[:, 0, 0, 0] * 255 / 120
        assert levels.min() < 0.75
        assert levels.max() > 1.25
        assert levels.min() > 0.59
        assert levels.max() < 1.41


def test_random_erasing_writes_noise() -> None:
    flat = Image.new("RGB", (60, 60), (120, 120, 120))
    erased = options(random_erasing=1.0).train_transform()(flat)
    assert len(erased.unique()) > 10
    assert len(options(random_erasing=0.0).train_transform()(flat).unique()) <= 3


@pytest.mark.long
def test_the_version_check_of_albumentations_is_off() -> None:
    code = (
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('a socket')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import warnings; warnings.simplefilter('error', UserWarning)\n"
        "import train.data.augment, albumentations.check_version as check\n"
        "assert check.opener is None, 'asked for a version'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"NO_ALBUMENTATIONS_UPDATE": "0"}
    )
    assert done.returncode == 0, done.stderr


WRONG = {
    "descending scale": ({"crop_scale": [0.9, 0.2]}, "crop_scale: [0.9, 0.2]: the first number must not be greater"),
    "descending ratio": ({"crop_ratio": [1.5, 0.5]}, "crop_ratio: [1.5, 0.5]: the first number must not be greater"),
    "scale above 1": ({"crop_scale": [0.5, 1.5]}, "crop_scale.1 = 1.5: should be less than or equal to 1"),
    "no library": ({"augment": "albumentation"}, "did you mean albumentations?"),
    "no policy": ({"auto_augment": "rnd-m9"}, "auto_augment: 'rnd-m9': unknown policy 'rnd'; must begin with one of rand"),
    "part that timm would pass over": ({"auto_augment": "rand-m9-foo"}, "'rand-m9-foo': rand takes no 'foo'; allowed: m, n"),
    "part of another policy": ({"auto_augment": "3a-m4"}, "3a takes no 'm4'; allowed: mstd"),
    "set of operations that timm would pass over": ({"auto_augment": "rand-tbest"}, "rand takes no 'tbest'"),
    "no number": ({"auto_augment": "rand-m"}, "rand takes no 'm'"),
    "fraction for a count": ({"auto_augment": "rand-n1.5"}, "'rand-n1.5': no policy of timm"),
    "size of three": ({"image_size": [3, 32, 32]}, "image_size"),
    "empty size": ({"image_size": 0}, "image_size = 0: should be greater than 0"),
    "std of 0": ({"std": [0.2, 0.0, 0.2]}, "std.1 = 0.0: should be greater than 0"),
    "colour": ({"background": [0, 0, 256]}, "background: [0, 0, 256]: red, green and blue must lie in 0..255"),
    "renamed key": ({"min_scale": 0.35}, "min_scale = 0.35: unknown key"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(case: str) -> None:
    given, text = WRONG[case]
    node, problems = validate(Options, given)
    assert node is None
    assert text in "\n".join(problems)
