"""An encoder that names the class of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relpos2d.models.blocks import MlpName, NormName, check_choice
from relpos2d.models.places import place
from relpos2d.models.token_model import TokenModel, check_like, check_size

Pooling = Literal["mean", "first"]


class TextClassifier(TokenModel):
    """Tokens see one another in both directions; the class comes from their mean or from the first one.

    Args:
        vocab_size: token ids run from 0 to vocab_size - 1.
        num_classes: classes.
        encoding: a name, a mapping with a name, or a list of these; absolute members are added to the embeddings.
        max_length: tokens that encodings with a size are made for; longer texts are read as far as the encoding goes on.
        embed_dim: channels.
        depth: blocks.
        num_heads: attention heads.
        mlp_ratio: hidden channels of the MLP, in embed_dim; None: 8/3 for "swiglu", 4 for "gelu".
        mlp: "swiglu" or "gelu".
        norm: "rmsnorm" or "layernorm".
        pooling: "mean" of the real tokens, or the "first" of them.
        dropout: of embeddings, attention weights and what is added to the residual path.
        shared_encoding: one encoding for all blocks and not one each.
        padding_id: what is read in place of padding.
        checkpointing: less memory in training, for a second forward pass.
        embedding_std: how far token embeddings start from 0; None: embed_dim ** -0.5. Where texts are few, a small start keeps
            rare words, which are hardly trained, from telling texts apart by chance.

    Raises:
        ValueError: sizes that do not fit one another, or what the encoding refuses.
    """

    takes_token_types: ClassVar[bool] = True

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        *,
        encoding: str | Mapping[str, Any] | Sequence[Any] = "none",
        max_length: int = 512,
        embed_dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float | None = None,
        mlp: MlpName = "swiglu",
        norm: NormName = "rmsnorm",
        pooling: Pooling = "mean",
        dropout: float = 0.0,
        shared_encoding: bool = False,
        padding_id: int = 0,
        checkpointing: bool = False,
        embedding_std: float | None = None,
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
        check_size("TextClassifier", "num_classes", num_classes)
        check_choice("TextClassifier", "pooling", pooling, Pooling)
        if embedding_std is not None and not 0 < embedding_std < float("inf"):
            raise ValueError(f"TextClassifier: embedding_std={embedding_std} must be positive")
        self.num_classes, self.pooling, self.embedding_std = num_classes, pooling, embedding_std
        self.encoder = self._new_stack(depth, encoding)
        self.head = nn.Linear(embed_dim, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.embedding_std is not None:
            nn.init.normal_(self.embedding.weight, std=self.embedding_std)

    def forward(
        self,
        token_ids: Int[Tensor, "batch tokens"],
        mask: Bool[Tensor, "batch tokens"] | None = None,
        *,
        token_types: Int[Tensor, "batch tokens"] | None = None,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch classes"]:
        """Logits (B, num_classes) of texts.

        Args:
            token_ids: (B, N).
            mask: (B, N), True for real tokens; padding stands at the ends of a row. None: all are real.
            token_types: (B, N), which part of the text a token belongs to; encodings with a term for it hear it.
            memory_limit: bytes that each attention may hold; None: as many as the fastest way takes.

        Raises:
            ValueError: shapes or dtypes that do not fit, ids outside the vocabulary, a text without a token, padding between
                real tokens, or a memory limit that no way keeps.
        """
        self._check("token_ids", token_ids, mask)
        check_like("TextClassifier", "token_types", token_types, token_ids)
        places = place("TextClassifier", self.encoder.an_encoding, token_ids.shape[1], mask, token_types=token_types)
        x = self.encoder(self._embed(token_ids, mask, places.tokens), places, memory_limit=memory_limit)
        return self.head(self._pool(x, mask))

    def _pool(
        self, x: Float[Tensor, "batch tokens channels"], mask: Bool[Tensor, "batch tokens"] | None
    ) -> Float[Tensor, "batch channels"]:
        if self.pooling == "first":
            first = x.new_zeros(len(x), dtype=torch.long) if mask is None else mask.long().argmax(dim=1)
            return x[torch.arange(len(x), device=x.device), first]
        if mask is None:
            return x.mean(dim=1)
        # a sum of many tokens is too much for float16
        total = torch.where(mask[..., None], x, 0).sum(dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
        return (total / mask.sum(dim=1, keepdim=True)).to(x.dtype)
