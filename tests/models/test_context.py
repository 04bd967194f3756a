"""Which frames see which, frame by frame, and attention in blocks against attention of all pairs under a mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from relpos2d.models import ConformerCTC
from relpos2d.models.context import Context, Sight
from relpos2d.positions import Grid
from relpos2d.tools.memory import peak_bytes
from tests.models.hearing import SPECS, build
from tests.oracles import gradients
from tests.refusals import refuses
from tests.tolerances import assert_close

BOUNDED = [Context(None, 3, 2), Context(None, 0, 4), Context(None, 1, 0), Context(None, 0, 0)]
BOUNDED += [Context(4, 3), Context(2, 5), Context(5, 0), Context(1, 4)]
BOUNDED += [Context(None, 40, 50), Context(None, 2, 50), Context(40, 3), Context(4, 50)]
UNBOUNDED = [Context(None, 2, None), Context(None, None, 1), Context(3), Context()]
FRAMES = 13
LENGTHS = [13, 1, 6]


def sees(context: Context, query: int, key: int) -> bool:
    """By what the words say."""
    if context.chunk_size is None:
        before, behind = query - key, key - query
        return (context.left is None or before <= context.left) and (context.right is None or behind <= context.right)
    start = query // context.chunk_size * context.chunk_size
    return key < start + context.chunk_size and (context.left is None or key >= start - context.left)


def dense(context: Context, num_frames: list[int]) -> Sight:
    """Attention of all pairs, those that are not seen hidden by a mask."""
    pairs = [
        [[sees(context, i, j) and j < length for j in range(FRAMES)] for i in range(FRAMES)] for length in num_frames
    ]
    return Sight(Grid(FRAMES), Grid(FRAMES), torch.tensor(pairs)[:, None])


def encoded(model: ConformerCTC, sight: Sight, x: Tensor, num_frames: Tensor) -> Tensor:
    real = torch.arange(FRAMES) < num_frames[:, None]
    return torch.where(real[..., None], model.encode(x, sight, real)[0], 0)


def assert_equal_to_dense(encoding: Any, context: Context, **options: Any) -> None:
    sizes = {"chunk_size": context.chunk_size} if context.chunk_size else {}
    model = build(encoding, left_context=context.left, right_context=context.right, depth=1, **sizes, **options)
    x = torch.randn(len(LENGTHS), FRAMES, 12, dtype=torch.float64, requires_grad=True)
    num_frames = torch.tensor(LENGTHS)
    real = torch.arange(FRAMES) < num_frames[:, None]
    sight = model.context.sight("test", model.an_encoding, num_frames, real)
    assert bool(sight.block_size) == context.is_bounded
    out = encoded(model, sight, x, num_frames)
    expected = encoded(model, dense(context, LENGTHS), x, num_frames)
    assert_close(out, expected)
    leaves = [x, *(p for p in model.an_encoding.parameters() if p.requires_grad)]
    leaves += [model.blocks[0].attention.q_proj.weight, model.blocks[0].attention.v_proj.weight]
    for mine, other in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("context", BOUNDED + UNBOUNDED, ids=str)
def test_equals_attention_of_all_pairs(context: Context) -> None:
    assert_equal_to_dense("transformer_xl", context)


@pytest.mark.parametrize("encoding", SPECS, ids=str)
def test_every_encoding_in_blocks(encoding: Any) -> None:
    """Also those that know the place of the query, and one for all blocks of the model."""
    assert_equal_to_dense(encoding, Context(None, 3, 2))
    assert_equal_to_dense(encoding, Context(3, 4), shared_encoding=True)


def test_seen() -> None:
    for context in BOUNDED + UNBOUNDED:
        queries, keys = torch.arange(-4, 9), torch.arange(-9, 14)
        expected = [[sees(context, int(i), int(j)) for j in keys] for i in queries]
        assert context.seen(queries, keys).tolist() == expected


def test_blocks_hold_about_two_copies_of_a_key() -> None:
    real = torch.ones(1, 1000, dtype=torch.bool)
    encoding = build("alibi").an_encoding
    for context in (Context(None, 20, 10), Context(4, 30), Context(16, 8)):
        sight = context.sight("test", encoding, torch.tensor([1000]), real)
        keys = sight.keys_of(torch.zeros(1, 3, 1000, 4))
        assert keys.shape[0] * keys.shape[2] < 2.2 * 1000
        assert keys.shape[2] == sight.keys.num_tokens


def test_a_view_beyond_the_ends_costs_nothing() -> None:
    real = torch.ones(1, FRAMES, dtype=torch.bool)
    for context in (Context(None, 10**9, 10**9), Context(None, 10**9, 1), Context(10**9, 10**9), Context(4, 10**9)):
        sight = context.sight("test", build("alibi").an_encoding, torch.tensor([FRAMES]), real)
        assert sight.queries.num_tokens < 2 * FRAMES
        assert sight.keys.num_tokens < 4 * FRAMES


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{"left_context": 8, "right_context": 4}, {"chunk_size": 8, "left_context": 8}])
def test_memory_is_linear_in_the_length(options: dict[str, int], training: bool) -> None:
    model = build("transformer_xl", depth=1, **options).float().train(training)

    def peak(num_frames: int) -> int:
        samples, num_samples = torch.zeros(1, 64 * num_frames), torch.tensor([64 * num_frames])

        def hear() -> None:
            with torch.set_grad_enabled(training):
                out = model(samples, num_samples).log_probs
            if training:
                out.sum().backward()
                model.zero_grad()

        return peak_bytes(hear)

    peak(50)  # what is made once
    short, long = peak(1000), peak(4000)
    assert long < 4.5 * short, f"{short} bytes for 1000 frames, {long} for 4000"
    assert long < 3 * 4 * 4000**2 / 4, "a quarter of one number for each pair and head"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((0, None, None), "chunk_size=0 must be a whole number of at least 1, or None"),
        ((2.0, None, None), "chunk_size=2.0 must be a whole number"),
        ((None, -1, 2), "left_context=-1 must be a whole number of at least 0, or None"),
        ((None, 1, True), "right_context=True must be a whole number"),
        ((4, 4, 0), "right_context=0 goes beyond a chunk.*give chunk_size=4 or right_context, not both"),
    ],
)
def test_refuses_what_is_no_context(sizes: tuple[Any, Any, Any], text: str) -> None:
    with refuses(text):
        Context(*sizes)
