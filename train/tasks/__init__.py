"""What a task is to the loop, and the tasks by the names that configs use."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from train.config import Config

Records = list[dict[str, Any]]


class Task(Protocol):
    """Owns the model, the data, the loss and the evaluation. The loop knows nothing else about what is learned."""

    model: nn.Module
    train_data: Dataset[Any]
    max_damaged: int  # how many examples may turn out unreadable
    score: str  # the key of `evaluate` that one would show first
    records_name: str  # where the records are written: predictions.jsonl
    files: dict[str, str]  # what is written beside data.json, by name
    notes: tuple[str, ...]  # what one should be told of the model before it is trained

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a batch, and further scalars to log."""

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        """Metrics over exactly the whole test split, and what they were computed from, one record an example."""

    def description(self) -> str:
        """What the users of the trained model must know of the data, as JSON: written as data.json."""

    def pictures(self, folder: Path, records: Records, model: nn.Module) -> list[Path]:
        """Draws what was learned, and returns the files.

        Args:
            model: as it was evaluated, whole and on the CPU.
        """


def create_task(config: "Config") -> Task:
    """The configured task with its data and its model."""
    return task_class(config.task)(config)


def task_class(name: str) -> Any:
    """The class behind a name of `task`; each is imported when it is wanted."""
    match name:
        case "classify":
            from train.tasks.classify import Classify

            return Classify
        case "detect":
            from train.tasks.detect import Detect

            return Detect
        case "text_classification":
            from train.tasks.text_classification import TextClassification

            return TextClassification
        case "language_modeling":
            from train.tasks.language_modeling import LanguageModeling

            return LanguageModeling
        case "sequence_to_sequence":
            from train.tasks.sequence_to_sequence import SequenceToSequence

            return SequenceToSequence
        case "speech_recognition":
            from train.tasks.speech_recognition import SpeechRecognition

            return SpeechRecognition
    raise ValueError(f"task = {name!r}: there is none of this name")
