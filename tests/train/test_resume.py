"""A run that is killed and started again ends as one that was never interrupted: same losses, same weights, same predictions."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import VIT
from train.checkpoint import last_checkpoint, load_checkpoint

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

#: everything that could go wrong on the way back: random depth and mixing, an average, strengths that move, a curved schedule
COMMAND = (
    "classify/digits_vit",
    VIT,
    "model.drop_path_rate=0.2",
    "encoding=[learned, rope_mixed]",
    "loss=mixed",
)
TRAINER = "batch_size: 8, log_every: 1, save_every: 3, ema_decay: 0.99, device: cpu"
LONG = (
    "handover={steps: 90, shape: cosine, start: 10}",
    "schedule.warmup_steps=15",
    f"trainer={{max_steps: 110, eval_every: 40, {TRAINER}}}",
)
SHORT = (
    "handover={steps: 16, shape: cosine, start: 3}",
    "schedule.warmup_steps=4",
    f"trainer={{max_steps: 24, eval_every: 10, {TRAINER}}}",
)


def arguments(
    folder: Path, digits_csv: str, *options: str, num_kills: int = 0, seed: int = 0, latest: int = 14
) -> list[str]:
    """The command, to be killed so many times on the way: in its first saves, if that is in a save."""
    return [str(num_kills), str(seed), str(latest), *COMMAND, f"data.path={digits_csv}", f"output={folder}", *options]


def train(*commands: list[str]) -> list[str]:
    """Runs commands one after the other; returns what was said about each attempt."""
    words = [sys.executable, "tests/train/kill_and_continue.py", *commands[0]]
    for command in commands[1:]:
        words += ["--", *command]
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves, but for the times."""
    last = last_checkpoint(folder / "checkpoints")
    assert last is not None
    checkpoint = load_checkpoint(last)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    metrics = json.loads((folder / "metrics.json").read_text())
    return {
        "history": [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
        "weights": checkpoint.weights,
        "optimizer": checkpoint.optimizer,
        "learner": checkpoint.state["learner"],
        "predictions": (folder / "predictions.jsonl").read_text(),
        "metrics": {key: metrics[key] for key in ("accuracy", "loss", "steps", "skipped_steps", "num_examples")},
    }


def assert_same(first: Any, second: Any, where: str = "") -> None:
    """Equal to the last bit. A pair may have become a list."""
    if isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for number, pair in enumerate(zip(first, second, strict=True)):
            assert_same(*pair, f"{where}.{number}")
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            assert_same(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    else:
        assert first == second, where


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, digits_csv: str) -> dict[str, Any]:
    """The run without interruption, without workers."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(arguments(folder, digits_csv, *LONG))
    return outcome(folder)


@pytest.mark.long
def test_sigterm_to_all_processes_saves_and_the_run_goes_on(
    straight: dict[str, Any], digits_csv: str, tmp_path: Path
) -> None:
    """As a scheduler does it: trainer and data workers get the signal at once."""
    options = [f"data.path={digits_csv}", "output=run", "trainer.num_workers=2", "trainer.save_every=1000"]
    command = [sys.executable, "-m", "train", *COMMAND, *LONG, *options]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    history = tmp_path / "run" / "history.jsonl"
    while not (history.exists() and len(history.read_text().splitlines()) >= 20):  # in the handover
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert re.search(
        r"^stopped by SIGTERM after step \d+, which is saved; the same command goes on from there$", said, re.M
    )
    assert "Traceback" not in said
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    train(arguments(tmp_path / "run", digits_csv, *LONG, "trainer.num_workers=0"))
    assert_same(outcome(tmp_path / "run"), straight)


def assert_killed(folder: Path, lines: list[str], num_kills: int) -> None:
    assert lines.count(f"end {-signal.SIGKILL}") == num_kills, lines
    assert not list((folder / "checkpoints").glob(".*"))


def test_m6_killed_twice_ends_the_same(digits_csv: str, tmp_path: Path) -> None:
    """In its third save, and then at any time."""
    options = (*SHORT, "trainer.num_workers=2")
    killed = arguments(tmp_path / "killed", digits_csv, *options, num_kills=2, seed=13, latest=40)
    lines = train(arguments(tmp_path / "straight", digits_csv, *SHORT), killed)
    assert_killed(tmp_path / "killed", lines, num_kills=2)
    assert [line.split(",")[0] for line in lines if line.startswith(("at any", "in a"))] == ["in a save", "at any time"]
    assert any("continues after step" in line for line in lines), lines
    straight = outcome(tmp_path / "straight")
    assert_same(outcome(tmp_path / "killed"), straight)
    strengths = [line["strength"] for line in straight["history"]]
    assert strengths[:4] == [0.0] * 4
    assert strengths[19:] == [1.0] * 5
    assert all(0 < strength < 1 for strength in strengths[4:19])


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 2])
def test_m6_killed_twenty_times_ends_the_same(
    num_workers: int, straight: dict[str, Any], digits_csv: str, tmp_path: Path
) -> None:
    workers = f"trainer.num_workers={num_workers}"
    folder = tmp_path / "run"
    lines = train(arguments(folder, digits_csv, *LONG, workers, num_kills=20, seed=num_workers))
    assert_killed(folder, lines, num_kills=20)
    assert sum(line.startswith("in a save") for line in lines) >= 3, lines
    assert len({line for line in lines if "continues after step" in line}) >= 2, lines
    assert_same(outcome(folder), straight)
