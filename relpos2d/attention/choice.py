"""Which way attend() takes: the fastest that is right, and fits into the memory that it may use."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos2d.attention import flex, fused
from relpos2d.attention.fused import Rows
from relpos2d.eager import is_transformed, runs_eagerly
from relpos2d.encoding import Encoding, LatticeNumbers, Projections
from relpos2d.positions import Grid, OffsetLattice, Positions

BACKENDS = ("auto", "explicit", "sdpa", "flex", "lowrank")
#: a dense bias above this is never the fastest: it is read from memory, and not from a cache
MAX_DENSE_BYTES = 2**26
#: a score this far below others has no weight, and a query that sees only such is still exact to a few digits
HIDING = 1e5
#: keys up to which making the dense bias costs less than going without it
FEW_KEYS = 256


@dataclass(frozen=True)
class Explanation:
    """Which way attend() took, and why; `str()` is one line.

    Args:
        backend: "explicit", "sdpa", "flex" or "lowrank".
        way: how the backend did it: "no mask", "is_causal", "view" and "bands" (numbers per distinct offset), "dense" (a number
            per pair), "whole" or "blocks" (explicit), "score_mod" (flex), "factors" (lowrank).
        why: the reason, in words.
        num_bytes: what it holds beside inputs, output, their gradients, and what the encoding needs to make its numbers; an
            upper bound.
        num_rows: rows of queries in each of the blocks; 0 without blocks.
        error: largest error of the bias; 0 but for lowrank.
    """

    backend: str
    way: str
    why: str
    num_bytes: int = 0
    num_rows: int = 0
    error: float = 0.0

    def __str__(self) -> str:
        error = f", bias wrong by at most {self.error:.1e}" if self.error else ""
        return f"{self.backend}, {self.way}: {self.why}; holds up to {_size(self.num_bytes)}{error}"


@dataclass(frozen=True, eq=False)
class Request:
    """What attend() was given, checked and completed.

    Args:
        numbers: of the encoding per distinct offset, or per pair; None if it has none, or has not been asked.
        mask: (1 or part of the batch, 1 or heads, 1 or Nq, 1 or Nk), bool or added.
        is_causal: False where every query sees every key anyhow.
        is_prepared: the numbers are those of `Encoding.prepare`, and not to be asked for again.
        project: the host's projections of queries and keys.
        length: of the whole sequence, where these are queries of a part of it and the encoding knows it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    encoding: Encoding
    numbers: LatticeNumbers | Tensor | None
    q_pos: Positions
    k_pos: Positions
    mask: Tensor | None
    is_causal: bool
    dropout_p: float
    scale: float
    is_prepared: bool = False
    project: Projections | None = None
    length: Tensor | None = None

    def turned(self) -> tuple[Tensor, Tensor]:
        """Queries and keys with what the encoding does to them."""
        q, k = self.q, self.k
        content = self.encoding.content(q, k)
        if content is not None:
            q = q + (content * self.encoding.strength).to(q.dtype)
        return self.encoding.rotate_both(q, k, self.q_pos, self.k_pos, length=self.length)

    @property
    def itemsize(self) -> int:
        return torch.promote_types(self.q.dtype, torch.float32).itemsize

    @property
    def pairs(self) -> int:
        """Pairs of tokens of one head of one sample."""
        return self.q.shape[2] * self.k.shape[2]

    @property
    def on_grids(self) -> bool:
        return isinstance(self.q_pos, Grid) and isinstance(self.k_pos, Grid)

    @property
    def meets(self) -> set[str]:
        """What the vectors of the encoding meet: "query", "key", "value"."""
        return {term.meets for term in self.encoding.terms()}

    @property
    def adds_scores(self) -> bool:
        return bool(self.meets - {"value"})

    @property
    def silent(self) -> bool:
        """Whether nothing but causality is added to the scores."""
        return not self.encoding.adds_numbers and not self.adds_scores and self.mask is None

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and (
            self.trains_numbers or any(x.requires_grad for x in (self.q, self.k, self.v))
        )

    @property
    def trains_numbers(self) -> bool:
        """Whether a gradient of what is added to the scores is wanted."""
        if not torch.is_grad_enabled():
            return False
        if self.mask is not None and self.mask.requires_grad:
            return True
        numbers = self.numbers
        if self.adds_scores and any(p.requires_grad for p in self.encoding.parameters()):
            return True
        if self.adds_scores and any(x.requires_grad for x in (self.q, self.k)):
            return True
        if isinstance(numbers, LatticeNumbers):
            return numbers.values.requires_grad or (numbers.prefix is not None and numbers.prefix.requires_grad)
        if isinstance(numbers, Tensor):
            return numbers.requires_grad
        return self.encoding.adds_numbers and any(p.requires_grad for p in self.encoding.parameters())

    @property
    def unfused(self) -> str:
        """Why the ways through torch's fused CPU kernel are closed; empty if they are open."""
        return fused.obstacle(self.q, self.v)

    @property
    def slow(self) -> str:
        """Why nothing is fast here whatever the positions are; empty if something is, or if it does not matter."""
        device, dtype = self.q.device.type, self.q.dtype
        if self.silent or not runs_eagerly():
            return ""
        if device not in ("cpu", "cuda", "meta"):
            return f"no fast way is known on {device}"
        if (device == "cpu" and dtype not in fused.DTYPES) or (device == "cuda" and dtype == torch.float64):
            return f"no fused kernel on {device} knows {dtype}"
        return ""

    def added_bytes(self) -> int:
        """What is added to the scores, for all samples if they differ; a mask alone stays as small as it is."""
        if self.mask is not None and not self.encoding.adds_numbers and not self.adds_scores and not self.is_causal:
            return self.mask.numel() * self.itemsize
        samples = 1 if self.mask is None else self.mask.shape[0]
        if not self.on_grids or self.adds_scores:
            samples = self.q.shape[0]
        return samples * self.q.shape[1] * self.pairs * self.itemsize

    def dense_bytes(self) -> int:
        """What is added, while its parts are put together and with its gradient."""
        prefix = self.q_pos.num_prefix_tokens or self.k_pos.num_prefix_tokens
        parts = 3 if prefix or self.mask is not None or self.adds_scores or self.is_causal else 2
        return (
            self.added_bytes() * max(parts, 3 if self.trains_numbers else 0)
            + self.vector_bytes(self.q.shape[2])
            + self.scratch_bytes()
            + self.turned_bytes()
        )

    def turned_bytes(self) -> int:
        """Queries and keys as the encoding turns them, and, under a mask, keys and values without what nobody sees."""
        tokens = self.q.numel() + self.k.numel()
        if self.mask is not None:
            tokens += 2 * (self.k.numel() + self.v.numel())
        return tokens * self.itemsize

    def vector_bytes(self, queries: int) -> int:
        """Products of the vectors with what they meet, for so many queries: each vector with each query, or with each key; and
        the gradients of these."""
        num_products = 0
        for term in self.encoding.terms():
            rows = queries + self.k.shape[2]
            if isinstance(term.vectors, Tensor):
                rows = min(rows, term.vectors.shape[-2])
            num_products += rows * (self.k.shape[2] if term.meets == "key" else queries)
        return 2 * self.q.shape[0] * self.q.shape[1] * num_products * self.itemsize

    def scratch_bytes(self) -> int:
        """Blocks in which scores are made again: they, what becomes of them, and room to shift rows."""
        if self.unfused or not (self.trains or self.dropout_p):
            return 0
        per_thread = min(max(fused.BLOCK, self.q.shape[0] * self.q.shape[1] * self.pairs), 4 * fused.BLOCK)
        return 3 * torch.get_num_threads() * per_thread * self.itemsize


