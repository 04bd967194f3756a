"""Attention between two grids with a number per distinct offset: prefix tokens, padded keys and the future join the view here."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from relpos2d.attention import explicit, fused
from relpos2d.attention.choice import Request, hiding_channel, lattice_view
from relpos2d.attention.explicit import repeated
from relpos2d.encoding import LatticeNumbers
from relpos2d.positions import Grid


def attend(request: Request) -> Tensor:
    """The request, by `fused`: among the tokens with a place as a view; prefix keys are merged in, prefix queries done apart."""
    k, v = request.k, request.v
    prefix_q, prefix_k = request.q_pos.num_prefix_tokens, request.k_pos.num_prefix_tokens
    mask = None if request.mask is None else repeated(request.mask, request.q.shape[0])
    if mask is not None:  # what nobody sees may hold anything, also NaN
        seen = mask.transpose(-1, -2)
        k, v = torch.where(seen, k, 0), torch.where(seen, v, 0)
    q, k = dataclasses.replace(request, k=k).turned()
    numbers = request.numbers if isinstance(request.numbers, LatticeNumbers) else None
    prefix = None if numbers is None else numbers.prefix

    places = q[:, :, prefix_q:]
    seen_places = None if mask is None else mask[..., -request.k_pos.num_places :]
    out, lse = _among_places(request, places, k[:, :, prefix_k:], v[:, :, prefix_k:], seen_places)
    if prefix_k:
        scores = ((places * request.scale) @ k[:, :, :prefix_k].transpose(-1, -2)).to(lse.dtype)
        if prefix is not None:
            scores = scores + prefix[1, :, None, None]
        if mask is not None:
            scores = scores.masked_fill(~mask[..., :prefix_k], float("-inf"))
        total = torch.cat((lse.unsqueeze(-1), scores), dim=-1).logsumexp(-1, keepdim=True)
        weights = F.dropout((scores - total).exp(), request.dropout_p)
        share = (lse.unsqueeze(-1) - total).exp()
        out = out * share.to(out.dtype) + weights.to(out.dtype) @ v[:, :, :prefix_k]
    if prefix_q:
        out = torch.cat((_from_prefix(request, q[:, :, :prefix_q], k, v, mask, prefix), out), dim=2)
    return out if mask is None else torch.where(mask.any(-1, keepdim=True), out, 0)


def _among_places(request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the queries with a place over the keys with a place; mask (B, 1, 1, keys)."""
    assert isinstance(request.q_pos, Grid)
    assert isinstance(request.k_pos, Grid)
    lattice, rows = lattice_view(request.q_pos, request.k_pos, is_causal=request.is_causal)
    heads, dim, scale = q.shape[1], q.shape[-1], request.scale
    if isinstance(request.numbers, LatticeNumbers):
        values = request.numbers.values.reshape(heads, *lattice.shape)
    else:
        values = torch.zeros(lattice.shape, device=q.device).expand(heads, *lattice.shape)
    if mask is not None:
        # a mask of keys fits into no view of numbers per offset; one more channel of q and k carries it
        channel = q.new_zeros(mask.shape).masked_fill(~mask, hiding_channel(scale, q.dtype)).transpose(-1, -2)
        q, v = F.pad(q, (0, 1), value=1.0), F.pad(v, (0, 1))
        k = torch.cat((k, channel.expand(k.shape[0], heads, -1, -1)), dim=-1)

    def attended(heads: slice) -> tuple[Tensor, Tensor]:
        numbers = lattice.rows(values[heads])
        if rows.visible is not None:
            future = torch.arange(numbers.shape[-1], device=q.device) > rows.visible
            numbers = numbers.masked_fill(future, float("-inf"))
        return fused.attend(q[:, heads], k[:, heads], v[:, heads], numbers[None], rows, scale, request.dropout_p)

    at_once = max(1, fused.SCRATCH_BYTES // rows.unfolded_bytes(1, values.itemsize))
    # one seed for all heads: a recomputation with gradients must drop the same weights
    if rows.is_view or torch.is_grad_enabled() or at_once >= heads or request.dropout_p:
        out, lse = attended(slice(None))
    else:  # never the unfolded numbers of all heads
        out = q.new_empty(q.shape[0], q.shape[2], heads, q.shape[-1]).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for h in range(0, heads, at_once):
            group = slice(h, min(h + at_once, heads))
            out[:, group], lse[:, group] = attended(group)
    return out[..., :dim], lse


def _from_prefix(
    request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, prefix: Tensor | None
) -> Tensor:
    """Output of the prefix queries, which are few, over all keys."""
    prefix_k, keys = request.k_pos.num_prefix_tokens, request.k_pos.num_places
    added = None
    if prefix is not None:
        to_places, among = prefix[0, :, None], prefix[2, :, None]
        added = torch.cat((among.expand(-1, prefix_k), to_places.expand(-1, keys)), dim=-1).unsqueeze(1)
    if request.is_causal:  # the prefix is in front of all places
        seen = torch.arange(prefix_k + keys, device=q.device) < prefix_k
        mask = seen.expand(1, 1, 1, -1) if mask is None else mask & seen
    if mask is not None:
        hidden = q.new_zeros(mask.shape).masked_fill(~mask & mask.any(-1, keepdim=True), float("-inf"))
        added = hidden if added is None else added + hidden
    out = explicit.attend(q, k, v, added, request.scale, request.dropout_p, lambda weights: None)
    return out if mask is None else torch.where(mask.any(-1, keepdim=True), out, 0)
