"""python -m train.evaluate: a trained classifier on other data, and at other sizes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train.runs import VIT, make_run
from train.__main__ import main as train
from train.data.description import Description
from train.data.images import Images
from train.evaluate import AsTrained, PermutedPatches, main

pytestmark = pytest.mark.usefixtures("undrawn")

SCENES = ["data.canvas=[56, 70]", "data.num_train=9", "data.num_test=9", "model.depth=2", "encoding=[learned, table]"]


@pytest.fixture(scope="module")
def trained(digits_csv: str, tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> Path:
    """A run of two steps, by the trainer itself."""
    folder = tmp_path_factory.mktemp("runs") / "swin"
    overrides = ["trainer.max_steps=2", "trainer.batch_size=8", "schedule.warmup_steps=1", "trainer.num_workers=0"]
    assert train(["classify/digits", f"data.path={digits_csv}", f"output={folder}", *overrides]) == 0
    return folder


@pytest.fixture(scope="module")
def scenes(digits_csv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "scenes"
    make_run(folder, "classify/digit_scenes", [f"data.path={digits_csv}", "trainer.num_workers=0", *SCENES])
    return folder


@pytest.fixture
def folder_run(image_folders: Path, tmp_path: Path) -> Path:
    overrides = [f"data.path={image_folders}", "data.image_size=28", "encoding=table", VIT, "trainer.num_workers=0"]
    make_run(
        tmp_path / "run", "classify/image_folder", [*overrides, "trainer.device=cpu", 'trainer.mixed_precision="no"']
    )
    return tmp_path / "run"


def measured(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    return printed.err


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def test_the_numbers_that_training_ended_with(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(trained)
    metrics = measured(capsys, trained)
    wanted = json.loads((trained / "metrics.json").read_text())
    for key in ("accuracy", "accuracy_standard_error", "loss", "num_examples", "num_damaged"):
        assert metrics[key] == wanted[key]
    assert metrics["num_examples"] == 40
    assert (metrics["image_size"], metrics["resize"], metrics["permute_tokens"]) == ([28, 28], [], False)
    assert files(trained) == before  # nothing is written

    output = tmp_path / "new" / "numbers"
    assert measured(capsys, trained, f"output={output}", "trainer.batch_size=7")["accuracy"] == wanted["accuracy"]
    assert files(output) == {Path("metrics.json"), Path("predictions.jsonl")}
    records = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    trained_records = [json.loads(line) for line in (trained / "predictions.jsonl").read_text().splitlines()]
    assert [(r["index"], r["label"], r["prediction"]) for r in records] == [
        (r["index"], r["label"], r["prediction"]) for r in trained_records
    ]
    assert json.loads((output / "metrics.json").read_text())["loss"] == pytest.approx(wanted["loss"])
    assert f"{output}: is there already; name another output" in refusal(capsys, trained, f"output={output}")


def test_the_table(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = measured(capsys, scenes, "image_size=84x98")
    assert main([str(scenes), "image_size=84x98"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"checkpoint               {scenes}/checkpoints/step_3 (weights)",
        "data                     digit_scenes, 84x98",
        f"accuracy                 {metrics['accuracy']:.4f}",
        f"accuracy_standard_error  {metrics['accuracy_standard_error']:.4f}",
        f"loss                     {metrics['loss']:.4f}",
        "num_examples             9",
        "num_damaged              0",
        "resize                   image: 56x70 -> 84x98",
        "resize                   patches: 4x5 -> 6x7",
        "resize                   table of offsets: 7x9 -> 11x13, resize=timm (2 times)",
        "resize                   learned: 4x5 -> 6x7, resampled as timm does",
    ]


def test_a_policy_is_what_the_encoding_does(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {
        resize: measured(capsys, scenes, "image_size=84", f"encoding.1.resize={resize}")
        for resize in ("timm", "bicubic", "clamp")
    }
    assert [m["resize"][2] for m in losses.values()] == [
        f"table of offsets: 7x9 -> 11x11, resize={resize} (2 times)" for resize in losses
    ]
    assert len({m["loss"] for m in losses.values()}) == 3
    same = [measured(capsys, scenes, f"encoding.1.resize={resize}")["loss"] for resize in ("timm", "clamp")]
    assert same[0] == same[1]  # at the size of training there is nothing to resize


def test_patches_in_another_order_are_felt_by_positions_alone(
    scenes: Path, digits_csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shuffled = [measured(capsys, scenes, "permute_tokens=true") for _ in range(2)]
    assert shuffled[0] == shuffled[1]
    assert abs(shuffled[0]["loss"] - measured(capsys, scenes)["loss"]) > 1e-3
    overrides = [f"data.path={digits_csv}", "trainer.num_workers=0", *SCENES[:-1], "encoding=none"]
    make_run(tmp_path / "none", "classify/digit_scenes", overrides)
    blind = [measured(capsys, tmp_path / "none", f"permute_tokens={value}")["loss"] for value in ("true", "false")]
    assert blind[0] == pytest.approx(blind[1], rel=1e-5)


def images_of(test: Any, height: int, width: int, **rest: Any) -> Images:
    known: dict[str, Any] = {"classes": ("a",), "num_channels": 2, "mean": (0.5, 0.5), "std": (0.5, 0.5)} | rest
    return Images(train=test, test=test, height=height, width=width, **known)


def test_permuted_patches_are_the_same_patches() -> None:
    examples = [(torch.randn(2, 6, 15), label) for label in range(4)]
    permuted = PermutedPatches(images_of(examples, 6, 15), (2, 3))
    assert len(permuted) == 4
    orders = set()
    for index, (image, label) in enumerate(examples):
        moved, same_label = permuted[index]
        assert same_label == label

        def patches(image: torch.Tensor) -> list[tuple[float, ...]]:
            return [
                tuple(image[:, y : y + 2, x : x + 3].flatten().tolist())
                for y in range(0, 6, 2)
                for x in range(0, 15, 3)
            ]

        assert sorted(patches(moved)) == sorted(patches(image))
        orders.add(tuple(patches(image).index(patch) for patch in patches(moved)))
        assert torch.equal(permuted[index][0], moved)
    assert len(orders) == 4
    with pytest.raises(ValueError, match="permute_tokens: 6x15 pixels cannot be cut into patches of 4x3"):
        PermutedPatches(images_of(examples, 6, 15), (4, 3))


def test_other_normalisation_is_undone() -> None:
    pixels = torch.rand(2, 3, 5)
    mean, std = torch.tensor([0.5, 0.25]).view(2, 1, 1), torch.tensor([0.5, 2.0]).view(2, 1, 1)
    images = images_of([((pixels - mean) / std, 0)], 3, 5, mean=(0.5, 0.25), std=(0.5, 2.0))
    known = Description(classes=("z", "a"), num_channels=2, height=3, width=5, mean=(0.1, 0.2), std=(0.3, 0.4))
    image, label = AsTrained(images, [1], known)[0]
    wanted = (pixels - torch.tensor([0.1, 0.2]).view(2, 1, 1)) / torch.tensor([0.3, 0.4]).view(2, 1, 1)
    torch.testing.assert_close(image, wanted)
    assert label == 1
    same = known.model_copy(update={"mean": images.mean, "std": images.std})
    assert torch.equal(AsTrained(images, [1], same)[0][0], images.test[0][0])


def test_data_with_fewer_classes_are_mapped_by_name(
    folder_run: Path, image_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Classes b and c alone: 0 and 1 there, 1 and 2 in training."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    rng = np.random.default_rng(0)
    for name in "bc":
        for split in ("train", "val"):
            (other / split / name).mkdir(parents=True)
            for number in range(3):
                pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(other / split / name / f"{number}.png")
    shutil.copytree(other, whole)
    (whole / "train" / "a").mkdir()
    Image.new("RGB", (30, 40)).save(whole / "train" / "a" / "0.png")
    metrics, wanted = (
        measured(capsys, folder_run, f"data.path={path}", f"output={path}.numbers") for path in (other, whole)
    )
    assert metrics["num_examples"] == 6
    assert {k: v for k, v in metrics.items() if k != "checkpoint"} == {
        k: v for k, v in wanted.items() if k != "checkpoint"
    }
    labels = [json.loads(line)["label"] for line in Path(f"{other}.numbers/predictions.jsonl").read_text().splitlines()]
    assert labels == ["b"] * 3 + ["c"] * 3

    (other / "train" / "cc").mkdir()
    Image.new("RGB", (30, 40)).save(other / "train" / "cc" / "0.png")
    error = refusal(capsys, folder_run, f"data.path={other}")
    assert "class 'cc' of the data is not among the classes of training, a, b, c; did you mean c?" in error


def test_an_image_size_for_any_kind_of_data(
    folder_run: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(capsys, folder_run, "image_size=35")["image_size"] == [35, 35]
    assert measured(capsys, folder_run, "image_size=21x42")["image_size"] == [21, 42]
    assert "image_size = 35: digits come in one size only" in refusal(capsys, trained, "image_size=35")
    assert "image size 'big': must be N or HEIGHTxWIDTH" in refusal(capsys, folder_run, "image_size=big")
    error = refusal(capsys, folder_run, "image_size=36")
    assert "image size 36x36: must be a multiple of the model's patches, 7x7 pixels" in error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.depth=3", "evaluation does not depend on it, or it would be another model"),
        ("optimizer.lr=1", "evaluation does not depend on it"),
        (
            "imagesize=28",
            "did you mean image_size? Allowed: data, encoding, decoding, scoring and their keys, trainer.batch_size",
        ),
        ("trainer.max_steps=3", "evaluation does not depend on it"),
        ("encoding=cpb", "encoding = cpb: the model was trained with table, and stays so"),
        ("encoding=[table, none]", "encoding = table + none: the model was trained with table, and stays so"),
        ("encoding.strength=0.5", "encoding table with {'strength': 0.5}: belongs to the weights, which are loaded"),
        ("encoding.resise=clamp", "did you mean encoding.resize?"),
        ("data.pth=x", "did you mean data.path?"),
        ("permute_tokens=yes", "permute_tokens = 'yes': must be true or false"),
    ],
)
def test_what_would_be_ignored_or_another_model_is_refused(
    override: str, message: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, trained, override)


def test_other_refusals(trained: Path, image_folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, trained, "data=image_folder", f"data.path={image_folders}", "data.image_size=28")
    assert error == "error: the data have 3 channels, the model was trained on 1\n"
    assert "image_size: given twice on the command line" in refusal(capsys, trained, "image_size=2", "image_size=3")
    assert "no such folder" in refusal(capsys, "absent")


@pytest.mark.long
def test_two_processes_measure_what_one_does(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = measured(capsys, trained)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "train.evaluate",
    ]
    done = subprocess.run([*launch, str(trained), "--json"], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    metrics = json.loads(line)
    assert metrics.pop("loss") == pytest.approx(wanted.pop("loss"), rel=1e-6)
    assert metrics == wanted
