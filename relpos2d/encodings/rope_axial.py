"""Axial rotary encoding: each axis turns its own share of the channels (RoPE arXiv:2104.09864; on images arXiv:2403.13298)."""

import math
from typing import Any

import torch
from torch import Tensor

from relpos2d.encoding import RotaryEncoding
from relpos2d.positions import Grid


class AxialRope(RotaryEncoding):
    """Turn q and k by angles that grow along each axis: with two axes half of the channel pairs see y, half see x.

    Pair j of an axis turns by p * theta^(-j / n), n pairs per axis. Agrees with timm's RotaryEmbeddingCat(in_pixels=False).

    Args:
        theta: base of the wavelengths, in tokens. Small grids want about 100, text 10000.
        layout: which channels make a pair, "interleaved" or "half".

    Raises:
        ValueError: head_dim cannot be shared out evenly, or theta is not positive.
    """

    name = "rope_axial"
    formula = "turn pair j by p_axis theta^(-j / n); the pairs are shared out among the axes"
    paper = "arXiv:2403.13298"
    keeps = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        theta: float = 100.0,
        layout: str = "interleaved",
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, layout=layout, strength=strength, device=device, dtype=dtype)
        shares = 2 * positions.num_axes
        if head_dim % shares:
            raise ValueError(f"AxialRope: head_dim={head_dim} must be a multiple of {shares}")
        if not 0 < theta < math.inf:
            raise ValueError(f"AxialRope: theta={theta} must be positive and finite")
        self.theta = theta

    @property
    def inv_freq(self) -> Tensor:
        """Radians per token of each pair of an axis (head_dim / 2 / axes); computed, so that no load or cast can spoil it."""
        return self._inv_freq(self.strength.device, torch.promote_types(self.strength.dtype, torch.float32))

    def _inv_freq(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        num_pairs = self.head_dim // (2 * self.positions.num_axes)
        return 1.0 / self.theta ** (torch.arange(num_pairs, device=device, dtype=dtype) / num_pairs)

    def angles(self, coords: Tensor) -> Tensor:
        return (coords.unsqueeze(-1) * self._inv_freq(coords.device, coords.dtype)).flatten(-2).unsqueeze(-3)
