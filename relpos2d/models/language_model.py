"""A decoder that says which token comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from relpos2d.models.blocks import MlpName, NormName
from relpos2d.models.cache import Cache
from relpos2d.models.places import place
from relpos2d.models.token_model import TokenModel, check_like


class LanguageModel(TokenModel):
    """Each token sees those before it and itself.

    Args:
        vocab_size: token ids run from 0 to vocab_size - 1.
        encoding: a name, a mapping with a name, or a list of these; absolute members are added to the embeddings.
        max_length: tokens that encodings with a size are made for; longer texts are read as far as the encoding goes on.
        embed_dim: channels.
        depth: blocks.
        num_heads: attention heads.
        mlp_ratio: hidden channels of the MLP, in embed_dim; None: 8/3 for "swiglu", 4 for "gelu".
        mlp: "swiglu" or "gelu".
        norm: "rmsnorm" or "layernorm".
        dropout: of embeddings, attention weights and what is added to the residual path.
        shared_encoding: one encoding for all blocks and not one each.
        tied: the token embeddings also make the logits.
        padding_id: what is read in place of padding.
        checkpointing: less memory in training, for a second forward pass.

    Raises:
        ValueError: sizes that do not fit one another, what the encoding refuses, or one with a term for token types.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        encoding: str | Mapping[str, Any] | Sequence[Any] = "none",
        max_length: int = 512,
        embed_dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float | None = None,
        mlp: MlpName = "swiglu",
        norm: NormName = "rmsnorm",
        dropout: float = 0.0,
        shared_encoding: bool = False,
        tied: bool = True,
        padding_id: int = 0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__(
            vocab_size,
            encoding=encoding,
            max_length=max_length,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            mlp=mlp,
            norm=norm,
            dropout=dropout,
            shared_encoding=shared_encoding,
            padding_id=padding_id,
            checkpointing=checkpointing,
        )
        self.decoder = self._new_stack(depth, encoding)
        self.head = None if tied else nn.Linear(embed_dim, vocab_size, bias=False)
        self.reset_parameters()

    def forward(
        self,
        token_ids: Int[Tensor, "batch tokens"],
        mask: Bool[Tensor, "batch tokens"] | None = None,
        *,
        segments: Int[Tensor, "batch tokens"] | None = None,
        cache: Cache | None = None,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch tokens vocabulary"]:
        """Logits (B, N, vocab_size) of the token behind each one; what stands at padding has no meaning.

        Args:
            token_ids: (B, N); with a cache, the tokens behind those that it holds.
            mask: (B, N), True for real tokens; padding stands at the ends of a row. None: all are real.
            segments: (B, N), documents packed into one row: tokens see only their own and are counted anew in each.
            cache: what was read before; the new tokens are added to it.
            memory_limit: bytes that each attention may hold; None: as many as the fastest way takes.

        Raises:
            ValueError: shapes or dtypes that do not fit, ids outside the vocabulary, a text without a token, padding between
                real tokens, a document in several pieces, segments together with a cache, a cache of other rows or with
                gradients, or a memory limit that no way keeps.
        """
        return self.forward_head(
            self.forward_features(token_ids, mask, segments=segments, cache=cache, memory_limit=memory_limit)
        )

    def forward_features(
        self,
        token_ids: Int[Tensor, "batch tokens"],
        mask: Bool[Tensor, "batch tokens"] | None = None,
        *,
        segments: Int[Tensor, "batch tokens"] | None = None,
        cache: Cache | None = None,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch tokens channels"]:
        """What `forward` makes logits of."""
        self._check("token_ids", token_ids, mask)
        check_like("LanguageModel", "segments", segments, token_ids)
        if segments is not None and cache is not None:
            raise ValueError("LanguageModel: segments are for training; a cache allows one text a row")
        all_real, past = joined_mask("LanguageModel", cache, token_ids, mask)
        places = place(
            "LanguageModel",
            self.decoder.an_encoding,
            token_ids.shape[1],
            all_real,
            is_causal=True,
            past=past,
            segments=segments,
        )
        x = self.decoder(
            self._embed(token_ids, mask, places.tokens),
            places,
            is_causal=True,
            cache=cache,
            memory_limit=memory_limit,
        )
        if cache is not None:
            cache.advance(token_ids.shape[1], all_real)
        return x

    def forward_head(self, x: Float[Tensor, "... channels"]) -> Float[Tensor, "... vocabulary"]:
        """Logits of what `forward_features` gives."""
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)


def joined_mask(
    who: str, cache: Cache | None, token_ids: Int[Tensor, "batch tokens"], mask: Bool[Tensor, "batch tokens"] | None
) -> tuple[Bool[Tensor, "batch all_tokens"] | None, int]:
    """Which of the tokens in a cache and the new ones are real (None: all), and how many are in the cache."""
    if cache is None or cache.batch_size is None:
        return mask, 0
    if cache.batch_size != len(token_ids):
        raise ValueError(f"{who}: the cache holds {cache.batch_size} rows, token ids have {len(token_ids)}")
    past = cache.length
    if mask is None and cache.mask is None:
        return None, past
    new = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask
    old = new.new_ones(len(new), past) if cache.mask is None else cache.mask
    return torch.cat((old, new), dim=1), past
