"""An encoder that reads a source and a decoder that writes a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from relpos2d.backbones.host import split
from relpos2d.models.blocks import MlpName, NormName
from relpos2d.models.cache import Cache
from relpos2d.models.language_model import joined_mask
from relpos2d.models.places import place
from relpos2d.models.token_model import TokenModel, check_size


class EncoderDecoder(TokenModel):
    """Tokens of the source see one another, each token of the target sees the source, those before it and itself.

    Source and target have one vocabulary, one token embedding and the same absolute positions. Attention to the source has no
    positions.

    Args:
        vocab_size: token ids run from 0 to vocab_size - 1.
        encoding: a name, a mapping with a name, or a list of these; absolute members are added to the embeddings.
        decoder_encoding: of the decoder's attention, as T5 has another one there ({"name": "t5", "bidirectional": False}),
            without absolute members; None: the same as in the encoder.
        max_length: tokens that encodings with a size are made for; longer texts are read as far as the encoding goes on.
        embed_dim: channels.
        depth: blocks of the encoder.
        decoder_depth: blocks of the decoder; None: as many as the encoder has.
        num_heads: attention heads.
        mlp_ratio: hidden channels of the MLP, in embed_dim; None: 8/3 for "swiglu", 4 for "gelu".
        mlp: "swiglu" or "gelu".
        norm: "rmsnorm" or "layernorm".
        dropout: of embeddings, attention weights and what is added to the residual path.
        shared_encoding: one encoding for all blocks of the encoder and one for those of the decoder, and not one each.
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
        decoder_encoding: str | Mapping[str, Any] | Sequence[Any] | None = None,
        max_length: int = 512,
        embed_dim: int = 128,
        depth: int = 4,
        decoder_depth: int | None = None,
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
        if decoder_depth is not None:
            check_size("EncoderDecoder", "decoder_depth", decoder_depth)
        if decoder_encoding is not None and split(decoder_encoding, "EncoderDecoder")[0] is not None:
            raise ValueError(
                f"EncoderDecoder: decoder_encoding={decoder_encoding!r} must have no absolute members; those of `encoding` "
                "are added to source and target"
            )
        self.encoder = self._new_stack(depth, encoding)
        self.decoder = self._new_stack(
            depth if decoder_depth is None else decoder_depth,
            encoding if decoder_encoding is None else decoder_encoding,
            option="encoding" if decoder_encoding is None else "decoder_encoding",
            has_source=True,
        )
        self.head = None if tied else nn.Linear(embed_dim, vocab_size, bias=False)
        self.reset_parameters()

    def forward(
        self,
        source: Int[Tensor, "batch source_tokens"],
        target: Int[Tensor, "batch tokens"],
        source_mask: Bool[Tensor, "batch source_tokens"] | None = None,
        target_mask: Bool[Tensor, "batch tokens"] | None = None,
        *,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch tokens vocabulary"]:
        """Logits (B, N, vocab_size) of the token behind each one of the target; what stands at padding has no meaning.

        Args:
            source: (B, M).
            target: (B, N).
            source_mask: (B, M), True for real tokens; padding stands at the ends of a row. None: all are real.
            target_mask: (B, N), the same of the target.
            memory_limit: bytes that each attention may hold; None: as many as the fastest way takes.

        Raises:
            ValueError: shapes or dtypes that do not fit, ids outside the vocabulary, a text without a token, padding between
                real tokens, or a memory limit that no way keeps.
        """
        states = self.encode(source, source_mask, memory_limit=memory_limit)
        x = self.decode(states, target, source_mask, target_mask, memory_limit=memory_limit)
        return self.forward_head(x)

    def encode(
        self,
        source: Int[Tensor, "batch source_tokens"],
        mask: Bool[Tensor, "batch source_tokens"] | None = None,
        *,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch source_tokens channels"]:
        """States (B, M, C) of the source."""
        self._check("source", source, mask)
        places = place("EncoderDecoder.source", self.encoder.an_encoding, source.shape[1], mask)
        return self.encoder(self._embed(source, mask, places.tokens), places, memory_limit=memory_limit)

    def decode(
        self,
        states: Float[Tensor, "batch source_tokens channels"],
        target: Int[Tensor, "batch tokens"],
        source_mask: Bool[Tensor, "batch source_tokens"] | None = None,
        target_mask: Bool[Tensor, "batch tokens"] | None = None,
        *,
        cache: Cache | None = None,
        memory_limit: int | None = None,
    ) -> Float[Tensor, "batch tokens channels"]:
        """States (B, N, C) of the target; with a cache, of the tokens behind those that it holds.

        A cache also holds what the first call made of `states`, which are not read again.
        """
        self._check("target", target, target_mask)
        if len(states) != len(target):
            raise ValueError(f"EncoderDecoder: {len(states)} sources and {len(target)} targets; each needs the other")
        all_real, past = joined_mask("EncoderDecoder", cache, target, target_mask)
        places = place(
            "EncoderDecoder.target", self.decoder.an_encoding, target.shape[1], all_real, is_causal=True, past=past
        )
        x = self.decoder(
            self._embed(target, target_mask, places.tokens),
            places,
            is_causal=True,
            source=states,
            source_mask=source_mask,
            cache=cache,
            memory_limit=memory_limit,
        )
        if cache is not None:
            cache.advance(target.shape[1], all_real)
        return x

    def forward_head(self, x: Float[Tensor, "... channels"]) -> Float[Tensor, "... vocabulary"]:
        """Logits of what `decode` gives."""
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
