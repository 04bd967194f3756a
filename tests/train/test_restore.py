"""A run's model from its folder, and everything that may be wrong with such a folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import VIT, halved, make_run
from train.checkpoint import Checkpoint, save_checkpoint
from train.config import load_config
from train.data import Digits
from train.data.description import Description, read_description
from train.restore import restore, to_device, without_pretrained

SUM = ["encoding=[{name: learned}, {name: table, strength: 0.5}, rope_mixed]", VIT]


@pytest.fixture(scope="module")
def run(digits_csv: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("runs") / "sum"
    return folder, make_run(folder, "classify/digits", [f"data.path={digits_csv}", *SUM], average=True)


@pytest.fixture
def copy(run: tuple[Path, Any], tmp_path: Path) -> Path:
    """The same run, to be damaged."""
    return Path(shutil.copytree(run[0], tmp_path / "copy"))


@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/step_3"])
def test_the_model_as_it_was_saved_without_its_data(
    part: str, run: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = run
    monkeypatch.delattr(Digits, "load")
    restored = restore(folder / part, "model")
    images = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(restored.model(images), model(images))
    assert not restored.model.training
    assert restored.model.state_dict().keys() == model.state_dict().keys()
    assert (restored.folder, restored.checkpoint) == (folder, folder / "checkpoints" / "step_3")
    assert (restored.step, restored.weights) == (3, "model")
    assert restored.description == Description(
        classes=tuple("0123456789"), num_channels=1, height=28, width=28, mean=(0.1307,), std=(0.3081,)
    )


def test_a_relative_path(run: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run[0] / "checkpoints")
    for path in (".", "step_3", ".."):
        assert restore(path).step == 3


def test_the_average_where_there_is_one(run: tuple[Path, Any], copy: Path) -> None:
    _, model = run
    for which in ("auto", "ema"):
        restored = restore(copy, which)  # type: ignore[arg-type]
        assert restored.weights == "ema"
        assert all(torch.equal(value, halved(model)[name]) for name, value in restored.model.state_dict().items())
    save_checkpoint(copy / "checkpoints", Checkpoint(4, {"model": model.state_dict()}, {}, {}))
    assert (restore(copy).step, restore(copy).weights) == (4, "model")
    with pytest.raises(ValueError, match=r"step_4: holds no ema\.safetensors"):
        restore(copy, "ema")


def test_a_run_in_the_middle_of_a_handover(digits_csv: str, tmp_path: Path) -> None:
    overrides = [f"data.path={digits_csv}", "encoding=rope_mixed", VIT, "handover={steps: 900, shape: linear}"]
    model = make_run(tmp_path / "run", "classify/digits", overrides)
    model.absolute_strength.fill_(0.25)
    for block in model.blocks:
        block.attn.encoding.set_strength(0.75)
    save_checkpoint(tmp_path / "run" / "checkpoints", Checkpoint(4, {"model": model.state_dict()}, {}, {}))
    restored: Any = restore(tmp_path / "run").model
    assert float(restored.absolute_strength) == 0.25
    assert float(restored.blocks[1].attn.encoding.strength) == 0.75
    images = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(restored(images), model(images))


def test_pretrained_weights_are_not_fetched() -> None:
    config = load_config("classify/image_folder", ["model.pretrained=true"])
    assert config.model.given()["pretrained"] is True
    assert without_pretrained(config).model.given() == {**config.model.given(), "pretrained": False}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent", r"absent': no such folder; wanted: a run's folder, its checkpoints/ or a step_N in there"),
        ("config.yaml", r"config\.yaml': is a file; wanted: a run's folder"),
        ("..", r"is no run, it has no config\.yaml; wanted: a run's folder"),
    ],
)
def test_what_is_no_run(path: str, message: str, copy: Path) -> None:
    with pytest.raises(ValueError, match=message):
        restore(copy / path)


def test_no_complete_checkpoint(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "step_3")
    for part in ("", "checkpoints"):
        with pytest.raises(ValueError, match=r"the run has no complete checkpoint yet \(step_N in checkpoints/\)"):
            restore(copy / part)
    (copy / "checkpoints" / "step_5").mkdir()
    with pytest.raises(ValueError, match=r"step_5: holds no ema\.safetensors or model\.safetensors"):
        restore(copy / "checkpoints" / "step_5")


def test_a_damaged_checkpoint_is_passed_over_or_refused_by_name(run: tuple[Path, Any], copy: Path) -> None:
    damaged = copy / "checkpoints" / "step_8"
    shutil.copytree(copy / "checkpoints" / "step_3", damaged)
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    with pytest.warns(UserWarning, match=r"step_8: model\.safetensors is damaged"):
        assert restore(copy).step == 3
    with pytest.raises(ValueError, match=r"step_8: model\.safetensors is damaged"):
        restore(damaged, "model")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "encoding=rope_axial",
            r"with rope_axial: it lacks pos_embed .*; it holds besides \S+encoding\S+ and \d+ more$",
        ),
        ("model.depth=3", r"with learned \+ table \+ rope_mixed: it lacks blocks\.2\.\S+ and \d+ more$"),
        ("model.depth=1", r"it holds besides blocks\.1\.\S+ and \d+ more$"),
        ("model.embed_dim=48", r"of another shape: cls_token \(1, 1, 24\) instead of \(1, 1, 48\) and \d+ more"),
        ("model.patch_size=14", r"of another shape: "),  # a table would be resized in silence
    ],
)
def test_weights_of_another_model_or_encoding(override: str, message: str, run: tuple[Path, Any]) -> None:
    folder, _ = run
    config = load_config(str(folder / "config.yaml"), [override])
    with pytest.raises(
        ValueError, match=rf"step_3: is of another model or encoding than .*config\.yaml says.*{message}"
    ):
        restore(folder, config=config)


def test_an_unreadable_description(copy: Path) -> None:
    text = (copy / "data.json").read_text()
    for damaged in ("{", json.dumps({**json.loads(text), "height": 0}), json.dumps({**json.loads(text), "hight": 1})):
        (copy / "data.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"data\.json: no readable description of data"):
            read_description(copy)
    (copy / "data.json").unlink()
    with pytest.raises(ValueError, match=r"copy: holds no data\.json, which a run writes when it starts"):
        restore(copy)


def test_devices() -> None:
    assert to_device("cpu") == torch.device("cpu")
    assert to_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match=r"device = 'gpu': .*gpu"):
        to_device("gpu")
