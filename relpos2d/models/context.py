"""Which frames a frame of a recording sees, and attention among bounded neighbours in memory that grows with the length alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from relpos2d.encoding import Encoding
from relpos2d.models.places import place
from relpos2d.positions import Grid, Points, Positions


@dataclass(frozen=True)
class Context:
    """How far frames see; None: as far as there are frames.

    Args:
        chunk_size: frames of a chunk; a frame sees to the end of its chunk, and back from the start of it. None: no chunks.
        left: frames seen before the frame itself, or before its chunk.
        right: frames seen behind the frame itself; with chunks there are none.

    Raises:
        ValueError: sizes that are no whole numbers, or a view beyond the chunk.
    """

    chunk_size: int | None = None
    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, size, least in (
            ("chunk_size", self.chunk_size, 1),
            ("left_context", self.left, 0),
            ("right_context", self.right, 0),
        ):
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < least):
                raise ValueError(f"{name}={size!r} must be a whole number of at least {least}, or None")
        if self.chunk_size is not None and self.right is not None:
            raise ValueError(
                f"right_context={self.right} goes beyond a chunk, to whose end a frame sees; give chunk_size={self.chunk_size} "
                "or right_context, not both"
            )

    @property
    def is_full(self) -> bool:
        """Whether every frame sees every frame."""
        return self == Context()

    @property
    def is_bounded(self) -> bool:
        """Whether a frame sees no more frames in a longer recording."""
        return self.left is not None and (self.chunk_size is not None or self.right is not None)

    def seen(self, queries: Int[Tensor, " queries"], keys: Int[Tensor, " keys"]) -> Bool[Tensor, "queries keys"]:
        """Which frames see which, by their numbers."""
        first = last = queries
        if self.chunk_size is not None:
            first = queries - queries % self.chunk_size
            last = first + self.chunk_size - 1
        allowed = torch.ones(len(queries), len(keys), dtype=torch.bool, device=queries.device)
        if self.left is not None:
            allowed &= keys >= (first - self.left)[:, None]
        if self.chunk_size is not None or self.right is not None:
            allowed &= keys <= (last + (self.right or 0))[:, None]
        return allowed

    def sight(
        self, who: str, encoding: Encoding, num_frames: Int[Tensor, " batch"], real: Bool[Tensor, "batch frames"]
    ) -> Sight:
        """What attention of a batch needs; with bounded context in blocks, see `Sight`.

        Args:
            who: stands in front of errors.
            encoding: of the attention.
            num_frames: of each recording.
            real: the same, frame by frame.
        """
        if self.is_full:
            places = place(who, encoding, real.shape[1], real)
            return Sight(places.queries, places.keys, places.mask)
        length, device = real.shape[1], real.device
        if not self.is_bounded:
            frames = torch.arange(length, device=device)
            return Sight(Grid(length), Grid(length), (self.seen(frames, frames) & real[:, None])[:, None])
        assert self.left is not None
        # no more than there is: a view beyond the ends of the recording costs nothing
        step, left, right = (min(n, length) for n in (self.chunk_size or 1, self.left, self.right or 0))
        # as many queries as they see neighbours: then each key is copied into about two blocks
        size = step * max(1, -(-(left + right) // step))
        size = min(size, step * -(-length // step))
        num_blocks, num_keys = -(-length // size), left + size + right
        starts = size * torch.arange(num_blocks, device=device)
        queries, keys = (torch.arange(n, device=device) - o for n, o in ((size, 0), (num_keys, left)))
        true_keys = starts[:, None] + keys
        exists = (true_keys >= 0) & (true_keys < num_frames[:, None, None])
        mask = exists.flatten(0, 1)[:, None, None]
        if size > step:
            mask = mask & self.seen(queries, keys)
        q_pos: Positions = Grid(size)
        k_pos: Positions = Grid(num_keys, origin=-left)
        if encoding.knows_query:
            q_pos, k_pos = (
                Points((starts[:, None] + x).repeat(len(real), 1)[..., None].float()) for x in (queries, keys)
            )
        return Sight(q_pos, k_pos, mask, size, left, right)


@dataclass(frozen=True, eq=False)
class Sight:
    """The places of queries and keys of one forward pass, and who sees whom.

    With a block size, queries are cut into blocks, and each block gets the keys that any of it sees. The offsets are those of a
    lattice in every block alike, so blocks are samples of a larger batch:

        # queries [a b c d e f] -> [a b] [c d] [e f],  keys -> [. a b c] [b c d e] [d e f .]

    Args:
        queries, keys: their places.
        mask: what may be seen, broadcast to (B, heads, queries, keys); None: all.
        block_size: queries of a block; 0: no blocks.
        left, right: keys in front of and behind a block that it gets.
    """

    queries: Positions
    keys: Positions
    mask: Tensor | None
    block_size: int = 0
    left: int = 0
    right: int = 0

    def queries_of(
        self, x: Float[Tensor, "batch heads frames head_dim"]
    ) -> Float[Tensor, "blocks heads queries head_dim"]:
        """Queries of frames, in blocks if there are blocks."""
        return self._cut(x, 0, 0)

    def keys_of(self, x: Float[Tensor, "batch heads frames head_dim"]) -> Float[Tensor, "blocks heads keys head_dim"]:
        """Keys or values of frames, in blocks if there are blocks."""
        return self._cut(x, self.left, self.right)

    def joined(
        self, x: Float[Tensor, "blocks heads queries head_dim"], num_frames: int
    ) -> Float[Tensor, "batch heads frames head_dim"]:
        """What came out for queries, as frames."""
        if not self.block_size:
            return x
        num_blocks = -(-num_frames // self.block_size)
        return x.unflatten(0, (-1, num_blocks)).transpose(1, 2).flatten(2, 3)[:, :, :num_frames]

    def _cut(self, x: Tensor, left: int, right: int) -> Tensor:
        if not self.block_size:
            return x
        behind = -x.shape[2] % self.block_size
        x = F.pad(x, (0, 0, left, right + behind))
        # [B heads (left + frames + right) D] -> [B heads blocks D size]
        blocks = x.unfold(2, left + self.block_size + right, self.block_size)
        return blocks.permute(0, 2, 1, 4, 3).flatten(0, 1)


class Past:
    """What one block remembers: keys and values that later chunks see, and the frames that its convolution sees.

    Args:
        left: frames before a chunk that it sees; None: all.
    """

    def __init__(self, left: int | None) -> None:
        self.left = left
        self._kept: tuple[Tensor, Tensor] | None = None
        self._frames: Tensor | None = None

    def seen(
        self, k: Float[Tensor, "batch heads frames head_dim"], v: Float[Tensor, "batch heads frames head_dim"]
    ) -> tuple[Float[Tensor, "batch heads keys head_dim"], Float[Tensor, "batch heads keys head_dim"]]:
        """Keys and values of a chunk behind those of the past that it sees."""
        if self._kept is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self._kept, (k, v), strict=True))
        first = 0 if self.left is None else max(0, k.shape[2] - self.left)
        # copies, or a view would hold on to all that was seen
        self._kept = k[:, :, first:].clone(), v[:, :, first:].clone()
        return k, v

    def heard(
        self, x: Float[Tensor, "batch channels frames"], num_past: int
    ) -> Float[Tensor, "batch channels all_frames"]:
        """Frames of a chunk behind `num_past` frames of the past, which is silent before the start."""
        x = F.pad(x, (num_past, 0)) if self._frames is None else torch.cat((self._frames, x), dim=2)
        self._frames = x[:, :, x.shape[2] - num_past :].clone()
        return x
