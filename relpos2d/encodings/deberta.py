"""Disentangled attention of DeBERTa (arXiv:2006.03654), as in versions 2 and 3: content meets vectors of log-spaced offsets."""

from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.encoding import Term, VectorEncoding
from relpos2d.positions import Grid


class Deberta(VectorEncoding):
    """Scores q . k + q . K r_d + k . Q r_d: queries and keys meet projections of one learned embedding of the offset.

    Offsets within half of the buckets have one each; from there to `max_distance` buckets grow with the logarithm, and all
    beyond fall into the last. With three products the paper's scale is `reference_scale`, which the caller gives to attend().
    Agrees with transformers' DisentangledSelfAttention where queries and keys are equally many (elsewhere that one mixes up
    offsets). Positions that the reference drops out are not dropped.

    Args:
        content_to_position: q . K r_d.
        position_to_content: k . Q r_d.
        share_projections: project with the projections of queries and keys of the host ("share_att_key", as in version 3),
            `attend(..., project=(q_proj, k_proj))`, in place of own ones.
        num_buckets: of each sign ("position_buckets"), even; the embedding has twice as many rows.
        max_distance: the offset at which the last bucket begins ("max_relative_positions").
        norm_embeddings: a layer norm of the embedding ("norm_rel_ebd").

    Raises:
        ValueError: no product at all, or buckets that are odd, fewer than 4 or more than max_distance.
    """

    name = "deberta"
    axes = (1,)
    formula = "(q . k + q . K r_d + k . Q r_d) / sqrt(3 head_dim), r by log-spaced buckets"
    paper = "arXiv:2006.03654"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        content_to_position: bool = True,
        position_to_content: bool = True,
        share_projections: bool = False,
        num_buckets: int = 256,
        max_distance: int = 512,
        norm_embeddings: bool = False,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        if not content_to_position and not position_to_content:
            raise ValueError("Deberta: content_to_position or position_to_content must be True, else nothing is left")
        if num_buckets < 4 or num_buckets % 2:
            raise ValueError(f"Deberta: num_buckets={num_buckets} must be even and at least 4")
        if num_buckets > max_distance:
            raise ValueError(f"Deberta: num_buckets={num_buckets} must not be more than max_distance={max_distance}")
        self.content_to_position, self.position_to_content = content_to_position, position_to_content
        self.share_projections = share_projections
        self.num_buckets, self.max_distance = num_buckets, max_distance
        channels = num_heads * head_dim
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.rel_embeddings = nn.Embedding(2 * num_buckets, channels, **options)
        self.norm = nn.LayerNorm(channels, eps=1e-7, **options) if norm_embeddings else None
        own_key, own_query = (uses and not share_projections for uses in (content_to_position, position_to_content))
        self.pos_key_proj = nn.Linear(channels, channels, **options) if own_key else None
        self.pos_query_proj = nn.Linear(channels, channels, **options) if own_query else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.rel_embeddings.weight, std=0.02)
        if self.norm is not None:
            self.norm.reset_parameters()
        for projection in (self.pos_key_proj, self.pos_query_proj):
            if projection is not None:
                nn.init.normal_(projection.weight, std=0.02)
                nn.init.zeros_(projection.bias)

    def reference_scale(self, head_dim: int) -> float:
        return (head_dim * (1 + self.content_to_position + self.position_to_content)) ** -0.5

    def terms(self) -> list[Term]:
        rows = self.rel_embeddings.weight
        rows = (rows if self.norm is None else self.norm(rows)).unsqueeze(0)
        terms = []
        if self.content_to_position:
            terms.append(Term(rows, "query", self._row, projected=self.pos_key_proj or "key"))
        if self.position_to_content:
            # the paper reads this row at key minus query; its code, and so all weights, as here
            terms.append(Term(rows, "key", self._row, projected=self.pos_query_proj or "query"))
        return terms

    def _row(self, offsets: Tensor) -> Tensor:
        offsets = offsets[..., 0]
        middle = self.num_buckets // 2
        # in float32 as the reference, whose rounding is part of the weights
        distance = offsets.abs().clamp(min=middle).float() / middle
        last = torch.tensor((self.max_distance - 1) / middle, device=offsets.device)
        logarithmic = torch.ceil(distance.log() / last.log() * (middle - 1)) + middle
        bucket = torch.where(offsets.abs() <= middle, offsets, logarithmic * offsets.sign())
        return (bucket + self.num_buckets).clamp(0, 2 * self.num_buckets - 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_buckets={self.num_buckets}, max_distance={self.max_distance}"
