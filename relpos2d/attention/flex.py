"""FlexAttention (arXiv:2412.05496): a fused kernel for GPUs that reads the numbers of the distinct offsets by itself."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from relpos2d.encoding import LatticeNumbers
from relpos2d.positions import Grid, OffsetLattice

#: queries and keys that share one entry of a block mask; torch's own size
BLOCK = 128
#: kernels kept: one for each dtype, number of heads, head_dim, kind of mask, sizes fixed or free; past it torch goes unfused
RECOMPILE_LIMIT = 128
#: more than there are distinct offsets
SPAN_BITS = 29
SPAN = 2**SPAN_BITS
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST_HEAD_DIM = 16
SMALLEST_CAPABILITY = (8, 0)

Lines = tuple[Tensor, Tensor]
Made = TypeVar("Made")


def _kept(make: Callable[[Grid, Grid, torch.device], Made]) -> Callable[[Grid, Grid, torch.device], Made]:
    """The same, remembered for the grids used last; what is made in inference mode may be used in training later."""
    remembered = functools.lru_cache(maxsize=64)(make)

    @functools.wraps(make)
    def kept(queries: Grid, keys: Grid, device: torch.device) -> Made:
        if torch.compiler.is_compiling():
            return make(queries, keys, device)
        with torch.inference_mode(False):
            return remembered(queries, keys, device)

    return kept


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: LatticeNumbers | None,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    lattice: OffsetLattice | None = None,
) -> Tensor:
    """softmax(scale * q . k + numbers + mask) v; on CUDA in one compiled kernel, on the CPU by torch's unfused path.

    Args:
        q, k, v: (B, heads, N, head_dim), where `obstacle` says nothing.
        numbers: what the encoding adds, once per distinct offset; gradients reach them, in at least float32.
        mask: bool (True: may be seen) or added to the scores; broadcasts to (B, heads, Nq, Nk). Its first size may also divide
            B, as that of shifted windows: sample b takes row b modulo that size.
        is_causal: keys whose coordinate is larger than the query's are not seen; prefix tokens are, and see only one another.
        scale: of the scores.
        lattice: where queries and keys stand, for a causal mask without numbers.

    Returns:
        (B, heads, Nq, value_dim); 0 for a query that sees no key.

    Raises:
        ValueError: causal without a lattice or on several axes, or a mask whose first size does not divide B.
    """
    lattice = lattice if numbers is None else numbers.lattice
    if is_causal and lattice is None:
        raise ValueError("flex.attend: is_causal needs numbers or a lattice, which say where queries and keys stand")
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        if q.shape[0] % mask.shape[0]:
            raise ValueError(
                f"flex.attend: the first size of mask {tuple(mask.shape)} must divide {q.shape[0]} samples"
            )

    added, allowed = (None, mask) if mask is None or mask.dtype == torch.bool else (mask, None)
    # one read of one tensor for all numbers: a second read would have no gradient in the fused kernel; float32 or more, because the
    # kernel adds up in their dtype what reaches them
    dtype = torch.promote_types(q.dtype, torch.float32)
    table = None if numbers is None else flat_numbers(numbers).to(dtype)
    added = None if added is None else added.to(dtype)
    modify = _score_modification(None if numbers is None else numbers.lattice, added, q)
    causal = lattice if is_causal else None
    block_mask = None
    if allowed is not None:
        block_mask = _mask_of(allowed, causal, q, k)
    elif causal is not None:
        block_mask = _causal_mask(causal.queries, causal.keys, q.device)
    compute = _unfused if q.device.type == "cpu" else _fused
    return compute(q, k, v, modify, table, added, block_mask, scale)


def obstacle(
    q: Tensor, k: Tensor, v: Tensor, numbers: LatticeNumbers | None, mask: Tensor | None, dropout_p: float
) -> str | None:
    """Why `attend` cannot do this, in words that follow "backend 'flex' ..."; None if it can."""
    if dropout_p > 0:
        return f"has no dropout of attention weights, and dropout_p={dropout_p}"
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return "has no kernel for empty tensors"
    if q.device.type == "cpu":
        return "runs on the CPU only outside torch.compile" if torch.compiler.is_compiling() else None
    if q.device.type != "cuda":
        return f"runs on cuda and cpu, and the tensors are on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"has no kernel for {q.dtype} on cuda, only for {', '.join(map(str, DTYPES))}"
    head_dim = min(q.shape[-1], v.shape[-1])
    if head_dim < SMALLEST_HEAD_DIM:
        return f"has no kernel for head_dim={head_dim}, only for {SMALLEST_HEAD_DIM} and more"
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(q.device) < SMALLEST_CAPABILITY:
        return f"needs a GPU of compute capability {'.'.join(map(str, SMALLEST_CAPABILITY))} or newer"
    return None


def flat_numbers(numbers: LatticeNumbers) -> Tensor:
    """(heads, 3 + distinct offsets): from prefix to place, from place to prefix, between prefix tokens, then all offsets."""
    values = numbers.values.flatten(1)
    front = values.new_zeros(len(values), 3) if numbers.prefix is None else numbers.prefix.T.to(values.dtype)
    return torch.cat([front, values], dim=1)


@_kept
def lines(queries: Grid, keys: Grid, device: torch.device) -> Lines:
    """A whole number per query (Nq,) and one per key (Nk,), whose sum says where the number of the pair stands in `flat_numbers`.

    Along every axis the index of an offset is a sum of what the query and what the key brings, and so is the index of all axes
    together: N numbers do for N * N pairs. Prefix tokens have numbers far below 0.
    """
    lattice = OffsetLattice(queries, keys)
    rows = columns = torch.zeros(1, device=device, dtype=torch.int32)
    for axis, size in enumerate(lattice.shape):
        of_queries = torch.arange(queries.shape[axis], device=device, dtype=torch.int32) * lattice.query_strides[axis]
        of_keys = torch.arange(keys.shape[axis], device=device, dtype=torch.int32).flip(0) * lattice.key_strides[axis]
        rows = (rows[:, None] * size + of_queries).flatten()
        columns = (columns[:, None] * size + of_keys).flatten()
    return _behind_prefix(rows + 3, queries, -SPAN), _behind_prefix(columns, keys, -2 * SPAN)


def place(row: Tensor, column: Tensor) -> Tensor:
    """Where in `flat_numbers` the number of a pair stands, from its two `lines`.

    Places come out as their sum. A prefix query alone brings the sum into the first span below 0, a prefix key alone into the
    second, both together into the third: ~(-1), ~(-2) and ~(-3) are 0, 1 and 2.
    """
    total = row + column
    return torch.maximum(total, ~(total >> SPAN_BITS))


@_kept
def orders(queries: Grid, keys: Grid, device: torch.device) -> Lines:
    """A whole number per query (Nq,) and one per key (Nk,): causal attention shows the keys whose number is not larger.

    Raises:
        ValueError: more than one axis.
    """
    if queries.num_axes != 1:
        raise ValueError(f"is_causal: needs one axis, the positions have {queries.num_axes}")
    lattice = OffsetLattice(queries, keys)
    # rounded up, without math.ceil, which the compiler does not take for fractions
    behind = -int((queries.origin[0] - keys.origin[0]) // lattice.steps[0])
    of_queries = torch.arange(queries.shape[0], device=device, dtype=torch.int32) * lattice.query_strides[0]
    of_keys = torch.arange(keys.shape[0], device=device, dtype=torch.int32) * lattice.key_strides[0] + behind
    lowest = torch.iinfo(torch.int32).min
    return _behind_prefix(of_queries, queries, lowest), _behind_prefix(of_keys, keys, lowest)


def _behind_prefix(line: Tensor, grid: Grid, value: int) -> Tensor:
    return torch.cat([line.new_full((grid.num_prefix_tokens,), value), line])


def _score_modification(lattice: OffsetLattice | None, mask: Tensor | None, q: Tensor) -> Callable[..., Tensor]:
    """What becomes of the score of one pair. The tensors that gradients may reach, (table, added mask), are its arguments."""
    rows = columns = samples = None
    if lattice is not None:
        rows, columns = lines(lattice.queries, lattice.keys, q.device)
    if mask is not None:
        samples = _samples(mask, q)

    def modify(
        score: Tensor,
        b: Tensor,
        h: Tensor,
        i: Tensor,
        j: Tensor,
        table: Tensor | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        if rows is not None and columns is not None and table is not None:
            score = score + table[h, place(rows[i], columns[j])]
        if samples is not None and added is not None:
            score = score + _read(added, samples, b, h, i, j)
        return score

    return modify


def _samples(mask: Tensor, q: Tensor) -> Tensor:
    """The row of a mask (rows, heads, Nq, Nk) that belongs to each sample of q."""
    return torch.arange(q.shape[0], device=q.device, dtype=torch.int32) % mask.shape[0]


def _read(mask: Tensor, samples: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The entry of a mask (rows, heads, Nq, Nk) for one pair, where any size may be 1."""
    h, i, j = (x if size > 1 else x * 0 for x, size in zip((h, i, j), mask.shape[1:], strict=True))
    return mask[samples[b], h, i, j]


