"""Mixed rotary encoding: every pair of channels has a learned direction on the image (arXiv:2403.13298)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.encoding import RotaryEncoding
from relpos2d.positions import Grid


class MixedRope(RotaryEncoding):
    """Turn pair j of head h by the sum over axes of p_axis * freqs[axis, h, j], with learned freqs in the order (y, x).

    They start as in the reference implementation: magnitudes theta^(-j / n), in directions at right angles to one another
    that are drawn anew for each head. timm keeps the same numbers as freqs[(x, y), depth, head, pair].

    Args:
        theta: base of the first wavelengths, in tokens.
        layout: which channels make a pair, "interleaved" or "half".

    Raises:
        ValueError: head_dim cannot be shared out evenly, or theta is not positive.
    """

    name = "rope_mixed"
    formula = "turn pair j by sum over axes of p_axis f[axis, h, j], f learned"
    paper = "arXiv:2403.13298"
    keeps = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        theta: float = 10.0,
        layout: str = "interleaved",
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, layout=layout, strength=strength, device=device, dtype=dtype)
        shares = 2 * positions.num_axes
        if head_dim % shares:
            raise ValueError(f"MixedRope: head_dim={head_dim} must be a multiple of {shares}")
        if not 0 < theta < math.inf:
            raise ValueError(f"MixedRope: theta={theta} must be positive and finite")
        self.theta = theta
        self.freqs = nn.Parameter(torch.empty(positions.num_axes, num_heads, head_dim // 2, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        num_axes, num_heads, num_pairs = self.freqs.shape
        num_magnitudes = num_pairs // num_axes
        like: dict[str, Any] = {"device": self.freqs.device, "dtype": torch.float32}
        magnitudes = 1.0 / self.theta ** (torch.arange(num_magnitudes, **like) / num_magnitudes)
        directions = torch.linalg.qr(torch.randn(num_heads, num_axes, num_axes, **like)).Q
        freqs = directions.permute(1, 0, 2).unsqueeze(-1) * magnitudes
        with torch.no_grad():
            self.freqs.copy_(freqs.flatten(-2))

    def angles(self, coords: Tensor) -> Tensor:
        # number by number: autocast would round the product of two matrices, and with it merge places beyond 256
        freqs = self.freqs.to(coords.dtype).unsqueeze(-2)
        places = coords[..., None, :, :, None]  # one head, one pair
        angles = places[..., 0, :] * freqs[0]
        for axis in range(1, len(freqs)):
            angles = torch.addcmul(angles, places[..., axis, :], freqs[axis])
        return angles
