"""FIRE, functional interpolation of relative positions (arXiv:2310.04418): a small MLP reads a distance between 0 and 1."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relpos2d.eager import runs_eagerly
from relpos2d.encoding import LatticeNumbers, NumberEncoding
from relpos2d.positions import Grid, Positions

#: of the authors' code: the first c, and what keeps the divisor from 0
INITIAL_C, EPS = 0.1, 1e-6


class FunctionalInterpolation(NumberEncoding):
    """MLP(log(c |d| + 1) / log(c max(L, i) + 1)), with i the place of the query and L = |L_multiplier * init_length|.

    For queries up to L only the offset matters. Beyond it distances are counted in shares of the query's own place: then the
    same offset means something else to each query, and memory grows with the number of pairs.

    Args:
        mlp_width: hidden units of the MLP.
        init_length: L at the start, in tokens; it is learned as a multiple of this.

    Raises:
        ValueError: a width below 1, or a length that is not positive.
    """

    name = "fire"
    axes = (1,)
    formula = "MLP_h(log(c |d| + 1) / log(c max(L, i) + 1))"
    paper = "arXiv:2310.04418"
    keeps = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        mlp_width: int = 32,
        init_length: float = 512.0,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        if mlp_width < 1:
            raise ValueError(f"FunctionalInterpolation: mlp_width={mlp_width} must be at least 1")
        if not 0 < init_length < math.inf:
            raise ValueError(f"FunctionalInterpolation: init_length={init_length} must be a positive number of tokens")
        self.init_length = float(init_length)
        self.mlp = nn.Sequential(
            nn.Linear(1, mlp_width, device=device, dtype=dtype),
            nn.ReLU(),
            nn.Linear(mlp_width, num_heads, device=device, dtype=dtype),
        )
        self.c = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.L_multiplier = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        nn.init.constant_(self.c, INITIAL_C)
        nn.init.ones_(self.L_multiplier)

    @property
    def knows_query(self) -> bool:
        return True

    @property
    def length(self) -> Tensor:
        """L, up to which all queries count alike, in tokens."""
        return (self.L_multiplier.to(self._dtype) * self.init_length).abs()

    def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
        """Number: the formula. Without `query` it is that of all queries up to L."""
        dtype = torch.promote_types(offsets.dtype, self._dtype)  # whole offsets may come as integers
        c, reach = self.c.to(dtype), self.length.to(dtype)
        if query is not None:
            query = query.to(dtype)
            reach = torch.where(query > reach, query, reach)
        distances = torch.log1p((c * offsets.to(dtype)).abs()) / (torch.log1p((c * reach).abs()) + EPS)
        return self._numbers(distances)

    def numbers(self, q_pos: Positions, k_pos: Positions) -> LatticeNumbers | None:
        if not isinstance(q_pos, Grid) or not self._are_within(q_pos):
            return None
        return super().numbers(q_pos, k_pos)

    def _are_within(self, queries: Grid) -> bool:
        """Whether all queries are known to stand up to L; nothing is known of it where its value cannot be read."""
        if not runs_eagerly() or self.L_multiplier.is_meta:
            return False
        last = queries.origin[0] + queries.step[0] * (queries.shape[0] - 1)
        return float(last) <= self.length.item()

    def _numbers(self, distances: Tensor) -> Tensor:
        """The MLP: (..., 1) to (..., heads)."""
        hidden, out = self.mlp[0], self.mlp[2]
        assert isinstance(hidden, nn.Linear)
        assert isinstance(out, nn.Linear)
        (w, b), (w_out, b_out) = ([p.to(distances.dtype) for p in (x.weight, x.bias)] for x in (hidden, out))
        if not runs_eagerly():
            return F.linear(F.relu(F.linear(distances, w, b)), w_out, b_out)
        # of one number it makes straight pieces, one more than hidden units: no pair needs a hidden layer of its own
        knots, slopes, heights = _pieces(w[:, 0], b, w_out, b_out)
        piece = torch.searchsorted(knots, distances.detach().squeeze(-1).contiguous(), out_int32=True)
        return torch.addcmul(F.embedding(piece, heights), F.embedding(piece, slopes), distances)


def _pieces(w: Tensor, b: Tensor, w_out: Tensor, b_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An MLP of one number as straight lines.

    Returns:
        knots (width,) in rising order; slopes and heights at 0 (width + 1, heads) of the pieces before, between and after.
    """
    with torch.no_grad():
        knots = torch.where(w == 0, math.inf, -b / w)
        rising = knots.sort().values
        left_ends = F.pad(rising, (1, 0), value=-math.inf)
        is_passed = knots <= left_ends[:, None]
        is_active = torch.where(w == 0, b > 0, is_passed == (w > 0))
    # no matrix product: autocast would round it, and slope and height of a far piece nearly cancel
    parts = is_active[:, None] * w_out
    return rising, (parts * w).sum(-1), (parts * b).sum(-1) + b_out
