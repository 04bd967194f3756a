"""What a trained model makes of texts: classes, how they go on, or what it writes about them."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos2d.models import generate
from train.data.tokenize import BOS, EOS, PAD, SEP, SPECIAL_TOKENS, encode_texts, pieces
from train.restore import Restored
from train.tasks.texts import beginning, trimmed

DEFAULT_TOP, DEFAULT_NEW_TOKENS = 5, 64


@dataclass(frozen=True)
class Text:
    """A text and what it is called: its file, or its own beginning."""

    name: str
    tokens: list[int]


def predict(given: argparse.Namespace, restored: Restored, device: torch.device) -> int:
    """Prints what the model says about each text; the exit code."""
    restored.model.to(device)
    texts: list[Text] = []
    num_failed = 0
    for name, text in named_texts(given):
        try:
            texts.append(Text(name, tokens_of(restored, name, text)))
        except ValueError as error:
            print(error, file=sys.stderr)
            num_failed += 1
    say = classes_of if restored.config.task == "text_classification" else writing
    for start in range(0, len(texts), given.batch_size):
        for line in say(given, restored, texts[start : start + given.batch_size], device):
            print(line)
    return 1 if num_failed else 0


def named_texts(given: argparse.Namespace) -> Iterator[tuple[str, str | Path]]:
    """The texts of the command line, and the files, a folder's *.txt in order."""
    for text in given.text:
        yield beginning(text), text
    for path in map(Path, given.files):
        found = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        yield from ((str(file), file) for file in found or [path])


def tokens_of(restored: Restored, name: str, text: str | Path) -> list[int]:
    """What the model reads of a text, or of a file with one: as in training, so its beginning where it is longer.

    Raises:
        ValueError: it cannot be read, or is empty.
    """
    assert restored.tokenizer is not None
    if isinstance(text, Path):
        try:
            text = text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: is not UTF-8, at byte {error.start} ({error.reason})") from error
        except OSError as error:
            raise ValueError(f"{name}: cannot be read ({error.strerror})") from error
    tokens: list[int] = []
    for number, part in enumerate(text.split(SPECIAL_TOKENS[SEP])):
        tokens += [SEP] * (number > 0)
        for piece in encode_texts(restored.tokenizer, pieces(part)):
            tokens += piece
    if not text.strip() or not tokens:
        raise ValueError(f"{name}: the text is empty")
    # a language model goes on with a text of any length
    return tokens if restored.config.task == "language_modeling" else tokens[: restored.description.max_length]


def classes_of(
    given: argparse.Namespace, restored: Restored, texts: Sequence[Text], device: torch.device
) -> Iterator[str]:
    """The most likely classes of each text."""
    tokens, lengths = padded([text.tokens for text in texts])
    with torch.no_grad():
        read, mask = trimmed(tokens.to(device), lengths.to(device))
        probabilities = restored.model(read, mask).softmax(dim=1).cpu()
    if not probabilities.isfinite().all():
        raise ValueError(f"{restored.checkpoint}: the model's outputs are not finite; its weights are spoilt")
    for text, row in zip(texts, probabilities, strict=True):
        predictions = top(row, restored.description.classes, given.top or DEFAULT_TOP)
        yield as_json(text.name, predictions) if given.json else as_text(text.name, predictions)


def padded(texts: Sequence[list[int]], left: bool = False) -> tuple[Tensor, Tensor]:
    """(texts, longest) tokens and their numbers, with padding behind them or before."""
    longest = max(map(len, texts))
    rows = [[PAD] * (longest - len(text)) * left + text + [PAD] * (longest - len(text)) * (not left) for text in texts]
    return torch.tensor(rows), torch.tensor([len(text) for text in texts])


def writing(
    given: argparse.Namespace, restored: Restored, texts: Sequence[Text], device: torch.device
) -> Iterator[str]:
    """How a language model goes on with each text, or what an encoder-decoder writes about it."""
    is_language_model = restored.config.task == "language_modeling"
    tokens, lengths = padded([text.tokens for text in texts], left=is_language_model)
    mask = None
    if lengths.min() < lengths.max():
        places = torch.arange(tokens.shape[1])
        first = tokens.shape[1] - lengths[:, None]
        mask = (places >= first if is_language_model else places < lengths[:, None]).to(device)
    options = restored.config.generation.given() if restored.config.generation else {}
    if given.num_beams:
        options["num_beams"] = given.num_beams
    longest = DEFAULT_NEW_TOKENS if is_language_model else restored.description.max_target_length - 1
    options |= {} if is_language_model else {"bos_id": BOS}
    longest = given.max_new_tokens or longest
    model: Any = restored.model
    written = generate(model, tokens.to(device), mask, max_new_tokens=longest, eos_id=EOS, **options)
    assert restored.tokenizer is not None
    for text, new in zip(texts, restored.tokenizer.decode_batch(written.tolist()), strict=True):
        yield json.dumps({"path": text.name, "generated": new}) if given.json else f"{text.name}\n  {new}"


def top(probabilities: Tensor, classes: Sequence[str], count: int) -> list[tuple[str, float]]:
    """The most likely classes, the likeliest first; at most as many as there are."""
    best = probabilities.topk(min(count, len(classes)))
    return [(classes[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def as_json(name: str | Path, predictions: Sequence[tuple[str, float]]) -> str:
    named: list[dict[str, Any]] = [{"class": label, "probability": p} for label, p in predictions]
    return json.dumps({"path": str(name), "predictions": named})


def as_text(name: str | Path, predictions: Sequence[tuple[str, float]]) -> str:
    longest = max(len(label) for label, _ in predictions)
    return "\n".join([str(name), *(f"  {label:<{longest}}  {p:6.1%}" for label, p in predictions)])
