"""python -m train.predict: what a trained classifier says about files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.train.runs import VIT, make_run
from train.checkpoint import Checkpoint, save_checkpoint
from train.config import load_config
from train.data.digits import read_digits
from train.predict import main

Printed = list[dict[str, Any]]


@pytest.fixture(scope="module")
def digits_run(digits_csv: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    return folder, make_run(folder, "classify/digits", [f"data.path={digits_csv}", VIT])


@pytest.fixture
def folder_run(image_folders: Path, tmp_path: Path) -> tuple[Path, Any]:
    folder = tmp_path / "run"
    overrides = [f"data.path={image_folders}", "data.image_size=[28, 35]", "encoding=[table, rope_axial]", VIT]
    return folder, make_run(folder, "classify/image_folder", overrides)


def said(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> Printed:
    assert main([*map(str, arguments), "--json"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def expected(model: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(image[None]).softmax(dim=1)[0]


def test_digits_from_files_as_they_were_tested(
    digits_run: tuple[Path, Any], digits_csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = digits_run
    pixels, _ = read_digits(digits_csv)
    for number in range(3):
        Image.fromarray(pixels[number].numpy()).save(tmp_path / f"{number}.png")
    lines = said(capsys, folder, tmp_path, "--top", 10, "--batch-size", 2)
    assert [line["path"] for line in lines] == [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, line in enumerate(lines):
        probabilities = expected(model, (pixels[number][None] / 255 - 0.1307) / 0.3081)
        named = line["predictions"]
        assert [p["class"] for p in named] == [str(i) for i in probabilities.argsort(descending=True).tolist()]
        torch.testing.assert_close(
            torch.tensor([p["probability"] for p in named]), probabilities.sort(descending=True).values
        )


def test_a_colour_image_of_another_size_is_grey_to_a_model_of_grey(
    digits_run: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = digits_run
    Image.new("RGB", (61, 43), (255, 0, 0)).save(tmp_path / "red.png")
    (line,) = said(capsys, folder, tmp_path / "red.png", "--top", 1)
    probabilities = expected(model, torch.full((1, 28, 28), (76 / 255 - 0.1307) / 0.3081))  # luminance: 0.299 of 255
    assert line["predictions"][0]["class"] == str(int(probabilities.argmax()))
    assert line["predictions"][0]["probability"] == pytest.approx(float(probabilities.max()), rel=1e-5)


def test_folders_of_images_as_they_were_tested(
    folder_run: tuple[Path, Any], image_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = folder_run
    test = load_config(str(folder / "config.yaml")).data.load(0).test
    lines = said(capsys, folder, image_folders / "val", "--top", 50)
    assert len(lines) == len(test) == 8  # type: ignore[arg-type]
    for line, (image, _) in zip(lines, test, strict=True):  # type: ignore[call-overload]
        probabilities = expected(model, image)
        assert len(line["predictions"]) == 3  # of 50 wanted: there are no more
        for prediction in line["predictions"]:
            assert prediction["probability"] == pytest.approx(
                float(probabilities["abc".index(prediction["class"])]), rel=1e-5
            )


def test_the_table(folder_run: tuple[Path, Any], image_folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = folder_run
    paths = [image_folders / "val" / "a" / f"{number}.png" for number in (2, 1)]
    (line, _) = said(capsys, folder, *paths)
    assert main([str(folder), *map(str, paths), "--top", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [printed[0], printed[3]] == list(map(str, paths))
    first, second = line["predictions"][:2]
    assert printed[1:3] == [f"  {p['class']}  {p['probability']:6.1%}" for p in (first, second)]


def test_another_size(folder_run: tuple[Path, Any], image_folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = folder_run
    config = load_config(str(folder / "config.yaml"), ["data.image_size=[42, 28]"])
    model.set_input_size(img_size=(42, 28))
    lines = said(capsys, folder, image_folders / "val", "--image-size", "42x28")
    for line, (image, _) in zip(lines, config.data.load(0).test, strict=True):  # type: ignore[call-overload]
        best = line["predictions"][0]
        assert best["probability"] == pytest.approx(float(expected(model, image).max()), rel=1e-5)
    for size, message in (
        ("42x27", "must be a multiple of the model's patches, 7x7"),
        ("big", "must be N or HEIGHTxWIDTH"),
    ):
        assert main([str(folder), str(image_folders), "--image-size", size]) == 1
        assert message in capsys.readouterr().err


def test_damaged_images_are_named_and_the_others_predicted(
    digits_run: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = digits_run
    (tmp_path / "empty").mkdir()
    (tmp_path / "all").mkdir()
    good, damaged = tmp_path / "all" / "b.png", tmp_path / "all" / "a.png"
    Image.new("L", (9, 11), 40).save(good)
    damaged.write_bytes(good.read_bytes()[:40])
    arguments = [
        str(folder),
        *map(str, (tmp_path / "all", tmp_path / "empty", tmp_path / "absent.png", good)),
        "--json",
    ]
    assert main([*arguments, "--batch-size", "1"]) == 1
    printed = capsys.readouterr()
    assert [json.loads(line)["path"] for line in printed.out.splitlines()] == [str(good)] * 2
    errors = printed.err.splitlines()
    assert len(errors) == 3
    assert errors[0] == f"{tmp_path / 'empty'}: no image in this folder"
    assert errors[1].startswith(f"{damaged}: no readable image (")
    assert errors[2].startswith(f"{tmp_path / 'absent.png'}: no readable image (")


def test_weights_that_are_no_numbers(digits_csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    model = make_run(folder, "classify/digits", [f"data.path={digits_csv}", VIT])
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    save_checkpoint(folder / "checkpoints", Checkpoint(4, {"model": model.state_dict()}, {}, {}))
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    assert main([str(folder), str(tmp_path / "black.png")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "step_4: the model's outputs are not finite; its weights are spoilt" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "error: device = 'gpu': "),
        (["--weights", "ema"], "holds no ema.safetensors"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, digits_run: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(digits_run[0]), "x.png", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert main(["absent", "x.png"]) == 1
    assert capsys.readouterr().err.startswith("error: checkpoint = 'absent': no such folder")


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["run"], ["run", "x.png", "--top", "0"], ["run", "x.png", "--batch-size", "many"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "'many' must be a whole number of at least 1" in capsys.readouterr().err
