"""Attention through torch's fused kernel, with all that is added to the scores as its mask."""

import torch
from torch import Tensor

from relpos2d.attention import fused
from relpos2d.attention.explicit import repeated
from relpos2d.attention.fused import Rows


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout_p: float) -> Tensor:
    """scaled_dot_product_attention.

    A mask may leave out leading dimensions of size 1, and have the samples of a part of the batch (see `repeated`). On the CPU
    torch gives no gradient of a mask and drops no weights but by unfused code that keeps all scores; there `fused` steps in.
    """
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        learns = torch.is_grad_enabled() and mask.requires_grad
        if (learns or dropout_p) and not fused.obstacle(q, v):
            mask = mask.expand(mask.shape[0], q.shape[1], q.shape[2], k.shape[2])
            dense = Rows(1, q.shape[2], 1, k.shape[2], reverse=False)
            return fused.attend(q, k, v, mask, dense, scale, dropout_p)[0]
        # before it is expanded: a mask of keys stays as small as it is
        dtype = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype
        mask = repeated(mask, q.shape[0]).to(dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)
