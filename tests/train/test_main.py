"""A run from its command line to its folder."""

import json
from pathlib import Path

import pytest
from PIL import Image
from torch.utils.data import DataLoader

from train.__main__ import main
from train.checkpoint import load_checkpoint
from train.config import list_configs, load_config
from train.tasks import create_task

SHORT = ["trainer.max_steps=2", "trainer.batch_size=8", "schedule.warmup_steps=1", "trainer.device=cpu"]


@pytest.fixture
def command(digits_csv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return ["classify/digits", f"data.path={digits_csv}", *SHORT]


def test_two_steps_fill_the_run_folder(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "seed=3"]) == 0
    folder = Path("runs/classify/digits-table-3")
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints", "config.yaml", "curves.png", "history.jsonl", "maps.png", "metrics.json", "predictions.jsonl",
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
    model, _, state = load_checkpoint(folder / "checkpoints")
    assert state["step"] == 2
    assert any(key.endswith("attn.encoding.relative_position_bias_table") for key in model)
    for picture in folder.glob("*.png"):
        with Image.open(picture) as image:
            assert min(image.size) > 200
    assert load_config(str(folder / "config.yaml")).seed == 3
    printed = capsys.readouterr().out
    assert f"test accuracy {metrics['accuracy']:.4f}" in printed
    assert "runs/classify/digits-table-3/checkpoints/step_2" in printed
    assert "runs/classify/digits-table-3/maps.png" in printed
    assert "\x1b" not in printed  # plain where there is no terminal


def test_nothing_is_overwritten_unless_told(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "encoding=none"]) == 0
    assert main([*command, "encoding=none"]) == 0  # the default finds a free name
    assert Path("runs/classify/digits-none-0-2/metrics.json").is_file()
    assert not Path("runs/classify/digits-none-0/maps.png").exists()  # `none` has no map
    capsys.readouterr()

    taken = "output=runs/classify/digits-none-0"
    before = Path("runs/classify/digits-none-0/metrics.json").read_text()
    assert main([*command, taken]) == 1
    assert "is not empty. Name another folder, or say trainer.overwrite=true" in capsys.readouterr().err
    assert Path("runs/classify/digits-none-0/metrics.json").read_text() == before
    (Path("runs/classify/digits-none-0") / "notes.txt").write_text("mine")
    assert main([*command, taken, "trainer.overwrite=true"]) == 0
    assert Path("runs/classify/digits-none-0/notes.txt").read_text() == "mine"
    assert Path("runs/classify/digits-none-0/maps.png").exists()

    Path("precious").mkdir()
    Path("precious/metrics.json").write_text("not a run")
    assert main([*command, "output=precious", "trainer.overwrite=true"]) == 1
    assert "replaces runs only, and there is no config.yaml in it" in capsys.readouterr().err
    assert Path("precious/metrics.json").read_text() == "not a run"
    Path("file").write_text("")
    assert main([*command, "output=file"]) == 1
    assert "is a file" in capsys.readouterr().err


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


@pytest.mark.parametrize("name", list_configs())
def test_m10_every_config_builds_and_every_parameter_gets_a_gradient(
    name: str, digits_csv: str, image_folders: Path
) -> None:
    data = load_config(name).data.name
    path = image_folders if data == "image_folder" else digits_csv
    task = create_task(load_config(name, [f"data.path={path}"]))
    images, labels = next(iter(DataLoader(task.train_data, batch_size=2)))
    loss, scalars = task.loss(task.model, (images, labels))
    assert loss.isfinite()
    assert set(scalars) == {"train_accuracy"}
    loss.backward()
    assert all(parameter.grad is not None for parameter in task.model.parameters())


@pytest.mark.parametrize("model", ["swin_mini", "vit_mini"])
@pytest.mark.parametrize("encoding", [*list_configs("encoding"), "[table, rope_axial]"])
def test_every_encoding_builds_in_the_small_models(encoding: str, model: str, digits_csv: str) -> None:
    task = create_task(
        load_config("classify/digits", [f"data.path={digits_csv}", f"encoding={encoding}", f"model={model}"])
    )
    assert task.model(task.train_data[0][0][None]).shape == (1, 10)
    assert task.model.swap_report is not None
