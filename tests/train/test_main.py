"""A run from its command line to its folder."""

import json
from pathlib import Path

import pytest
from PIL import Image

from relpos2d.encodings import encoding_class
from tests.train.boxes import coco_folder
from train.__main__ import main
from train.checkpoint import load_checkpoint
from train.config import list_configs, load_config
from train.data.description import read_description
from train.data.stream import collate_of
from train.tasks import create_task

SHORT = ["trainer.max_steps=2", "trainer.batch_size=8", "schedule.warmup_steps=1", "trainer.device=cpu"]


@pytest.fixture
def command(digits_csv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return ["classify/digits", f"data.path={digits_csv}", *SHORT]


def test_two_steps_fill_the_run_folder_and_the_same_command_again_says_so(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "seed=3"]) == 0
    folder = Path("runs/classify/digits-table-3")
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "checkpoints", "config.yaml", "curves.png", "data.json", "history.jsonl", "maps.png", "metrics.json",
        "predictions.jsonl",
        "predictions.png", "tensorboard",
    ]  # fmt: skip
    metrics = json.loads((folder / "metrics.json").read_text())
    records = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(40))
    assert metrics["num_examples"] == 40
    assert metrics["accuracy"] == sum(record["label"] == record["prediction"] for record in records) / 40
    assert all(0.1 <= record["probability"] <= 1 for record in records)
    assert (metrics["seed"], metrics["steps"]) == (3, 2)
    assert set(metrics["versions"]) == {"python", "relpos2d", "torch", "timm", "accelerate"}
    assert metrics["machine"]["cores"] >= 1
    assert "commit" in metrics
    checkpoint = load_checkpoint(folder / "checkpoints" / "step_2")
    assert any(key.endswith("attn.encoding.relative_position_bias_table") for key in checkpoint.weights["model"])
    assert read_description(folder).classes == tuple("0123456789")
    assert set(metrics["seconds"]) == {"data", "logging", "evaluation", "saving", "total"}
    for picture in folder.glob("*.png"):
        with Image.open(picture) as image:
            assert min(image.size) > 200
    assert load_config(str(folder / "config.yaml")).seed == 3
    printed = capsys.readouterr().out
    assert f"test accuracy {metrics['accuracy']:.4f}" in printed
    assert "runs/classify/digits-table-3/checkpoints/step_2" in printed
    assert "runs/classify/digits-table-3/maps.png" in printed
    assert "\x1b" not in printed  # plain where there is no terminal

    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix in (".json", ".safetensors")}
    assert main([*command, "seed=3", f"output={folder}"]) == 0
    score = next(line for line in printed.splitlines() if line.startswith("test accuracy"))
    assert f"finished before: {score}" in capsys.readouterr().out
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_a_model_without_relative_positions_has_no_maps(command: list[str]) -> None:
    command += ["model.depths=[1, 1]", "model.embed_dim=16", "model.num_heads=[1, 2]"]
    assert main([*command, "encoding=none", "output=run"]) == 0
    assert Path("run/metrics.json").is_file()
    assert not Path("run/maps.png").exists()
    assert main([*command, "output=run"]) == 1
    assert main([*command, "output=run", "trainer.overwrite=true"]) == 0
    assert Path("run/maps.png").exists()


@pytest.mark.long
def test_a_finished_run_can_be_lengthened(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "output=run"]) == 0
    longer = [*(o for o in command if "max_steps" not in o), "trainer.max_steps=3", "output=run"]
    assert main(longer) == 1
    assert "trainer.max_steps: 2 -> 3" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"goes on with another config: trainer.max_steps: 2 -> 3"):
        assert main([*longer, "trainer.allow_changes=true"]) == 0
    assert "continues after step 2 of 3" in capsys.readouterr().out
    assert json.loads(Path("run/metrics.json").read_text())["steps"] == 3
    assert main(longer) == 0  # the same run from now on
    shorter = [*command, "output=run", "trainer.allow_changes=true"]
    with pytest.warns(UserWarning, match=r"trainer.max_steps: 3 -> 2"):
        assert main(shorter) == 1
    assert load_config("run/config.yaml").trainer.max_steps == 3
    assert "trainer.max_steps = 2: the run in run has taken 3 steps already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "did you mean optimizer.lr?"),
        ("trainer.batch_size=161", "trainer.batch_size = 161: must be at most 160"),
        ("data.path=absent.csv", "absent.csv"),
        ("model.window_size=0", "window_size"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_folder(
    override: str, message: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    key = override.split("=")[0]
    assert main([*(o for o in command if not o.startswith(f"{key}=")), override]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error
    assert not Path("runs").exists()


LARGE = ("classify/imagenet_", "classify/finetune_", "detect/coco_", "text/", "speech/")
SMALL_ENOUGH = [name for name in list_configs() if not name.startswith(LARGE)]


@pytest.mark.parametrize("name", SMALL_ENOUGH)  # the others, made smaller, in test_recipes.py and tasks/
def test_m10_every_config_builds_and_every_parameter_gets_a_gradient(
    name: str, digits_csv: str, image_folders: Path, tmp_path: Path
) -> None:
    config = load_config(name)
    if config.task == "detect":
        options = ["data=coco", f"data.path={coco_folder(tmp_path / 'coco')}"]
    else:
        options = [f"data.path={image_folders if config.data.name == 'image_folder' else digits_csv}"]
    task = create_task(load_config(name, options))
    batch = collate_of(task.train_data)([task.train_data[0], task.train_data[1]])
    loss, scalars = task.loss(task.model, batch)
    assert loss.isfinite()
    assert all(value.isfinite() for value in scalars.values())
    loss.backward()
    assert all(parameter.grad is not None for parameter in task.model.parameters())


IN_TWO_AXES = [name for name in list_configs("encoding") if 2 in (encoding_class(name).axes or (2,))]


@pytest.mark.parametrize("model", ["swin_mini", "vit_mini"])
@pytest.mark.parametrize("encoding", [*IN_TWO_AXES, "[table, rope_axial]"])
def test_every_encoding_builds_in_the_small_models(encoding: str, model: str, digits_csv: str) -> None:
    task = create_task(
        load_config("classify/digits", [f"data.path={digits_csv}", f"encoding={encoding}", f"model={model}"])
    )
    assert task.model(task.train_data[0][0][None]).shape == (1, 10)
    assert task.model.swap_report is not None
