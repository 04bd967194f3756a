"""data.json: what the users of a trained model must know of its data, so that these need not be there."""

import hashlib
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError
from tokenizers import Tokenizer

from train.data.tokenize import check_fits
from train.schema import Node

DESCRIPTION, TOKENIZER = "data.json", "tokenizer.json"


class Description(Node):
    """What a classifier sees, and what its outputs are called. Written beside a run, read when its model is used."""

    classes: tuple[str, ...] = Field(min_length=1)
    num_channels: PositiveInt
    height: PositiveInt
    width: PositiveInt
    mean: tuple[float, ...]
    std: tuple[PositiveFloat, ...]


class BoxDescription(Node):
    """What a detector sees, and what its labels 1, 2, ... are called. `category_ids`: as the annotations have them."""

    classes: tuple[str, ...] = Field(min_length=1)
    category_ids: tuple[int | str, ...]
    mean: tuple[float, float, float]
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class TokenDescription(Node):
    """What every model that reads or writes tokens must know. `tokenizer`: the checksum of tokenizer.json beside it."""

    vocab_size: PositiveInt
    tokenizer: str


class TextDescription(TokenDescription):
    """What every model of text must know; lengths are in tokens."""

    max_length: PositiveInt


class LabelledDescription(TextDescription):
    """For a classifier of texts. `groups`: for each class the question that it answers."""

    classes: tuple[str, ...] = Field(min_length=1)
    groups: tuple[str, ...] | None = None


class RunningDescription(TextDescription):
    """For a language model."""


class PairsDescription(TextDescription):
    """For a model from text to text."""

    max_target_length: PositiveInt


class SpeechDescription(TokenDescription):
    """For a recogniser of speech. `sample_rate` in Hz, `max_duration` of a recording in training, in seconds."""

    sample_rate: PositiveInt
    max_duration: PositiveFloat


AnyDescription = (
    Description | BoxDescription | LabelledDescription | RunningDescription | PairsDescription | SpeechDescription
)
DESCRIPTIONS: dict[str, type[Any]] = {
    "classify": Description,
    "detect": BoxDescription,
    "text_classification": LabelledDescription,
    "language_modeling": RunningDescription,
    "sequence_to_sequence": PairsDescription,
    "speech_recognition": SpeechDescription,
}


def describe(task: str, data: Any) -> Any:
    """The description of loaded data."""
    fields = DESCRIPTIONS[task].model_fields
    known: dict[str, Any] = {}
    if "tokenizer" in fields:
        known = {"vocab_size": data.tokenizer.get_vocab_size(), "tokenizer": checksum(data.tokenizer)}
    return DESCRIPTIONS[task](**known, **{name: getattr(data, name) for name in fields if name not in known})


def read_description(folder: Path, task: str = "classify") -> Any:
    """The description in a run's folder.

    Raises:
        ValueError: there is none, or none that can be read.
    """
    path = folder / DESCRIPTION
    try:
        return DESCRIPTIONS[task].model_validate_json(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder}: holds no {DESCRIPTION}, which a run writes when it starts") from None
    except (ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no readable description of data ({' '.join(str(error).split())})") from error


def checksum(tokenizer: Tokenizer) -> str:
    """Of all that makes up a tokenizer."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def read_tokenizer(folder: Path, description: TokenDescription) -> Tokenizer:
    """The tokenizer that a run was trained with.

    Raises:
        ValueError: there is none in its folder, none that can be read, or another.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{folder}: holds no {TOKENIZER}, which a run on text or speech writes when it starts")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: no readable tokenizer ({error})") from error
    tokenizer.encode_special_tokens = True  # as in training, which its file does not say
    try:
        check_fits(tokenizer, description.vocab_size)
        check_same_tokenizer(tokenizer, description)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return tokenizer


def check_same_tokenizer(tokenizer: Tokenizer, description: TokenDescription) -> None:
    """Holds a tokenizer against the one of training.

    Raises:
        ValueError: it is another.
    """
    if checksum(tokenizer) != description.tokenizer:
        raise ValueError(
            f"a tokenizer that does not fit the checkpoint: its tokens or rules are others than those of training "
            f"(checksum {checksum(tokenizer)[:8]} instead of {description.tokenizer[:8]})"
        )
