"""Where the tokens of a batch of texts stand, given its padding, its past and its packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from relpos2d.encoding import Encoding
from relpos2d.positions import Grid, Points, Positions

Side = Literal["none", "right", "left"]


@dataclass(frozen=True, eq=False)
class Places:
    """The places of one forward pass.

    Args:
        tokens: of the new tokens, counted from the first real one; for absolute encodings.
        queries: of the new tokens, for attention.
        keys: of the past and the new tokens, for attention.
        mask: (B, 1, 1, keys), which keys are real where `keys` does not tell; None: all.
    """

    tokens: Positions
    queries: Positions
    keys: Positions
    mask: Bool[Tensor, "batch 1 1 keys"] | None


def place(
    who: str,
    encoding: Encoding,
    num_tokens: int,
    mask: Bool[Tensor, "batch all_tokens"] | None = None,
    *,
    is_causal: bool = False,
    past: int = 0,
    segments: Int[Tensor, "batch tokens"] | None = None,
    token_types: Int[Tensor, "batch tokens"] | None = None,
) -> Places:
    """Place the new tokens of a batch behind `past` tokens that were read before.

    A lattice wherever the offsets are those of a lattice: padding on the left moves a whole text and changes no offset, so
    only encodings that know the true place (absolute ones, and those that know the query or the length) get Points.

    Args:
        who: stands in front of errors.
        encoding: of the attention.
        num_tokens: new tokens of each row.
        mask: which of all tokens, past ones first, are real.
        is_causal: no token sees a later one.
        past: tokens read before.
        segments: documents packed into one row: tokens see only their own, and are counted anew in each.
        token_types: which part of the text a token belongs to; encodings with a term for it hear it.

    Raises:
        ValueError: a row without a real token, with padding between real ones, or with a document in several pieces.
    """
    side: Side = "none" if mask is None else padding_side(who, mask)
    if side == "none":
        mask = None
    if segments is not None or token_types is not None:
        given = segments if segments is not None else token_types
        assert given is not None
        real = torch.ones_like(given, dtype=torch.bool) if mask is None else mask
        if segments is not None:
            _check_segments(who, segments, real)
        coords = _counted(real) if segments is None else _counted_anew(real, segments)
        points = Points(coords, mask, segments, token_types=token_types)
        return Places(points, points, points, None)
    keys = Grid(past + num_tokens)
    queries = Grid(num_tokens, origin=past) if past else keys
    if mask is None:
        return Places(queries, queries, keys, None)
    hidden = mask[:, None, None, :]
    if side == "right" and not encoding.knows_length:
        # nothing real comes behind padding: causality hides it from all real tokens
        return Places(queries, queries, keys, None if is_causal else hidden)
    all_tokens = Points(_counted(mask), mask)
    tokens = all_tokens.part(past, past + num_tokens) if past else all_tokens
    if encoding.knows_query or encoding.knows_length:
        return Places(tokens, tokens, all_tokens, None)
    return Places(tokens, queries, keys, hidden)


# what follows depends on values, which no compiler can
@torch.compiler.disable
def padding_side(who: str, mask: Bool[Tensor, "batch tokens"]) -> Side:
    """Where the padding of a batch is: nowhere, on the right of each row, or (also) on the left of some.

    Raises:
        ValueError: a row without a real token, or with padding between real ones.
    """
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    num_runs = begins.sum(dim=1)
    fewest, most, all_real, starts_real = torch.stack(
        (num_runs.amin(), num_runs.amax(), mask.all().long(), mask[:, 0].all().long())
    ).tolist()
    if fewest < 1:
        row = int(num_runs.argmin())
        raise ValueError(f"{who}: row {row} of mask has no real token; an empty text has nothing to read")
    if most > 1:
        row = int(num_runs.argmax())
        raise ValueError(f"{who}: row {row} of mask has padding between real tokens; allowed is padding at its ends")
    return "none" if all_real else "right" if starts_real else "left"


@torch.compiler.disable
def _check_segments(who: str, segments: Int[Tensor, "batch tokens"], real: Bool[Tensor, "batch tokens"]) -> None:
    """Refuse a document in several pieces: its tokens would be counted from 0 in each."""
    neighbours = real[:, 1:] & real[:, :-1]
    num_pieces = ((segments[:, 1:] != segments[:, :-1]) & neighbours).sum(dim=1)
    first = segments.gather(1, real.long().argmax(dim=1, keepdim=True))
    in_order = torch.where(real, segments, first).sort(dim=1).values
    num_documents = (in_order[:, 1:] != in_order[:, :-1]).sum(dim=1)
    torn = num_pieces != num_documents
    if bool(torn.any()):
        row = int(torn.long().argmax())
        raise ValueError(f"{who}: row {row} of segments has a document in several pieces; each must be in one")


def _counted(real: Bool[Tensor, "batch tokens"]) -> Tensor:
    """Real tokens in front of each token, as coordinates (B, N, 1)."""
    return (real.cumsum(dim=1) - 1).clamp(min=0)[..., None].float()


def _counted_anew(real: Bool[Tensor, "batch tokens"], segments: Int[Tensor, "batch tokens"]) -> Tensor:
    """Tokens in front of each token in its own document, as coordinates (B, N, 1)."""
    begins = torch.ones_like(real)
    begins[:, 1:] = (segments[:, 1:] != segments[:, :-1]) | ~real[:, :-1]
    index = torch.arange(real.shape[1], device=real.device).expand_as(segments)
    return (index - torch.where(begins, index, 0).cummax(dim=1).values)[..., None].float()
