"""A trained model from its run's folder alone: the data that it was trained on need not be there."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import nn

from train.checkpoint import last_checkpoint, load_weights, misfits, read_state
from train.config import Backbone, Config, DetectorModel, load_config
from train.data.description import TextDescription, TokenDescription, read_description, read_tokenizer
from train.run_folder import CHECKPOINTS, CONFIG
from train.tasks.classify import create_backbone
from train.tasks.texts import create_text_model

Weights = Literal["auto", "model", "ema"]


@dataclass(frozen=True)
class Restored:
    """A trained model, in evaluation mode on the CPU, and what is known about it.

    Attributes:
        description: of the data of its task, as in data.json.
        folder: of the run.
        checkpoint: its step_N.
        tokenizer: of a model of text or speech.
    """

    config: Config
    model: nn.Module
    description: Any
    folder: Path
    checkpoint: Path
    step: int
    weights: Literal["model", "ema"]
    tokenizer: Tokenizer | None = None

    @property
    def is_text(self) -> bool:
        return isinstance(self.description, TextDescription)


def restore(checkpoint: str | Path, which: Weights = "auto", config: Config | None = None) -> Restored:
    """Builds a run's model in the size that it was trained in, and loads its weights.

    Args:
        checkpoint: a run's folder, its checkpoints/ (both: the latest complete checkpoint), or a step_N in there.
        which: the weights themselves, their moving average, or the average where there is one.
        config: the run's own with changes that leave the weights as they are.

    Raises:
        ValueError: no run, no complete checkpoint, a damaged one, or one of another model, encoding or tokenizer.
    """
    folder, found = find_checkpoint(Path(checkpoint))
    config = config or load_config(str(folder / CONFIG))
    description = read_description(folder, config.task)
    has_tokenizer = isinstance(description, TokenDescription)
    tokenizer = read_tokenizer(folder, description) if has_tokenizer else None
    model: nn.Module = model_maker(config.task)(without_pretrained(config), description)
    try:
        weights = load_weights(found, which)
        step = read_state(found)["step"]
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{found}: no readable checkpoint ({error})") from error
    load_strictly(model, weights, found, config)
    used: Literal["model", "ema"] = "ema" if which != "model" and (found / "ema.safetensors").is_file() else "model"
    return Restored(config, model.eval(), description, folder, found, step, used, tokenizer)


def model_maker(task: str) -> Callable[[Config, Any], nn.Module]:
    """What makes the model of a task from its config and the description of its data."""
    match task:
        case "classify":
            return create_backbone
        case "detect":
            from train.tasks.detect import create_detection_model

            return create_detection_model
        case "speech_recognition":
            from train.tasks.speech_recognition import create_speech_model

            return create_speech_model
    return create_text_model


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """The run's folder and the step_N that a path means.

    Raises:
        ValueError: the path is no part of a run, or holds no complete checkpoint.
    """
    wanted = f"a run's folder, its {CHECKPOINTS}/ or a step_N in there"
    if not path.is_dir():
        raise ValueError(
            f"checkpoint = {str(path)!r}: {'is a file' if path.exists() else 'no such folder'}; wanted: {wanted}"
        )
    above = path.resolve().parents
    folder = next((f for f in (path, *above[:2]) if (f / CONFIG).is_file()), None)
    if folder is None:
        raise ValueError(f"checkpoint = {str(path)!r}: is no run, it has no {CONFIG}; wanted: {wanted}")
    if folder != path and path.name.startswith("step_"):
        return folder, path
    found = last_checkpoint(folder / CHECKPOINTS)
    if found is None:
        raise ValueError(
            f"checkpoint = {str(path)!r}: the run has no complete checkpoint yet (step_N in {CHECKPOINTS}/)"
        )
    return folder, found


def without_pretrained(config: Config) -> Config:
    """The same config for a model whose weights come from a checkpoint: nothing is fetched for it."""
    if isinstance(config.model, Backbone):
        update = {"pretrained": False}
    elif isinstance(config.model, DetectorModel):
        update = {"load_pretrained": False}
    else:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update=update)})


def load_strictly(model: nn.Module, weights: dict[str, torch.Tensor], checkpoint: Path, config: Config) -> None:
    """Loads weights that fit exactly.

    Raises:
        ValueError: with what differs.
    """
    if different := misfits(model, weights):
        encodings = " + ".join(encoding.name for encoding in config.encodings)
        raise ValueError(
            f"{checkpoint}: is of another model or encoding than its run's {CONFIG} says, "
            f"{config.model.name} with {encodings}: {'; '.join(different)}"
        )
    model.load_state_dict(weights)


def to_device(name: str) -> torch.device:
    """The device of that name; auto: CUDA where there is one.

    Raises:
        ValueError: torch knows no such device, or this machine has none.
    """
    wanted = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:  # torch's ways of saying so
        raise ValueError(f"device = {name!r}: {str(error).splitlines()[0]}") from error
