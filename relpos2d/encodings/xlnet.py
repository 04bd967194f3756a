"""Relative encoding of XLNet (arXiv:1906.08237): that of Transformer-XL, and a term for tokens of the same or another part."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.encoding import Projections, Term, VectorEncoding
from relpos2d.encodings.transformer_xl import sinusoid
from relpos2d.positions import Grid, Points, Positions


class XLNet(VectorEncoding):
    """Scores (q + r_w) . k + (q + r_r) . R r_d + (q + r_s) . s, s one vector for pairs of one part, one for all other pairs.

    Which part a token belongs to is told by `Points.token_types` of queries and keys; where one side has none, there is no such
    term. Agrees with transformers' XLNetRelativeAttention (attn_type "bi"), whose names the parameters have. XLNet's
    pretraining, with two streams and permuted orders, is not built.

    Args:
        token_types: whether there is a term for parts at all. It has parameters, which learn nothing unless tokens have types.
        max_distance: offsets beyond it are read as this far; None: no limit ("clamp_len" of the reference).
        theta: base of the wavelengths, in tokens.

    Raises:
        ValueError: an odd number of channels, a max_distance below 1, or a theta that is not positive.
    """

    name = "xlnet"
    axes = (1,)
    formula = "((q + r_w) . k + (q + r_r) . R r_d + (q + r_s) . s_same) / sqrt(head_dim)"
    paper = "arXiv:1906.08237"

    r_s_bias: nn.Parameter | None
    seg_embed: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        token_types: bool = False,
        max_distance: int | None = None,
        theta: float = 10000.0,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        channels = num_heads * head_dim
        if channels % 2:
            raise ValueError(f"XLNet: {channels} channels (num_heads * head_dim) must be even")
        if max_distance is not None and max_distance < 1:
            raise ValueError(f"XLNet: max_distance={max_distance} must be at least 1, or None for no limit")
        if not 0 < theta < math.inf:
            raise ValueError(f"XLNet: theta={theta} must be positive and finite")
        self.max_distance, self.theta = max_distance, theta

        def new(*lead: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*lead, num_heads, head_dim, device=device, dtype=dtype))

        self.r_w_bias, self.r_r_bias, self.r = new(), new(), new(channels)
        self.r_s_bias, self.seg_embed = (new(), new(2)) if token_types else (None, None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def content(self, q: Tensor, k: Tensor) -> Tensor:
        return self.r_w_bias.unsqueeze(1).to(q.dtype)

    def terms(self) -> list[Term]:
        return [Term(self._vectors, "query", added=self.r_r_bias.unsqueeze(1))]

    def _vectors(self, offsets: Tensor) -> Tensor:
        offsets = offsets[..., 0]
        if self.max_distance is not None:
            offsets = offsets.clamp(-self.max_distance, self.max_distance)
        waves = sinusoid(offsets, len(self.r), self.theta, "half")
        return torch.einsum("kc,chd->hkd", waves.to(self.r.dtype), self.r)

    def score(
        self,
        q: Tensor,
        k: Tensor,
        q_pos: Positions,
        k_pos: Positions,
        scale: float,
        project: Projections | None = None,
    ) -> Tensor | None:
        total = super().score(q, k, q_pos, k_pos, scale, project)
        parts = self._parts_score(q, q_pos, k_pos, scale)
        return total if total is None or parts is None else total + parts

    def _parts_score(self, q: Tensor, q_pos: Positions, k_pos: Positions, scale: float) -> Tensor | None:
        """Product with the vector of the same part or of different ones; 0 where a prefix token takes part."""
        if self.r_s_bias is None or self.seg_embed is None:
            return None
        if not isinstance(q_pos, Points) or not isinstance(k_pos, Points):
            return None
        if q_pos.token_types is None or k_pos.token_types is None:
            return None
        side = q[..., q_pos.num_prefix_tokens :, :] + self.r_s_bias.unsqueeze(1).to(q.dtype)
        side = side * (self.strength * scale).to(q.dtype)
        same, other = (side @ self.seg_embed.to(q.dtype).permute(1, 2, 0)).split(1, dim=-1)
        differ = (q_pos.token_types[:, None, :, None] != k_pos.token_types[:, None, None, :]).to(q.device)
        pairs = torch.where(differ, other, same)
        return nn.functional.pad(pairs, (k_pos.num_prefix_tokens, 0, q_pos.num_prefix_tokens, 0))

    def extra_repr(self) -> str:
        has_types = self.seg_embed is not None
        return (
            f"{super().extra_repr()}, token_types={has_types}, max_distance={self.max_distance}, theta={self.theta:g}"
        )