@dataclass(frozen=True)
class Way:
    """A way that is right, what speaks for it, and what it holds."""

    backend: str
    name: str
    why: str
    num_bytes: int


def choose(request: Request, backend: str, memory_limit: int | None) -> Explanation:
    """The first way of the backend (of all, for "auto") that fits into the limit.

    Raises:
        ValueError: no way of this backend is right, or none fits into the limit; then with what each would need.
    """
    ways = list(_ways(request, backend))
    if request.slow and backend in ("auto", "sdpa"):
        warn_once(f"attend: {request.slow}; positions are added in a slower way, which is right")
    for way in ways:
        if memory_limit is None or way.num_bytes <= memory_limit:
            why, num_bytes, num_rows = way.why, way.num_bytes, 0
            if way is not ways[0]:
                why += f"; {ways[0].name} would hold {_size(ways[0].num_bytes)}, more than memory_limit={memory_limit}"
            if way.name == "blocks":
                assert memory_limit is not None
                num_rows = rows_per_block(request, memory_limit)
                num_bytes = block_bytes(request, num_rows)
            return Explanation(way.backend, way.name, why, num_bytes, num_rows)
    needs = ", ".join(f"{way.backend} ({way.name}) {way.num_bytes}" for way in ways)
    raise ValueError(f"attend: memory_limit={memory_limit} bytes is less than each way needs: {needs}")


