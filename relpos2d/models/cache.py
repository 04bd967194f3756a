"""What a decoder remembers of the tokens that it has read: projected keys and values, and which of them are padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Cache:
    """Keys and values of all layers, as projected and not turned; empty when made.

    A model appends to it in each forward pass and reads all of it. Memory grows by doubling, so that a step copies nothing but
    its own tokens. Only for decoding, without gradients.
    """

    def __init__(self) -> None:
        #: tokens read so far
        self.length = 0
        #: (B, length), which of them are real; None: all
        self.mask: Tensor | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._source: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def batch_size(self) -> int | None:
        """Rows it was filled with; None if it is empty."""
        return self._keys[0].shape[0] if self._keys else None

    def append(
        self,
        layer: int,
        keys: Float[Tensor, "batch heads tokens head_dim"],
        values: Float[Tensor, "batch heads tokens head_dim"],
    ) -> tuple[Float[Tensor, "batch heads all_tokens head_dim"], Float[Tensor, "batch heads all_tokens head_dim"]]:
        """Keep the new tokens of a layer and return all of its tokens. They count as read once `advance` is called.

        Raises:
            ValueError: a gradient is wanted.
        """
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ValueError("Cache: is for decoding and keeps no gradients; use it under torch.no_grad()")
        stop = self.length + keys.shape[2]
        if layer == len(self._keys):
            self._keys.append(_room(keys, stop))
            self._values.append(_room(values, stop))
        kept = []
        for buffers, new in ((self._keys, keys), (self._values, values)):
            buffer = buffers[layer]
            if buffer.shape[2] < stop:
                buffer = _room(new, max(stop, 2 * buffer.shape[2]))
                buffer[:, :, : self.length] = buffers[layer][:, :, : self.length]
                buffers[layer] = buffer
            buffer[:, :, self.length : stop] = new
            kept.append(buffer[:, :, :stop])
        return kept[0], kept[1]

    def source(self, layer: int, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values that a layer makes of the source: made at the first call, kept for all others."""
        if layer not in self._source:
            self._source[layer] = make()
        return self._source[layer]

    def advance(self, num_tokens: int, mask: Bool[Tensor, "batch all_tokens"] | None) -> None:
        """Count the tokens that all layers have appended as read; `mask` is that of all tokens, None if all are real."""
        self.length += num_tokens
        self.mask = mask

    def reorder(self, rows: Int[Tensor, " new_batch"], *, same_source: bool = False) -> None:
        """Go on with these rows, in this order; a row may be taken several times or not at all, as beams need it.

        Args:
            rows: numbers of rows.
            same_source: each row takes the place of one with the same source, so that nothing of the source has to move.
        """
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                moved = _room(buffer, buffer.shape[2], batch_size=len(rows))
                moved[:, :, : self.length] = buffer[:, :, : self.length].index_select(0, rows)
                buffers[layer] = moved
        if self.mask is not None:
            self.mask = self.mask.index_select(0, rows)
        if not same_source:
            self._source = {
                layer: (keys.index_select(0, rows), values.index_select(0, rows))
                for layer, (keys, values) in self._source.items()
            }


def _room(like: Tensor, num_tokens: int, *, batch_size: int | None = None) -> Tensor:
    """Memory for the keys or values of this many tokens."""
    batch, heads, _, head_dim = like.shape
    return like.new_empty(batch if batch_size is None else batch_size, heads, num_tokens, head_dim)
