"""Attention through torch's fused kernel, with all that is added to the scores as its mask."""

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout_p: float) -> Tensor:
    """scaled_dot_product_attention; a mask may leave out leading dimensions of size 1."""
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)
