"""What the tasks that read or write text share: their models, batches cut to their longest text, and sums over the processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn
from torch.utils.data import Dataset

from train.config import OWN_MODELS, Config, encoding_argument
from train.data.description import TOKENIZER, TextDescription, describe
from train.data.stream import evaluation_batches
from train.tasks import Records

LONGEST_SHOWN = 80  # characters of a text in a record


class TextTask:
    """Data, model and files of a task that reads or writes text; what is minimised and measured is for the subclass to say.

    Attributes:
        length: how many tokens are read at once in an evaluation; None: as in training.
    """

    length: int | None = None
    notes: tuple[str, ...] = ()

    def __init__(self, config: Config):
        self.data = self.load(config)
        self.train_data, self.max_damaged = self.data.train, self.data.max_damaged
        self.batch_size = config.trainer.batch_size // config.trainer.accumulate
        self.num_workers = config.trainer.num_workers
        self.smoothing = config.loss.smoothing
        self.generation = config.generation
        self.about = describe(config.task, self.data)
        self.files = {TOKENIZER: json.dumps(json.loads(self.data.tokenizer.to_str()))}  # ASCII, whatever the system
        self.model = self.create_model(config)

    def load(self, config: Config) -> Any:
        """The data, with a tokenizer."""
        return config.data.load(config.seed)

    def create_model(self, config: Config) -> nn.Module:
        """The model, in the size of the data."""
        return create_text_model(config, self.about)

    def description(self) -> str:
        return self.about.model_dump_json(indent=2) + "\n"

    def pictures(self, folder: Path, records: Records, model: nn.Module) -> list[Path]:
        return []

    def batches(self, dataset: Dataset[Any], accelerator: Accelerator) -> Iterator[tuple[list[int], Any]]:
        """This process's share of a test split, on its device. No index for an example that is not its own."""
        share = (accelerator.process_index, accelerator.num_processes)
        size = max(1, self.batch_size // accelerator.num_processes)
        for indices, batch in evaluation_batches(dataset, size, self.num_workers, *share, self.max_damaged):
            yield indices, send_to_device(batch, accelerator.device)


def create_text_model(config: Config, about: TextDescription) -> nn.Module:
    """The configured model with the configured encoding, in the size of the data.

    Raises:
        ValueError: the model cannot be built like this, with what it said.
    """
    sizes: list[int] = [about.vocab_size]
    if hasattr(about, "classes"):
        sizes.append(len(about.classes))
    longest = max(about.max_length, getattr(about, "max_target_length", 0))
    options = {"max_length": longest, **config.model.given()}
    try:
        return OWN_MODELS[config.model.name](*sizes, encoding=encoding_argument(config), **options)
    except ValueError as error:
        raise ValueError(f"model {config.model.name} with {options}: {error}") from error


def trimmed(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tokens up to the longest text of the batch, and which of them are real: None if all are."""
    longest, shortest = int(lengths.max()), int(lengths.min())
    mask = None if shortest == longest else torch.arange(longest, device=tokens.device) < lengths[:, None]
    return tokens[:, :longest], mask


def next_token_losses(logits: Tensor, tokens: Tensor, counts: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cross entropy of each token that follows another, 0 behind the end of a text.

    Args:
        logits: (batch, tokens - 1 or fewer, vocabulary), from the tokens but the last.
        tokens: (batch, tokens).
        counts: (batch,) how many of them are to be predicted.
    """
    targets = tokens[:, 1 : 1 + logits.shape[1]]
    losses = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing
    ).view(targets.shape)
    return losses * (torch.arange(targets.shape[1], device=tokens.device) < counts[:, None])


def gathered(records: Records) -> Records:
    """The records of all processes, by index."""
    return sorted(gather_object(records), key=lambda record: record["index"])


def beginning(text: str) -> str:
    """The start of a text in one line, for a record."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_SHOWN else line[: LONGEST_SHOWN - 3] + "..."
