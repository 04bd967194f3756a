"""What a position encoding is: the hooks through which an offset enters attention, and sums of encodings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos2d.eager import runs_eagerly
from relpos2d.interpolation import corners
from relpos2d.positions import Grid, OffsetLattice, Positions
from relpos2d.rotation import Rotation

Role = Literal["query", "key"]
Made = TypeVar("Made", bound="Sized")
#: a host's own projections of queries and of keys: (..., channels) to (..., heads * head_dim)
Projections = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
LAYOUTS = ("interleaved", "half")
#: what is larger is not kept; it takes long to use, and little of that to make
MAX_KEPT_BYTES = 2**22


@runtime_checkable
class Sized(Protocol):
    """What knows how many bytes it holds."""

    @property
    def nbytes(self) -> int: ...


class Encoding(nn.Module):
    """Base of all encodings; itself the encoding that does nothing.

    A subclass fills in one of the hooks: ``embed`` (absolute), ``at`` (a number per offset), ``rotate`` (a rotation), or
    ``terms`` / ``content`` (vectors). The rest, spreading numbers over pairs, prefix tokens and strength, is done here.

    Args:
        num_heads: attention heads.
        head_dim: channels of one head.
        positions: the grid the encoding is made for: its axes, its size (tables) and its prefix tokens.
        strength: 0 is no encoding, 1 the whole of it; kept in a persistent buffer.

    Raises:
        ValueError: sizes below 1, a strength outside 0..1, or axes on which the encoding has no meaning.
    """

    name: ClassVar[str] = ""
    family: ClassVar[str] = "none"
    #: numbers of axes on which the encoding has a meaning; None: any
    axes: ClassVar[tuple[int, ...] | None] = None
    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    #: whether numbers and rotations depend on nothing but parameters, buffers and attributes of the module itself, so that
    #: evaluation may use what it made before
    keeps: ClassVar[bool] = False

    strength: Tensor
    _kept: tuple[tuple[Any, list[Tensor], Any], ...]

    @property
    def knows_query(self) -> bool:
        """Whether what an offset becomes also depends on the query's own place (FIRE beyond its L)."""
        return False

    @property
    def knows_length(self) -> bool:
        """Whether what an offset becomes also depends on the length of the sequence (dynamic NTK, LongRoPE): decoding step by
        step then differs from one pass over the whole, by definition."""
        return False

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        strength: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        if not isinstance(positions, Grid):
            raise ValueError(f"{who}: positions={positions!r} must be a Grid, for example Grid(14, 14)")
        for label, size in (("num_heads", num_heads), ("head_dim", head_dim)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{who}: {label}={size!r} must be a whole number of at least 1")
        if self.axes is not None and positions.num_axes not in self.axes:
            allowed = " or ".join(map(str, self.axes))
            raise ValueError(f"{who}: has no meaning on {positions.num_axes} axes ({positions}), allowed: {allowed}")
        self.num_heads, self.head_dim, self.positions = num_heads, head_dim, positions
        self.initial_strength = _checked_strength(who, strength)
        self.register_buffer("strength", torch.full((), self.initial_strength, device=device, dtype=dtype))

    def set_strength(self, strength: float) -> None:
        """Set how much of the encoding is felt, from 0 (none) to 1 (all)."""
        with torch.no_grad():
            self.strength.fill_(_checked_strength(type(self).__name__, strength))

    def reset_parameters(self) -> None:
        """Draw the parameters anew and rebuild everything derived; also after to_empty()."""
        with torch.no_grad():
            self.strength.fill_(self.initial_strength)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Rebuild what is derived and not saved, as after a load onto the meta device."""

    def set_window_size(self, window_size: tuple[int, ...]) -> None:
        """Tell the encoding that the grid is now this large. Encodings without a size of their own do not care."""

    def _checked_window(self, window_size: tuple[int, ...]) -> Grid:
        window = Grid(*window_size)
        if window.num_axes != self.positions.num_axes:
            raise ValueError(
                f"{type(self).__name__}: window_size={window_size} must have {self.positions.num_axes} axes"
            )
        return window

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that must not decay: all of them."""
        return {name for name, _ in self.named_parameters()}

    def reference_scale(self, head_dim: int) -> float:
        """Scale of the scores in the paper; for information, attend() never applies it by itself."""
        return head_dim**-0.5

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, positions={self.positions}"

    # Hooks -----------------------------------------------------------------------------------------------------------

    def embed(
        self, x: Float[Tensor, "batch tokens channels"], pos: Positions
    ) -> Float[Tensor, "batch tokens channels"]:
        """Absolute: x plus what belongs to each token's place."""
        return x

    def rotate(
        self,
        x: Float[Tensor, "batch heads tokens head_dim"],
        pos: Positions,
        role: Role = "query",
        *,
        strength: Tensor | float = 1.0,
    ) -> Float[Tensor, "batch heads tokens head_dim"]:
        """Rotation: queries or keys turned by their place. `strength` multiplies the encoding's own."""
        return x

    def rotate_both(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        q_pos: Positions,
        k_pos: Positions,
        *,
        strength: Tensor | float = 1.0,
        length: Tensor | None = None,
    ) -> tuple[Float[Tensor, "batch heads queries head_dim"], Float[Tensor, "batch heads keys head_dim"]]:
        """`rotate` of queries and of keys; what both need is made once where their places are the same.

        `length`: of the sequence that these are a part of, for encodings that know it; None: see `sequence_length`.
        """
        return self.rotate(q, q_pos, "query", strength=strength), self.rotate(k, k_pos, "key", strength=strength)

    def at(self, offsets: Float[Tensor, "*batch axes"], query: Tensor | None = None) -> Float[Tensor, "*batch heads"]:
        """Number: the formula, at real offsets (query minus key, in tokens).

        `query`: the query's place (..., axes), broadcast against the offsets; it matters to encodings that know it.
        """
        raise NotImplementedError(f"{type(self).__name__}: an encoding of the family '{self.family}' has no numbers")

    def terms(self) -> list[Term]:
        """Vectors: what meets the query, the key or the value."""
        return []

    def content(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Vectors: what is added to the query before content meets content (Transformer-XL), times the strength; None: nothing."""
        return None

    # Derived ---------------------------------------------------------------------------------------------------------

    def bias(self, q_pos: Positions, k_pos: Positions) -> Float[Tensor, "... queries keys"] | None:
        """What is added to the scaled scores: (heads, Nq, Nk), (B, heads, Nq, Nk) for Points; None for no numbers."""
        return None

    def numbers(self, q_pos: Positions, k_pos: Positions) -> LatticeNumbers | None:
        """What `bias` is made of, once per distinct offset; None if it is not, as between Points, and without numbers."""
        return None

    @property
    def adds_numbers(self) -> bool:
        """Whether `bias` gives anything."""
        return type(self).bias is not Encoding.bias

    def score(
        self,
        q: Tensor,
        k: Tensor,
        q_pos: Positions,
        k_pos: Positions,
        scale: float,
        project: Projections | None = None,
    ) -> Float[Tensor, "batch heads queries keys"] | None:
        """What the vectors that meet queries and keys add to the scores; None without such vectors.

        `project`: the host's own projections, for encodings that share them (DeBERTa).
        """
        total = None
        for term in self.terms():
            if term.meets != "value":
                factor = (self.strength * (scale if term.scaled else 1.0)).to(q.dtype)
                part = term.score(q, k, q_pos, k_pos, project, factor)
                total = part if total is None else total + part
        return total

    def value(
        self, weights: Tensor, q_pos: Positions, k_pos: Positions
    ) -> Float[Tensor, "batch heads queries head_dim"] | None:
        """What the vectors that meet the value add to the output, from the attention weights; None without such vectors."""
        total = None
        for term in self.terms():
            if term.meets == "value":
                part = term.value(weights, q_pos, k_pos) * self.strength.to(weights.dtype)
                total = part if total is None else total + part
        return total

    def _recall(self, key: tuple[Any, ...], values: list[Tensor], make: Callable[[], Made], like: Tensor) -> Made:
        """What `make` gives, or gave before for an equal key and equal values.

        Kept are the newest two of each kind (the first entry of the key), if they need no gradient and are not large. Values are
        compared and not version counters, which neither a fused optimiser nor a write through `.data` moves. On other devices a
        comparison would wait for all that was asked for before, so there nothing is kept.
        """
        # first, since a compiler can follow nothing of what comes below
        if not runs_eagerly() or not self.keeps:
            return make()
        values = values + [value for value in vars(self).values() if isinstance(value, Tensor)]
        for value in (like, *values):
            if not value.is_cpu or type(value) not in (Tensor, nn.Parameter):
                return make()
        if torch.is_grad_enabled() and any(value.requires_grad for value in values):
            return make()
        # a module inside may have been exchanged, and autocast makes other numbers of the same values
        key = (*key, autocast_state(), *map(type, self.modules()))
        for kept_key, kept_values, made in self._kept:
            if kept_key == key and len(kept_values) == len(values) and all(map(_same, kept_values, values)):
                return made
        # a tensor made in inference mode would be refused by the next training step
        with torch.inference_mode(False), torch.no_grad():
            made = make()
            if made.nbytes <= MAX_KEPT_BYTES:
                entry = (key, [value.detach().clone() for value in values], made)
                others = [other for other in self._kept if other[0][0] != key[0]]
                newest = [other for other in self._kept if other[0][0] == key[0]][:1]
                self.__dict__["_kept"] = (entry, *newest, *others)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and forget what was made with another one."""
        super().__setattr__(name, value)
        self.__dict__["_kept"] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": ()}

    def prepare(self, q_pos: Positions, k_pos: Positions | None = None) -> Prepared:
        """Compute the bias once for these positions, to be given to several attend() calls in place of the encoding."""
        k_pos = q_pos if k_pos is None else k_pos
        numbers = self.numbers(q_pos, k_pos)
        return Prepared(self, q_pos, k_pos, self.bias(q_pos, k_pos) if numbers is None else numbers)


@dataclass(frozen=True, eq=False)
class LatticeNumbers:
    """What is added to the scores between two grids, once per distinct offset.

    Args:
        lattice: the distinct offsets.
        values: (heads, *lattice.shape), in rising order of the offsets along each axis.
        prefix: (3, heads): from prefix query to place key, from place query to prefix key, between prefix tokens; None: zeros.
    """

    lattice: OffsetLattice
    values: Float[Tensor, "heads *shape"]
    prefix: Float[Tensor, "3 heads"] | None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def bias(self) -> Float[Tensor, "heads queries keys"]:
        """The numbers of all pairs of tokens, prefix tokens included."""
        queries, keys = self.lattice.queries, self.lattice.keys
        numbers = self.lattice.spread(self.values)
        return _with_prefix(numbers, self.prefix, queries.num_prefix_tokens, keys.num_prefix_tokens)


@dataclass(frozen=True, eq=False)
class Prepared:
    """An encoding with its numbers for given positions already computed."""

    encoding: Encoding
    q_pos: Positions
    k_pos: Positions
    numbers: LatticeNumbers | Tensor | None

    @property
    def bias(self) -> Tensor | None:
        """(heads, Nq, Nk), (B, heads, Nq, Nk) for Points; None for no numbers."""
        return self.numbers.bias() if isinstance(self.numbers, LatticeNumbers) else self.numbers


@dataclass(frozen=True, eq=False)
class Term:
    """Vectors that an offset selects, and whom they meet.

    Args:
        vectors: a table (heads or 1, buckets, head_dim), or a formula: from offsets (K, axes) to (heads or 1, K, head_dim). It is
            asked once for each distinct offset, or for each pair where nearly all differ.
        meets: "query" (q . vector), "key" (k . vector) or "value" (the weights pick vectors that join the output).
        bucket: of a table: from whole offsets (..., axes) to its rows (...). Between whole offsets the vectors of the
            neighbours are mixed.
        scaled: whether the product is multiplied by the scale of the scores.
        added: (heads, 1, head_dim), what is added to the query or key before it meets a vector; v of Transformer-XL.
        projected: what makes vectors of `vectors`, which then have the channels of a token (and 1 head): one of the host's
            projections, or a function (K, channels) to (K, heads * head_dim).
    """

    vectors: Tensor | Callable[[Tensor], Tensor]
    meets: Literal["query", "key", "value"]
    bucket: Callable[[Tensor], Tensor] | None = None
    scaled: bool = True
    added: Float[Tensor, "heads 1 head_dim"] | None = None
    projected: Literal["query", "key"] | Callable[[Tensor], Tensor] | None = None

    def score(
        self,
        q: Tensor,
        k: Tensor,
        q_pos: Positions,
        k_pos: Positions,
        project: Projections | None = None,
        factor: Tensor | float = 1.0,
    ) -> Tensor:
        """`factor` times the product that each pair of tokens picks; 0 where a prefix token takes part."""
        by_query = self.meets == "query"
        side, pos = (q, q_pos) if by_query else (k, k_pos)
        side = side[..., pos.num_prefix_tokens :, :]
        if self.added is not None:
            side = side + self.added.to(side.dtype)
        side = side * factor  # before the product, which may be too large for half precision
        lattice = _lattice(q_pos, k_pos)
        if lattice is not None and self._fits(lattice):
            vectors = self._projected(self._along(lattice, side), side, project)
            total = _shifted(side, vectors.flip(-2) if by_query else vectors)
            total = total if by_query else total.transpose(-1, -2)
        else:
            total = self._picked(side, q_pos, k_pos, project)
        if not q_pos.num_prefix_tokens and not k_pos.num_prefix_tokens:
            return total
        return nn.functional.pad(total, (k_pos.num_prefix_tokens, 0, q_pos.num_prefix_tokens, 0))

    def value(self, weights: Tensor, q_pos: Positions, k_pos: Positions) -> Tensor:
        weights = weights[..., q_pos.num_prefix_tokens :, k_pos.num_prefix_tokens :]
        vectors, picks = self._picks(q_pos, k_pos, weights)
        if not picks:
            joined = torch.einsum("bhqk,hbqkd->bhqd", weights, vectors.to(weights.dtype))
        else:
            per_row = weights.new_zeros(*weights.shape[:-1], vectors.shape[-2])
            for index, weight in picks:
                share = weights if weight is None else weights * weight.to(weights.dtype)
                per_row = per_row.scatter_add(-1, index.expand_as(share), share)
            joined = per_row @ vectors.to(weights.dtype)
        return nn.functional.pad(joined, (0, 0, q_pos.num_prefix_tokens, 0))

    def _fits(self, lattice: OffsetLattice) -> bool:
        """Whether a vector for each offset of a line is the cheapest: each row of pairs is then that of its neighbour, shifted."""
        if not lattice.is_line:
            return False
        # a size that is a symbol must not be compared
        return not isinstance(self.vectors, Tensor) or (
            runs_eagerly() and lattice.num_offsets <= self.vectors.shape[-2]
        )

    def _along(self, lattice: OffsetLattice, like: Tensor) -> Tensor:
        """A vector (heads or 1, offsets, ...) for each offset of a line, rising."""
        offsets = lattice.offsets(device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
        if not isinstance(self.vectors, Tensor):
            return self.vectors(offsets)
        assert self.bucket is not None
        if lattice.is_whole:
            return self.vectors[:, self.bucket(offsets).long()]
        total: Tensor | int = 0
        for whole, weight in corners(offsets):
            total = total + self.vectors[:, self.bucket(whole).long()] * weight.unsqueeze(-1).to(self.vectors.dtype)
        assert isinstance(total, Tensor)
        return total

    def _picked(self, side: Tensor, q_pos: Positions, k_pos: Positions, project: Projections | None) -> Tensor:
        """Products of each query or key with all vectors, of which its pairs pick theirs."""
        by_query = self.meets == "query"
        vectors, picks = self._picks(q_pos, k_pos, side)
        if not picks:
            pairs = self._projected(vectors.flatten(1, -2), side, project).unflatten(1, vectors.shape[1:-1])
            return torch.einsum(f"bh{'q' if by_query else 'k'}d,hbqkd->bhqk", side, pairs)
        per_row = _products(side, self._projected(vectors, side, project))
        total: Tensor | int = 0
        for index, weight in picks:
            rows = index if by_query else index.transpose(-1, -2)
            picked = per_row.gather(-1, rows.expand(*per_row.shape[:-1], rows.shape[-1]))
            picked = picked if by_query else picked.transpose(-1, -2)
            total = total + (picked if weight is None else picked * weight.to(side.dtype))
        assert isinstance(total, Tensor)
        return total

    def _projected(self, vectors: Tensor, side: Tensor, project: Projections | None) -> Tensor:
        if self.projected is None:
            return vectors.to(side.dtype)
        if not isinstance(self.projected, str):
            made = self.projected(vectors.squeeze(0)).to(side.dtype)
        elif project is None:
            raise ValueError(
                "attend: the encoding shares the projections of queries and keys with its host; give them: "
                "project=(q_proj, k_proj), or make it with projections of its own"
            )
        else:
            made = project[0 if self.projected == "query" else 1](vectors.squeeze(0).to(side.dtype))
        return made.unflatten(-1, (side.shape[1], -1)).transpose(0, 1)

    def _picks(
        self, q_pos: Positions, k_pos: Positions, like: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor | None]]]:
        """Vectors (heads or 1, K, ...), and of each pair (1 or B, 1, Nq, Nk) the rows it reads, with their weights.

        Of a formula of which nearly each pair reads another vector: the vectors of all pairs (heads or 1, 1 or B, Nq, Nk, ...)
        and no picks.
        """
        device, dtype = like.device, torch.promote_types(like.dtype, torch.float32)
        lattice = _lattice(q_pos, k_pos)
        is_whole = lattice is not None and lattice.is_whole
        if lattice is not None and lattice.is_line and not runs_eagerly():
            lattice = None  # a size that is a symbol cannot be unfolded

        def of_pairs(x: Tensor) -> Tensor:
            """From distinct offsets to all pairs; what is given for all pairs stays as it is."""
            x = x if lattice is None else lattice.spread(x)
            return x.unsqueeze(1) if x.ndim == 3 else x[None, None]

        offsets = (
            q_pos.offsets(k_pos, device=device, dtype=dtype)
            if lattice is None
            else lattice.offsets(device=device, dtype=dtype)
        )
        if not isinstance(self.vectors, Tensor):
            flat = offsets.flatten(0, -2)
            if lattice is not None:
                return self.vectors(flat), [
                    (of_pairs(torch.arange(len(flat), device=device).view(offsets.shape[:-1])), None)
                ]
            if runs_eagerly():  # a compiler knows no number of distinct ones
                distinct, index = flat.unique(dim=0, return_inverse=True)
                if len(distinct) <= k_pos.num_places * like.shape[-1]:
                    return self.vectors(distinct), [(of_pairs(index.view(offsets.shape[:-1])), None)]
            batch = 1 if offsets.ndim == 3 else len(offsets)
            return self.vectors(flat).unflatten(1, (batch, q_pos.num_places, k_pos.num_places)), []
        assert self.bucket is not None
        if is_whole:
            return self.vectors, [(of_pairs(self.bucket(offsets).long()), None)]
        return self.vectors, [
            (of_pairs(self.bucket(whole).long()), of_pairs(weight)) for whole, weight in corners(offsets)
        ]


def _lattice(q_pos: Positions, k_pos: Positions) -> OffsetLattice | None:
    """The distinct offsets between two grids, if they are not more than the pairs."""
    if not isinstance(q_pos, Grid) or not isinstance(k_pos, Grid):
        return None
    lattice = q_pos.lattice(k_pos)
    # first, since a size that is a symbol should not be compared
    if lattice.is_line or lattice.num_offsets <= q_pos.num_places * k_pos.num_places:
        return lattice
    return None


def _products(side: Tensor, vectors: Float[Tensor, "heads vectors head_dim"]) -> Tensor:
    """Each query or key times each vector; vectors that all heads share make one large product."""
    return side @ (vectors[0] if len(vectors) == 1 else vectors).transpose(-1, -2)


def _shifted(
    side: Float[Tensor, "batch heads rows head_dim"], vectors: Float[Tensor, "#heads offsets head_dim"]
) -> Float[Tensor, "batch heads rows columns"]:
    """Row i, column j: row i of `side` times vector rows - 1 - i + j, of which there are rows + columns - 1.

    With one more vector, that nobody reads, a row of products is as long as both, and the next reads one place earlier:

        # [. . a b c x]      [a b c x .]
        # [. d e f . x]  ->  [d e f . x]
        # [g h i . . x]      [g h i . .]
    """
    rows, stride = side.shape[-2], vectors.shape[-2]
    products = _products(side, nn.functional.pad(vectors, (0, 0, 0, 1))).contiguous()
    shape, strides = (*products.shape[:-1], stride - rows + 1), (*products.stride()[:-2], stride, 1)
    return products.as_strided(shape, strides, rows - 1)


class AbsoluteEncoding(Encoding):
    """An encoding that adds to each token a vector of its place; one instance per model, before the first block."""

    family = "absolute"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        self.embed_dim = num_heads * head_dim

    def vectors(self, pos: Positions, *, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "... channels"]:
        """(N, channels), (B, N, channels) for Points, for the tokens with a place, or for all tokens of a sample."""
        raise NotImplementedError

    def embed(
        self, x: Float[Tensor, "batch tokens channels"], pos: Positions
    ) -> Float[Tensor, "batch tokens channels"]:
        if x.shape[-2:] != (pos.num_tokens, self.embed_dim):
            raise ValueError(
                f"{type(self).__name__}: x has {x.shape[-2]} tokens of {x.shape[-1]} channels, the positions {pos} and "
                f"the encoding allow {pos.num_tokens} tokens of {self.embed_dim} channels"
            )
        dtype = torch.promote_types(x.dtype, torch.float32)
        vectors = self.vectors(pos, device=x.device, dtype=dtype) * self.strength.to(dtype)
        vectors = nn.functional.pad(vectors, (0, 0, pos.num_tokens - vectors.shape[-2], 0))
        return (x + vectors).to(x.dtype)


class VectorEncoding(Encoding):
    """An encoding whose vectors meet queries, keys or values; a subclass writes only its ``terms``."""

    family = "vector"

    def terms(self) -> list[Term]:
        raise NotImplementedError(f"{type(self).__name__}: write its vectors, terms() -> list[Term]")


class NumberEncoding(Encoding):
    """An encoding that adds a number to the score; a subclass writes only its formula, ``at``.

    With prefix tokens it owns three learned numbers per head in ``prefix_bias``: prefix query to patch key, patch query to
    prefix key, prefix to prefix.
    """

    family = "number"

    prefix_bias: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        self.prefix_bias = _new_prefix_bias(positions, num_heads, device, dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.prefix_bias is not None:
            nn.init.zeros_(self.prefix_bias)

    def at(self, offsets: Float[Tensor, "*batch axes"], query: Tensor | None = None) -> Float[Tensor, "*batch heads"]:
        raise NotImplementedError(
            f"{type(self).__name__}: write its formula, at(offsets, query=None): (..., axes) -> (..., heads)"
        )

    def bias(self, q_pos: Positions, k_pos: Positions) -> Float[Tensor, "... queries keys"]:
        numbers = self.numbers(q_pos, k_pos)
        if numbers is not None:
            return numbers.bias()
        like: dict[str, Any] = {"device": self.strength.device, "dtype": self._dtype}
        offsets, queries = q_pos.offsets(k_pos, **like), q_pos.coords(**like).unsqueeze(-2)
        values = self.at(offsets, queries).movedim(-1, -3) * self.strength.to(self._dtype)
        return _with_prefix(values, self._prefix(), q_pos.num_prefix_tokens, k_pos.num_prefix_tokens)

    def numbers(self, q_pos: Positions, k_pos: Positions) -> LatticeNumbers | None:
        # whoever overrides `bias` has said all
        if type(self).bias is not NumberEncoding.bias or not isinstance(q_pos, Grid) or not isinstance(k_pos, Grid):
            return None
        lattice = q_pos.lattice(k_pos)
        # grids whose steps have hardly a common measure have more lattice points than pairs
        if lattice.num_offsets > q_pos.num_places * k_pos.num_places:
            return None

        def made() -> LatticeNumbers:
            values = self._on_lattice(lattice) * self.strength.to(self._dtype)
            return LatticeNumbers(lattice, values, self._prefix())

        return self._recall(("numbers", q_pos, k_pos), [*self.parameters(), *self.buffers()], made, self.strength)

    def _on_lattice(self, lattice: OffsetLattice) -> Float[Tensor, "heads *shape"]:
        """The number of each distinct offset."""
        return self.at(lattice.offsets(device=self.strength.device, dtype=self._dtype)).movedim(-1, 0)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.strength.dtype, torch.float32)

    def _prefix(self) -> Tensor | None:
        return None if self.prefix_bias is None else self.prefix_bias * self.strength.to(self._dtype)


class RotaryEncoding(Encoding):
    """An encoding that turns pairs of channels of queries and keys; a subclass writes only its ``angles``.

    Args:
        layout: which channels make a pair: "interleaved", (0, 1), (2, 3), ...; or "half", (0, D/2), (1, D/2 + 1), ...
            The layout belongs to the weights that make q and k: it is saved with them and checked when they are loaded;
            `convert_rotary_layout` turns one into the other.
        rotary_dim: how many channels, the first of each head, are turned; the others stay. None: all.
    """

    family = "rotation"

    layout_half: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        layout: str = "interleaved",
        rotary_dim: int | None = None,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        who = type(self).__name__
        _check_layout(who, layout)
        if rotary_dim is not None and not 0 < rotary_dim <= head_dim:
            raise ValueError(f"{who}: rotary_dim={rotary_dim} must be between 1 and head_dim={head_dim}")
        self.layout = layout
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.register_buffer("layout_half", torch.tensor(layout == "half", device=device))

    def angles(self, coords: Float[Tensor, "*batch tokens axes"]) -> Float[Tensor, "*batch heads tokens pairs"]:
        """Angle of each pair of channels at each place, in radians; one head stands for all if they agree."""
        raise NotImplementedError

    def turns(
        self, coords: Float[Tensor, "*batch tokens axes"], role: Role, length: Tensor | None
    ) -> tuple[Float[Tensor, "*batch heads tokens pairs"], Float[Tensor, "*batch heads tokens pairs"] | None]:
        """Angles, and the logarithm of what turned pairs are multiplied with (None: nothing); both times the strength.

        A subclass overrides this in place of `angles` if queries and keys turn differently, vectors change their length, or
        the length of the sequence matters.

        Args:
            role: "query" or "key".
            length: one behind the last place of queries and keys, () or (B,) for Points; None unless `knows_length`.
        """
        return self.angles(coords), None

    @property
    def turns_alike(self) -> bool:
        """Whether queries and keys at the same place turn alike."""
        return True

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.layout_half.fill_(self.layout == "half")

    def rotate(
        self,
        x: Float[Tensor, "batch heads tokens head_dim"],
        pos: Positions,
        role: Role = "query",
        *,
        strength: Tensor | float = 1.0,
    ) -> Float[Tensor, "batch heads tokens head_dim"]:
        self._check_tokens(x, pos)
        length = sequence_length(pos, device=self.strength.device) if self.knows_length else None
        return self._turned(x, self._rotation(x, pos, strength, role, length))

    def rotate_both(
        self,
        q: Tensor,
        k: Tensor,
        q_pos: Positions,
        k_pos: Positions,
        *,
        strength: Tensor | float = 1.0,
        length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if type(self).rotate is not RotaryEncoding.rotate:  # one that has its own has said all
            return super().rotate_both(q, k, q_pos, k_pos, strength=strength)
        self._check_tokens(q, q_pos)
        self._check_tokens(k, k_pos)
        if length is None and self.knows_length:
            length = sequence_length(q_pos, k_pos, device=self.strength.device)
        of_queries = of_keys = self._rotation(q, q_pos, strength, "query", length)
        if not (self.turns_alike and (q_pos is k_pos or q_pos == k_pos) and q.dtype == k.dtype):
            of_keys = self._rotation(k, k_pos, strength, "key", length)
        return self._turned(q, of_queries), self._turned(k, of_keys)

    def _check_tokens(self, x: Tensor, pos: Positions) -> None:
        if x.shape[-2] != pos.num_tokens or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"{type(self).__name__}: x has {x.shape[-2]} tokens of {x.shape[-1]} channels, the positions {pos} and the "
                f"encoding allow {pos.num_tokens} tokens of {self.head_dim} channels"
            )

    def _turned(self, x: Tensor, rotation: Rotation) -> Tensor:
        if self.rotary_dim == self.head_dim:
            return rotation(x)
        return torch.cat((rotation(x[..., : self.rotary_dim]), x[..., self.rotary_dim :]), dim=-1)

    def _rotation(
        self, x: Tensor, pos: Positions, strength: Tensor | float, role: Role, length: Tensor | None
    ) -> Rotation:
        """The rotation of these places for tensors like x; see `_recall`."""

        def made() -> Rotation:
            return self._new_rotation(x, pos, strength, role, length)

        if not isinstance(pos, Grid) or self._modules or (length is not None and length.ndim):
            return made()
        values = [value for value in (*self._parameters.values(), *self._buffers.values()) if value is not None]
        values += [value for value in (strength, length) if isinstance(value, Tensor)]
        fixed = None if isinstance(strength, Tensor) else strength
        key = ("rotation", pos, x.dtype, fixed, None if self.turns_alike else role)
        return self._recall(key, values, made, x)

    def _new_rotation(
        self, x: Tensor, pos: Positions, strength: Tensor | float, role: Role, length: Tensor | None
    ) -> Rotation:
        # angles grow with the place: in half precision neighbours far from the origin would merge
        dtype = torch.promote_types(x.dtype, torch.float32)
        own = self.strength.to(dtype) * strength
        angles, logarithms = self.turns(pos.coords(device=x.device, dtype=dtype), role, length)
        parts = [None if part is None else part * own for part in (angles, logarithms)]
        if pos.num_prefix_tokens:
            parts = [
                None if part is None else nn.functional.pad(part, (0, 0, pos.num_prefix_tokens, 0)) for part in parts
            ]
        assert parts[0] is not None
        return Rotation(parts[0], self.layout, None if parts[1] is None else parts[1].exp())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layout={self.layout!r}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *rest: list[str]
    ) -> None:
        saved = state_dict.get(prefix + "layout_half")
        if saved is not None and not saved.is_meta and bool(saved) != (self.layout == "half"):
            error_messages = rest[-1]
            error_messages.append(
                f"{type(self).__name__}: the weights {prefix}* have layout={LAYOUTS[bool(saved)]!r}, the module has "
                f"{self.layout!r}; make it with the layout of the weights, or convert their q and k with "
                "relpos2d.convert_rotary_layout"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        with torch.no_grad():  # what is saved next must tell the layout of this module, also after a refused load
            self.layout_half.fill_(self.layout == "half")


class Combined(Encoding):
    """The sum of several encodings: their numbers and vectors are added, their rotations follow one another.

    It owns the prefix terms, once; its strength multiplies that of each part.

    Args:
        parts: encodings with equal heads and axes, made for a grid without prefix tokens.
        positions: the grid with its prefix tokens.
    """

    name = "combined"
    family = "sum"
    keeps = True

    prefix_bias: nn.Parameter | None

    def __init__(self, *parts: Encoding, positions: Grid | None = None, strength: float = 1.0) -> None:
        if not parts:
            raise ValueError("Combined: needs at least one encoding")
        first = parts[0]
        for part in parts[1:]:
            same = (part.num_heads, part.head_dim, part.positions.num_axes)
            if same != (first.num_heads, first.head_dim, first.positions.num_axes):
                raise ValueError(f"Combined: {part} does not fit {first}; heads, head_dim and axes must be equal")
        if any(getattr(part, "prefix_bias", None) is not None for part in parts):
            raise ValueError("Combined: owns the prefix terms; make its parts for a grid without prefix tokens")
        like = first.strength
        super().__init__(
            first.num_heads,
            first.head_dim,
            first.positions if positions is None else positions,
            strength=strength,
            device=like.device,
            dtype=like.dtype,
        )
        self.parts = nn.ModuleList(parts)
        has_numbers = any(_has_numbers(part) for part in parts)
        self.prefix_bias = (
            _new_prefix_bias(self.positions, self.num_heads, like.device, like.dtype) if has_numbers else None
        )

    @property
    def knows_query(self) -> bool:
        return any(part.knows_query for part in self)

    @property
    def knows_length(self) -> bool:
        return any(part.knows_length for part in self)

    def terms(self) -> list[Term]:
        return [term for part in self for term in part.terms()]

    def __iter__(self) -> Iterator[Encoding]:
        return (part for part in self.parts if isinstance(part, Encoding))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for part in self:
            part.reset_parameters()
        if self.prefix_bias is not None:
            nn.init.zeros_(self.prefix_bias)

    def init_non_persistent_buffers(self) -> None:
        for part in self:
            part.init_non_persistent_buffers()

    def set_window_size(self, window_size: tuple[int, ...]) -> None:
        for part in self:
            part.set_window_size(window_size)

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        for part in self:
            embedded = part.embed(x, pos)
            x = x if embedded is x else x + self.strength.to(x.dtype) * (embedded - x)
        return x

    def rotate(self, x: Tensor, pos: Positions, role: Role = "query", *, strength: Tensor | float = 1.0) -> Tensor:
        for part in self:
            x = part.rotate(x, pos, role, strength=self.strength * strength)
        return x

    def rotate_both(
        self,
        q: Tensor,
        k: Tensor,
        q_pos: Positions,
        k_pos: Positions,
        *,
        strength: Tensor | float = 1.0,
        length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        for part in self:
            q, k = part.rotate_both(q, k, q_pos, k_pos, strength=self.strength * strength, length=length)
        return q, k

    def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
        total = _sum(part.at(offsets, query) * part.strength for part in self if _has_numbers(part))
        return super().at(offsets, query) if total is None else total

    def content(self, q: Tensor, k: Tensor) -> Tensor | None:
        total = None
        for part in self:
            content = part.content(q, k)
            if content is not None:
                content = content * part.strength.to(content.dtype)
                total = content if total is None else total + content
        return total

    @property
    def adds_numbers(self) -> bool:
        return any(part.adds_numbers for part in self)

    def bias(self, q_pos: Positions, k_pos: Positions) -> Tensor | None:
        total = _sum(part.bias(q_pos, k_pos) for part in self)
        if total is None:
            return None
        blank = _with_prefix(
            total.new_zeros(self.num_heads, q_pos.num_places, k_pos.num_places),
            self.prefix_bias,
            q_pos.num_prefix_tokens,
            k_pos.num_prefix_tokens,
        )
        return (total + blank) * self.strength.to(total.dtype)

    def numbers(self, q_pos: Positions, k_pos: Positions) -> LatticeNumbers | None:
        parts = [part.numbers(q_pos, k_pos) for part in self if part.adds_numbers]
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts) or type(self).bias is not Combined.bias:
            return None

        def made() -> LatticeNumbers:
            values = _sum(part.values for part in known)
            assert values is not None
            strength = self.strength.to(values.dtype)
            prefix = None if self.prefix_bias is None else self.prefix_bias * strength
            return LatticeNumbers(known[0].lattice, values * strength, prefix)

        own = [self.strength] if self.prefix_bias is None else [self.strength, self.prefix_bias]
        # parts whose numbers are kept give the very same ones again
        return self._recall(("numbers", *known), own + [part.values for part in known], made, self.strength)

    def score(
        self,
        q: Tensor,
        k: Tensor,
        q_pos: Positions,
        k_pos: Positions,
        scale: float,
        project: Projections | None = None,
    ) -> Tensor | None:
        total = _sum(part.score(q, k, q_pos, k_pos, scale, project) for part in self)
        return None if total is None else total * self.strength.to(total.dtype)

    def value(self, weights: Tensor, q_pos: Positions, k_pos: Positions) -> Tensor | None:
        total = _sum(part.value(weights, q_pos, k_pos) for part in self)
        return None if total is None else total * self.strength.to(total.dtype)


def convert_rotary_layout(
    x: Float[Tensor, channels * rest], num_heads: int, *, source: str, target: str, rotary_dim: int | None = None
) -> Float[Tensor, channels * rest]:
    """Reorder the output channels of a q or k projection (weight or bias, heads * head_dim first) for the other layout.

    With both q and k reordered, a rotary encoding in the layout `target` gives the scores that it gave in `source`.

    Args:
        rotary_dim: how many channels, the first of each head, the encoding turns; the others stay where they are. None: all.

    Raises:
        ValueError: an unknown layout, or channels that heads cannot share evenly in pairs.
    """
    for layout in (source, target):
        _check_layout("convert_rotary_layout", layout)
    channels = x.shape[0]
    if num_heads < 1 or channels % (2 * num_heads):
        raise ValueError(
            f"convert_rotary_layout: {channels} channels must be a multiple of 2 * num_heads={2 * num_heads}"
        )
    head_dim = channels // num_heads
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"convert_rotary_layout: rotary_dim={rotary_dim} must be even and between 2 and the {head_dim} channels of a head"
        )
    if source == target:
        return x.clone()
    turned, rest = x.unflatten(0, (num_heads, head_dim)).split((rotary_dim, head_dim - rotary_dim), dim=1)
    pairs = turned.unflatten(1, (-1, 2) if source == "interleaved" else (2, -1))
    return torch.cat((pairs.transpose(1, 2).flatten(1, 2), rest), dim=1).flatten(0, 1)