def _ways(request: Request, backend: str) -> Iterator[Way]:
    """The ways that are right, the fastest first."""
    needs_weights = "value" in request.meets
    if backend == "sdpa" and needs_weights:
        raise ValueError(
            f"attend: backend 'sdpa' has no weights to give to {type(request.encoding).__name__}, use 'explicit'"
        )
    if backend in ("flex", "lowrank"):
        obstacle = _flex_obstacle(request) if backend == "flex" else _lowrank_obstacle(request)
        if obstacle:
            raise ValueError(f"attend: backend '{backend}' {obstacle}")
        way = _flex_way(request) if backend == "flex" else _lowrank_way(request)
        yield way
    if backend in ("auto", "sdpa") and not needs_weights:
        yield from _sdpa_ways(request, backend)
    if backend in ("auto", "explicit"):
        why = "the vectors that meet values need the weights" if needs_weights else "plain tensor code"
        yield Way("explicit", "whole", why, explicit_bytes(request))
        if not request.is_prepared:
            yield Way("explicit", "blocks", "some rows of queries at a time", block_bytes(request))


def _sdpa_ways(request: Request, backend: str) -> Iterator[Way]:
    if request.silent and request.on_grids:
        unfused = request.q.device.type == "cpu" and (
            request.dropout_p > 0 or request.v.shape[-1] != request.q.shape[-1]
        )
        num_bytes = explicit_bytes(request) if unfused else request.turned_bytes()
        if not request.is_causal:
            yield Way("sdpa", "no mask", "nothing is added to the scores", num_bytes)
            return
        # torch multiplies its -inf by the scale
        if request.q_pos == request.k_pos and not request.q_pos.num_prefix_tokens and request.scale > 0:
            why = "nothing is added to the scores, and tokens stand in the order of places"
            yield Way("sdpa", "is_causal", why, num_bytes)
            return
    dense = request.dense_bytes()
    rows, obstacle = lattice_rows(request)
    if rows is None and is_transformed() and backend == "auto":
        yield Way("explicit", "whole", request.unfused, explicit_bytes(request))
    if rows is None:
        written_out = request.unfused and request.q.device.type == "cpu" and request.trains_numbers
        if written_out and backend == "auto":
            why = f"{request.unfused}; by itself torch has no fused gradient of a mask on the CPU"
            yield Way("explicit", "whole", why, explicit_bytes(request))
        if backend == "auto" and request.q.device.type == "cuda" and not _flex_obstacle(request):
            flexible = _flex_way(request)
            yield from (flexible,) if dense > MAX_DENSE_BYTES else ()
        yield Way("sdpa", "dense", f"a number for each pair: {obstacle}", dense)
        return
    way = "view" if rows.is_view else "bands"
    num_bytes = rows_bytes(request, rows)
    num_keys = request.k.shape[2]
    if (
        num_keys <= max(FEW_KEYS, 2 * request.q.shape[0] * request.q.shape[-1])
        and request.added_bytes() <= MAX_DENSE_BYTES
    ):
        yield Way("sdpa", "dense", f"with {num_keys} keys a number for each pair costs less than a view", dense)
        yield Way("sdpa", way, "one number per distinct offset", num_bytes)
    else:
        yield Way("sdpa", way, "one number per distinct offset, a view of them is the mask", num_bytes)
        yield Way("sdpa", "dense", "a number for each pair", dense)


def _flex_obstacle(request: Request) -> str | None:
    if request.meets:
        return "has no vectors that meet the content of pairs"
    if not request.on_grids or (request.encoding.adds_numbers and not isinstance(request.numbers, LatticeNumbers)):
        return "needs Grids whose offsets are a lattice"
    numbers = request.numbers if isinstance(request.numbers, LatticeNumbers) else None
    return flex.obstacle(request.q, request.k, request.v, numbers, request.mask, request.dropout_p)


def _flex_way(request: Request) -> Way:
    numbers = request.numbers.values.numel() if isinstance(request.numbers, LatticeNumbers) else 0
    why = "the kernel reads one number per distinct offset"
    num_bytes = 3 * numbers * request.itemsize
    if request.q.device.type == "cpu":
        why = "asked for; on the CPU by torch's unfused path"
        num_bytes = 2 * explicit_bytes(request)
    return Way("flex", "score_mod", why, num_bytes)


def _lowrank_obstacle(request: Request) -> str | None:
    if request.meets or not isinstance(request.numbers, LatticeNumbers):
        return "needs an encoding of numbers between Grids whose offsets are a lattice"
    if request.trains_numbers and (request.mask is None or not request.mask.requires_grad):
        return "factors the numbers once and gives them no gradient; use 'auto', or freeze the encoding"
    return None


def _lowrank_way(request: Request) -> Way:
    tokens = request.q.numel() + request.k.numel() + request.v.numel()
    return Way("lowrank", "factors", "asked for; not exact", 2 * tokens * request.itemsize + request.scratch_bytes())


