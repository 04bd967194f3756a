"""What all models of text share: token embeddings, absolute places, checks at the door, and how parameters start."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relpos2d.backbones.host import Spec, position_parameters, split
from relpos2d.eager import runs_eagerly
from relpos2d.encoding import Encoding
from relpos2d.encodings import create_encoding
from relpos2d.encodings.xlnet import XLNet
from relpos2d.models.blocks import MlpName, NormName, Stack, check_choice, reset
from relpos2d.positions import Grid, Positions


class TokenModel(nn.Module):
    """Base of the models of text. Subclasses make their stacks with `_new_stack` and then draw all parameters."""

    #: whether tokens can be given types, for encodings with a term for them
    takes_token_types: ClassVar[bool] = False

    def __init__(
        self,
        vocab_size: int,
        *,
        encoding: Spec,
        max_length: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float | None,
        mlp: MlpName,
        norm: NormName,
        dropout: float,
        shared_encoding: bool,
        padding_id: int,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        for name, size in (
            ("vocab_size", vocab_size),
            ("max_length", max_length),
            ("embed_dim", embed_dim),
            ("depth", depth),
            ("num_heads", num_heads),
        ):
            check_size(who, name, size)
        if embed_dim % num_heads:
            raise ValueError(f"{who}: embed_dim={embed_dim} must be a multiple of num_heads={num_heads}")
        if mlp_ratio is not None and not 0 < mlp_ratio < float("inf"):
            raise ValueError(f"{who}: mlp_ratio={mlp_ratio} must be positive")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"{who}: dropout={dropout} must be at least 0 and below 1")
        if not 0 <= padding_id < vocab_size:
            raise ValueError(
                f"{who}: padding_id={padding_id} must be between 0 and {vocab_size - 1}, an id of the vocabulary"
            )
        check_choice(who, "mlp", mlp, MlpName)
        check_choice(who, "norm", norm, NormName)
        self.vocab_size, self.embed_dim, self.padding_id = vocab_size, embed_dim, padding_id
        self.max_length = max_length
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        absolute, _ = split(encoding, who)
        #: the absolute members of the encoding; None without such members
        self.absolute = (
            None if absolute is None else create_encoding(absolute, num_heads, embed_dim // num_heads, Grid(max_length))
        )
        self.dropout = nn.Dropout(dropout)
        self._num_heads = num_heads
        self._options: dict[str, Any] = {
            "mlp_ratio": mlp_ratio,
            "mlp": mlp,
            "norm": norm,
            "dropout": dropout,
            "shared_encoding": shared_encoding,
            "checkpointing": checkpointing,
        }
        self.register_load_state_dict_post_hook(_rebuild)

    def _new_stack(self, depth: int, encoding: Spec, *, option: str = "encoding", has_source: bool = False) -> Stack:
        _, relative = split(encoding, type(self).__name__)
        stack = Stack(
            self.embed_dim,
            depth,
            self._num_heads,
            "none" if relative is None else relative,
            Grid(self.max_length),
            has_source=has_source,
            **self._options,
        )
        if not self.takes_token_types:
            for part in stack.an_encoding.modules():
                if isinstance(part, XLNet) and part.seg_embed is not None:
                    raise ValueError(
                        f"{type(self).__name__}: {option}={encoding!r} has a term for token types, which this model does not "
                        "take, so it would learn nothing; xlnet is allowed with token_types=False (TextClassifier takes them)"
                    )
        return stack

    def reset_parameters(self) -> None:
        """Draw all parameters anew; also after to_empty()."""
        reset(self.children())

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that must not decay: those of the encodings."""
        return position_parameters(self)

    def init_non_persistent_buffers(self) -> None:
        """Rebuild what encodings derive and do not save."""
        for module in self.modules():
            if isinstance(module, Encoding):
                module.init_non_persistent_buffers()

    def _embed(
        self, token_ids: Int[Tensor, "batch tokens"], mask: Bool[Tensor, "batch tokens"] | None, places: Positions
    ) -> Float[Tensor, "batch tokens channels"]:
        x = self.embedding(hide(token_ids, mask, self.padding_id))
        return self.dropout(x if self.absolute is None else self.absolute.embed(x, places))

    def _check(
        self, name: str, token_ids: Int[Tensor, "batch tokens"], mask: Bool[Tensor, "batch tokens"] | None
    ) -> None:
        """Refuse what are no texts of the vocabulary."""
        who = type(self).__name__
        if token_ids.ndim != 2 or token_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{who}: {name} is {token_ids.dtype} of shape {tuple(token_ids.shape)}, allowed is int64 of shape (B, N)"
            )
        if not token_ids.numel():
            raise ValueError(f"{who}: {name} has shape {tuple(token_ids.shape)}; an empty text has nothing to read")
        check_like(who, "mask" if name == "token_ids" else f"{name}_mask", mask, token_ids)
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"{who}: the mask of {name} is {mask.dtype}, allowed is bool (True: a real token)")
        if not runs_eagerly() or token_ids.is_meta:
            return
        lowest, highest = torch.stack(hide(token_ids, mask, self.padding_id).aminmax()).tolist()
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"{who}: {name} holds the id {wrong}, the vocabulary has the ids 0 to {self.vocab_size - 1}; does the "
                "tokenizer belong to this model?"
            )


def hide(
    token_ids: Int[Tensor, "batch tokens"], mask: Bool[Tensor, "batch tokens"] | None, padding_id: int
) -> Int[Tensor, "batch tokens"]:
    """The tokens with `padding_id` wherever they are not real, so that what stands there never matters."""
    return token_ids if mask is None else torch.where(mask, token_ids, padding_id)


def check_like(who: str, name: str, value: Tensor | None, token_ids: Tensor) -> None:
    """Refuse a tensor that has not one entry for each token."""
    if value is not None and value.shape != token_ids.shape:
        raise ValueError(f"{who}: {name} has shape {tuple(value.shape)}, the token ids allow {tuple(token_ids.shape)}")


def check_size(who: str, name: str, size: int) -> None:
    """Refuse what is no whole number of at least 1."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{who}: {name}={size!r} must be a whole number of at least 1")


def _rebuild(model: nn.Module, incompatible_keys: object) -> None:
    assert isinstance(model, TokenModel)
    model.init_non_persistent_buffers()
