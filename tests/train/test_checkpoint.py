"""Checkpoints are whole or not there."""

import json
import os
import signal
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.forks import in_a_fork
from train import checkpoint
from train.checkpoint import (
    Checkpoint,
    CheckpointError,
    last_checkpoint,
    load_checkpoint,
    load_weights,
    read_state,
    remove_unfinished,
    replace_text,
    save_checkpoint,
)


def save(
    folder: Path, step: int, value: float = 1.0, keep: int = 2, average: float | None = None, **state: object
) -> Path:
    layer = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(layer.weight, value)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights = {"model": {"weight": torch.full((2, 3), value), "tied": torch.full((2, 3), value)}}
    if average is not None:
        weights["ema"] = {"weight": torch.full((2, 3), average)}
    return save_checkpoint(folder, Checkpoint(step, weights, optimizer.state_dict(), dict(state)), keep)


def last(folder: Path) -> Checkpoint:
    found = last_checkpoint(folder)
    assert found is not None
    return load_checkpoint(found)


def test_round_trip(tmp_path: Path) -> None:
    save(tmp_path, 7, value=2.5, average=1.5, note="x")
    checkpoint = last(tmp_path)
    assert checkpoint.weights["model"]["weight"].tolist() == [[2.5] * 3] * 2
    assert checkpoint.weights["ema"]["weight"].tolist() == [[1.5] * 3] * 2
    assert checkpoint.optimizer["state"][0]["step"] == 1
    assert (checkpoint.step, checkpoint.state) == (7, {"note": "x"})


@pytest.mark.parametrize("written", [None, "0.0.1"])
def test_f7_another_version_is_told(tmp_path: Path, written: str | None) -> None:
    step = save(tmp_path, 3)
    state = json.loads((step / "state.json").read_text())
    assert state["version"] == version("relpos2d")
    assert "version" not in read_state(step)  # and no warning
    state.pop("version")
    (step / "state.json").write_text(json.dumps(state if written is None else {**state, "version": written}))
    by = "a version of relpos2d that did not record which" if written is None else "relpos2d 0.0.1"
    with pytest.warns(UserWarning, match=f"step_3: written by {by}, read by {version('relpos2d')}"):
        assert read_state(step)["step"] == 3


def test_weights_are_the_average_where_there_is_one(tmp_path: Path) -> None:
    with_average, without = save(tmp_path, 1, value=2.5, average=1.5), save(tmp_path, 2, value=3.5)
    values = [
        load_weights(folder, which)["weight"].unique().item()
        for folder, which in ((with_average, "auto"), (with_average, "model"), (with_average, "ema"), (without, "auto"))
    ]
    assert values == [1.5, 2.5, 1.5, 3.5]
    with pytest.raises(ValueError, match=r"step_2: holds no ema.safetensors"):
        load_weights(without, "ema")


