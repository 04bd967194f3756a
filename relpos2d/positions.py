"""Where tokens stand: on a lattice (Grid) or at real coordinates (Points), and the offsets between two such places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Number: TypeAlias = int | float | Fraction


@dataclass(frozen=True, init=False, repr=False)
class Grid:
    """Tokens on a lattice, row-major, with prefix tokens (class, registers) in front of them.

    The token at lattice index i of an axis stands at ``origin + step * i``; units are tokens of the grid with step 1.
    Immutable, hashable and free of tensors, so that it can be a key, a default or a constant of a traced graph.

    Args:
        shape: tokens along each axis, in the order (y, x) for images, (t,) for sequences, (t, y, x) for video.
        num_prefix_tokens: tokens in front of the lattice; they have no place.
        step: distance between neighbours, for all axes or one each. Rational; a float is read as its decimal digits.
        origin: place of the first token, for all axes or one each.

    Raises:
        ValueError: no axis, an axis shorter than 1, a step that is not positive, or not one step (origin) per axis.
    """

    shape: tuple[int, ...]
    num_prefix_tokens: int
    step: tuple[Fraction, ...]
    origin: tuple[Fraction, ...]

    def __init__(
        self,
        *shape: int,
        num_prefix_tokens: int = 0,
        step: Number | Sequence[Number] = 1,
        origin: Number | Sequence[Number] = 0,
    ) -> None:
        if not shape:
            raise ValueError("Grid: needs at least one axis, for example Grid(14, 14)")
        for size in shape:
            if isinstance(size, bool) or not isinstance(size, Integral | torch.SymInt) or size < 1:
                raise ValueError(f"Grid: shape={shape} must hold whole numbers of at least 1")
        _check_prefix("Grid", num_prefix_tokens)
        steps, origins = _per_axis("step", step, len(shape)), _per_axis("origin", origin, len(shape))
        if any(s <= 0 for s in steps):
            raise ValueError(f"Grid: step={step} must be positive")
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "num_prefix_tokens", num_prefix_tokens)
        object.__setattr__(self, "step", steps)
        object.__setattr__(self, "origin", origins)

    def __repr__(self) -> str:
        parts = [str(size) for size in self.shape]
        if self.num_prefix_tokens:
            parts.append(f"num_prefix_tokens={self.num_prefix_tokens}")
        if any(step != 1 for step in self.step):
            parts.append(f"step=({', '.join(map(str, self.step))})")
        if any(origin != 0 for origin in self.origin):
            parts.append(f"origin=({', '.join(map(str, self.origin))})")
        return f"Grid({', '.join(parts)})"

    @property
    def num_axes(self) -> int:
        return len(self.shape)

    @property
    def num_places(self) -> int:
        """Tokens on the lattice, without the prefix."""
        return math.prod(self.shape)

    @property
    def num_tokens(self) -> int:
        """All tokens: prefix and lattice."""
        return self.num_prefix_tokens + self.num_places

    def coords(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "places axes"]:
        """Places of the lattice tokens, row-major: token t of an (H, W) grid is at (t // W, t % W) times step plus origin."""
        lines = [
            torch.arange(size, device=device, dtype=dtype) * float(step) + float(origin)
            for size, step, origin in zip(self.shape, self.step, self.origin, strict=True)
        ]
        return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)

    def offsets(
        self, other: Positions, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*batch queries keys axes"]:
        """Offset of every pair of places, this one's (queries) minus the other's (keys)."""
        return _pair_offsets(self, other, device, dtype)

    def lattice(self, other: Grid) -> OffsetLattice:
        """The distinct offsets between this grid (queries) and the other (keys)."""
        _check_axes(self, other)
        return OffsetLattice(self, other)

    def pool(self, factor: int | Sequence[int]) -> Grid:
        """Grid of the means over blocks of `factor` tokens: centres of blocks, so half-step offsets for even factors.

        A last block that is not full counts as full, as in pooling with padding.
        """
        factors = _per_axis("factor", factor, self.num_axes)
        if any(f < 1 or f.denominator != 1 for f in factors):
            raise ValueError(f"Grid.pool: factor={factor} must hold whole numbers of at least 1")
        return Grid(
            *(-(-size // int(f)) for size, f in zip(self.shape, factors, strict=True)),
            num_prefix_tokens=self.num_prefix_tokens,
            step=tuple(step * f for step, f in zip(self.step, factors, strict=True)),
            origin=tuple(o + s * (f - 1) / 2 for o, s, f in zip(self.origin, self.step, factors, strict=True)),
        )

    def part(self, start: int, stop: int) -> Grid:
        """Rows `start` to `stop` of the first axis, as far as there are any; the prefix tokens stay with the first row."""
        size = min(stop, self.shape[0]) - start
        return Grid(
            size,
            *self.shape[1:],
            num_prefix_tokens=0 if start else self.num_prefix_tokens,
            step=self.step,
            origin=(self.origin[0] + self.step[0] * start, *self.origin[1:]),
        )

    def points(self, batch_size: int = 1, *, device: torch.device | str | None = None) -> Points:
        """The same places as Points, for each sample of a batch."""
        coords = self.coords(device=device).expand(batch_size, -1, -1)
        return Points(coords, num_prefix_tokens=self.num_prefix_tokens)


@dataclass(frozen=True, eq=False)
class Points:
    """Tokens at real coordinates that may differ from sample to sample.

    For dropped tokens, packed images of different sizes, boxes, mixed text and image.

    Args:
        places: coordinates (B, N, axes), axes in the order (y, x), in tokens; at least float32.
        valid: (B, N), which of the N are real; the others are padding: no key for anyone, and 0 as output. None: all.
        segments: (B, N), tokens see only those of their own segment (packed images). None: one segment.
        num_prefix_tokens: tokens in front; they have no place and are seen by, and see, everybody.
        token_types: (B, N), which part of the input a token belongs to, as the two sentences of a pair. It hides nothing; an
            encoding with a term for it (`xlnet`) tells equal types from different ones. None: no such term.

    Raises:
        ValueError: shapes that do not fit one another, or coordinates in low precision (bfloat16 merges 256 and 257).
    """

    places: Float[Tensor, "batch places axes"]
    valid: Bool[Tensor, "batch places"] | None = None
    segments: Int[Tensor, "batch places"] | None = None
    num_prefix_tokens: int = 0
    token_types: Int[Tensor, "batch places"] | None = None

    def __post_init__(self) -> None:
        if self.places.ndim != 3 or self.places.shape[-1] < 1:
            raise ValueError(f"Points: coordinates have shape {tuple(self.places.shape)}, allowed is (B, N, axes)")
        if self.places.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Points: coordinates are {self.places.dtype}, allowed are float32 and float64")
        per_place = {"valid": self.valid, "segments": self.segments, "token_types": self.token_types}
        for name, value in per_place.items():
            if value is not None and value.shape != self.places.shape[:2]:
                raise ValueError(
                    f"Points: {name} has shape {tuple(value.shape)}, coordinates allow {tuple(self.places.shape[:2])}"
                )
        if self.valid is not None and self.valid.dtype != torch.bool:
            raise ValueError(f"Points: valid is {self.valid.dtype}, allowed is bool")
        for name in ("segments", "token_types"):
            value = per_place[name]
            if value is not None and (value.is_floating_point() or value.dtype == torch.bool):
                raise ValueError(f"Points: {name} is {value.dtype}, allowed are whole numbers")
        _check_prefix("Points", self.num_prefix_tokens)

    @property
    def num_axes(self) -> int:
        return self.places.shape[-1]

    @property
    def num_places(self) -> int:
        """Tokens with a place, without the prefix."""
        return self.places.shape[1]

    @property
    def num_tokens(self) -> int:
        """All tokens of a sample: prefix and places."""
        return self.num_prefix_tokens + self.num_places

    def coords(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "batch places axes"]:
        """Coordinates of the tokens that have a place; 0 for padding, whose own may be anything, also NaN."""
        places = self.places.to(device=device, dtype=dtype)
        return places if self.valid is None else torch.where(self.valid.to(places.device)[..., None], places, 0)

    def offsets(
        self, other: Positions, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "batch queries keys axes"]:
        """Offset of every pair of places, this one's (queries) minus the other's (keys)."""
        return _pair_offsets(self, other, device, dtype)

    def part(self, start: int, stop: int) -> Points:
        """Places `start` to `stop` of each sample; the prefix tokens stay with the first."""
        valid, segments, types = (
            None if x is None else x[:, start:stop] for x in (self.valid, self.segments, self.token_types)
        )
        return Points(self.places[:, start:stop], valid, segments, 0 if start else self.num_prefix_tokens, types)


Positions: TypeAlias = Grid | Points


class OffsetLattice:
    """The distinct offsets between two grids, which are themselves a lattice, and the way from them to all pairs.

    Along one axis with steps sq, sk and their common measure g, the pair (i, j) has the offset
    ``first + g * (a * i + b * (num_keys - 1 - j))`` with a = sq / g and b = sk / g. With the numbers in falling order of
    the offset and the queries in reverse, pair (i', j) reads number a * i' + b * j: the bias of all pairs is a strided view of
    the numbers of the distinct offsets. No index tensor exists.
    """

    def __init__(self, queries: Grid, keys: Grid) -> None:
        self.queries, self.keys = queries, keys
        self.steps = tuple(_common_measure(q, k) for q, k in zip(queries.step, keys.step, strict=True))
        self.query_strides = tuple(int(s / g) for s, g in zip(queries.step, self.steps, strict=True))
        self.key_strides = tuple(int(s / g) for s, g in zip(keys.step, self.steps, strict=True))
        # plain numbers: a compiler that takes a size as a symbol knows no fractions
        self.first = tuple(
            float(oq - ok) - (size - 1) * float(sk)
            for oq, ok, size, sk in zip(queries.origin, keys.origin, keys.shape, keys.step, strict=True)
        )
        self.shape = tuple(
            a * (nq - 1) + b * (nk - 1) + 1
            for a, b, nq, nk in zip(self.query_strides, self.key_strides, queries.shape, keys.shape, strict=True)
        )

    @property
    def num_offsets(self) -> int:
        return math.prod(self.shape)

    @property
    def is_line(self) -> bool:
        """Whether there is one axis, and neighbours of queries are as far apart as those of keys."""
        return self.query_strides == self.key_strides == (1,)

    @property
    def is_whole(self) -> bool:
        """Whether every offset is a whole number."""
        origins = zip(self.queries.origin, self.keys.origin, strict=True)
        return all(step.denominator == 1 for step in self.steps) and all((q - k).denominator == 1 for q, k in origins)

    def offsets(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*shape axes"]:
        """The distinct offsets, in rising order along each axis."""
        lines = [
            torch.arange(size, device=device, dtype=dtype) * float(step) + first
            for size, step, first in zip(self.shape, self.steps, self.first, strict=True)
        ]
        return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1)

    def spread(self, values: Shaped[Tensor, "..."]) -> Shaped[Tensor, "... queries keys"]:
        """From one value per distinct offset (..., *shape) to one per pair (..., num queries, num keys), both row-major."""
        if not all(isinstance(size, int) for size in (*self.queries.shape, *self.keys.shape)):
            return self._looked_up(values)
        axes = tuple(range(-len(self.shape), 0))
        unfolded = self._unfold(values.flip(axes), range(len(self.shape)))
        pairs = (self.queries.num_places, self.keys.num_places)
        # the queries come out in reverse; to turn whole rows round costs half of what turning the keys does
        return unfolded.reshape(*values.shape[: values.ndim - len(self.shape)], *pairs).flip(-2)

    def rows(self, values: Shaped[Tensor, "..."]) -> Shaped[Tensor, "... width offsets"]:
        """From one value per distinct offset to all pairs of every axis but the first: (..., width of a row of queries,
        offsets of the first axis times width of a row of keys).

        With the order of the queries reversed, query x of row y and key j (counted over all rows) have the value at
        ``[..., x, y * width_k + j]``: the values of all pairs are a strided view of this. Needs `rows_fit`.
        """
        num_axes = len(self.shape)
        lead = values.ndim - num_axes
        unfolded = self._unfold(values.flip(tuple(range(-num_axes, 0))), range(1, num_axes))
        # [... s, x axes, k axes] -> [... x axes, s, k axes]
        unfolded = unfolded.movedim(lead, lead + num_axes - 1)
        width = math.prod(self.queries.shape[1:])
        return unfolded.reshape(*values.shape[:lead], width, self.shape[0] * math.prod(self.keys.shape[1:]))

    @property
    def rows_fit(self) -> bool:
        """Whether rows of queries and of keys follow one another in equal steps, as `rows` needs it."""
        return self.query_strides[0] == self.key_strides[0] == 1

    def _looked_up(self, values: Tensor) -> Tensor:
        """`spread` for sizes that an exporter keeps open, which a view cannot have."""
        num_axes = len(self.shape)
        index: Tensor | int = 0
        for axis, size in enumerate(self.shape):
            q = self.query_strides[axis] * torch.arange(self.queries.shape[axis], device=values.device)
            k = self.key_strides[axis] * torch.arange(self.keys.shape[axis], device=values.device)
            along = q[:, None] + (k[-1] - k)
            # (queries, keys) of this axis among those of all: (query axes..., key axes...)
            shape = [1] * (2 * num_axes)
            shape[axis], shape[num_axes + axis] = along.shape
            index = index * size + along.reshape(shape)
        assert isinstance(index, Tensor)
        index = index.reshape(self.queries.num_places, self.keys.num_places)
        return values.flatten(-num_axes)[..., index]

    def _unfold(self, values: Tensor, axes: range) -> Tensor:
        """Numbers in falling order (..., *shape) to (..., reversed queries, keys of the axes); axes not named stay."""
        lead = values.ndim - len(self.shape)
        for axis in axes:
            b = self.key_strides[axis]
            values = values.unfold(lead + axis, b * (self.keys.shape[axis] - 1) + 1, self.query_strides[axis])[..., ::b]
        return values


def join(*parts: Positions, packed: bool = False, device: torch.device | str | None = None) -> Points:
    """The places of several parts one behind the other, as in mixed text and image or images packed into one sequence.

    Args:
        parts: Grids or Points with the same number of axes and, where they are Points, the same batch size.
            Only the first may have prefix tokens.
        packed: give each part a segment of its own, so that its tokens see only one another.
        device: device of the coordinates of Grids; by default that of the first Points.

    Raises:
        ValueError: nothing to join, or parts that do not fit one another.
    """
    if not parts:
        raise ValueError("join: needs at least one Grid or Points")
    if any(part.num_prefix_tokens for part in parts[1:]):
        raise ValueError("join: only the first part may have prefix tokens, since they stand in front of all places")
    for part in parts[1:]:
        _check_axes(parts[0], part)
    given = [part for part in parts if isinstance(part, Points)]
    batch_sizes = {part.places.shape[0] for part in given}
    if len(batch_sizes) > 1:
        raise ValueError(f"join: batch sizes {sorted(batch_sizes)} differ")
    if given and device is None:
        device = given[0].places.device
    batch = batch_sizes.pop() if batch_sizes else 1
    points = [part.points(batch, device=device) if isinstance(part, Grid) else part for part in parts]
    dtype = max((p.places.dtype for p in points), key=lambda d: d.itemsize)

    valid = segments = types = None
    if any(p.token_types is not None for p in points):
        if any(p.token_types is None for p in points):
            raise ValueError("join: all parts must have token_types, or none")
        types = torch.cat([p.token_types for p in points if p.token_types is not None], 1)
    if any(p.valid is not None for p in points):
        valid = torch.cat(
            [p.places.new_ones(p.places.shape[:2], dtype=torch.bool) if p.valid is None else p.valid for p in points], 1
        )
    if packed or any(p.segments is not None for p in points):
        numbered, next_segment = [], 0
        for p in points:
            own = p.places.new_zeros(p.places.shape[:2], dtype=torch.long) if p.segments is None else p.segments.long()
            if packed and own.numel():
                own = own - own.min() + next_segment
                next_segment = int(own.max()) + 1
            numbered.append(own)
        segments = torch.cat(numbered, dim=1)
    places = torch.cat([p.places.to(dtype) for p in points], 1)
    return Points(places, valid, segments, parts[0].num_prefix_tokens, types)


def visible(
    queries: Positions, keys: Positions, *, is_causal: bool = False, device: torch.device | str | None = None
) -> Bool[Tensor, "batch queries keys"] | None:
    """Which query may see which key, prefix tokens included; None if every query sees every key.

    Padding is seen by nobody and sees nobody; segments keep to themselves. Causal: a query sees the keys whose coordinate
    is not larger than its own, and all prefix tokens; prefix tokens, being in front, see one another.

    Raises:
        ValueError: causal on more than one axis.
    """
    if is_causal and queries.num_axes != 1:
        raise ValueError(f"is_causal: needs one axis, the positions have {queries.num_axes}")
    allowed: Tensor | None = None
    if is_causal:
        if isinstance(queries, Grid) and isinstance(keys, Grid):
            # whole numbers of the common measure: floats would lose a key at an offset of 0 and steps like 1/10
            measure = math.lcm(*(x.denominator for g in (queries, keys) for x in (*g.step, *g.origin)))
            q, k = (
                torch.arange(g.shape[0], device=device) * int(g.step[0] * measure) + int(g.origin[0] * measure)
                for g in (queries, keys)
            )
            allowed = (q[:, None] >= k)[None]
        else:
            allowed = (queries.offsets(keys, device=device, dtype=torch.float64) >= 0).all(-1)
    segments_q, segments_k = getattr(queries, "segments", None), getattr(keys, "segments", None)
    if (segments_q is None) != (segments_k is None):
        raise ValueError("segments: queries and keys must both have segments, or neither")
    if segments_q is not None and segments_k is not None:
        same = segments_q[:, :, None] == segments_k[:, None, :]
        allowed = same if allowed is None else allowed & same
    if allowed is not None:
        pad_q, pad_k = queries.num_prefix_tokens, keys.num_prefix_tokens
        allowed = torch.nn.functional.pad(allowed, (pad_k, 0, pad_q, 0), value=True)
        if is_causal and pad_q:
            allowed = allowed.clone()
            allowed[:, :pad_q, pad_k:] = False
    for positions, dim in ((queries, -1), (keys, -2)):
        real = real_tokens(positions)
        if real is not None:
            real = real.unsqueeze(dim)
            allowed = real if allowed is None else allowed & real
    if allowed is None:
        return None
    return allowed.expand(-1, queries.num_tokens, keys.num_tokens)


def real_tokens(positions: Positions) -> Bool[Tensor, "batch tokens"] | None:
    """Which tokens are no padding, prefix tokens included; None if all are real."""
    valid = getattr(positions, "valid", None)
    return None if valid is None else torch.nn.functional.pad(valid, (positions.num_prefix_tokens, 0), value=True)


def _pair_offsets(queries: Positions, keys: Positions, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
    _check_axes(queries, keys)
    if device is None:
        device = next((p.places.device for p in (queries, keys) if isinstance(p, Points)), None)
    q, k = queries.coords(device=device, dtype=dtype), keys.coords(device=device, dtype=dtype)
    return q.unsqueeze(-2) - k.unsqueeze(-3)


def _check_axes(queries: Positions, keys: Positions) -> None:
    if queries.num_axes != keys.num_axes:
        raise ValueError(f"offsets: {queries.num_axes} axes against {keys.num_axes}; both sides need the same axes")


def _check_prefix(who: str, num_prefix_tokens: int) -> None:
    if isinstance(num_prefix_tokens, bool) or not isinstance(num_prefix_tokens, Integral) or num_prefix_tokens < 0:
        raise ValueError(f"{who}: num_prefix_tokens={num_prefix_tokens!r} must be a whole number of at least 0")


def _common_measure(a: Fraction, b: Fraction) -> Fraction:
    """The largest step of which both steps are whole multiples."""
    denominator = a.denominator * b.denominator
    return Fraction(math.gcd(a.numerator * b.denominator, b.numerator * a.denominator), denominator)


def _per_axis(name: str, value: Number | Sequence[Number], num_axes: int) -> tuple[Fraction, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * num_axes
    if len(values) != num_axes:
        raise ValueError(f"Grid: {name}={value} has {len(values)} entries, the shape has {num_axes} axes")
    if any(isinstance(v, float) and not math.isfinite(v) for v in values):
        raise ValueError(f"Grid: {name}={value} must be finite")
    # the decimal digits of a float are what was meant: 0.1 is 1/10 and not 3602879701896397/36028797018963968
    return tuple(Fraction(str(v)) if isinstance(v, float) else Fraction(v) for v in values)
