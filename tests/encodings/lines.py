"""Lines of tokens, attention on them pair by pair, and what holds for every encoding of vectors on a line."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import relpos2d
from relpos2d import Encoding, Grid, attend, create_encoding
from tests.oracles import gradients, grid_places, pair_attention, redraw
from tests.tolerances import assert_close

#: (head, offset of the query from the key, query, key) -> what is added to the score before the scale
OfPair = Callable[[int, float, Tensor, Tensor], Tensor]

#: as many queries as keys, fewer, more, a continued cache, one query behind a cache, prefix tokens, places between the tokens
LINES = [
    (Grid(5), Grid(5)),
    (Grid(3), Grid(6)),
    (Grid(6), Grid(3)),
    (Grid(2, origin=5), Grid(7)),
    (Grid(1, origin=6), Grid(7)),
    (Grid(4, num_prefix_tokens=2), Grid(3, num_prefix_tokens=1)),
    (Grid(3, origin=0.25), Grid(4)),
    (Grid(5), Grid(6).pool(2)),
]


def made(name: str, num_heads: int = 2, head_dim: int = 4, **options: Any) -> Encoding:
    encoding = create_encoding(name, num_heads, head_dim, Grid(5), dtype=torch.float64, **options)
    redraw(encoding)
    return encoding


def qkv(encoding: Encoding, num_queries: int, num_keys: int, batch: int = 2) -> list[Tensor]:
    return [
        torch.randn(batch, encoding.num_heads, size, encoding.head_dim, dtype=torch.float64, requires_grad=True)
        for size in (num_queries, num_keys, num_keys)
    ]


def assert_pair_by_pair(
    encoding: Encoding,
    q_pos: Grid,
    k_pos: Grid,
    of_pair: OfPair,
    *,
    everywhere: Callable[[int, Tensor, Tensor], Tensor | float] = lambda h, q, k: 0.0,
    value: Callable[[float], Tensor] | None = None,
    project: Any = None,
    leaves: Sequence[Tensor] = (),
) -> None:
    """attend() is the softmax of the pairs' numbers: output, and gradients of q, k, v, `leaves` and every parameter.

    `everywhere` is added also where a prefix token takes part.
    """
    scale = 0.7
    q, k, v = qkv(encoding, q_pos.num_tokens, k_pos.num_tokens)
    places = []
    for grid in (q_pos, k_pos):
        line = grid_places(grid.shape, [float(s) for s in grid.step], [float(o) for o in grid.origin])
        places.append([None] * grid.num_prefix_tokens + [place for (place,) in line])

    def number(b: int, h: int, i: int, j: int) -> Tensor | float:
        total = everywhere(h, q[b, h, i], k[b, h, j])
        if places[0][i] is not None and places[1][j] is not None:
            total = total + of_pair(h, places[0][i] - places[1][j], q[b, h, i], k[b, h, j])
        return scale * float(encoding.strength) * total

    def joins(b: int, h: int, i: int, j: int) -> Tensor | float:
        if value is None or places[0][i] is None or places[1][j] is None:
            return 0.0
        return float(encoding.strength) * value(places[0][i] - places[1][j])

    expected = pair_attention(q, k, v, scale, number, value=joins)
    out = attend(q, k, v, encoding, q_pos, k_pos, scale=scale, project=project)
    assert_close(out, expected)
    inputs = [q, k, v, *leaves, *(p for p in encoding.parameters() if p.requires_grad)]
    for ours, theirs in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(ours, theirs)


def mixed(row: Callable[[int], Tensor], offset: float) -> Tensor:
    """Between whole offsets: of the two around it, the nearer counts more."""
    low = int(offset // 1)
    share = offset - low
    return row(low) if not share else (1 - share) * row(low) + share * row(low + 1)


def scores(encoding: Encoding, q: Tensor, k: Tensor, length: int) -> Tensor:
    """The scores of a line of equal queries and equal keys."""
    grid = Grid(length)
    q, k = (x[:, :, :1].expand(-1, -1, length, -1) for x in (q, k))
    score = encoding.score(q, k, grid, grid, 1.0)
    assert score is not None
    return score[0]


def assert_relative_at_every_length(encoding: Encoding) -> None:
    """Lines of 2, 7 and 33 tokens feel the offset alone, and one more token changes nothing that was there."""
    q, k, _ = qkv(encoding, 1, 1)
    for length in (2, 7, 33):
        relpos2d.check(encoding, Grid(length))
        here, longer = scores(encoding, q, k, length), scores(encoding, q, k, length + 1)
        assert_close(longer[:, :length, :length], here)
        assert_close(longer[:, 1:, 1:], here)
        assert not torch.equal(here[:, 0, 0], here[:, 1, 0])
