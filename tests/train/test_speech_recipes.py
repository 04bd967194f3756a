"""The full recipe for speech: it runs as it stands on a few recordings in the same layout, and its numbers reach their place."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from relpos2d.encodings import encoding_class
from tests.train.tones import WORDS, spoken, tone_clips, write_manifest
from train.__main__ import main
from train.config import list_configs, load_config
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


ON_A_LINE = [name for name in list_configs("encoding") if 1 in (encoding_class(name).axes or (1,))]
TINY = [
    "model.embed_dim=24",
    "model.depth=2",
    "model.num_heads=2",
    "model.subsampling_channels=4",
    "model.kernel_size=5",
]


def check_gradients(config: str, folder: Path, *options: str) -> None:
    """Every parameter of the model that a config describes learns from a batch of recordings."""
    given = ["model.intermediate_layers=[1]", *TINY, "trainer.device=cpu", *options]
    task: Any = create_task(
        load_config(config, [f"data={{name: speech_jsonl, path: {folder}, sample_rate: 8000}}", *given])
    )
    task.model.train()
    data = task.train_data
    loss, _ = task.loss(task.model, data.collate([data[index] for index in range(3)]))
    assert loss.isfinite()
    loss.backward()
    assert not [name for name, parameter in task.model.named_parameters() if parameter.grad is None]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tones")
    for split in ("train", "val"):
        write_manifest(folder / f"{split}.jsonl", tone_clips(4, seed=2), language="en")
    return folder


@pytest.mark.parametrize("name", [name for name in list_configs() if name.startswith("speech/")])
def test_m10_every_config_of_speech_builds_small_and_every_parameter_gets_a_gradient(
    name: str, manifests: Path
) -> None:
    check_gradients(name, manifests)


@pytest.mark.parametrize("encoding", [*ON_A_LINE, "[learned, rope]", "[t5, rope]"])
def test_every_encoding_trains_in_full_view_and_in_chunks(encoding: str, manifests: Path) -> None:
    chunks = [
        "model={name: conformer_ctc, chunk_size: 4, left_context: 8, normalize: fixed, num_mels: 40}",
        "model.dropout=0.0",
    ]
    for options in ([], chunks):
        check_gradients("speech/prompts_tiny", manifests, f"encoding={encoding}", *options)


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
