"""The numbers of all pairs as a product of a few channels, which join those of q and k: attention without a mask, not exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from relpos2d.attention.flex import flat_numbers, lines, orders, place
from relpos2d.encoding import LatticeNumbers
from relpos2d.positions import OffsetLattice

MAX_RANK = 16
#: of a score: attention weights then change by a factor of at most exp(2 * TOLERANCE), 2 %
TOLERANCE = 0.01
#: queries that a rank is tried on before all are looked at
NUM_TRIED = 32
#: numbers of pairs looked at together: what stays in a cache
PAIRS_AT_ONCE = 2**17


@dataclass(frozen=True, eq=False)
class LowRank:
    """Factors of the numbers between two grids, and how far they are off.

    Args:
        queries, keys: (heads, Nq, rank) and (heads, Nk, rank), in the dtype of q; their product stands for the numbers.
        errors: (heads,), the largest absolute difference to the numbers over all pairs (those seen, if causal), with the
            rounding of the factors to their dtype in it.
        lattice: the distinct offsets they were made for.
        is_causal: whether only pairs that causal attention sees were minded.
    """

    queries: Float[Tensor, "heads queries rank"]
    keys: Float[Tensor, "heads keys rank"]
    errors: Float[Tensor, "heads"]
    lattice: OffsetLattice
    is_causal: bool

    @property
    def rank(self) -> int:
        return self.queries.shape[-1]

    @property
    def error(self) -> float:
        """The largest of `errors`."""
        return float(self.errors.max())

    @property
    def weight_factor(self) -> float:
        """No attention weight is larger by more than this factor, or smaller by more than its inverse: exp(2 * error).

        A score that is off by at most e changes its exponential by a factor within exp(-e)..exp(e), and so it changes the sum of
        all exponentials; a weight is the one divided by the other.
        """
        return float((2 * self.errors.max()).exp())


def attend(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch heads keys head_dim"],
    v: Float[Tensor, "batch heads keys value_dim"],
    numbers: LatticeNumbers | LowRank,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    rank: int | None = None,
    tolerance: float | None = None,
) -> tuple[Float[Tensor, "batch heads queries value_dim"], LowRank]:
    """softmax(scale * q . k + about the numbers + mask) v, through torch's fused kernel with some more channels.

    Gradients reach q, k, v and a mask that is added, not the numbers.

    Args:
        q, k, v: (B, heads, N, head_dim).
        numbers: what the encoding adds, or what `factor` made of it, which then is not done again.
        mask: bool (True: may be seen) or added to the scores; broadcasts to (B, heads, Nq, Nk).
        is_causal: keys whose coordinate is larger than the query's are not seen; prefix tokens are, and see only one another.
        scale: of the scores.
        dropout_p: dropout of the attention weights.
        rank, tolerance: see `factor`.

    Returns:
        The output, (B, heads, Nq, value_dim), and the factors with their error.

    Raises:
        ValueError: see `factor`; or factors made for causal attention used without, or given together with rank or tolerance.
    """
    if isinstance(numbers, LatticeNumbers):
        factors = factor(numbers, is_causal=is_causal, dtype=q.dtype, rank=rank, tolerance=tolerance)
    else:
        factors = numbers
        if rank is not None or tolerance is not None:
            raise ValueError("lowrank.attend: factors are made already; give rank and tolerance to lowrank.factor")
        if factors.is_causal and not is_causal:
            raise ValueError("lowrank.attend: factors were made with is_causal=True and hold only for causal attention")

    batch, heads = q.shape[:2]
    padding = -(q.shape[-1] + factors.rank) % 8
    q = _joined(q * scale, factors.queries.expand(batch, heads, -1, -1), padding)
    k = _joined(k, factors.keys.expand(batch, heads, -1, -1), padding)
    value_dim = v.shape[-1]
    # fused kernels want one head_dim for all three
    v = torch.nn.functional.pad(v, (0, q.shape[-1] - value_dim))
    like_torch = is_causal and mask is None and _is_top_left(factors.lattice)
    if is_causal and not like_torch:
        mask = _with_order(mask, factors.lattice, q)
    if mask is not None:
        mask = mask.expand(batch, heads, q.shape[-2], k.shape[-2])
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=like_torch, scale=1.0
    )
    return out[..., :value_dim], factors


def factor(
    numbers: LatticeNumbers,
    *,
    is_causal: bool = False,
    dtype: torch.dtype | None = None,
    rank: int | None = None,
    tolerance: float | None = None,
) -> LowRank:
    """Factors of the numbers of all pairs, their leading singular vectors, and the error that leaves.

    The vectors come from products with the matrix, O(N log N) each, the error from one look at every pair, in blocks; neither
    holds the matrix. To be called once where the numbers stay: it takes seconds at thousands of tokens.

    Under a causal mask the numbers of keys not seen are free. They are chosen as the mirror image of those seen, through the
    number of offset 0, which keeps a bend out of the matrix: ALiBi in one dimension becomes linear, and its rank is 2.

    Args:
        numbers: what an encoding adds, from `encoding.numbers(q_pos, k_pos)`.
        is_causal: mind only pairs that causal attention sees (one axis only).
        dtype: of the factors, that of q; the dtype of the numbers unless given. Half precision rounds long lines coarsely.
        rank: this many channels, at most min(Nq, Nk), whatever the error.
        tolerance: the fewest channels, at most MAX_RANK, with an error of no more than this in any score; TOLERANCE unless given.

    Returns:
        Factors, rank and error.

    Raises:
        ValueError: numbers that want gradients; rank and tolerance together or below what makes sense; a tolerance that no rank
            up to MAX_RANK reaches; causal on several axes.
    """
    lattice, kept = numbers.lattice, dtype or numbers.values.dtype
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (numbers.values, numbers.prefix)):
        raise ValueError(
            "lowrank: no gradient reaches numbers that are factored, and these want one; use backend 'auto' to train them, or "
            "torch.no_grad() or requires_grad_(False) to keep them as they are"
        )
    if rank is not None and tolerance is not None:
        raise ValueError(f"lowrank: rank={rank} and tolerance={tolerance} are given, allowed is one of them")
    largest = min(lattice.queries.num_tokens, lattice.keys.num_tokens)
    if rank is not None and not 1 <= rank <= largest:
        raise ValueError(f"lowrank: rank={rank} must be between 1 and {largest}, the smaller number of tokens")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"lowrank: tolerance={tolerance} must be above 0")

    with torch.no_grad():
        most = min(MAX_RANK, largest) if rank is None else rank
        queries, keys = (x.to(kept) for x in _singular_channels(_Matrix(numbers, is_causal), most))
        if rank is not None:
            return LowRank(queries, keys, _errors(numbers, is_causal, queries, keys), lattice, is_causal)
        # some queries tell which ranks are not enough, all of them tell which one is
        some = torch.linspace(0, len(queries[0]) - 1, NUM_TRIED).long().unique()
        tolerance = TOLERANCE if tolerance is None else tolerance
        for fewer in range(most + 1):
            parts = queries[..., :fewer], keys[..., :fewer]
            errors = _errors(numbers, is_causal, *parts, some)
            if errors.max() <= tolerance:
                errors = _errors(numbers, is_causal, *parts)
            if errors.max() <= tolerance:
                return LowRank(*parts, errors, lattice, is_causal)
    raise ValueError(
        f"lowrank: with rank {most} in {kept} a score is off by {float(errors.max()):.2g} or more, above "
        f"tolerance={tolerance}; give a rank to take what it gives, a larger tolerance, or an exact backend"
    )


class _Matrix:
    """The numbers of all pairs, known by their products with vectors alone.

    Reversed keys make the numbers of a lattice a correlation, also where queries or keys take only every second or third place
    of it, and so a product of spectra. Prefix tokens are four constant blocks.
    """

    def __init__(self, numbers: LatticeNumbers, is_causal: bool) -> None:
        self.lattice = numbers.lattice
        self.values = numbers.values.double()
        heads = len(self.values)
        self.prefix = self.values.new_zeros(3, heads) if numbers.prefix is None else numbers.prefix.double()
        if is_causal:
            self.values = _mirrored(self.values, self.lattice)
            self.prefix = self.prefix * self.prefix.new_tensor([0.0, 1.0, 1.0])[:, None]
        self.axes = tuple(range(-len(self.lattice.shape), 0))
        self.spectrum = torch.fft.rfftn(self.values, dim=self.axes)

    def times(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        """(heads, Nk, n) to (heads, Nq, n), or back from queries to keys."""
        lattice, axes = self.lattice, self.axes
        sides = [(lattice.keys, lattice.key_strides), (lattice.queries, lattice.query_strides)]
        (source, source_strides), (target, target_strides) = reversed(sides) if transposed else sides
        from_prefix, from_places = x[:, : source.num_prefix_tokens], x[:, source.num_prefix_tokens :]

        places = from_places.transpose(1, 2).unflatten(-1, source.shape)
        spread = x.new_zeros(len(x), x.shape[-1], *lattice.shape)
        _every(spread, source_strides, source.shape).copy_(places if transposed else places.flip(axes))
        product = self.spectrum[:, None] * torch.fft.rfftn(spread, dim=axes).conj()
        out = _every(torch.fft.irfftn(product, s=lattice.shape, dim=axes), target_strides, target.shape)
        out = (out.flip(axes) if transposed else out).flatten(2).transpose(1, 2)

        to_prefix, to_places, between = self.prefix[[1, 0, 2] if transposed else [0, 1, 2]][:, :, None, None]
        of_prefix, of_places = from_prefix.sum(1, keepdim=True), from_places.sum(1, keepdim=True)
        front = (to_prefix * of_places + between * of_prefix).expand(-1, target.num_prefix_tokens, -1)
        return torch.cat([front, out + to_places * of_prefix], dim=1)


def _every(x: Tensor, strides: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """The places of one side in a lattice (..., *shape), a view."""
    first = x.ndim - len(sizes)
    for axis, (stride, size) in enumerate(zip(strides, sizes, strict=True), first):
        x = x.unfold(axis, 1, stride).squeeze(-1).narrow(axis, 0, size)
    return x


def _singular_channels(matrix: _Matrix, num_channels: int) -> tuple[Tensor, Tensor]:
    """The leading singular vectors, each times the root of its singular value: (heads, Nq, n), (heads, Nk, n)."""
    lattice, values = matrix.lattice, matrix.values
    # more directions than asked for, and the matrix a few times more, part near singular values (arXiv:0909.4061)
    num_directions = min(num_channels + 8, lattice.queries.num_tokens, lattice.keys.num_tokens)
    generator = torch.Generator(values.device).manual_seed(0)
    start = torch.randn(
        lattice.keys.num_tokens, num_directions, device=values.device, dtype=values.dtype, generator=generator
    )
    basis = torch.linalg.qr(matrix.times(start.expand(len(values), -1, -1))).Q
    for _ in range(4):
        basis = torch.linalg.qr(matrix.times(basis, transposed=True)).Q
        basis = torch.linalg.qr(matrix.times(basis)).Q
    right, sizes, mixed = torch.linalg.svd(matrix.times(basis, transposed=True), full_matrices=False)
    roots = sizes[:, None].sqrt()
    return (basis @ mixed.mT * roots)[..., :num_channels], (right * roots)[..., :num_channels]


def _errors(
    numbers: LatticeNumbers, is_causal: bool, queries: Tensor, keys: Tensor, some: Tensor | None = None
) -> Tensor:
    """(heads,): the largest difference between numbers and product over all pairs seen, or over those of some queries."""
    lattice, device = numbers.lattice, queries.device
    table, keys = flat_numbers(numbers).double(), keys.double().mT
    rows, columns = lines(lattice.queries, lattice.keys, device)
    of_queries = of_keys = None
    if is_causal:
        of_queries, of_keys = orders(lattice.queries, lattice.keys, device)
    errors = table.new_zeros(len(table))
    index = torch.arange(len(rows), device=device) if some is None else some.to(device)
    for block in index.split(max(1, PAIRS_AT_ONCE // (len(table) * len(columns)))):
        places = place(rows[block, None], columns)
        off = table.index_select(1, places.flatten()).unflatten(1, places.shape)
        off -= queries[:, block].double() @ keys
        if of_queries is not None and of_keys is not None:
            off.masked_fill_(of_queries[block, None] < of_keys, 0.0)
        low, high = off.flatten(1).aminmax(dim=1)
        errors = torch.stack([errors, high, -low]).amax(0)
    return errors


def _mirrored(values: Tensor, lattice: OffsetLattice) -> Tensor:
    """Numbers (heads, offsets) of which those of the future are the others, turned about the number of the present."""
    # the index of the first offset seen, which the last key has with a query whose order is 0
    present = int(orders(lattice.queries, lattice.keys, values.device)[1][-1])
    if present >= values.shape[-1]:
        return torch.zeros_like(values)
    index = torch.arange(values.shape[-1], device=values.device)
    mirror = (2 * max(present, 0) - index).clamp(0, values.shape[-1] - 1)
    return torch.where(index < present, 2 * values[:, max(present, 0), None] - values[:, mirror], values)


def _joined(x: Tensor, channels: Tensor, padding: int) -> Tensor:
    """Channels behind those of x, and zeros behind them."""
    return torch.nn.functional.pad(torch.cat([x, channels.to(x.dtype)], dim=-1), (0, padding))


def _is_top_left(lattice: OffsetLattice) -> bool:
    """Whether causal attention of these grids is the triangle that torch's kernels know."""
    queries, keys = lattice.queries, lattice.keys
    alike = (queries.shape, queries.step, queries.origin) == (keys.shape, keys.step, keys.origin)
    return alike and queries.num_prefix_tokens == keys.num_prefix_tokens == 0


def _with_order(mask: Tensor | None, lattice: OffsetLattice, q: Tensor) -> Tensor:
    """The mask, and nothing of the future seen."""
    of_queries, of_keys = orders(lattice.queries, lattice.keys, q.device)
    seen = of_queries[:, None] >= of_keys
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.to(q.dtype).masked_fill(~seen, float("-inf"))