def lattice_rows(request: Request) -> tuple[Rows | None, str]:
    """How the numbers lie for a view of them, or why there is no such view."""
    if request.unfused:
        return None, request.unfused
    if not isinstance(request.q_pos, Grid) or not isinstance(request.k_pos, Grid):
        return None, "Points have no lattice of offsets"
    if request.adds_scores:
        return None, "vectors meet the content of each pair"
    if request.encoding.adds_numbers and not isinstance(request.numbers, LatticeNumbers):
        return None, "the numbers are not given per distinct offset"
    mask = request.mask
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1:3] != (1, 1) or mask.shape[3] == 1):
        return None, "the mask does not only hide keys"
    if mask is not None and abs(request.scale * hiding_channel(request.scale, request.q.dtype)) < HIDING:
        return (
            None,
            f"a scale of {request.scale:g} in {request.q.dtype} leaves no score that is low enough to hide a key",
        )
    if not request.encoding.adds_numbers and not request.is_causal:
        return None, "there is a mask and no number"
    lattice, rows = lattice_view(request.q_pos, request.k_pos, is_causal=request.is_causal)
    if not lattice.rows_fit:
        return None, "rows of queries and of keys follow one another in unequal steps"
    if rows.visible is not None and rows.visible < rows.rows_q - 1:
        return None, "some query sees no key"
    return rows, ""


def hiding_channel(scale: float, dtype: torch.dtype) -> float:
    """What one more channel of a key holds, against 1 in that of a query, to make its score one that has no weight."""
    return math.copysign(min(10 * HIDING / max(abs(scale), 1e-6), torch.finfo(dtype).max / 2), -scale)


def lattice_view(q_pos: Grid, k_pos: Grid, *, is_causal: bool) -> tuple[OffsetLattice, Rows]:
    """The distinct offsets of the tokens with a place, without axes of one token, and how `OffsetLattice.rows` lays them out."""
    axes = [a for a in range(q_pos.num_axes) if q_pos.shape[a] > 1 or k_pos.shape[a] > 1] or [0]
    q, k = (
        Grid(*(g.shape[a] for a in axes), step=[g.step[a] for a in axes], origin=[g.origin[a] for a in axes])
        for g in (q_pos, k_pos)
    )
    visible = None
    if is_causal:
        # offset = last query - first key - step * (row of queries, from the last one, + row of keys)
        last = q.origin[0] + q.step[0] * (q.shape[0] - 1) - k.origin[0]
        visible = math.floor(last / q.step[0])
    rows = Rows(q.shape[0], math.prod(q.shape[1:]), k.shape[0], math.prod(k.shape[1:]), visible=visible)
    return q.lattice(k), rows


def rows_bytes(request: Request, rows: Rows) -> int:
    heads = request.q.shape[1]
    numbers = rows.unfolded_bytes(heads, request.itemsize)
    if not torch.is_grad_enabled() and not rows.is_view:
        numbers = min(numbers, max(fused.SCRATCH_BYTES, rows.unfolded_bytes(1, request.itemsize)))
    elif request.trains_numbers:
        numbers *= 3
    tokens = 2 * request.q.numel() * request.itemsize  # reversed, in and out
    if request.mask is not None:  # with one more channel
        tokens += 2 * (request.q.numel() + request.k.numel() + request.v.numel()) * request.itemsize
    prefix = request.q_pos.num_prefix_tokens + request.k_pos.num_prefix_tokens
    if prefix:  # scores of the prefix, and outputs merged
        most = max(request.q.shape[2], request.k.shape[2])
        tokens += (6 * request.q.shape[0] * heads * prefix * most + 3 * request.q.numel()) * request.itemsize
    scratch = rows.scratch_bytes(heads, request.itemsize) + request.scratch_bytes()
    return numbers + tokens + scratch + request.turned_bytes()


def explicit_bytes(request: Request) -> int:
    """Scores, the same with what is added, weights and dropped weights; in training the gradients of two of them."""
    scores = (6 if request.trains else 4) * request.q.shape[0] * request.q.shape[1] * request.pairs * request.itemsize
    return scores + request.vector_bytes(request.q.shape[2])


def block_bytes(request: Request, num_rows: int = 1) -> int:
    """What explicit attention of some rows of queries holds."""
    pos = request.q_pos
    width = math.prod(pos.shape[1:]) if isinstance(pos, Grid) else 1
    queries = min(num_rows * width + pos.num_prefix_tokens, request.q.shape[2])
    scores = explicit_bytes(request) - request.vector_bytes(request.q.shape[2])
    return scores * queries // max(request.q.shape[2], 1) + request.vector_bytes(queries)


def rows_per_block(request: Request, memory_limit: int) -> int:
    """The most rows of queries whose blocks keep the limit, at least one."""
    one, two = block_bytes(request, 1), block_bytes(request, 2)
    return max(1, 1 + (memory_limit - one) // max(two - one, 1))


@functools.cache
def warn_once(message: str) -> None:
    """Say something once in the life of the process."""
    warnings.warn(message, stacklevel=2)


def _size(num_bytes: int | float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"
