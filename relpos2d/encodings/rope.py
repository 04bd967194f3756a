"""Rotary encoding of sequences (RoPE, arXiv:2104.09864), of all or of the first channels of a head, with its length scalings."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from relpos2d.encoding import Role, RotaryEncoding
from relpos2d.positions import Grid
from relpos2d.scaling import Scaling, make_scaling


class Rope(RotaryEncoding):
    """Turn pair j of n by p * theta^(-j / n). Llama and GPT-NeoX have the layout "half", GPT-J and the paper "interleaved".

    Args:
        theta: base of the wavelengths, in tokens.
        layout: which channels make a pair, "interleaved" or "half".
        rotary_dim: how many channels, the first of each head, are turned (partial rotary); None: all.
        scaling: how it reaches lengths beyond those of training: {"kind": "yarn", "factor": 4.0, "original_length": 2048}, or a
            `Scaling`; see relpos2d/scaling.py for kinds and fields. None: not at all. Not saved with the weights.

    Raises:
        ValueError: channels that do not make pairs, theta is not positive, or a scaling that is wrong or does not fit.
    """

    name = "rope"
    axes = (1,)
    formula = "turn pair j by p theta^(-j / n)"
    paper = "arXiv:2104.09864"
    keeps = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        theta: float = 10000.0,
        layout: str = "interleaved",
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | Scaling | None = None,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_dim,
            positions,
            layout=layout,
            rotary_dim=rotary_dim,
            strength=strength,
            device=device,
            dtype=dtype,
        )
        if self.rotary_dim % 2:
            name = "head_dim" if rotary_dim is None else "rotary_dim"
            raise ValueError(
                f"Rope: {name}={self.rotary_dim} must be a multiple of 2; rotary_dim may be less than head_dim"
            )
        if not 0 < theta < math.inf:
            raise ValueError(f"Rope: theta={theta} must be positive and finite")
        self.theta, self.num_pairs = theta, self.rotary_dim // 2
        self.scaling = make_scaling(scaling)
        if self.scaling is not None:
            self.scaling.check_fits(theta, self.num_pairs)

    @property
    def knows_length(self) -> bool:
        return self.scaling is not None and self.scaling.knows_length

    @property
    def turns_alike(self) -> bool:
        return self.scaling is None or self.scaling.turns_alike

    @property
    def inv_freq(self) -> Tensor:
        """Radians per token of each pair (rotary_dim / 2), at short lengths where they depend on it; computed, so that no load or
        cast can spoil it."""
        dtype = torch.promote_types(self.strength.dtype, torch.float32)
        return self._inv_freq(torch.ones((), device=self.strength.device, dtype=dtype), None)

    def _inv_freq(self, like: Tensor, length: Tensor | None) -> Tensor:
        inv_freq = 1.0 / self.theta ** (
            torch.arange(self.num_pairs, device=like.device, dtype=like.dtype) / self.num_pairs
        )
        if self.scaling is None:
            return inv_freq
        return self.scaling.inv_freq(inv_freq, self.theta, inv_freq.new_ones(()) if length is None else length)

    def turns(self, coords: Tensor, role: Role, length: Tensor | None) -> tuple[Tensor, Tensor | None]:
        angles = coords * self._inv_freq(coords, length).unsqueeze(-2)
        logarithms = None if self.scaling is None else self.scaling.log_magnitude(coords, role, self.num_pairs)
        return angles.unsqueeze(-3), None if logarithms is None else logarithms.unsqueeze(-3)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rotary_dim={self.rotary_dim}, theta={self.theta}, scaling={self.scaling}"
