"""How memory grows with the length of a text: linearly for numbers and rotations, in evaluation and in training."""

from typing import Any

import pytest
import torch

from relpos2d import list_encodings
from relpos2d.models import LanguageModel
from relpos2d.tools.memory import peak_bytes

LENGTHS = 4096, 16384
#: what an encoding is made with so that it is relative at these lengths, and does not grow with them
OPTIONS: dict[str, dict[str, Any]] = {"table": {"max_distance": 64}, "fire": {"init_length": 16384.0}}
NAMES = [i.name for i in list_encodings() if i.family in ("number", "rotation") and (i.axes is None or 1 in i.axes)]
#: of each family one; the others are long tests
QUICK = (("t5", False), ("rope", False), ("rope", True))


def peak(model: LanguageModel, length: int, training: bool) -> int:
    tokens = torch.randint(11, (1, length))

    def evaluate() -> None:
        with torch.no_grad():
            model.forward_features(tokens)

    def step() -> None:
        model.forward_features(tokens).square().mean().backward()
        model.zero_grad()

    return peak_bytes(step if training else evaluate)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(
            n, t, id=f"{n}-{'training' if t else 'evaluation'}", marks=[] if (n, t) in QUICK else [pytest.mark.long]
        )
        for n in NAMES
        for t in (False, True)
    ],
)
def test_memory_is_linear_in_the_length(name: str, training: bool) -> None:
    encoding = {"name": name, **OPTIONS.get(name, {})}
    model = LanguageModel(11, encoding=encoding, max_length=64, embed_dim=8, depth=1, num_heads=1).train(training)
    peak(model, 64, training)  # what is made once
    short, long = (peak(model, length, training) for length in LENGTHS)
    scores = 4 * LENGTHS[1] ** 2
    assert long < 4.5 * short, f"{short} bytes at {LENGTHS[0]} tokens, {long} at {LENGTHS[1]}"
    assert long < scores / 4, "a quarter of one number for each pair"
