"""Checkpoints that are complete or not there: written aside, flushed, then renamed; plain types and safetensors only."""

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

Weights = dict[str, torch.Tensor]

MANIFEST, STATE, OPTIMIZER = "manifest.json", "state.json", "optimizer.pt"


class CheckpointError(OSError):
    """A checkpoint could not be written; what was there before still is."""


@dataclass(frozen=True)
class Checkpoint:
    """What one step folder holds.

    Attributes:
        step: how many steps had been taken.
        weights: state dicts by name: `model`, and `ema` where an average is kept.
        optimizer: its state dict.
        state: further plain values.
    """

    step: int
    weights: dict[str, Weights]
    optimizer: dict[str, Any]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Writes FOLDER/step_N: NAME.safetensors, optimizer.pt, state.json, and manifest.json with the checksum of each.

    Args:
        folder: made if need be. One process at a time may write here.
        keep: how many checkpoints to keep, counting this one.

    Raises:
        CheckpointError: the disk is full, the folder read-only, ...; older checkpoints are untouched.
    """
    target, aside = folder / f"step_{checkpoint.step}", folder / f".step_{checkpoint.step}.{os.getpid()}"
    state = {**checkpoint.state, "step": checkpoint.step, "version": version("relpos2d")}
    try:
        aside.mkdir(parents=True)
        for name, weights in checkpoint.weights.items():
            # tied weights share memory, which safetensors refuses: each name gets a copy of its own
            copies = {key: value.detach().cpu().contiguous().clone() for key, value in weights.items()}
            save_file(copies, aside / f"{name}.safetensors")
        torch.save(plain(checkpoint.optimizer), aside / OPTIMIZER)
        (aside / STATE).write_text(json.dumps(plain(state), indent=2) + "\n")
        checksums = {file.name: checksum(file) for file in sorted(aside.iterdir())}
        (aside / MANIFEST).write_text(json.dumps(checksums, indent=2) + "\n")
        for file in aside.iterdir():
            flush(file)
        flush(aside)
        if target.exists():  # a damaged one that was passed over: a good one of this step would have been continued
            shutil.rmtree(target)
        os.replace(aside, target)
        flush(folder)
    except (
        OSError,
        SafetensorError,
        RuntimeError,
    ) as error:  # torch and safetensors have their own words for a full disk
        shutil.rmtree(aside, ignore_errors=True)
        kept = step_folders(folder)
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} could not be written into {folder} ({error}); "
            + (f"the last one there is {kept[-1].name}" if kept else "there is none yet")
        ) from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for old in step_folders(folder)[:-keep]:
        try:
            if old != target:
                shutil.rmtree(old)
        except OSError as error:  # somebody reads it over a network
            warnings.warn(f"{old}: could not be removed ({error})", stacklevel=2)
    return target


def load_checkpoint(folder: Path) -> Checkpoint:
    """All of one step folder.

    Raises:
        ValueError: it is damaged.
    """
    if damage := damage_of(folder):
        raise ValueError(f"{folder}: {damage}")
    state = read_state(folder)
    weights = {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
    optimizer = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    return Checkpoint(state.pop("step"), weights, optimizer, state)


def read_state(folder: Path) -> dict[str, Any]:
    """The plain values of one step folder. A warning says if another version of this library wrote it, which may have computed
    something else of the same weights.

    Raises:
        OSError, ValueError: there are none that can be read.
    """
    state = json.loads((folder / STATE).read_text())
    written, own = state.pop("version", None), version("relpos2d")
    if written != own:
        by = f"relpos2d {written}" if written else "a version of relpos2d that did not record which"
        warnings.warn(f"{folder}: written by {by}, read by {own}", stacklevel=2)
    return state


def load_weights(folder: Path, which: Literal["auto", "model", "ema"] = "auto") -> Weights:
    """The weights of one step folder: the average where one was kept (auto), the trained ones, or the average.

    Raises:
        ValueError: there are none of this kind, or they are damaged.
    """
    names = {"auto": ("ema", "model"), "model": ("model",), "ema": ("ema",)}[which]
    for name in names:
        file = folder / f"{name}.safetensors"
        if file.is_file():
            if damage := damage_of(folder, file.name):
                raise ValueError(f"{folder}: {damage}")
            return load_file(file)
    raise ValueError(f"{folder}: holds no {' or '.join(f'{name}.safetensors' for name in names)}")


def misfits(model: nn.Module, weights: Weights) -> list[str]:
    """Why weights do not fit a model exactly, no name too few or too many, no shape that would have to be resized."""
    own = model.state_dict()
    shapes = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    found = {
        "it lacks": [name for name in own if name not in weights],
        "it holds besides": [name for name in weights if name not in own],
        "of another shape:": shapes,
    }
    return [
        f"{what} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for what, names in found.items()
        if names
    ]


def last_checkpoint(folder: Path) -> Path | None:
    """The step folder of the highest step that is whole. Damaged ones are passed over, with a warning each."""
    for candidate in reversed(step_folders(folder)):
        damage = damage_of(candidate)
        if damage is None:
            return candidate
        warnings.warn(f"{candidate}: {damage}; looking for an earlier checkpoint", stacklevel=2)
    return None


def damage_of(folder: Path, *names: str) -> str | None:
    """What is wrong with a step folder (or with some of its files), None if nothing is."""
    try:
        checksums = json.loads((folder / MANIFEST).read_text())
        expected = names or tuple(checksums)
        if not names and not {STATE, OPTIMIZER, "model.safetensors"} <= set(checksums):
            return f"{MANIFEST} does not name all files of a checkpoint"
        for name in expected:
            if checksum(folder / name) != checksums[name]:
                return f"{name} is damaged (its checksum differs from {MANIFEST})"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"is not readable ({error})"
    return None


def checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def step_folders(folder: Path) -> list[Path]:
    """All step folders, whole or not, by step."""
    found = [path for path in folder.glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def remove_unfinished(folder: Path) -> None:
    """What a killed process had not finished writing."""
    for aside in folder.glob(".step_*"):
        shutil.rmtree(aside, ignore_errors=True)


def set_aside_after(folder: Path, step: int) -> None:
    """Renames the step folders after a step, which were damaged and passed over: so they do not count as kept ones."""
    for later in step_folders(folder):
        if int(later.name[5:]) > step:
            aside = folder / f"damaged_{later.name}"
            shutil.rmtree(aside, ignore_errors=True)
            later.replace(aside)


def plain(value: Any) -> Any:
    """Numpy's numbers and arrays as Python's and torch's own, so that safe loading accepts them."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def replace_text(path: Path, text: str) -> None:
    """A whole new file or the old one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text)
        flush(aside)
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written ({error})") from error
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file or the names in a folder have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
