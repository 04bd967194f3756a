"""The door of attention: checks what comes in, asks the encoding for its parts, and hands them to a backend."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from relpos2d.attention import explicit, sdpa
from relpos2d.encoding import Encoding, Prepared
from relpos2d.positions import Points, Positions, real_tokens, visible

BACKENDS = ("auto", "explicit", "sdpa")


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
) -> Float[Tensor, "batch heads queries value_dim"]:
    """softmax(scale * q . k + what the encoding adds + mask) v, with the places of queries and keys.

    Args:
        q, k, v: (B, heads, N, head_dim); equal heads and dtypes.
        encoding: an encoding, or what its `prepare` returned for these positions.
        q_pos: places of the queries, and of the keys if k_pos is None.
        k_pos: places of the keys.
        mask: bool (True: may be seen) or added to the scores; broadcast to (B, heads, Nq, Nk).
        is_causal: a query sees only keys whose coordinate is not larger than its own (one axis only).
        dropout_p: dropout of the attention weights; the caller gives 0 outside training.
        scale: of the scores, head_dim ** -0.5 unless given.
        backend: "explicit", "sdpa", or "auto" for the fastest that is right.

    Returns:
        (B, heads, Nq, head_dim) in the dtype of q. A query that may see no key has output 0.

    Raises:
        ValueError: shapes, dtypes or positions that do not fit, an unknown backend, or one that cannot do this encoding.
    """
    prepared = encoding if isinstance(encoding, Prepared) else None
    if isinstance(encoding, Prepared):
        if encoding.q_pos != q_pos or (k_pos is not None and encoding.k_pos != k_pos):
            raise ValueError(f"attend: prepared for {encoding.q_pos} and {encoding.k_pos}, given {q_pos} and {k_pos}")
        k_pos, encoding = encoding.k_pos, encoding.encoding
    k_pos = q_pos if k_pos is None else k_pos
    _check(q, k, v, encoding, q_pos, k_pos, mask, backend)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"attend: dropout_p={dropout_p} must be between 0 and 1")
    bias = encoding.bias(q_pos, k_pos) if prepared is None else prepared.bias
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    mask, seen_queries, seen_keys = _combine_masks(
        mask, visible(q_pos, k_pos, is_causal=is_causal, device=q.device), q.dtype
    )
    # what nobody sees may hold anything, also NaN, and 0 * NaN would reach the valid outputs
    real_q = real_tokens(q_pos)
    if real_q is not None:
        q = torch.where(real_q[:, None, :, None], q, 0)
    if seen_keys is not None:
        k, v = (torch.where(seen_keys, x, 0) for x in (k, v))

    if bias is not None:
        mask = bias.to(q.dtype) if mask is None else mask + bias.to(q.dtype)
    content = encoding.content(q, k)
    score = encoding.score(q, k, q_pos, k_pos, scale)
    if score is not None:
        mask = score if mask is None else mask + score

    if content is not None:
        q = q + (content * encoding.strength).to(q.dtype)
    q = encoding.rotate(q, q_pos, "query")
    k = encoding.rotate(k, k_pos, "key")
    needs_weights = any(term.meets == "value" for term in encoding.terms())
    if backend == "sdpa" and needs_weights:
        raise ValueError(f"attend: backend 'sdpa' has no weights to give to {type(encoding).__name__}, use 'explicit'")
    # torch's fused CPU kernel has no gradient for its mask and falls back to unfused code; against that the plain path was up to
    # a quarter faster on single attentions, and 2 % slower in a whole Swin-T
    unfused = backend == "auto" and mask is not None and mask.requires_grad and mask.device.type == "cpu"
    if backend == "explicit" or needs_weights or unfused:
        out = explicit.attend(q, k, v, mask, scale, dropout_p, lambda weights: encoding.value(weights, q_pos, k_pos))
    else:
        out = sdpa.attend(q, k, v, mask, scale, dropout_p)
    return out if seen_queries is None else torch.where(seen_queries, out, 0)


def _combine_masks(
    mask: Tensor | None, seen: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The additive mask (None: nothing), which queries see any key (..., Nq, 1), and which keys anyone sees (..., Nk, 1).

    A query that sees nothing is shown everything, so that softmax stays finite, and its output is dropped afterwards.
    """
    if mask is None and seen is None:
        return None, None, None
    added = None
    if seen is not None:
        seen = seen[:, None]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        if mask.dtype == torch.bool:
            allowed = mask
        else:
            # in the dtype of the scores first: the lowest float32, a common mask, is -inf in half precision
            added = mask.to(dtype)
            allowed = added != float("-inf")
        seen = allowed if seen is None else allowed & seen
    assert seen is not None
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
        raise ValueError(f"attend: backend={backend!r} must be one of {', '.join(BACKENDS)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
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
        if len(shape) != 4 or any(size not in (1, full) for size, full in zip(shape, allowed, strict=True)):
            raise ValueError(f"attend: mask has shape {tuple(mask.shape)}, allowed is what broadcasts to {allowed}")
