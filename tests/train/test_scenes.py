"""Larger canvases, permuted patches and moved scenes, on models whose answers are known beforehand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.runs import make_run
from train.config import load_config
from train.scenes import accuracy, main, measure, shift_consistency, ways_to_resize

SMALL = ("model.embed_dim=16", "model.depth=1", "model.num_heads=2", "data.num_test=40", "data.num_train=50")
SUM = ("encoding=[{name: learned}, {name: table}]",)


class ByInk(nn.Module):
    """Answers by what is on the canvas, wherever it is, or only by what is in its upper left."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.patch_embed = SimpleNamespace(patch_size=(14, 14))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        ink = (images[..., : self.size, : self.size] - images.min()).sum(dim=(1, 2, 3)).double().round()
        return nn.functional.one_hot(ink.long() % 6, 6).float()


def restored(model: nn.Module, digits_csv: str) -> tuple[Any, Any]:
    config = load_config("classify/digit_scenes", [f"data.path={digits_csv}", *SMALL])
    return SimpleNamespace(model=model, config=config), config.data.load(0)


def test_a_model_that_knows_no_places_is_wholly_consistent(digits_csv: str) -> None:
    numbers = shift_consistency(*restored(ByInk(84), digits_csv), num_scenes=30)
    assert numbers == {"same when moved by 1-8 px": 1.0, "same when moved by 14 px": 1.0}


def test_a_model_that_looks_at_one_place_is_not(digits_csv: str) -> None:
    numbers = shift_consistency(*restored(ByInk(42), digits_csv), num_scenes=30)
    assert 0.0 < numbers["same when moved by 1-8 px"] < 1.0
    assert numbers["same when moved by 14 px"] < 0.9


def test_a_canvas_without_room_is_left_out(digits_csv: str) -> None:
    config = load_config("classify/digit_scenes", [f"data.path={digits_csv}", *SMALL, "data.canvas=[42, 42]"])
    assert shift_consistency(SimpleNamespace(model=ByInk(42), config=config), config.data.load(0)) == {}  # type: ignore[arg-type]


def test_accuracy_is_the_share_of_right_answers(digits_csv: str) -> None:
    _, images = restored(ByInk(84), digits_csv)

    class Constant(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.eye(6)[2].expand(len(batch), 6)

    labels = [images.test[index][1] for index in range(40)]
    assert accuracy(Constant(), images) == labels.count(2) / 40


def test_all_numbers_of_a_run(digits_csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", "classify/digit_scenes", [f"data.path={digits_csv}", *SMALL, *SUM])
    make_run(tmp_path / "b", "classify/digit_scenes", [f"data.path={digits_csv}", *SMALL, "encoding=rope_axial"])
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(tmp_path / "numbers.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "numbers.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == ["learned + table", "rope_axial"]
    always = {"run", "label", "84x84", "patches permuted", "same when moved by 1-8 px", "same when moved by 14 px"}
    assert set(lines[0]) == always | {"126x126 timm", "168x168 timm", "126x126 clamp", "168x168 clamp"}
    assert set(lines[1]) == always | {"126x126", "168x168"}
    assert all(0 <= value <= 1 for line in lines for value in line.values() if isinstance(value, float))
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .startswith("|  | runs | 84x84 | patches permuted | same when moved by 1-8 px |")
    )


def test_tables_are_read_in_both_ways(digits_csv: str, tmp_path: Path) -> None:
    make_run(tmp_path / "a", "classify/digit_scenes", [f"data.path={digits_csv}", *SMALL, *SUM])
    ways = dict(ways_to_resize(tmp_path / "a" / "config.yaml"))
    assert [config.encodings[1].resize for config in ways.values()] == ["timm", "clamp"]  # type: ignore[attr-defined]


def test_other_runs_are_refused(digits_csv: str, tmp_path: Path) -> None:
    make_run(tmp_path / "a", "classify/digits", [f"data.path={digits_csv}"])
    with pytest.raises(ValueError, match=r"was trained on digits, not on digit_scenes"):
        measure(tmp_path / "a")
