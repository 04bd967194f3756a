"""python -m train.lengths: perplexity against length, on the same text."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from tests.train.runs import make_run
from tests.train.texts import TINY, write_jsonl
from train.lengths import main
from train.restore import restore

MODEL = f"model={{name: language_model, {TINY}}}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of three encodings that were never trained, one of them with two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_jsonl(folder / "data", "running")
    options = {"alibi": ["seed=0"], "alibi-1": ["encoding=alibi", "seed=1"], "learned": ["encoding=learned"]}
    for name, own in options.items():
        make_run(folder / name, "text/verses", [*data, MODEL, "data.max_length=16", *own])
    return {name: folder / name for name in options}


def expected(folder: Path, length: int, num_tokens: int) -> float:
    """Perplexity, window by window."""
    restored: Any = restore(folder)
    tokens = restored.config.data.load(0).test.tokens[: num_tokens + 1]
    losses = []
    for start in range(0, len(tokens) - 1, length):
        window = tokens[start : start + length + 1]
        with torch.no_grad():
            losses.append(F.cross_entropy(restored.model(window[None, :-1])[0], window[1:], reduction="none"))
    assert sum(map(len, losses)) == num_tokens
    return math.exp(float(torch.cat(losses).mean()))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_and_the_picture(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "lengths.png"
    options = ["--lengths", "16", "9", "50", "--max-tokens", "120", "--picture", str(picture)]
    assert main([*map(str, runs.values()), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cells(lines[0]) == ["perplexity at", "9", "16", "50"]
    for line, name, folders in zip(lines[2:4], ("alibi", "learned"), (["alibi", "alibi-1"], ["learned"]), strict=True):
        row = cells(line)
        assert row[0] == name
        for cell, length in zip(row[1:], (9, 16, 50), strict=True):
            values = [expected(runs[folder], length, 120) for folder in folders]
            mean, digits = sum(values) / len(values), 0 if max(values) >= 100 else 2
            assert float(cell.split(" ± ")[0]) == pytest.approx(mean, abs=0.51 * 10**-digits)
            assert ("±" in cell) == (len(values) > 1)
    notes = "\n".join(lines[4:])
    assert "trained at 16 tokens: alibi, learned" in notes
    assert "learned at 50: learned knows the 16 places of training alone" in notes
    assert "alibi at" not in notes
    with Image.open(picture) as image:
        assert image.width > 500


def test_a_limit_of_memory_that_is_not_kept_is_told(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs["alibi"]), "--lengths", "16", "--memory-limit", "1", "--max-tokens", "40"]) == 0
    printed = capsys.readouterr().out
    assert cells(printed.splitlines()[2]) == ["alibi", "refused"]
    assert "refused: alibi at 16: " in printed


def test_only_language_models_of_the_same_text(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = write_jsonl(tmp_path / "labels", "labels")
    make_run(tmp_path / "news", "text/news", [*labels, f"model={{name: text_classifier, {TINY}}}"])
    assert main([str(tmp_path / "news")]) == 1
    assert "is a run of text_classification; wanted: runs of language_modeling" in capsys.readouterr().err
    other = write_jsonl(tmp_path / "other", "running")
    make_run(tmp_path / "bytes", "text/verses", [*other, MODEL, "data.tokenizer=bytes", "data.vocab_size=262"])
    assert main([str(runs["alibi"]), str(tmp_path / "bytes"), "--max-tokens", "40", "--lengths", "8"]) == 1
    assert "perplexities of different tokens cannot be compared" in capsys.readouterr().err