def test_m9_numpy_numbers_become_plain_ones(tmp_path: Path) -> None:
    folder = save(
        tmp_path, 1, best=np.float64(0.5), count=np.int64(3), more={"list": [np.float32(0.25)], "on": np.bool_(True)}
    )
    assert load_checkpoint(folder).state == {"best": 0.5, "count": 3, "more": {"list": [0.25], "on": True}}
    optimizer = {"lr": np.float64(0.1), "moments": np.ones(3)}
    save_checkpoint(tmp_path, Checkpoint(2, {"model": {}}, optimizer, {}))
    loaded = torch.load(tmp_path / "step_2" / "optimizer.pt", weights_only=True)
    assert loaded["lr"] == 0.1
    assert type(loaded["lr"]) is float
    assert torch.equal(loaded["moments"], torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("broken", ["save_file", "flush", "replace"])
def test_m6_a_failed_save_leaves_the_last_checkpoint(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, value=1.0)

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os if broken == "replace" else checkpoint, broken, fail)
    message = r"step 2 could not be written into .* \(No space left on device\); the last one there is step_1"
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 2, value=2.0)
    monkeypatch.undo()
    assert last(tmp_path).weights["model"]["weight"].unique().tolist() == [1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_m6_a_file_that_may_not_grow_is_like_a_full_disk(tmp_path: Path) -> None:
    """The system itself refuses to write: at different places, whichever file meets the limit first."""
    save(tmp_path, 1)

    def save_within_limits() -> str:
        import resource  # which Windows has not

        errors = []
        for size, limit in ((100_000, 65_536), (10, 2_048), (10, 100)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            many = {str(i): torch.zeros(3) for i in range(50)}
            with pytest.raises(CheckpointError) as caught:
                save_checkpoint(tmp_path, Checkpoint(2, {"model": {"w": torch.zeros(size)}}, many, {}))
            errors.append(str(caught.value))
        return "\n".join(errors)

    code, said = in_a_fork(save_within_limits)
    assert code == 0
    lines = said.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("the checkpoint of step 2 could not be written into ") for line in lines)
    assert all(line.endswith("the last one there is step_1") for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert last(tmp_path).step == 1


def test_m6_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"step 1 could not be written into .*; there is none yet"):
        save(tmp_path / "file" / "checkpoints", 1)
    with pytest.raises(OSError, match=r"metrics.json could not be written"):
        replace_text(tmp_path / "file" / "metrics.json", "{}")


def test_m6_killed_while_saving(tmp_path: Path) -> None:
    """SIGKILL at each of the places where something has just been flushed."""
    places = range(8)
    for place in places:
        save(tmp_path / str(place), 1, value=1.0)
    flush, calls = checkpoint.flush, []

    def save_and_die(place: int) -> str:
        def dying_flush(path: Path) -> None:
            flush(path)
            calls.append(path)
            if len(calls) > place:
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.flush = dying_flush
        save_checkpoint(tmp_path / str(place), Checkpoint(2, {"model": {"weight": torch.full((2, 3), 2.0)}}, {}, {}))
        return ""

    ends = [in_a_fork(partial(save_and_die, place))[0] for place in places]
    assert ends == [-signal.SIGKILL] * 6 + [0] * 2  # four files and two folders; then all was saved
    steps = []
    for place in places:
        found = last(tmp_path / str(place))
        assert found.weights["model"]["weight"].unique().tolist() == [float(found.step)]
        steps.append(found.step)
        remove_unfinished(tmp_path / str(place))
        assert all(path.name.startswith("step_") for path in (tmp_path / str(place)).iterdir())
    assert steps == sorted(steps)
    assert steps[0] == 1
    assert steps[-1] == 2


DAMAGE = {
    "truncated": lambda folder: os.truncate(folder / "model.safetensors", 40),
    "one bit": lambda folder: flip(folder / "model.safetensors", -1),
    "one bit of the optimizer": lambda folder: flip(folder / "optimizer.pt", 200),
    "one bit of the counters": lambda folder: flip(folder / "state.json", 5),
    "empty": lambda folder: (folder / "state.json").write_text(""),
    "missing": lambda folder: (folder / "optimizer.pt").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: os.truncate(folder / "manifest.json", 90),
    "no file named": lambda folder: (folder / "manifest.json").write_text("{}"),
    "list": lambda folder: (folder / "manifest.json").write_text("[1]"),
}


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGE)
def test_m6_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path) -> None:
    save(tmp_path, 1, value=1.0)
    DAMAGE[damage](save(tmp_path, 2, value=2.0))
    with pytest.warns(UserWarning, match=r"step_2: .*; looking for an earlier checkpoint"):
        assert last(tmp_path).step == 1
    with pytest.raises(ValueError, match="step_2: "):
        load_checkpoint(tmp_path / "step_2")
    save(tmp_path, 2, value=3.0)  # come to that step again
    assert last(tmp_path).weights["model"]["weight"].unique().tolist() == [3.0]


def test_steps_are_numbers(tmp_path: Path) -> None:
    save(tmp_path, 9)
    save(tmp_path, 10)
    (tmp_path / "step_11.tmp").mkdir()
    (tmp_path / "step_12").write_text("no folder")
    assert last(tmp_path).step == 10


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11"]
    save(tmp_path, 12, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11", "step_12"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    assert last_checkpoint(tmp_path / "absent") is None
