"""Fixed sine and cosine embedding of the place (arXiv:1706.03762; on two axes as in timm's build_sincos2d_pos_embed)."""

import math
from typing import Any

import torch
from torch import Tensor

from relpos2d.encoding import AbsoluteEncoding
from relpos2d.positions import Grid, Positions


class SinCos(AbsoluteEncoding):
    """Add to each token sines and cosines of its coordinates: channels [sin y, sin x, cos y, cos x].

    Args:
        theta: base of the wavelengths, in tokens.

    Raises:
        ValueError: num_heads * head_dim, the channels of a token, cannot be shared out evenly.
    """

    name = "sincos"
    formula = "x + [sin(p f_j), cos(p f_j)], f_j = theta^(-j / n), n channels per axis and function"
    paper = "arXiv:1706.03762"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        theta: float = 10000.0,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        shares = 2 * positions.num_axes
        if self.embed_dim % shares:
            raise ValueError(f"SinCos: {self.embed_dim} channels (num_heads * head_dim) must be a multiple of {shares}")
        if not 0 < theta < math.inf:
            raise ValueError(f"SinCos: theta={theta} must be positive and finite")
        self.theta = theta

    def vectors(self, pos: Positions, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        num_bands = self.embed_dim // (2 * pos.num_axes)
        bands = 1.0 / self.theta ** (torch.arange(num_bands, device=device, dtype=dtype) / num_bands)
        angles = pos.coords(device=device, dtype=dtype).unsqueeze(-1) * bands
        return torch.stack((angles.sin(), angles.cos()), dim=-3).flatten(-3)
