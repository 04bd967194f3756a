"""Several processes: the losses of one, whether the model is copied or shared out; and back to one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.launch import free_port
from tests.train.runs import VIT
from train.checkpoint import last_checkpoint, load_checkpoint

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TRAINER = (
    "max_steps: 6, batch_size: 8, log_every: 1, eval_every: 3, save_every: 2, keep_checkpoints: 9, "
    "ema_decay: 0.9, device: cpu"
)
#: nothing drawn at random in the model: processes draw each for themselves
COMMAND = ("classify/digits_vit", VIT, "encoding=table", "schedule.warmup_steps=2", "optimizer.layer_decay=0.8")


def launch(*commands: tuple[int, list[str]], fails: bool = False) -> str:
    """Runs commands, each on so many processes, one after the other; returns what was printed."""
    words: list[str] = []
    for num_processes, arguments in commands:
        words += [*(["--"] if words else []), str(num_processes), *arguments]
    command = [sys.executable, "tests/train/launch.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def arguments(folder: Path, digits_csv: str, *options: str, trainer: str = "") -> list[str]:
    return [*COMMAND, f"trainer={{{TRAINER}{trainer}}}", f"data.path={digits_csv}", f"output={folder}", *options]


def history(folder: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def assert_same_run(first: Path, second: Path) -> None:
    """Equal up to the order in which numbers are added."""
    for key in ("loss", "grad_norm", "lr", "train_accuracy", "test_loss", "test_accuracy"):
        assert history(first, key) == pytest.approx(history(second, key), rel=2e-5), key
    weights: list[Any] = []
    for folder in (first, second):
        last = last_checkpoint(folder / "checkpoints")
        assert last is not None
        weights.append(load_checkpoint(last).weights)
    for kind in ("model", "ema"):
        for name, value in weights[0][kind].items():
            torch.testing.assert_close(value, weights[1][kind][name], rtol=1e-4, atol=1e-5, msg=f"{kind} {name}")
    predictions = [
        [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
        for folder in (first, second)
    ]
    assert [p["index"] for p in predictions[0]] == [p["index"] for p in predictions[1]] == list(range(40))
    assert [p["loss"] for p in predictions[0]] == pytest.approx([p["loss"] for p in predictions[1]], rel=1e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, digits_csv: str) -> Path:
    """The same run on one process, on two with copies, and on two that share the model and sum the gradients of two parts."""
    folder = tmp_path_factory.mktemp("processes")
    said = launch(
        (1, arguments(folder / "one", digits_csv)),
        (2, arguments(folder / "ddp", digits_csv)),
        (2, arguments(folder / "fsdp2", digits_csv, trainer=", parallel: fsdp2, accumulate: 2")),
    )
    assert said.count("2 processes") == 2  # one of them speaks
    assert len(re.findall("^test accuracy", said, re.M)) == 3
    return folder


def test_two_processes_have_the_losses_of_one_whether_the_model_is_copied_or_shared(runs: Path) -> None:
    assert_same_run(runs / "ddp", runs / "one")
    assert_same_run(runs / "fsdp2", runs / "ddp")
    assert (runs / "fsdp2" / "maps.png").is_file()


@pytest.mark.long
@pytest.mark.parametrize(("before", "num_processes", "trainer"), [
    ("ddp", 1, ""),
    ("fsdp2", 1, ""),
    ("one", 2, ", parallel: fsdp2"),
])  # fmt: skip
def test_another_number_of_processes_goes_on_at_the_same_sample(
    before: str, num_processes: int, trainer: str, runs: Path, digits_csv: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / before, folder)
    (folder / "metrics.json").unlink()
    for step in (3, 4, 6):
        shutil.rmtree(folder / "checkpoints" / f"step_{step}")
    assert "continues after step 2 of 6" in launch((num_processes, arguments(folder, digits_csv, trainer=trainer)))
    assert_same_run(folder, runs / "one")


@pytest.mark.long
def test_a_batch_that_cannot_be_shared_out_is_refused_by_all(digits_csv: str, tmp_path: Path) -> None:
    said = launch((3, arguments(tmp_path / "run", digits_csv)), fails=True)
    assert "error: trainer.batch_size = 8: must be a multiple of 3" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_what_is_wrong_with_the_folder_ends_all(runs: Path, digits_csv: str, tmp_path: Path) -> None:
    shutil.copytree(runs / "one", tmp_path / "run")
    said = launch((2, arguments(tmp_path / "run", digits_csv, "optimizer.lr=0.5")), fails=True)
    assert "holds a run of another config:\n  - optimizer.lr: 0.002 -> 0.5" in said
    assert "finished before: test accuracy" in launch((2, arguments(tmp_path / "run", digits_csv)))


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments, "-m", "train"]


@pytest.mark.long
def test_one_process_that_fails_ends_all_with_its_error(image_folders: Path, tmp_path: Path) -> None:
    """Half of the batches hold a damaged image, which no more than one process meets first."""
    for name in ("0.png", "1.png"):
        (image_folders / "train" / "b" / name).write_bytes(b"no image")
    model = "model={name: relpos2d_vit_tiny_patch16_224, patch_size: 16, embed_dim: 24, depth: 1, num_heads: 3}"
    options = ["data.max_damaged=0", "data.image_size=32", "schedule.warmup_steps=1", f"output={tmp_path / 'run'}"]
    trainer = "trainer={max_steps: 9, batch_size: 2, save_every: 1, device: cpu}"
    command = [*torchrun("--nproc-per-node=2", f"--master-port={free_port()}"), "classify/image_folder", model, trainer]
    done = subprocess.run(
        [*command, f"data.path={image_folders}", *options],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert "error: 1 damaged examples, data.max_damaged = 0 are allowed: " in done.stderr
    assert ".png" in done.stderr
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.long
def test_two_machines_train_together(runs: Path, digits_csv: str, tmp_path: Path) -> None:
    """Two agents that know each other by an address only. What they write is the first one's."""
    port = free_port()
    machines = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        rendezvous = (
            f"--nnodes=2 --nproc-per-node=1 --node-rank={rank} --master-addr=127.0.0.1 --master-port={port}"
        ).split()
        machines.append(
            subprocess.Popen(
                [*torchrun(*rendezvous), *arguments(Path("run"), digits_csv)],
                cwd=tmp_path / str(rank),
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert_same_run(tmp_path / "0" / "run", runs / "one")
    assert not (tmp_path / "1" / "run").exists()
