"""Pre-norm transformer blocks (arXiv:1706.03762, arXiv:2002.04745) whose positions come from any encoding."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from timm.layers import Mlp, SwiGLU
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from relpos2d.attention import attend
from relpos2d.backbones.host import Spec
from relpos2d.encoding import Encoding, Prepared
from relpos2d.encodings import create_encoding
from relpos2d.models.cache import Cache
from relpos2d.models.places import Places
from relpos2d.positions import Grid

MlpName = Literal["swiglu", "gelu"]
NormName = Literal["rmsnorm", "layernorm"]
MLP_RATIOS = {"swiglu": 8 / 3, "gelu": 4.0}


class SelfAttention(nn.Module):
    """Attention of tokens to one another, at their places.

    Args:
        embed_dim: channels.
        num_heads: attention heads.
        encoding: of its own; None: the caller gives one in each forward pass.
        dropout: of the attention weights.
    """

    def __init__(self, embed_dim: int, num_heads: int, encoding: Encoding | None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.encoding = encoding

    def forward(
        self,
        x: Float[Tensor, "batch tokens channels"],
        places: Places,
        *,
        encoding: Encoding | Prepared | None = None,
        is_causal: bool = False,
        cache: Cache | None = None,
        layer: int = 0,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch tokens channels"]:
        """x (B, N, C) to (B, N, C); `encoding` stands in for its own, `layer` is its number in the cache."""
        q, k, v = (_by_head(proj(x), self.num_heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            k, v = cache.append(layer, k, v)
        encoding = self.encoding if encoding is None else encoding
        assert encoding is not None
        out = attend(
            q,
            k,
            v,
            encoding,
            places.queries,
            places.keys,
            mask=places.mask,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            memory_limit=memory_limit,
            project=(self.q_proj, self.k_proj),
        )
        return self.out_proj(out.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Attention of tokens to the states of a source; it has no positions, since the two have no common line.

    Args:
        embed_dim: channels.
        num_heads: attention heads.
        dropout: of the attention weights.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.encoding = create_encoding("none", num_heads, embed_dim // num_heads, Grid(1))

    def project(self, source: Float[Tensor, "batch source_tokens channels"]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, heads, M, head_dim) of the source."""
        return _by_head(self.k_proj(source), self.num_heads), _by_head(self.v_proj(source), self.num_heads)

    def forward(
        self,
        x: Float[Tensor, "batch tokens channels"],
        source: Float[Tensor, "batch source_tokens channels"],
        mask: Bool[Tensor, "batch source_tokens"] | None = None,
        *,
        cache: Cache | None = None,
        layer: int = 0,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch tokens channels"]:
        """x (B, N, C) and source (B, M, C) to (B, N, C); `mask`: which tokens of the source are real."""
        k, v = self.project(source) if cache is None else cache.source(layer, lambda: self.project(source))
        out = attend(
            _by_head(self.q_proj(x), self.num_heads),
            k,
            v,
            self.encoding,
            Grid(x.shape[1]),
            Grid(k.shape[2]),
            mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            memory_limit=memory_limit,
        )
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention, cross-attention where there is a source, and an MLP, each behind a norm and beside a residual path."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        encoding: Encoding | None,
        *,
        has_source: bool = False,
        mlp_ratio: float | None = None,
        mlp: MlpName = "swiglu",
        norm: NormName = "rmsnorm",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = new_norm(norm, embed_dim)
        self.attention = SelfAttention(embed_dim, num_heads, encoding, dropout=dropout)
        self.source_norm = new_norm(norm, embed_dim) if has_source else None
        self.source_attention = CrossAttention(embed_dim, num_heads, dropout=dropout) if has_source else None
        self.mlp_norm = new_norm(norm, embed_dim)
        hidden = max(1, round(embed_dim * (MLP_RATIOS[mlp] if mlp_ratio is None else mlp_ratio)))
        self.mlp = (SwiGLU if mlp == "swiglu" else Mlp)(embed_dim, hidden, bias=False, drop=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch tokens channels"],
        places: Places,
        *,
        encoding: Encoding | Prepared | None = None,
        is_causal: bool = False,
        source: Float[Tensor, "batch source_tokens channels"] | None = None,
        source_mask: Bool[Tensor, "batch source_tokens"] | None = None,
        cache: Cache | None = None,
        layer: int = 0,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch tokens channels"]:
        attended = self.attention(
            self.attention_norm(x),
            places,
            encoding=encoding,
            is_causal=is_causal,
            cache=cache,
            layer=layer,
            memory_limit=memory_limit,
        )
        x = x + self.dropout(attended)
        if self.source_attention is not None and self.source_norm is not None:
            attended = self.source_attention(
                self.source_norm(x), source, source_mask, cache=cache, layer=layer, memory_limit=memory_limit
            )
            x = x + self.dropout(attended)
        return x + self.mlp(self.mlp_norm(x))

    def residual_outputs(self) -> list[Tensor]:
        """The weights of the projections that write on the residual path."""
        outputs = [self.attention.out_proj.weight, self.mlp.fc2.weight]
        return outputs if self.source_attention is None else [*outputs, self.source_attention.out_proj.weight]


class Stack(nn.Module):
    """Blocks one after another and a last norm.

    Args:
        embed_dim: channels.
        depth: blocks.
        num_heads: attention heads.
        encoding: what the attentions get, without absolute members.
        positions: the grid that encodings are made for.
        shared_encoding: one encoding for all blocks, whose numbers are computed once a forward pass, and not one each.
        has_source: blocks also attend to a source.
        checkpointing: a training step keeps what goes into each block, and computes what happens inside it twice.
    """

    def __init__(
        self,
        embed_dim: int,
        depth: int,
        num_heads: int,
        encoding: Spec,
        positions: Grid,
        *,
        shared_encoding: bool = False,
        has_source: bool = False,
        mlp_ratio: float | None = None,
        mlp: MlpName = "swiglu",
        norm: NormName = "rmsnorm",
        dropout: float = 0.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()

        def new_encoding() -> Encoding:
            return create_encoding(encoding, num_heads, embed_dim // num_heads, positions)

        self.checkpointing = checkpointing
        self.encoding = new_encoding() if shared_encoding else None
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                None if shared_encoding else new_encoding(),
                has_source=has_source,
                mlp_ratio=mlp_ratio,
                mlp=mlp,
                norm=norm,
                dropout=dropout,
            )
            for _ in range(depth)
        )
        self.norm = new_norm(norm, embed_dim)

    @property
    def an_encoding(self) -> Encoding:
        """The encoding of one of its attentions; all are of a kind."""
        if self.encoding is not None:
            return self.encoding
        encoding = self.blocks[0].get_submodule("attention.encoding")
        assert isinstance(encoding, Encoding)
        return encoding

    def forward(
        self,
        x: Float[Tensor, "batch tokens channels"],
        places: Places,
        *,
        is_causal: bool = False,
        source: Float[Tensor, "batch source_tokens channels"] | None = None,
        source_mask: Bool[Tensor, "batch source_tokens"] | None = None,
        cache: Cache | None = None,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch tokens channels"]:
        """x (B, N, C) to (B, N, C)."""
        encoding: Encoding | Prepared | None = self.encoding
        on_grids = isinstance(places.queries, Grid) and isinstance(places.keys, Grid)
        # what is prepared is held in full, whatever the limit
        if self.encoding is not None and on_grids and memory_limit is None:
            encoding = self.encoding.prepare(places.queries, places.keys)
        for layer, block in enumerate(self.blocks):
            options: dict[str, Any] = {
                "encoding": encoding,
                "is_causal": is_causal,
                "source": source,
                "source_mask": source_mask,
                "cache": cache,
                "layer": layer,
                "memory_limit": memory_limit,
            }
            if self.checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, places, use_reentrant=False, **options)
            else:
                x = block(x, places, **options)
        return self.norm(x)

    def reset_parameters(self) -> None:
        """Draw all parameters anew; what writes on the residual path is smaller by sqrt(2 * depth), as in GPT-2."""
        reset(self.children())
        for block in self.blocks:
            assert isinstance(block, Block)
            for weight in block.residual_outputs():
                nn.init.normal_(weight, std=(2 * len(self.blocks) * weight.shape[1]) ** -0.5)


def new_norm(norm: NormName, embed_dim: int) -> nn.Module:
    """A norm by its name."""
    return nn.RMSNorm(embed_dim, eps=1e-6) if norm == "rmsnorm" else nn.LayerNorm(embed_dim)


def reset(modules: Iterable[nn.Module]) -> None:
    """Draw the parameters of modules and all within them anew: weights with a variance of 1 / channels that they read (an
    embedding's: that it makes), since the usual 0.02 is too small a start for few channels; no bias."""
    for module in modules:
        if isinstance(module, Encoding | Stack | nn.RMSNorm | nn.LayerNorm):
            module.reset_parameters()
            continue
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        reset(module.children())


def check_choice(who: str, name: str, value: object, literal: object) -> None:
    """Refuse what is none of the values of a Literal, naming the nearest."""
    allowed = get_args(literal)
    if value not in allowed:
        close = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{who}: {name}={value!r} must be one of {', '.join(allowed)}{hint}")


def _by_head(x: Float[Tensor, "batch tokens channels"], num_heads: int) -> Float[Tensor, "batch heads tokens head_dim"]:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
