"""Tiny models of text with every parameter redrawn, and batches of texts with padding."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from relpos2d import Grid, create_encoding, list_encodings
from relpos2d.models import EncoderDecoder, LanguageModel, TextClassifier
from relpos2d.models.token_model import TokenModel

VOCAB_SIZE = 19
NUM_CLASSES = 5
SMALL: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 3, "max_length": 12}
#: encodings that have a meaning on a line
NAMES = [info.name for info in list_encodings() if info.axes is None or 1 in info.axes]
#: a sum with an absolute member, and one whose members differ in kind
SUMS = [["learned", "alibi"], ["sincos", "table", "rope_axial"]]
SPECS: list[Any] = [*NAMES, *SUMS]
#: those that decode step by step as they read the whole
DECODING = [spec for spec in SPECS if not create_encoding(spec, 3, 8, Grid(12)).knows_length]
Model = TypeVar("Model", bound=TokenModel)


def build(cls: type[Model], encoding: Any = "none", *, seed: int = 1, **kwargs: Any) -> Model:
    """A tiny model in float64 and eval mode, every parameter redrawn from a seed."""
    sizes = (kwargs.pop("vocab_size", VOCAB_SIZE), *([NUM_CLASSES] if cls is TextClassifier else []))
    state = torch.get_rng_state()  # what a test draws must not depend on the model that it builds
    model = cls(*sizes, encoding=encoding, **{**SMALL, **kwargs}).double().eval()
    draw(model, seed)
    torch.set_rng_state(state)
    return model


def draw(model: TokenModel, seed: int) -> None:
    """Redraw every parameter, norm weights too; the same for the same seed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)


def texts(*lengths: int) -> list[Tensor]:
    """A text (1, N) of each length."""
    return [torch.randint(VOCAB_SIZE, (1, length)) for length in lengths]


def batch(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Token ids and mask of texts padded on one side, with any ids as padding."""
    longest = max(row.shape[1] for row in rows)
    token_ids = torch.randint(VOCAB_SIZE, (len(rows), longest))
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        where = slice(longest - row.shape[1], None) if side == "left" else slice(row.shape[1])
        token_ids[number, where], mask[number, where] = row[0], True
    return token_ids, mask


def logits(model: TokenModel, token_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What a model says, as one row for each text: (B, N, V), or (B, 1, classes) of a classifier.

    An encoder-decoder reads the text and writes it again.
    """
    if isinstance(model, TextClassifier):
        return model(token_ids, mask)[:, None]
    if isinstance(model, EncoderDecoder):
        return model(token_ids, token_ids, mask, mask)
    assert isinstance(model, LanguageModel)
    return model(token_ids, mask)
