"""timm's Swin Transformer V2 (arXiv:2111.09883): cosine attention with a learned temperature and a continuous bias."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from timm.models.swin_transformer_v2 import (
    SwinTransformerV2,
    SwinTransformerV2Block,
    SwinTransformerV2Stage,
    WindowAttention,
)
from torch import Tensor, nn
from torch.nn import functional as F

from relpos2d.backbones.host import Host, HostModel, Spec, with_default
from relpos2d.backbones.swin import BlockHost, StageHost, SwinFamily, WindowHost


class RelPosWindowAttentionV2(WindowHost, WindowAttention):
    """timm's WindowAttention of V2 with any encoding in place of its bias; cosine attention folds logit_scale into q."""

    native_encoding = "cpb"
    native_parameters = ("cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight")
    derived = ("relative_position_index", "relative_coords_table")

    def _init_buffers(self) -> None:
        if self.k_bias is not None:
            self.k_bias.zero_()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        if self.q_bias is None:
            qkv = self.qkv(x)
        else:
            # not timm's buffer k_bias, which holds anything where transformers has loaded a model by way of the meta device
            bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
            qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        temperature = self.logit_scale.clamp(max=math.log(1.0 / 0.01)).exp()
        q, k = (_unit(q) * temperature).to(v.dtype), _unit(k).to(v.dtype)
        return self._attend(q, k, v, mask, 1.0)


def _unit(x: Tensor) -> Tensor:
    """x / |x| in at least float32, where F.normalize divides 0 by 0 in half precision: keys of padding are zeros.

    Zeros stay zeros, and their gradient, which nobody needs, stays small enough for half precision.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(norm > 1e-12, norm, 1.0)


class RelPosSwinTransformerV2Block(BlockHost, SwinTransformerV2Block):
    """timm's SwinTransformerV2Block around a swapped attention."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        x = x + self.drop_path1(self.norm1(self._attn(x, valid)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


class RelPosSwinTransformerV2Stage(StageHost, SwinTransformerV2Stage):
    """timm's SwinTransformerV2Stage around swapped blocks."""


class RelPosSwinTransformerV2(HostModel, SwinTransformerV2):
    """A swapped SwinTransformerV2."""


class SwinV2Family(SwinFamily):
    """How to swap a SwinTransformerV2, or a feature extractor made from one."""

    name = "swinv2"
    description = "swinv2_* (SwinTransformerV2)"
    attention: ClassVar[tuple[type[nn.Module], type[Host]]] = (WindowAttention, RelPosWindowAttentionV2)
    block: ClassVar[tuple[type[nn.Module], type[Host]]] = (SwinTransformerV2Block, RelPosSwinTransformerV2Block)
    stage: ClassVar[tuple[type[nn.Module], type[Host]]] = (SwinTransformerV2Stage, RelPosSwinTransformerV2Stage)
    model: ClassVar[tuple[type[nn.Module], type[HostModel]]] = (SwinTransformerV2, RelPosSwinTransformerV2)

    @classmethod
    def defaults(cls, spec: Spec, attention: Any) -> Spec:
        return with_default(spec, "cpb", pretrained_window_size=tuple(attention.pretrained_window_size))
