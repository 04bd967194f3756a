"""A run from its command line to its folder."""

import json
from pathlib import Path

import pytest
from PIL import Image
from torch.utils.data import DataLoader

from train.__main__ import claim_folder, main
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


def test_the_default_output_is_the_first_free_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("classify/digits", ["encoding=[table, rope_axial]", "seed=4"])
    folders = [claim_folder("classify/digits", config) for _ in range(3)]
    base = "runs/classify/digits-table+rope_axial-4"
    assert [str(folder) for folder in folders] == [base, f"{base}-2", f"{base}-3"]
    assert all(folder.is_dir() for folder in folders)


def test_a_run_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    config = load_config("classify/digits", [f"output={tmp_path}"])
    overwriting = load_config("classify/digits", [f"output={tmp_path}", "trainer.overwrite=true"])
    assert claim_folder("classify/digits", config) == tmp_path  # empty
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not empty. Name another folder, or say trainer.overwrite=true"):
        claim_folder("classify/digits", config)
    with pytest.raises(ValueError, match=r"replaces runs only, and there is no config.yaml in it"):
        claim_folder("classify/digits", overwriting)
    assert (tmp_path / "metrics.json").read_text() == "{}"

    for name in ("config.yaml", "maps.png", "history.jsonl", "notes.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
    assert claim_folder("classify/digits", overwriting) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]  # what a run does not write stays

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; a folder is wanted"):
        claim_folder("classify/digits", load_config("classify/digits", [f"output={tmp_path / 'file'}"]))


def test_a_model_without_relative_positions_has_no_maps(command: list[str]) -> None:
    assert main([*command, "encoding=none", "output=run"]) == 0
    assert Path("run/metrics.json").is_file()
    assert not Path("run/maps.png").exists()
    assert main([*command, "output=run"]) == 1
    assert main([*command, "output=run", "trainer.overwrite=true"]) == 0
    assert Path("run/maps.png").exists()


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
