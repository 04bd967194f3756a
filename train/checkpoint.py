"""Checkpoints that are complete or not there: written aside, flushed, then renamed; plain types and safetensors only."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LAST = "last"


def save_checkpoint(
    folder: Path,
    step: int,
    model: dict[str, torch.Tensor],
    optimizer: dict[str, Any],
    state: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Writes FOLDER/step_N with model.safetensors, optimizer.pt and state.json, then points FOLDER/last to it.

    Args:
        model: a state dict.
        optimizer: a state dict.
        state: further plain values; `step` is added.
        keep: how many checkpoints to keep, counting this one.
    """
    target, aside = folder / f"step_{step}", folder / f".step_{step}.{os.getpid()}"
    aside.mkdir(parents=True)
    try:
        # tied weights share memory, which safetensors refuses: each name gets a copy of its own
        save_file(
            {key: value.detach().cpu().contiguous().clone() for key, value in model.items()},
            aside / "model.safetensors",
        )
        torch.save(plain(optimizer), aside / "optimizer.pt")
        (aside / "state.json").write_text(json.dumps(plain({**state, "step": step}), indent=2) + "\n")
        for file in aside.iterdir():
            flush(file)
        if target.exists():  # the same step again: the old one goes only when the new one is complete
            shutil.rmtree(target)
        os.replace(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    replace_text(folder / LAST, f"{target.name}\n")
    for old in step_folders(folder)[:-keep]:
        if old != target:
            shutil.rmtree(old)
    return target


def load_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Model, optimizer and state of one step folder, or of the latest one in a folder of them.

    Raises:
        ValueError: there is no complete checkpoint.
    """
    found = folder if (folder / "state.json").is_file() else last_checkpoint(folder)
    if found is None:
        raise ValueError(f"{folder}: holds no checkpoint (step_N/model.safetensors, optimizer.pt, state.json)")
    optimizer = torch.load(found / "optimizer.pt", map_location="cpu", weights_only=True)
    return load_file(found / "model.safetensors"), optimizer, json.loads((found / "state.json").read_text())


def last_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `last` points to, else the one of the highest step. Half-written ones never get their name."""
    with contextlib.suppress(OSError):
        pointed = folder / (folder / LAST).read_text().strip()
        if (pointed / "state.json").is_file():
            return pointed
    steps = step_folders(folder)
    return steps[-1] if steps else None


def step_folders(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step_*") if path.name[5:].isdigit() and (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def plain(value: Any) -> Any:
    """Numpy's numbers and arrays as Python's and torch's own, so that safe loading accepts them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def replace_text(path: Path, text: str) -> None:
    """A whole new file or the old one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    flush(aside)
    os.replace(aside, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file or the names in a folder have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
