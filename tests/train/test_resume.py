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
    "handover={steps: 90, shape: cosine, start: 10}",
    "loss=mixed",
    "schedule.warmup_steps=15",
    "trainer={max_steps: 110, batch_size: 8, log_every: 1, eval_every: 40, save_every: 3, ema_decay: 0.99, device: cpu}",
)


def train(folder: Path, digits_csv: str, *options: str, num_kills: int = 0, seed: int = 0) -> list[str]:
    """Runs the command, with so many kills on the way; returns what was said about each attempt."""
    script = [sys.executable, "tests/train/kill_and_continue.py", str(num_kills), str(seed)]
    arguments = [*COMMAND, f"data.path={digits_csv}", f"output={folder}", *options]
    done = subprocess.run([*script, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
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
    train(folder, digits_csv)
    return outcome(folder)


@pytest.mark.long
def test_sigterm_to_all_processes_saves_and_the_run_goes_on(
    straight: dict[str, Any], digits_csv: str, tmp_path: Path
) -> None:
    """As a scheduler does it: trainer and data workers get the signal at once."""
    arguments = [*COMMAND, f"data.path={digits_csv}", "output=run", "trainer.num_workers=2", "trainer.save_every=1000"]
    command = [sys.executable, "-m", "train", *arguments]
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
    train(tmp_path / "run", digits_csv, "trainer.num_workers=0")
    assert_same(outcome(tmp_path / "run"), straight)


def killed(folder: Path, digits_csv: str, num_workers: int, num_kills: int) -> list[str]:
    """Trains with so many kills; returns what the attempts said."""
    workers = f"trainer.num_workers={num_workers}"
    lines = train(folder, digits_csv, workers, num_kills=num_kills, seed=num_workers)
    assert lines.count(f"end {-signal.SIGKILL}") == num_kills, lines
    assert not list((folder / "checkpoints").glob(".*"))
    return lines


def test_m6_killed_four_times_ends_the_same(straight: dict[str, Any], digits_csv: str, tmp_path: Path) -> None:
    killed(tmp_path / "run", digits_csv, num_workers=2, num_kills=4)
    assert_same(outcome(tmp_path / "run"), straight)
    strengths = [line["strength"] for line in straight["history"]]
    assert strengths[:11] == [0.0] * 11
    assert strengths[100:] == [1.0] * 10
    assert all(0 < strength < 1 for strength in strengths[11:100])


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 2])
def test_m6_killed_twenty_times_ends_the_same(
    num_workers: int, straight: dict[str, Any], digits_csv: str, tmp_path: Path
) -> None:
    lines = killed(tmp_path / "run", digits_csv, num_workers, num_kills=20)
    assert sum(line.startswith("in a save") for line in lines) >= 3, lines
    assert len({line for line in lines if "continues after step" in line}) >= 2, lines
    assert_same(outcome(tmp_path / "run"), straight)