@_kept
def _causal_mask(queries: Grid, keys: Grid, device: torch.device) -> BlockMask:
    of_queries, of_keys = orders(queries, keys, device)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return of_queries[i] >= of_keys[j]

    return _from_blocks(*_causal_blocks(of_queries, of_keys), seen, queries.num_tokens, keys.num_tokens)


def _mask_of(allowed: Tensor, causal: OffsetLattice | None, q: Tensor, k: Tensor) -> BlockMask:
    """The mask (rows, heads, Nq, Nk), any size of which may be 1, and the causal one; without a value per pair of its own."""
    samples = _samples(allowed, q)
    some = _in_blocks(_in_blocks(allowed, -1).any(-1), -2).any(-2)
    every = _in_blocks(_in_blocks(allowed, -1).all(-1), -2).all(-2)
    if 1 < len(allowed) < len(q):
        some, every = some[samples], every[samples]
    of_queries = of_keys = None
    if causal is not None:
        of_queries, of_keys = orders(causal.queries, causal.keys, q.device)
        in_order = _causal_blocks(of_queries, of_keys)
        some, every = some & in_order[0], every & in_order[1]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        shown = _read(allowed, samples, b, h, i, j)
        return shown if of_queries is None or of_keys is None else shown & (of_queries[i] >= of_keys[j])

    return _from_blocks(some, every, seen, q.shape[-2], k.shape[-2])


