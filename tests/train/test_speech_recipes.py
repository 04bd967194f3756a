"""The full recipe for speech: it runs as it stands on a few recordings in the same layout, and its numbers reach their place."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.tones import WORDS, spoken
from train.__main__ import main
from train.config import load_config
from train.recipe import create_schedule
from train.tasks import create_task

SMALLER = [
    "model.embed_dim=24",
    "model.depth=9",
    "model.num_heads=2",
    "model.subsampling_channels=4",
    "data.vocab_size=40",
]
SHORTER = ["trainer.batch_seconds=40.0", "trainer.num_workers=0", "trainer.device=cpu", "trainer.mixed_precision='no'"]


@pytest.fixture
def librispeech(tmp_path: Path) -> Path:
    """SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER.flac and SPEAKER-CHAPTER.trans.txt with texts in capitals."""
    soundfile = pytest.importorskip("soundfile")
    for split, seed in (("train-clean-100", 1), ("test-clean", 9)):
        clips = [spoken(text, seed, 16000) for text in (*WORDS[:5], " ".join(WORDS))]
        for chapter, part in (("11", clips[:4]), ("12", clips[4:])):
            folder = tmp_path / split / "103" / chapter
            folder.mkdir(parents=True)
            lines = []
            for number, clip in enumerate(part):
                name = f"103-{chapter}-{number:04d}"
                soundfile.write(folder / f"{name}.flac", clip.samples, clip.sample_rate)
                lines.append(f"{name} {clip.text.upper()}\n")
            (folder / f"103-{chapter}.trans.txt").write_text("".join(lines))
    return tmp_path


def test_two_steps_of_librispeech(librispeech: Path, tmp_path: Path) -> None:
    options = [f"data.path={librispeech}", *SMALLER, *SHORTER, "trainer.max_steps=2", "schedule.warmup_steps=1"]
    assert main(["speech/librispeech_100", *options, f"output={tmp_path / 'run'}"]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["steps"], metrics["skipped_steps"], metrics["num_examples"]) == (2, 0, 6)
    assert math.isfinite(metrics["loss"])
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in history)


def test_every_number_of_librispeech_reaches_its_place(librispeech: Path) -> None:
    config = load_config("speech/librispeech_100", [f"data.path={librispeech}", *SMALLER, *SHORTER])
    task: Any = create_task(config)
    model = task.model
    assert (model.num_time_masks, model.time_mask, model.num_freq_masks, model.freq_mask) == (10, 40, 2, 27)
    assert model.intermediate_layers == (8,)
    assert model.sample_rate == task.about.sample_rate == 16000
    assert sum(isinstance(module, nn.BatchNorm1d) for module in model.modules()) == 9
    assert all(module.kernel_size == (31,) for module in model.modules() if isinstance(module, nn.Conv1d))
    assert task.intermediate == 0.3
    assert task.data.train.speed == (0.9, 1.0, 1.1)
    parameters = [nn.Parameter(model.head.weight.detach())]
    optimizer = torch.optim.SGD(parameters, lr=config.optimizer.lr)
    schedule = create_schedule(optimizer, config)
    schedule.step_update(3000)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3, rel=0.03)
    full = load_config("speech/librispeech_100", [f"data.path={librispeech}"])
    assert full.model.given()["embed_dim"] == 256
    assert full.trainer.batch_seconds == 1200.0
