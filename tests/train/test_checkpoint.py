"""Checkpoints are whole or not there."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from train import checkpoint
from train.checkpoint import last_checkpoint, load_checkpoint, save_checkpoint


def save(folder: Path, step: int, value: float = 1.0, **state: object) -> Path:
    layer = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(layer.weight, value)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights = {"weight": torch.full((2, 3), value), "tied": torch.full((2, 3), value)}
    return save_checkpoint(folder, step, weights, optimizer.state_dict(), dict(state))


def test_round_trip(tmp_path: Path) -> None:
    save(tmp_path, 7, value=2.5, note="x")
    model, optimizer, state = load_checkpoint(tmp_path)
    assert model["weight"].tolist() == [[2.5] * 3] * 2
    assert optimizer["state"][0]["step"] == 1
    assert state == {"note": "x", "step": 7}


def test_m9_numpy_numbers_become_plain_ones(tmp_path: Path) -> None:
    folder = save(
        tmp_path, 1, best=np.float64(0.5), count=np.int64(3), more={"list": [np.float32(0.25)], "on": np.bool_(True)}
    )
    assert load_checkpoint(folder)[2] == {"best": 0.5, "count": 3, "more": {"list": [0.25], "on": True}, "step": 1}
    save_checkpoint(tmp_path, 2, {}, {"lr": np.float64(0.1), "moments": np.ones(3)}, {})
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
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, value=2.0)
    monkeypatch.undo()
    assert load_checkpoint(tmp_path)[0]["weight"].unique().tolist() == [1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_1"]


def test_m6_killed_while_saving(tmp_path: Path) -> None:
    """SIGKILL at each of the places where a file has just been flushed."""
    places = range(6)
    for place in places:
        save(tmp_path / str(place), 1, value=1.0)
    script = f"""
        import os, signal, torch
        from pathlib import Path
        from train import checkpoint

        flush, calls = checkpoint.flush, []

        def save_and_die(place):
            def dying_flush(path):
                flush(path)
                calls.append(path)
                if len(calls) > place:
                    os.kill(os.getpid(), signal.SIGKILL)
            checkpoint.flush = dying_flush
            folder = Path({str(tmp_path)!r}) / str(place)
            checkpoint.save_checkpoint(folder, 2, {{"weight": torch.full((2, 3), 2.0)}}, {{}}, {{}})

        for place in {list(places)}:
            child = os.fork()
            if child == 0:
                save_and_die(place)
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    ends = [int(line) for line in done.stdout.split()]
    assert ends == [-signal.SIGKILL] * 5 + [0], done.stderr  # three files, the pointer, the folder; then all was saved
    steps = []
    for place in places:
        model, _, state = load_checkpoint(tmp_path / str(place))
        assert model["weight"].unique().tolist() == [float(state["step"])]
        assert last_checkpoint(tmp_path / str(place)) == tmp_path / str(place) / f"step_{state['step']}"
        steps.append(state["step"])
    assert steps == sorted(steps)
    assert steps[0] == 1
    assert steps[-1] == 2


def test_a_lost_pointer_falls_back_to_the_highest_step(tmp_path: Path) -> None:
    save(tmp_path, 9, value=9.0)
    save(tmp_path, 10, value=10.0)
    for text in (None, "step_77\n"):
        (tmp_path / "last").unlink(missing_ok=True)
        if text:
            (tmp_path / "last").write_text(text)
        assert load_checkpoint(tmp_path)[2]["step"] == 10


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_10", "step_11"]
    save(tmp_path, 11, value=5.0)  # the same step again
    assert load_checkpoint(tmp_path)[0]["weight"].unique().tolist() == [5.0]


def test_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_checkpoint(tmp_path)
