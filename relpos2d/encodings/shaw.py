"""Relative position representations (Shaw et al., arXiv:1803.02155): a vector for each clipped offset."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.encoding import Term, VectorEncoding
from relpos2d.positions import Grid


class Shaw(VectorEncoding):
    """Queries meet a learned vector of the offset, clipped on both sides; values may get another one. All heads share them.

    As in the paper, rows are counted in offsets of the key from the query: row 0 is the farthest key in the past. Agrees with
    transformers' "relative_key" of wav2vec2-bert (where `max_distance` is (64, 8)) and of SeamlessM4T v2.

    Args:
        max_distance: offsets beyond it share the vector of the last; one number, or one for the past and one for the future.
        values: whether what a query takes from a key also gets a vector of the offset. It needs the attention weights, which only
            the backend "explicit" has.

    Raises:
        ValueError: a max_distance that is no whole number of at least 0, or not one for each side.
    """

    name = "shaw"
    axes = (1,)
    formula = "q . a_clip(d) / sqrt(head_dim), with values=True also v + b_clip(d)"
    paper = "arXiv:1803.02155"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        max_distance: int | tuple[int, int] = 16,
        values: bool = False,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        sides = max_distance if isinstance(max_distance, Sequence) else (max_distance, max_distance)
        if len(sides) != 2 or not all(isinstance(side, int) and side >= 0 for side in sides):
            raise ValueError(
                f"Shaw: max_distance={max_distance} must be a whole number of at least 0, or one for the past and one for the "
                "future"
            )
        self.past, self.future = sides
        num_rows = self.past + self.future + 1
        self.distance_embedding = nn.Embedding(num_rows, head_dim, device=device, dtype=dtype)
        self.value_embedding = nn.Embedding(num_rows, head_dim, device=device, dtype=dtype) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for embedding in (self.distance_embedding, self.value_embedding):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=0.02)

    def terms(self) -> list[Term]:
        terms = [Term(self.distance_embedding.weight.unsqueeze(0), "query", self._row)]
        if self.value_embedding is not None:
            terms.append(Term(self.value_embedding.weight.unsqueeze(0), "value", self._row))
        return terms

    def _row(self, offsets: Tensor) -> Tensor:
        # the paper's offsets are key minus query
        return torch.clamp(-offsets[..., 0], -self.past, self.future) + self.past

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, max_distance=({self.past}, {self.future})"
