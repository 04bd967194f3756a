"""The bucketed relative bias of T5 (arXiv:1910.10683): a learned number per head for near offsets and for bands of far ones."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.encoding import NumberEncoding
from relpos2d.interpolation import corners
from relpos2d.positions import Grid


class BucketedBias(NumberEncoding):
    """Look the number up by bucket: half of the buckets hold one distance each, half hold bands that grow with its logarithm.

    Offsets between whole numbers mix the numbers of their neighbours. With `bidirectional` half of the buckets are for keys
    behind the query; without it all keys behind the query share the bucket of offset 0, so that a mask must hide them.

    Args:
        num_buckets: rows of the table, even; at least 4, or 2 without `bidirectional`.
        max_distance: distance in tokens from which on everything is in the last bucket, at least num_buckets.
        bidirectional: whether keys before and behind the query are told apart.

    Raises:
        ValueError: a number of buckets that cannot be shared out, or more buckets than distances.
    """

    name = "t5"
    axes = (1,)
    formula = "T_h[bucket(d)]"
    paper = "arXiv:1910.10683"
    keeps = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        least = 4 if bidirectional else 2
        if num_buckets < least or num_buckets % 2:
            raise ValueError(
                f"BucketedBias: num_buckets={num_buckets} must be even and at least {least} "
                f"with bidirectional={bidirectional}"
            )
        if num_buckets > max_distance:
            raise ValueError(
                f"BucketedBias: num_buckets={num_buckets} must be at most max_distance={max_distance}: there are no more "
                "distances to tell apart"
            )
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.num_per_side = num_buckets // 2 if bidirectional else num_buckets
        self.num_exact = self.num_per_side // 2
        self.band_starts = _band_starts(self.num_exact, self.num_per_side, max_distance)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.relative_attention_bias.weight, std=(self.num_heads * self.head_dim) ** -0.5)

    def reference_scale(self, head_dim: int) -> float:
        """T5 does not scale: its initial weights do."""
        return 1.0

    def buckets(self, offsets: Tensor) -> Tensor:
        """Row of the table for whole offsets (query minus key) of any shape."""
        distances = offsets.abs() if self.bidirectional else offsets.clamp(min=0)
        rows = distances.clamp(max=self.num_exact).long()
        for start in self.band_starts:
            rows = rows + (distances >= start)
        # T5 counts key minus query: its positive side are the keys behind the query
        return rows + self.num_per_side * (offsets < 0) if self.bidirectional else rows

    def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
        dtype = torch.promote_types(offsets.dtype, self._dtype)  # whole offsets may come as integers
        table = self.relative_attention_bias.weight
        low, high = (
            table[self.buckets(whole.squeeze(-1))] * weight.unsqueeze(-1)
            for whole, weight in corners(offsets.to(dtype))
        )
        return low + high

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


def _band_starts(num_exact: int, num_per_side: int, max_distance: int) -> tuple[int, ...]:
    """The least distance of each bucket but the first `num_exact` + 1.

    Weights are trained on the rounding of a float32 logarithm, and distances at which it is a whole number are common ones
    (16, 32, 64). Whole starts, found once on the CPU, give the same buckets on every device and under every compiler.
    """
    distances = torch.arange(num_exact, max_distance + 1, device="cpu")
    bands = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact) * (num_per_side - num_exact)
    bands = bands.long().clamp(max=num_per_side - num_exact - 1)
    wanted = torch.arange(1, num_per_side - num_exact, device="cpu")
    return tuple((torch.searchsorted(bands, wanted) + num_exact).tolist())
