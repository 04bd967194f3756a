"""KERPLE, kernelized relative biases (arXiv:2205.09921): the score falls with the distance as a kernel that each head learns."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from relpos2d.encoding import NumberEncoding
from relpos2d.positions import Grid

KINDS = ("log", "power")
#: the least value of a parameter, as in the authors' code
LEAST = 1e-2


class Kerple(NumberEncoding):
    """Subtract p log(1 + a |d|), or a |d|^p with p at most 2; p and a are learned for each head and positive.

    The names are those of the authors' code, in which p is the factor of the logarithm and the exponent of the power. A
    parameter below 0.01 counts as 0.01 and still has its gradient, so that it can come back.

    Args:
        kind: "log" or "power".

    Raises:
        ValueError: an unknown kind.
    """

    name = "kerple"
    axes = (1,)
    formula = "-p_h log(1 + a_h |d|), or -a_h |d|^p_h"
    paper = "arXiv:2205.09921"
    keeps = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        kind: Literal["log", "power"] = "log",
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        if kind not in KINDS:
            raise ValueError(f"Kerple: kind={kind!r} must be one of {', '.join(KINDS)}")
        self.kind = kind
        self.bias_p = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.bias_a = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.bias_p, 0.0, 2.0)
        nn.init.uniform_(self.bias_a, 0.0, 1.0)

    def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
        dtype = torch.promote_types(offsets.dtype, self._dtype)  # whole offsets may come as integers
        distances = offsets.to(dtype).abs()
        a = _held(self.bias_a.to(dtype), LEAST)
        if self.kind == "log":
            return -_held(self.bias_p.to(dtype), LEAST) * torch.log1p(a * distances)
        p = _held(self.bias_p.to(dtype), LEAST, 2.0)
        # a power of 0 has no finite derivative
        is_zero = distances == 0
        return -a * torch.where(is_zero, 0, torch.where(is_zero, 1, distances) ** p)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind!r}"


def _held(parameter: Tensor, least: float, most: float | None = None) -> Tensor:
    """The parameter within its limits; the gradient does not see them."""
    return parameter.detach().clamp(least, most) + (parameter - parameter.detach())
