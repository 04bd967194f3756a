"""python -m train.export: what others load computes what the run's model computes."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config

from tests.train.runs import VIT, make_run
from train import export
from train.data.images import read_image
from train.export import main
from train.predict import main as predict
from train.restore import restore

PLAIN_VIT = VIT.replace("relpos2d_", "")
SWIN, SWINV2 = (
    f"model={{name: {name}, patch_size: 2, window_size: 7, embed_dim: 16, depths: [1, 1], num_heads: [2, 4]}}"
    for name in ("relpos2d_swin_tiny_patch4_window7_224", "relpos2d_swinv2_tiny_window8_256")
)
RUNS = {
    "swin table": ["encoding=table", SWIN],
    "swinv2 cpb": ["encoding=cpb", SWINV2],
    "vit rope_mixed": ["encoding=rope_mixed", "model=vit_mini", "model.depth=2"],
    "vit sum": ["encoding=[learned, {name: cpb, hidden_dim: 8}, rope_axial]", VIT],
    "vit fade": ["encoding={name: table, strength: 0.5}", VIT, "model.absolute=fade"],
    "plain vit": ["encoding=rope_mixed", PLAIN_VIT],
}


@pytest.fixture(scope="module")
def runs(digits_csv: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for name, overrides in RUNS.items():
        folder = tmp_path_factory.mktemp("runs") / "run"
        made[name] = (
            folder,
            make_run(folder, "classify/digits", [f"data.path={digits_csv}", *overrides], average=name == "swin table"),
        )
    return made


def grey(batch: int) -> torch.Tensor:
    return torch.randn(batch, 1, 28, 28)


@pytest.mark.parametrize("name", RUNS)
def test_timm_loads_the_very_model(
    name: str, runs: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = runs[name]
    out = tmp_path / "new" / "hub"
    assert main([str(folder), "--to", "timm", str(out), "--weights", "model"]) == 0
    assert f"{out}: relpos2d_" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    loaded = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    assert type(loaded) is type(model)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    images = grey(3)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))

    config = json.loads((out / "config.json").read_text())
    assert config["architecture"].startswith("relpos2d_")
    assert config["label_names"] == list("0123456789")
    encoding = config["model_args"]["encoding"]
    assert [e["name"] for e in (encoding if isinstance(encoding, list) else [encoding])] == [
        e.name for e in restore(folder).config.encodings
    ]
    cfg = loaded.pretrained_cfg
    assert (cfg["input_size"], cfg["num_classes"]) == ((1, 28, 28), 10)
    assert "tag" not in cfg  # that, and the licence, is of weights which these are not
    assert "license" not in cfg
    data = resolve_model_data_config(loaded)
    assert (data["mean"], data["std"], data["crop_pct"], data["crop_mode"]) == ([0.1307], [0.3081], 1.0, "squash")


def test_timm_prepares_images_as_we_do(image_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"data.path={image_folders}", "data.image_size=28", "data.crop_fraction=0.7", "encoding=table", VIT]
    make_run(tmp_path / "run", "classify/image_folder", overrides)
    out = tmp_path / "hub"
    assert main([str(tmp_path / "run"), "--to", "timm", str(out)]) == 0
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    data = resolve_model_data_config(model)
    assert (data["crop_pct"], data["crop_mode"], data["interpolation"]) == (0.7, "center", "bicubic")
    path = tmp_path / "slope.png"
    slope = np.linspace(0, 255, 60)[None, :, None] * np.linspace(0, 1, 80)[:, None, None] * np.array([1.0, 0.7, 0.2])
    Image.fromarray(slope.astype(np.uint8)).save(path)
    with torch.no_grad():
        theirs = model(create_transform(**data)(read_image(path))[None]).softmax(dim=1)[0]
    capsys.readouterr()
    assert predict([str(tmp_path / "run"), str(path), "--json"]) == 0
    ours = {p["class"]: p["probability"] for p in json.loads(capsys.readouterr().out)["predictions"]}
    assert [ours[name] for name in "abc"] == pytest.approx(
        theirs.tolist(), abs=0.01
    )  # they round to whole pixels before they crop


@pytest.mark.parametrize("which", ["model", "ema"])
def test_safetensors_say_what_they_are(which: str, runs: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, _ = runs["swin table"]
    out = tmp_path / "model.safetensors"
    assert main([str(folder), "--to", "safetensors", str(out), "--weights", which]) == 0
    expected = restore(folder, which).model.state_dict()  # type: ignore[arg-type]
    weights = load_file(out)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    with safe_open(out, "pt") as file:
        about = {key: json.loads(value) for key, value in file.metadata().items()}
    assert about["model"] == "relpos2d_swin_tiny_patch4_window7_224"
    assert about["model_args"]["window_size"] == 7
    assert (about["encoding"]["name"], about["encoding"]["resize"]) == ("table", "timm")
    assert about["classes"] == list("0123456789")
    assert (about["height"], about["width"], about["num_channels"]) == (28, 28, 1)
    assert (about["mean"], about["std"], about["step"], about["weights"]) == ([0.1307], [0.3081], 3, which)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "name",  # a Swin's ONNX in tests/backbones/test_export.py
    ["vit fade", *(pytest.param(n, marks=pytest.mark.long) for n in ("swin table", "vit sum"))],
)
def test_onnx_computes_the_same_for_any_batch(
    name: str, runs: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = runs[name]

    out = tmp_path / "model.onnx"
    assert main([str(folder), "--to", "onnx", str(out), "--weights", "model"]) == 0
    assert "the logits differ from the model's by at most" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        images = grey(batch)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.no_grad():
            assert (torch.from_numpy(logits) - model(images)).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.long
def test_onnx_that_computes_something_else_is_not_left(
    runs: dict[str, tuple[Path, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(runs["vit fade"][0]), "--to", "onnx", str(tmp_path / "model.onnx")]
    for difference in (2e-4, float("nan")):
        monkeypatch.setattr(export, "onnx_difference", lambda *_, d=difference: d)
        assert main(arguments) == 1
        assert f"the logits differ from the model's by {difference:.1e}, allowed is 1e-04" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else object())
    assert main(arguments) == 1
    assert capsys.readouterr().err == "error: export to ONNX needs onnxscript: pip install onnxscript\n"


def test_what_is_there_stays_unless_told(
    runs: dict[str, tuple[Path, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = runs["vit rope_mixed"]
    out = tmp_path / "out"
    out.write_text("mine")
    for to in ("safetensors", "onnx", "timm"):
        assert main([str(folder), "--to", to, str(out)]) == 1
        assert capsys.readouterr().err == f"error: {out}: is there already; --overwrite replaces it\n"
    assert out.read_text() == "mine"
    for _ in range(2):
        assert main([str(folder), "--to", "timm", str(out), "--overwrite"]) == 0
    (out / "notes.txt").write_text("mine")
    for to in ("safetensors", "timm"):
        assert main([str(folder), "--to", to, str(out), "--overwrite"]) == 1
        assert "so it is not replaced" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    monkeypatch.chdir(out)
    assert main([str(folder), "--to", "timm", ".", "--overwrite"]) == 1
    assert f"{out}: holds notes.txt, so it is not replaced" in capsys.readouterr().err


def test_a_model_that_timm_could_not_build(digits_csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        f"data.path={digits_csv}",
        "encoding=table",
        PLAIN_VIT.replace("vit_tiny_patch16_224", "vit_tiny_patch16_384"),
    ]
    make_run(tmp_path / "run", "classify/digits", overrides)
    assert main([str(tmp_path / "run"), "--to", "timm", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "vit_tiny_patch16_384 with an encoding is no registered model" in error
    assert "registered are relpos2d_vit_tiny_patch16_224, " in error
    assert not (tmp_path / "out").exists()
    assert main([str(tmp_path / "run"), "--to", "safetensors", str(tmp_path / "out")]) == 0


def test_a_format_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--to", "tflite", "out"])
    assert "invalid choice: 'tflite'" in capsys.readouterr().err