def _causal_blocks(of_queries: Tensor, of_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Whether some pair of each block is seen, and whether every one is: (1, 1, query blocks, key blocks)."""
    low_q, high_q = _in_blocks(of_queries, -1).aminmax(dim=-1)
    low_k, high_k = _in_blocks(of_keys, -1).aminmax(dim=-1)
    return (high_q[:, None] >= low_k)[None, None], (low_q[:, None] >= high_k)[None, None]


def _in_blocks(x: Tensor, dim: int) -> Tensor:
    """A dimension of N cut into (blocks, BLOCK); its last entry fills up the last block."""
    size = x.shape[dim]
    num_blocks = -(-size // BLOCK)
    index = torch.arange(num_blocks * BLOCK, device=x.device).clamp(max=size - 1)
    return x.index_select(dim, index).unflatten(dim, (num_blocks, BLOCK))


def _from_blocks(
    some: Tensor, every: Tensor, seen: Callable[..., Tensor], num_queries: int, num_keys: int
) -> BlockMask:
    """Blocks seen in part ask `seen` for each of their pairs, those seen as a whole do not; ragged ones count as parts."""
    grid = (*some.shape[:2], -(-num_queries // BLOCK), -(-num_keys // BLOCK))
    some, every = some.expand(grid), every.expand(grid).clone()
    every[:, :, num_queries // BLOCK :] = False
    every[:, :, :, num_keys // BLOCK :] = False
    partly = _listed(some & ~every)
    wholly = _listed(every)
    return BlockMask.from_kv_blocks(
        *partly, *wholly, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(num_queries, num_keys)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks are marked for each block of queries, and the marked ones in front in rising order."""
    counts = blocks.sum(-1, dtype=torch.int32)
    return counts, (~blocks).byte().argsort(dim=-1, stable=True).int()


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    modify: Callable[..., Tensor],
    table: Tensor | None,
    added: Tensor | None,
    block_mask: BlockMask | None,
    scale: float,
) -> Tensor:
    """One kernel forward, one backward. The function of the scores is new on each call, its code is not: no new compilation."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return modify(score, b, h, i, j, table, added)

    compiled: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    out: Tensor = compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale)
    return out


@functools.cache
def _compiled() -> Callable[..., Any]:
    options = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}  # these are not in torch's overloads
    return torch.compile(flex_attention, **options)  # type: ignore[call-overload, no-any-return]


def _unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    modify: Callable[..., Tensor],
    table: Tensor | None,
    added: Tensor | None,
    block_mask: BlockMask | None,
    scale: float,
) -> Tensor:
    """torch's own evaluation of the same functions over all pairs. `flex_attention` refuses gradients on the CPU at its door, not
    in the operator behind it, which gives gradients to the captured tensors that it is handed one by one.
    """
    _warn_unfused()
    given = {name: tensor for name, tensor in (("table", table), ("added", added)) if tensor is not None}

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *captured: Tensor) -> Tensor:
        return modify(score, b, h, i, j, **dict(zip(given, captured, strict=True)))

    if block_mask is None:
        block_mask = _mask_of(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device), None, q, k)
    operands: tuple[Any, ...] = (q, k, v, score_mod, block_mask.as_tuple(), scale, {}, tuple(given.values()))
    out: Tensor = flex_operator(*operands)[0]
    return out


@functools.cache
def _warn_unfused() -> None:
    warnings.warn(
        "attend: backend 'flex' has a fused kernel only on GPUs; on the CPU it is right but slow, and holds the scores "
        "of all pairs. Use backend 'auto' there",
        RuntimeWarning,
    )
