"""Attention in plain tensor code: the reference that every other backend is held to."""

from collections.abc import Callable

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout_p: float,
    value: Callable[[Tensor], Tensor | None],
) -> Tensor:
    """Scores, softmax (at least float32), weights, values; `value` gives what the weights add to the output."""
    scores = (q * scale) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores + repeated(mask[(None,) * (4 - mask.ndim)], q.shape[0]).to(q.dtype)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    out = weights @ v
    added = value(weights)
    return out if added is None else out + added


def repeated(x: Tensor, batch: int) -> Tensor:
    """A mask (groups, ...) of some samples, as of the windows of one image, for all `batch` of them."""
    return x if x.shape[0] in (1, batch) else x.repeat(batch // x.shape[0], *[1] * (x.ndim - 1))