def sequence_length(*positions: Positions, device: torch.device) -> Tensor:
    """One behind the last place of all positions: (), or (B,) where there are Points."""
    lasts = [pos.coords(device=device, dtype=torch.float64).amax(dim=(-2, -1)) for pos in positions]
    return functools.reduce(torch.maximum, lasts) + 1


def autocast_state() -> tuple[bool, torch.dtype]:
    """Whether operations on the CPU are cast by themselves, and to what."""
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _has_numbers(encoding: Encoding) -> bool:
    return any(isinstance(part, NumberEncoding) for part in encoding.modules())


def _check_layout(who: str, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{who}: layout={layout!r} must be one of {', '.join(LAYOUTS)}")


def _checked_strength(who: str, strength: float) -> float:
    strength = float(strength)
    if not 0.0 <= strength <= 1.0:
        raise ValueError(f"{who}: strength={strength} must be between 0 (no encoding) and 1 (all of it)")
    return strength


def _sum(parts: Iterable[Tensor | None]) -> Tensor | None:
    total = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def _new_prefix_bias(positions: Grid, num_heads: int, device: Any, dtype: Any) -> nn.Parameter | None:
    if not positions.num_prefix_tokens:
        return None
    return nn.Parameter(torch.zeros(3, num_heads, device=device, dtype=dtype))


def _with_prefix(
    numbers: Float[Tensor, "... queries keys"],
    prefix_bias: Float[Tensor, "3 heads"] | None,
    num_prefix_queries: int,
    num_prefix_keys: int,
) -> Float[Tensor, "... all_queries all_keys"]:
    """Put the blocks of the prefix tokens around the numbers of the places; zeros where there is no prefix_bias."""
    if not num_prefix_queries and not num_prefix_keys:
        return numbers
    queries, keys = numbers.shape[-2:]
    rows = numbers.new_zeros(3, numbers.shape[-3]) if prefix_bias is None else prefix_bias.to(numbers.dtype)
    prefix_to_patch, patch_to_prefix, prefix_to_prefix = rows[:, :, None, None]
    lead = numbers.shape[:-2]
    top = torch.cat(
        (
            prefix_to_prefix.expand(*lead, num_prefix_queries, num_prefix_keys),
            prefix_to_patch.expand(*lead, num_prefix_queries, keys),
        ),
        dim=-1,
    )
    bottom = torch.cat((patch_to_prefix.expand(*lead, queries, num_prefix_keys), numbers), dim=-1)
    return torch.cat((top, bottom), dim=-2)
