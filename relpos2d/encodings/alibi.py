"""ALiBi, attention with linear biases (arXiv:2108.12409); on images the distance is Euclidean."""

import math

import torch
from torch import Tensor

from relpos2d.encoding import NumberEncoding


class Alibi(NumberEncoding):
    """Subtract from the score the distance times a slope that is fixed for each head."""

    name = "alibi"
    axes = (1, 2)
    formula = "-slope_h |d|"
    paper = "arXiv:2108.12409"
    keeps = True

    @property
    def slopes(self) -> Tensor:
        """Slope of each head. For a number of heads that is no power of two: those of the next lower power, then every
        second one of the next higher."""
        lower = 2 ** math.floor(math.log2(self.num_heads))
        slopes = [2.0 ** (-8 * (i + 1) / lower) for i in range(lower)]
        slopes += [2.0 ** (-4 * (2 * i + 1) / lower) for i in range(self.num_heads - lower)]
        return torch.tensor(
            slopes, device=self.strength.device, dtype=torch.promote_types(self.strength.dtype, torch.float32)
        )

    def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
        dtype = torch.promote_types(offsets.dtype, self.slopes.dtype)  # whole offsets may come as integers
        return -self.slopes * torch.linalg.vector_norm(offsets.to(dtype), dim=-1, keepdim=True)
