"""The door of attention: checks what comes in, chooses a way, asks the encoding for its parts, and hands them over."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Literal, overload
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from relpos2d.attention import explicit, flex, lattice, lowrank, sdpa
from relpos2d.attention.choice import BACKENDS, Explanation, Request, choose
from relpos2d.attention.explicit import repeated
from relpos2d.eager import runs_eagerly
from relpos2d.encoding import (
    MAX_KEPT_BYTES,
    Encoding,
    LatticeNumbers,
    Prepared,
    Projections,
    autocast_state,
    sequence_length,
)
from relpos2d.positions import Grid, Points, Positions, real_tokens, visible


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | Prepared,
    q_pos: Positions,
    k_pos: Positions | None = None,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    memory_limit: int | None = None,
    project: Projections | None = None,
    explain: Literal[False] = False,
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | Prepared,
    q_pos: Positions,
    k_pos: Positions | None = None,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    memory_limit: int | None = None,
    project: Projections | None = None,
    explain: Literal[True],
) -> tuple[Tensor, Explanation]: ...
def attend(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch heads keys head_dim"],
    v: Float[Tensor, "batch heads keys value_dim"],
    encoding: Encoding | Prepared,
    q_pos: Positions,
    k_pos: Positions | None = None,
    *,
    mask: Shaped[Tensor, "..."] | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    memory_limit: int | None = None,
    project: Projections | None = None,
    explain: bool = False,
) -> (
    Float[Tensor, "batch heads queries value_dim"] | tuple[Float[Tensor, "batch heads queries value_dim"], Explanation]
):
    """softmax(scale * q . k + what the encoding adds + mask) v, with the places of queries and keys.

    Args:
        q, k, v: (B, heads, N, head_dim), v of any number of channels; equal heads and dtypes.
        encoding: an encoding, or what its `prepare` returned for these positions.
        q_pos: places of the queries, and of the keys if k_pos is None.
        k_pos: places of the keys.
        mask: bool (True: may be seen) or added to the scores; broadcast to (B, heads, Nq, Nk). Its batch may also be a part of
            B: it is repeated, as the masks of shifted windows are for every image.
        is_causal: a query sees only keys whose coordinate is not larger than its own (one axis only).
        dropout_p: dropout of the attention weights; the caller gives 0 outside training.
        scale: of the scores, head_dim ** -0.5 unless given.
        backend: "explicit", "sdpa", "flex", "lowrank" (not exact), or "auto" for the fastest that is right.
        memory_limit: bytes that may be held beside inputs and output; None: as many as the fastest way takes.
        project: the functions (channels to heads * head_dim) that made q and k of the tokens, for an encoding that projects its
            vectors with them too (`deberta` with share_projections).
        explain: return the output and an `Explanation` of the way that was taken.

    Returns:
        (B, heads, Nq, channels of v) in the dtype of q. A query that may see no key has output 0.

    Raises:
        ValueError: shapes, dtypes or positions that do not fit, an unknown backend, one that cannot do this, or a memory limit that
            no way keeps.
    """
    for name, given in (("q_pos", q_pos), ("k_pos", q_pos if k_pos is None else k_pos)):
        if not isinstance(given, Grid | Points):
            raise ValueError(f"attend: {name}={given!r} must be a Grid, for example Grid(14, 14), or Points")
    if not isinstance(encoding, Encoding | Prepared):
        raise ValueError(f"attend: encoding is a {type(encoding).__name__}, allowed is what create_encoding() makes")
    prepared = encoding if isinstance(encoding, Prepared) else None
    if isinstance(encoding, Prepared):
        if encoding.q_pos != q_pos or (k_pos is not None and encoding.k_pos != k_pos):
            raise ValueError(f"attend: prepared for {encoding.q_pos} and {encoding.k_pos}, given {q_pos} and {k_pos}")
        k_pos, encoding = encoding.k_pos, encoding.encoding
    k_pos = q_pos if k_pos is None else k_pos
    _check(q, k, v, encoding, q_pos, k_pos, mask, backend)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"attend: dropout_p={dropout_p} must be between 0 and 1")
    if is_causal and q_pos.num_axes != 1:
        raise ValueError(f"is_causal: needs one axis, the positions have {q_pos.num_axes}")
    if memory_limit is not None and memory_limit < 0:
        raise ValueError(f"attend: memory_limit={memory_limit} must be a number of bytes, at least 0")
    request = Request(
        q,
        k,
        v,
        encoding,
        encoding.numbers(q_pos, k_pos) if prepared is None else prepared.numbers,
        q_pos,
        k_pos,
        mask=None if mask is None else mask[(None,) * (4 - mask.ndim)],
        is_causal=is_causal and not _all_in_the_past(q_pos, k_pos),
        dropout_p=dropout_p,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        is_prepared=prepared is not None,
        project=project,
    )
    explanation = choose(request, backend, memory_limit)
    if explanation.backend == "lowrank":
        out, error = _lowrank(request)
        explanation = dataclasses.replace(explanation, error=error)
    else:
        out = _run(request, explanation)
    return (out, explanation) if explain else out


def _run(request: Request, explanation: Explanation) -> Tensor:
    match explanation.way:
        case "score_mod":
            return _flex(request)
        case "no mask" | "is_causal":
            q, k = request.turned()
            causal = explanation.way == "is_causal"
            return F.scaled_dot_product_attention(
                q, k, request.v, is_causal=causal, dropout_p=request.dropout_p, scale=request.scale
            )
        case "view" | "bands":
            return lattice.attend(request)
        case "dense":
            return _whole(request, fused=True)
        case "whole":
            return _whole(request, fused=False)
        case "blocks":
            return _in_blocks(request, explanation.num_rows)
    raise AssertionError(explanation.way)


def _whole(request: Request, *, fused: bool) -> Tensor:
    """With a number for each pair of tokens, through the fused kernel or in plain tensor code."""
    q, k, v, encoding, q_pos, k_pos = request.q, request.k, request.v, request.encoding, request.q_pos, request.k_pos
    batch = q.shape[0]
    mask, seen_queries, seen_keys = _added(request)
    # what nobody sees may hold anything, also NaN, and 0 * NaN would reach the valid outputs
    real_q = real_tokens(q_pos)
    if real_q is not None:
        q = torch.where(real_q[:, None, :, None], q, 0)
    if seen_keys is not None:
        k, v = (torch.where(repeated(seen_keys, batch), x, 0) for x in (k, v))

    score = encoding.score(q, k, q_pos, k_pos, request.scale, request.project)
    if score is not None:
        mask = score if mask is None else repeated(mask[(None,) * (4 - mask.ndim)], batch) + score
    q, k = dataclasses.replace(request, q=q, k=k).turned()

    if fused:
        out = sdpa.attend(q, k, v, mask, request.scale, request.dropout_p)
    else:
        out = explicit.attend(
            q, k, v, mask, request.scale, request.dropout_p, lambda weights: encoding.value(weights, q_pos, k_pos)
        )
    return out if seen_queries is None else torch.where(repeated(seen_queries, batch), out, 0)


Added = tuple[Tensor | None, Tensor | None, Tensor | None]
_KEPT: WeakKeyDictionary[LatticeNumbers, tuple[object, Tensor | None, Added] | None] = WeakKeyDictionary()


def _added(request: Request) -> Added:
    """What is added to the scores but for vectors, and who is seen: see `_combine_masks`.

    An encoding in evaluation gives the very same numbers again and again; what was made of them and of an equal mask is kept
    with them, from their second use on.
    """
    numbers, mask = request.numbers, request.mask
    if not isinstance(numbers, LatticeNumbers) or request.trains_numbers or not request.q.is_cpu or not runs_eagerly():
        return _all_added(request)
    key = request.q_pos, request.k_pos, request.is_causal, request.q.dtype, autocast_state()
    if numbers not in _KEPT:
        _KEPT[numbers] = None
        return _all_added(request)
    kept = _KEPT[numbers]
    if kept is not None:
        kept_key, kept_mask, added = kept
        same_mask = kept_mask is mask is None or (
            kept_mask is not None
            and mask is not None
            and kept_mask.dtype == mask.dtype
            and torch.equal(kept_mask, mask)
        )
        if kept_key == key and same_mask:
            return added
    # a tensor made in inference mode would be refused by the next training step
    with torch.inference_mode(False), torch.no_grad():
        added = _all_added(request)
        if sum(x.nbytes for x in added if x is not None) <= MAX_KEPT_BYTES:
            _KEPT[numbers] = key, None if mask is None else mask.clone(), added
    return added


def _all_added(request: Request) -> Added:
    q, q_pos, k_pos = request.q, request.q_pos, request.k_pos
    given = request.mask
    if given is not None and not request.on_grids:
        given = repeated(given, q.shape[0])
    mask, seen_queries, seen_keys = _combine_masks(
        given, visible(q_pos, k_pos, is_causal=request.is_causal, device=q.device), q.dtype
    )
    bias = request.numbers
    if isinstance(bias, LatticeNumbers):
        bias = bias.bias()
    elif bias is None:
        bias = request.encoding.bias(q_pos, k_pos)
    if bias is not None:
        mask = bias if mask is None else mask + bias
    return mask, seen_queries, seen_keys


def _flex(request: Request) -> Tensor:
    numbers = request.numbers if isinstance(request.numbers, LatticeNumbers) else None
    assert isinstance(request.q_pos, Grid)
    assert isinstance(request.k_pos, Grid)
    k, v, mask = request.k, request.v, request.mask
    if mask is not None:  # what nobody sees may hold anything, also NaN
        seen = mask if mask.dtype == torch.bool else mask.to(k.dtype) != float("-inf")
        seen = repeated(seen.any(-2).unsqueeze(-1), k.shape[0])
        k, v = torch.where(seen, k, 0), torch.where(seen, v, 0)
    q, k = dataclasses.replace(request, k=k).turned()
    lattice = request.q_pos.lattice(request.k_pos)
    return flex.attend(q, k, v, numbers, mask=mask, is_causal=request.is_causal, scale=request.scale, lattice=lattice)


def _lowrank(request: Request) -> tuple[Tensor, float]:
    """The output, and the largest error of the bias."""
    assert isinstance(request.numbers, LatticeNumbers)
    k, v, mask = request.k, request.v, request.mask
    batch, seen_queries = k.shape[0], None
    if mask is not None:
        causal = visible(request.q_pos, request.k_pos, is_causal=request.is_causal, device=k.device)
        mask, seen_queries, seen_keys = _combine_masks(mask, causal, k.dtype)
        assert mask is not None
        mask = repeated(mask, batch)
        if seen_keys is not None:
            k, v = (torch.where(repeated(seen_keys, batch), x, 0) for x in (k, v))
    q, k = dataclasses.replace(request, k=k).turned()
    out, factors = lowrank.attend(
        q, k, v, request.numbers,
        mask=mask, is_causal=request.is_causal, scale=request.scale, dropout_p=request.dropout_p,
    )  # fmt: skip
    return out if seen_queries is None else torch.where(repeated(seen_queries, batch), out, 0), factors.error


def _in_blocks(request: Request, num_rows: int) -> Tensor:
    """In plain tensor code, some rows of queries at a time; a backward pass makes them again."""
    if request.encoding.knows_length:  # that of all queries, not of those of a block
        length = sequence_length(request.q_pos, request.k_pos, device=request.q.device)
        request = dataclasses.replace(request, length=length)
    start = row = 0
    parts = []
    while start < request.q.shape[2]:
        pos = request.q_pos.part(row, row + num_rows)
        stop = start + pos.num_tokens
        mask = request.mask
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, start:stop]
        block = dataclasses.replace(request, q_pos=pos, mask=mask, numbers=None)

        def attended(q: Tensor, k: Tensor, v: Tensor, block: Request = block) -> Tensor:
            return _whole(dataclasses.replace(block, q=q, k=k, v=v), fused=False)

        inputs = request.q[:, :, start:stop], request.k, request.v
        kept = not torch.is_grad_enabled()
        parts.append(attended(*inputs) if kept else checkpoint(attended, *inputs, use_reentrant=False))
        start, row = stop, row + num_rows
    return torch.cat(parts, dim=2)


def _all_in_the_past(q_pos: Positions, k_pos: Positions) -> bool:
    """Whether every query sees every key though attention is causal, as one query behind a long cache does."""
    if not isinstance(q_pos, Grid) or not isinstance(k_pos, Grid) or q_pos.num_prefix_tokens:
        return False
    # plain numbers: a compiler that takes a size as a symbol knows no fractions
    last_key = float(k_pos.origin[0]) + float(k_pos.step[0]) * (k_pos.shape[0] - 1)
    return float(q_pos.origin[0]) >= last_key


def _combine_masks(
    mask: Tensor | None, seen: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The additive mask (None: nothing), which queries see any key (..., Nq, 1), and which keys anyone sees (..., Nk, 1).

    A query that sees nothing is shown everything, so that softmax stays finite, and its output is dropped afterwards. Where
    everything is seen, and a look at it costs no wait for a device, the last two are None.
    """
    if mask is None and seen is None:
        return None, None, None
    added = None
    if seen is not None:
        seen = seen[:, None]
    if mask is not None:
        if mask.dtype == torch.bool:
            allowed = mask
        else:
            # in the dtype of the scores first: the lowest float32, a common mask, is -inf in half precision
            added = mask.to(dtype)
            allowed = added != float("-inf")
        seen = allowed if seen is None else allowed & seen
    assert seen is not None
    if added is not None and seen.device.type == "cpu" and runs_eagerly() and bool(seen.all()):
        return added, None, None
    seen_queries, seen_keys = seen.any(dim=-1, keepdim=True), seen.any(dim=-2).unsqueeze(-1)
    if added is None:
        added = torch.zeros_like(seen, dtype=dtype)
    added = added.masked_fill(~seen & seen_queries, float("-inf")).masked_fill(~seen_queries, 0.0)
    return added, seen_queries, seen_keys


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding,
    q_pos: Positions,
    k_pos: Positions,
    mask: Tensor | None,
    backend: str,
) -> None:
    if backend not in BACKENDS:
        close = difflib.get_close_matches(str(backend), BACKENDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"attend: backend={backend!r} must be one of {', '.join(BACKENDS)}{hint}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise ValueError(f"attend: {name} is {x.dtype}, allowed are floating point numbers")
        if x.ndim != 4:
            raise ValueError(f"attend: {name} has shape {tuple(x.shape)}, allowed is (B, heads, N, head_dim)")
        if x.dtype != q.dtype:
            raise ValueError(f"attend: {name} is {x.dtype} and q is {q.dtype}; all need the same dtype")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"attend: {name} has a batch of {x.shape[0]} and q of {q.shape[0]}; all need the same")
        if x.shape[1] != encoding.num_heads:
            raise ValueError(f"attend: {name} has {x.shape[1]} heads, the encoding is made for {encoding.num_heads}")
    for name, x in (("q", q), ("k", k)):
        if x.shape[-1] != encoding.head_dim:
            raise ValueError(f"attend: {name} has head_dim={x.shape[-1]}, the encoding is made for {encoding.head_dim}")
    for name, x, pos in (("q", q, q_pos), ("k", k, k_pos), ("v", v, k_pos)):
        if x.shape[-2] != pos.num_tokens:
            raise ValueError(f"attend: {name} has {x.shape[-2]} tokens, its positions {pos} have {pos.num_tokens}")
    for pos in (q_pos, k_pos):
        if pos.num_axes != encoding.positions.num_axes:
            raise ValueError(f"attend: {pos} has {pos.num_axes} axes, the encoding is made for {encoding.positions}")
        if isinstance(pos, Points) and pos.places.shape[0] not in (1, q.shape[0]):
            raise ValueError(f"attend: Points have a batch of {pos.places.shape[0]}, q has one of {q.shape[0]}")
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"attend: mask is {mask.dtype}, allowed are bool (True: may be seen) and floating point")
        allowed = (*q.shape[:3], k.shape[2])
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        fits = len(shape) == 4 and all(size in (1, full) for size, full in zip(shape[1:], allowed[1:], strict=True))
        if not fits or shape[0] < 1 or q.shape[0] % shape[0]:
            raise ValueError(f"attend: mask has shape {tuple(mask.shape)}, allowed is what broadcasts to {allowed}")
