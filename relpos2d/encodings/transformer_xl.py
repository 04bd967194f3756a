"""Relative encoding of Transformer-XL (arXiv:1901.02860): queries meet a projected sinusoid of the offset."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.encoding import LAYOUTS, Term, VectorEncoding
from relpos2d.positions import Grid


class TransformerXL(VectorEncoding):
    """Scores (q + u) . k + (q + v) . W r_d, r_d the sines and cosines of the offset, u and v learned for each head.

    Agrees with transformers' "relative" of wav2vec2-conformer and ESPnet's RelPositionMultiHeadedAttention (interleaved), and
    with the original (half). Positions that the original drops out are not dropped.

    Args:
        theta: base of the wavelengths, in tokens.
        layout: how sines and cosines share the channels of r_d: "interleaved", sin, cos, sin, cos, ...; or "half", all sines
            first. It belongs to the weights W.

    Raises:
        ValueError: an unknown layout, an odd number of channels, or a theta that is not positive.
    """

    name = "transformer_xl"
    axes = (1,)
    formula = "((q + u) . k + (q + v) . W r_d) / sqrt(head_dim)"
    paper = "arXiv:1901.02860"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        theta: float = 10000.0,
        layout: str = "interleaved",
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        channels = num_heads * head_dim
        if layout not in LAYOUTS:
            raise ValueError(f"TransformerXL: layout={layout!r} must be one of {', '.join(LAYOUTS)}")
        if channels % 2:
            raise ValueError(f"TransformerXL: {channels} channels (num_heads * head_dim) must be even")
        if not 0 < theta < math.inf:
            raise ValueError(f"TransformerXL: theta={theta} must be positive and finite")
        self.theta, self.layout = theta, layout
        self.pos_bias_u = nn.Parameter(torch.empty(num_heads, head_dim, device=device, dtype=dtype))
        self.pos_bias_v = nn.Parameter(torch.empty(num_heads, head_dim, device=device, dtype=dtype))
        self.linear_pos = nn.Linear(channels, channels, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for parameter in (self.pos_bias_u, self.pos_bias_v, self.linear_pos.weight):
            nn.init.normal_(parameter, std=0.02)

    def content(self, q: Tensor, k: Tensor) -> Tensor:
        return self.pos_bias_u.unsqueeze(1).to(q.dtype)

    def terms(self) -> list[Term]:
        return [Term(self._vectors, "query", added=self.pos_bias_v.unsqueeze(1))]

    def _vectors(self, offsets: Tensor) -> Tensor:
        waves = sinusoid(offsets[..., 0], self.num_heads * self.head_dim, self.theta, self.layout)
        projected = self.linear_pos(waves.to(self.linear_pos.weight.dtype))
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, theta={self.theta:g}, layout={self.layout!r}"


def sinusoid(offsets: Tensor, channels: int, theta: float, layout: str) -> Tensor:
    """Sines and cosines (K, channels) of offsets (K,); wavelengths grow from 2 pi to almost 2 pi theta."""
    bands = torch.arange(0, channels, 2, device=offsets.device, dtype=offsets.dtype) / channels
    angles = offsets.unsqueeze(-1) * theta**-bands
    waves = (angles.sin(), angles.cos())
    return torch.stack(waves, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(waves, dim=-1)
