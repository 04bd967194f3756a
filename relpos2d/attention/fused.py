"""Attention through torch's fused CPU kernel, with numbers that may be learned and of which a view makes all pairs.

With the order of the queries reversed, the numbers of all pairs are a strided view of those of the distinct offsets
(`OffsetLattice.rows`), and the kernel reads such a view as its mask. It gives no gradient for a mask, so the
backward pass is ours: blocks of the scores are made again from the log-sum-exp of each query, and the gradient of a block is
summed through the same kind of view. Neither pass ever holds the scores of all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relpos2d.eager import is_transformed, runs_eagerly

kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

#: dtypes that the kernel knows
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LOG2_E = math.log2(math.e)
#: the fused kernel takes FULL_BLOCK queries at a time in a call of at least FULL_CALL, SMALL_BLOCK in one of SMALL_CALL
FULL_CALL, FULL_BLOCK = 768, 256
SMALL_CALL, SMALL_BLOCK = 256, 64
#: keys and values of one head that stay in a core's cache beside the scores: shorter calls cost nothing then
CACHED_KEYS = 2048
#: numbers of some heads that are unfolded, or laid out for their bands, at once
SCRATCH_BYTES = 1 << 22
#: scores that a block of the backward pass holds for each thread, the keys of a block, and scores of small blocks done at once
BLOCK = 1 << 18
BLOCK_KEYS = 1024
PIECE = 3 << 17


@dataclass(frozen=True)
class Rows:
    """How the numbers of all pairs lie in ``values`` (groups, heads, width_q, (rows_q + rows_k - 1) * width_k).

    Query x of row y and key j, counted over all rows, have the number ``values[..., x, y * width_k + j]``. One row of queries
    and one of keys is the dense bias.

    Args:
        rows_q, width_q: rows of queries, and queries in each.
        rows_k, width_k: the same of the keys.
        reverse: the queries come in their own order and are to be reversed.
        visible: causal, for rows of one token: row y of the queries sees row z of the keys if y + z <= visible.
    """

    rows_q: int
    width_q: int
    rows_k: int
    width_k: int
    reverse: bool = True
    visible: int | None = None

    @property
    def num_queries(self) -> int:
        return self.rows_q * self.width_q

    @property
    def num_keys(self) -> int:
        return self.rows_k * self.width_k

    @property
    def is_view(self) -> bool:
        """Whether one view shows the fused kernel the numbers of all pairs."""
        return self.rows_q == 1 or self.width_q == 1

    def band(self) -> int:
        """Rows of queries that go through the fused kernel in one call, where one view cannot show all.

        The kernel takes 256 queries at a time in calls of 768 or more, 64 in shorter ones: the band that leaves the fewest
        places of such blocks empty, among those of about the wanted size.
        """
        wanted, block = (SMALL_CALL, SMALL_BLOCK) if self.num_keys <= CACHED_KEYS else (FULL_CALL, FULL_BLOCK)
        least = min(self.rows_q, -(-wanted // self.width_q))

        def places(band: int) -> tuple[int, int]:
            whole, rest = divmod(self.rows_q, band)
            blocks = whole * -(-band * self.width_q // block) + -(-rest * self.width_q // block)
            return blocks, band

        return min(range(least, min(self.rows_q, 2 * least) + 1), key=places)

    def band_length(self) -> int:
        """Numbers of one row of a band's scratch: what its first row of queries needs in the first and in the last band."""
        last = (-(-self.rows_q // self.band()) - 1) * self.band()
        return (last + self.rows_k) * self.width_k

    def unfolded_bytes(self, heads: int, itemsize: int) -> int:
        """What the numbers of these rows take."""
        return heads * self.width_q * (self.rows_q + self.rows_k - 1) * self.width_k * itemsize

    def heads_at_once(self, heads: int, itemsize: int) -> int:
        """Heads whose scratches fit into a cache together, at least one."""
        one = self.band() * self.width_q * self.band_length() * itemsize
        return max(1, min(heads, SCRATCH_BYTES // one))

    def scratch_bytes(self, heads: int, itemsize: int) -> int:
        """What the forward pass needs beside the numbers."""
        if self.is_view:
            return 0
        return self.heads_at_once(heads, itemsize) * self.band() * self.width_q * self.band_length() * itemsize


def obstacle(q: Tensor, v: Tensor) -> str:
    """Why queries and values (B, heads, N, D) cannot go this way, in words; empty if they can."""
    if is_transformed():
        return "torch.func or a forward-mode derivative goes along, which the fused kernel does not know"
    if not runs_eagerly():
        return "a compiler or an exporter follows, which fuses by itself"
    if q.device.type != "cpu":
        return f"the kernel that takes a view as its mask is the CPU's, and q is on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"no fused CPU kernel knows {q.dtype}"
    if v.shape[-1] != q.shape[-1]:
        return f"the fused kernel wants values of {q.shape[-1]} channels, as q has, and v has {v.shape[-1]}"
    if not q.numel() or not v.numel():
        return "there is nothing to attend to"
    if v.shape[2] == 1:
        return "a single key has all the weight, exactly"
    return ""


def attend(
    q: Tensor, k: Tensor, v: Tensor, values: Tensor, rows: Rows, scale: float, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention with the numbers of `rows`, its output and the log-sum-exp of each query's scores.

    Args:
        q: (B, heads, Nq, D), any strides.
        k, v: (B, heads, Nk, D).
        values: (groups, heads, width_q, ...), see `Rows`; sample b takes group b % groups.
        scale: of the scores.
        dropout_p: dropout of the attention weights.

    Returns:
        (B, heads, Nq, D) and (B, heads, Nq). A query that sees no key has output 0.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    # on other dtypes the kernel reads its mask wrongly, without an error
    values = values.to(dtype).contiguous()
    # a seed of the common generator, so that a recomputation under checkpoint() drops the same weights
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout_p else 0
    out, lse = _Attention.apply(q, k, v, values, rows, scale, dropout_p, seed)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        values: Tensor,
        rows: Rows,
        scale: float,
        dropout_p: float,
        seed: int,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, values, rows, scale)
        if dropout_p:
            out = _dropped(q, k, v, values, lse, rows, scale, dropout_p, seed)
        ctx.save_for_backward(q, k, v, values, out, lse)
        ctx.options = rows, scale, dropout_p, seed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None and d_lse is None:
            return (None,) * 8
        grads = _FirstDerivative.apply(d_out, d_lse, *ctx.saved_tensors, ctx.options, ctx.needs_input_grad[3])
        return (*grads, None, None, None, None)


class _FirstDerivative(torch.autograd.Function):
    """The backward pass as a function of its own, which has no derivative and says so."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        *tensors, options, need_values = given
        arguments: tuple[Any, ...] = (*tensors, *options, need_values)
        return _backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "attend: the fused ways with positions have no second derivative; use attend(..., backend='explicit'), which has"
        )


def _forward(q: Tensor, k: Tensor, v: Tensor, values: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    if rows.reverse:
        q = q.flip(-2)
    if rows.visible is not None:
        out, lse = _causal(q, k, v, values, rows, scale)
    elif rows.is_view:
        out, lse = _view(q, k, v, values, rows, scale)
    else:
        out, lse = _bands(q, k, v, values, rows, scale)
    if rows.reverse:
        out, lse = out.flip(-2), lse.flip(-1)
    return out, lse


def _view(q: Tensor, k: Tensor, v: Tensor, values: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    groups = values.shape[0]
    mask = _numbers(values, rows, 0, rows.rows_q, 0, rows.rows_k)
    if groups == 1:
        return kernel(q, k, v, 0.0, False, attn_mask=mask.expand(q.shape[0], -1, -1, -1), scale=scale)
    parts = [
        kernel(*(x[a : a + groups] for x in (q, k, v)), 0.0, False, attn_mask=mask, scale=scale)
        for a in range(0, q.shape[0], groups)
    ]
    if len(parts) == 1:
        return parts[0]
    # in the layout in which the kernel writes, so that heads are merged without another copy
    out = torch.cat([out.transpose(1, 2) for out, _ in parts]).transpose(1, 2)
    return out, torch.cat([lse for _, lse in parts])


def _causal(q: Tensor, k: Tensor, v: Tensor, values: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    """Keys that no query of a part can see are left out; inside a part the numbers of the future are -inf."""
    assert rows.visible is not None
    part = max(FULL_CALL, -(-rows.rows_q // 8))
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    lse = values.new_full(q.shape[:-1], float("-inf"))
    for a in range(0, min(rows.rows_q, rows.visible + 1), part):
        b = min(a + part, rows.rows_q, rows.visible + 1)
        seen = min(rows.rows_k, rows.visible - a + 1)
        mask = _numbers(values, rows, a, b - a, 0, seen)
        out[:, :, a:b], lse[:, :, a:b] = kernel(
            q[:, :, a:b],
            k[:, :, :seen],
            v[:, :, :seen],
            0.0,
            False,
            attn_mask=mask.expand(q.shape[0], -1, -1, -1),
            scale=scale,
        )
    return out, lse


def _bands(q: Tensor, k: Tensor, v: Tensor, values: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    """A scratch holds the numbers of one band of rows for some heads, and the other bands are views of it."""
    batch, heads, _, dim = q.shape
    width, band, length = rows.width_q, rows.band(), rows.band_length()
    at_once = rows.heads_at_once(heads, values.itemsize)
    scratch = values.new_empty(at_once, band, width, length)
    out = q.new_empty(batch, rows.num_queries, heads, dim).transpose(1, 2)
    lse = values.new_empty(batch, heads, rows.num_queries)
    # whole bands, and a last one that is shorter
    whole, rest = divmod(rows.rows_q, band)
    calls = [(0, whole, band)] + ([(whole * band, 1, rest)] if rest else [])
    for h in range(0, heads, at_once):
        group = slice(h, min(h + at_once, heads))
        numbers = values[0, group]
        for y in range(band):
            # the scratch is longer than what its last rows have, where the last band is short
            piece = numbers[..., y * rows.width_k :][..., :length]
            scratch[: len(numbers), y, :, : piece.shape[-1]] = piece
        # every band reads them all
        keys, contents = k[:, group].contiguous(), v[:, group].contiguous()
        for first, count, size in calls:
            tokens = slice(first * width, (first + count * size) * width)
            mask = scratch.as_strided(
                (count, len(numbers), size * width, rows.num_keys),
                (band * rows.width_k, scratch.stride(0), length, 1),
                first * rows.width_k,
            )
            for sample in range(batch):
                # [heads, bands * n] -> [bands, heads, n]: the bands take the place of the batch
                part, part_lse = kernel(
                    q[sample, group, tokens].unflatten(1, (count, -1)).transpose(0, 1),
                    keys[sample].expand(count, -1, -1, -1),
                    contents[sample].expand(count, -1, -1, -1),
                    0.0,
                    False,
                    attn_mask=mask,
                    scale=scale,
                )
                out[sample, group, tokens] = part.transpose(0, 1).flatten(1, 2)
                lse[sample, group, tokens] = part_lse.transpose(0, 1).flatten(1, 2)
    return out, lse


def _numbers(values: Tensor, rows: Rows, row: int, num_rows: int, key_row: int, num_key_rows: int) -> Tensor:
    """View (groups, heads, num_rows * width_q, num_key_rows * width_k) of the numbers of some rows, if one view can show them."""
    groups, heads, width, length = values.shape
    stride = rows.width_k if width == 1 else length
    return values.as_strided(
        (groups, heads, num_rows * width, num_key_rows * rows.width_k),
        (values.stride(0), values.stride(1), stride, 1),
        values.storage_offset() + (row + key_row) * rows.width_k,
    )


@dataclass(frozen=True)
class _Piece:
    """Samples of one head, or heads of one sample, that are worked on together; (pieces, N, D) each."""

    batch: slice
    heads: slice
    groups: slice


def _pieces(q: Tensor, groups: int, rows: Rows) -> tuple[list[_Piece], bool]:
    """All pairs of samples and heads, in pieces whose scores fill a cache; and whether a piece is of one head.

    Samples share numbers, so they come first if there are enough of them.
    """
    batch, heads = q.shape[:2]
    threads = torch.get_num_threads()
    largest = max(threads * PIECE // (rows.num_queries * rows.num_keys), min(threads, max(batch, heads)), 1)
    if batch < heads and batch < largest:
        size = _share(heads, largest)
        return [
            _Piece(slice(b, b + 1), slice(a, min(a + size, heads)), slice(b % groups, b % groups + 1))
            for b in range(batch)
            for a in range(0, heads, size)
        ], False
    run = batch if groups == 1 else groups
    size = _share(run, largest)
    pieces = []
    for h in range(heads):
        for first in range(0, batch, run):
            for a in range(0, run, size):
                b = min(a + size, run)
                shared = slice(0, 1) if groups == 1 else slice(a, b)
                pieces.append(_Piece(slice(first + a, first + b), slice(h, h + 1), shared))
    return pieces, True


@dataclass(frozen=True)
class _Step:
    """Some rows of queries against some rows of keys."""

    row: int
    num_rows: int
    key_row: int
    num_key_rows: int
    key_block: int


class _Block:
    """Scores of some rows of queries against some rows of keys, made again in the backward pass.

    The scratch of the scores' gradient has as many zeros behind each row as the view needs that shifts each row of queries
    by the width of a row of keys: the pairs of one offset stand in one column there.
    """

    def __init__(self, rows: Rows, size: int, like: Tensor) -> None:
        pairs = rows.num_queries * rows.num_keys
        if pairs <= BLOCK:
            self.rows_q, self.rows_k = rows.rows_q, rows.rows_k
        else:
            # along the edge of the future half a block of keys is for nothing
            keys = BLOCK_KEYS if rows.visible is None else BLOCK_KEYS // 2
            self.rows_k = _share(rows.rows_k, max(1, keys // rows.width_k))
            self.rows_q = _share(rows.rows_q, max(1, BLOCK // (self.rows_k * rows.width_k * rows.width_q)))
        self.rows = rows
        self.num_keys = self.rows_k * rows.width_k
        self.pitch = self.num_keys + (self.rows_q - 1) * rows.width_k
        num_queries = self.rows_q * rows.width_q
        self._weights = like.new_empty(size, num_queries, self.num_keys)
        self._product = like.new_empty(size, num_queries, self.num_keys)
        self._gradient = like.new_zeros(size, num_queries, self.pitch) if self.pitch > self.num_keys else self._product

    @property
    def is_whole(self) -> bool:
        """Whether one block has all pairs of tokens."""
        return self.rows_q == self.rows.rows_q and self.rows_k == self.rows.rows_k

    def steps(self) -> Iterator[tuple[slice, list[_Step]]]:
        """Queries, and the steps through the keys that any of them sees, for all blocks of rows of queries."""
        rows = self.rows
        for y in range(0, rows.rows_q, self.rows_q):
            num_rows = min(self.rows_q, rows.rows_q - y)
            steps = [
                _Step(y, num_rows, z, min(self.rows_k, rows.rows_k - z), z // self.rows_k)
                for z in range(0, rows.rows_k, self.rows_k)
                if rows.visible is None or y + z <= rows.visible
            ]
            yield slice(y * rows.width_q, (y + num_rows) * rows.width_q), steps

    def keys(self, step: _Step) -> slice:
        width = self.rows.width_k
        return slice(step.key_row * width, (step.key_row + step.num_key_rows) * width)

    def sums(self, keys: Tensor) -> Tensor:
        """Zeros (blocks of keys, pieces, keys of a block, D) to add up what concerns (pieces, keys, D)."""
        return keys.new_zeros(-(-self.rows.rows_k // self.rows_k), len(keys), self.num_keys, keys.shape[-1])

    def weights(self, step: _Step, q: Tensor, k: Tensor, values: Tensor, lse: Tensor, alpha: float) -> Tensor:
        """(pieces, queries, keys): 2 ** (alpha q . k + numbers - lse), all of them for base 2."""
        y, num_rows, z = step.row, step.num_rows, step.key_row
        width, keys = self.rows.width_q, step.num_key_rows * self.rows.width_k
        out = self._weights[: len(q), : num_rows * width, :keys]
        numbers = values.as_strided(
            (len(values), num_rows, width, keys),
            (values.stride(0), self.rows.width_k, values.stride(1), 1),
            values.storage_offset() + (y + z) * self.rows.width_k,
        )
        torch.sub(numbers, lse.unflatten(1, (num_rows, width)), out=out.unflatten(1, (num_rows, width)))
        return out.baddbmm_(q, k.transpose(1, 2), alpha=alpha).exp2_()

    def product(self, d_out: Tensor, v: Tensor) -> Tensor:
        """(pieces, queries, keys): d_out . v, the gradient of the weights."""
        return torch.bmm(d_out, v.transpose(1, 2), out=self._product[: len(v), : d_out.shape[1], : v.shape[1]])

    def gradient(self, product: Tensor, delta: Tensor, weights: Tensor) -> Tensor:
        """(pieces, queries, keys): weights * (product - delta), the gradient of the scores, where `add_to` finds it."""
        _, queries, keys = product.shape
        if keys < self.num_keys:
            self._gradient[..., keys:].zero_()
        return torch.mul(product.sub_(delta), weights, out=self._gradient[: len(product), :queries, :keys])

    def add_to(self, d_values: Tensor, step: _Step, num_pieces: int) -> None:
        """Sum the gradient of the block's scores over the pairs of each offset; over the pieces too if they share numbers."""
        y, num_rows, z, num_key_rows = step.row, step.num_rows, step.key_row, step.num_key_rows
        width, width_k = self.rows.width_q, self.rows.width_k
        span = (num_key_rows + num_rows - 1) * width_k
        shifted = self._gradient.as_strided(
            (num_pieces, num_rows, width, span),
            (self._gradient.stride(0), width * self.pitch - width_k, self.pitch, 1),
        )
        target = d_values[..., (y + z) * width_k :][..., :span]
        if width == 1 and num_rows > 1:  # torch's sum over rows is four times slower than this product
            ones = shifted.new_ones(1, 1, num_rows).expand(num_pieces, -1, -1)
            summed = torch.bmm(ones, shifted.squeeze(2))
        else:
            summed = shifted.sum(1) if num_rows > 1 else shifted.squeeze(1)
        target += summed if len(target) == num_pieces else summed.sum(0)


def _share(count: int, largest: int) -> int:
    """The size of the fewest parts of nearly equal size, none above `largest`."""
    return -(-count // -(-count // min(count, largest)))


def _dropout(shape: torch.Size, like: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    """0 with probability p, else 1 / (1 - p)."""
    kept = like.new_empty(shape).bernoulli_(1.0 - p, generator=generator)
    return kept.div_(1.0 - p) if p < 1.0 else kept


def _dropped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Tensor,
    lse: Tensor,
    rows: Rows,
    scale: float,
    dropout_p: float,
    seed: int,
) -> Tensor:
    """The output with dropout of the weights, which are made again as in the backward pass, block by block."""
    worker = _Worker(q, k, v, values, lse, rows, scale, dropout_p, seed)
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    for piece in worker.pieces:
        qs, ks, vs, numbers, ls = worker.take(piece)
        total = qs.new_zeros(qs.shape)
        for i, steps in worker.block.steps():
            for step in steps:
                j = worker.block.keys(step)
                weights = worker.block.weights(step, qs[:, i], ks[:, j], numbers, ls[:, i], scale * LOG2_E)
                weights.mul_(_dropout(weights.shape, weights, dropout_p, worker.generator))
                total[:, i].baddbmm_(weights, vs[:, j])
        worker.put(out, piece, total, reverse=rows.reverse)
    return out


def _backward(
    d_out: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Rows,
    scale: float,
    dropout_p: float,
    seed: int,
    need_values: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    d_out = torch.zeros_like(out) if d_out is None else d_out
    dense = not rows.reverse and len(values) == 1
    if dense and not need_values and not dropout_p and d_lse is None:
        # torch's own backward pass does all that is wanted
        mask = _numbers(values, rows, 0, 1, 0, 1).expand(len(q), -1, -1, -1)
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        return (*kernel_backward(d_out, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale), None)
    worker = _Worker(q, k, v, values, lse, rows, scale, dropout_p, seed)
    block, reverse = worker.block, rows.reverse
    d_values = torch.zeros_like(values) if need_values else None
    # laid out as the pieces are: only what is written in one piece is written by one product
    d_q, d_k, d_v = (
        x.new_empty(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1) if worker.by_head else x.new_empty(x.shape)
        for x in (q, k, v)
    )
    if not reverse and not dropout_p and d_lse is None and block.is_whole and q.dtype == values.dtype:
        _backward_at_once(worker, d_out, d_q, d_k, d_v, d_values, scale)
        return d_q, d_k, d_v, d_values
    delta = (d_out * out).sum(-1, dtype=values.dtype)
    delta = delta if d_lse is None else delta - d_lse
    for piece in worker.pieces:
        qs, ks, vs, numbers, ls = worker.take(piece)
        ds = worker.get(d_out, piece, reverse=reverse)
        deltas = worker.get(delta.unsqueeze(-1), piece, reverse=reverse)
        # block by block, and not zeros_like, which has the strides of the inputs: see above
        gq = qs.new_empty(qs.shape)
        gk, gv = (block.sums(ks) for _ in range(2))
        target = None if d_values is None else d_values[piece.groups, piece.heads].flatten(0, 1)
        for i, steps in block.steps():
            qi, di, li, deltai = qs[:, i], ds[:, i], ls[:, i], deltas[:, i]
            total = qs.new_zeros(qi.shape)
            for step in steps:
                j, b = block.keys(step), step.key_block
                kj = ks[:, j]
                weights = block.weights(step, qi, kj, numbers, li, scale * LOG2_E)
                product = block.product(di, vs[:, j])
                if dropout_p:
                    kept = _dropout(weights.shape, weights, dropout_p, worker.generator)
                    product.mul_(kept)
                    gv[b][:, : kj.shape[1]].baddbmm_(kept.mul_(weights).transpose(1, 2), di)
                else:
                    gv[b][:, : kj.shape[1]].baddbmm_(weights.transpose(1, 2), di)
                gradient = block.gradient(product, deltai, weights)
                total.baddbmm_(gradient, kj, alpha=scale)
                gk[b][:, : kj.shape[1]].baddbmm_(gradient.transpose(1, 2), qi, alpha=scale)
                if target is not None:
                    block.add_to(target, step, len(qs))
            gq[:, i] = total
        gk, gv = (x.transpose(0, 1).flatten(1, 2)[:, : rows.num_keys] for x in (gk, gv))
        worker.put(d_q, piece, gq, reverse=reverse)
        worker.put(d_k, piece, gk)
        worker.put(d_v, piece, gv)
    return d_q, d_k, d_v, d_values


def _backward_at_once(
    worker: _Worker, d_out: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor, d_values: Tensor | None, scale: float
) -> None:
    """The same where a block has all pairs of tokens: nothing to add up, and the weights of each query are all there."""
    block = worker.block
    ((_, (step,)),) = block.steps()
    for piece in worker.pieces:
        q, k, v, numbers, lse = worker.take(piece)
        d_piece = worker.get(d_out, piece)
        weights = block.weights(step, q, k, numbers, lse, scale * LOG2_E)
        gradient = block.product(d_piece, v)
        torch.bmm(weights.transpose(1, 2), d_piece, out=worker.part(d_v, piece))
        torch.ops.aten._softmax_backward_data.out(gradient, weights, -1, weights.dtype, grad_input=gradient)
        worker.part(d_q, piece).baddbmm_(gradient, k, beta=0, alpha=scale)
        worker.part(d_k, piece).baddbmm_(gradient.transpose(1, 2), q, beta=0, alpha=scale)
        if d_values is not None:
            block.add_to(d_values[piece.groups, piece.heads].flatten(0, 1), step, len(q))


class _Worker:
    """What the passes over blocks share: the pieces and their tensors, in the dtype of the scores."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        values: Tensor,
        lse: Tensor,
        rows: Rows,
        scale: float,
        dropout_p: float,
        seed: int,
    ) -> None:
        self.q, self.k, self.v, self.rows = q, k, v, rows
        self.values, self.lse = values * LOG2_E, (lse * LOG2_E).unsqueeze(-1)
        self.pieces, self.by_head = _pieces(q, values.shape[0], rows)
        size = max((p.batch.stop - p.batch.start) * (p.heads.stop - p.heads.start) for p in self.pieces)
        self.block = _Block(rows, size, values)
        self.generator = torch.Generator().manual_seed(seed) if dropout_p else None

    def get(self, x: Tensor, piece: _Piece, *, reverse: bool = False) -> Tensor:
        """(pieces, N, D) of (B, heads, N, D)."""
        x = x[piece.batch, piece.heads].flatten(0, 1).to(self.values.dtype)
        return x.flip(1) if reverse else x

    def take(self, piece: _Piece) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, numbers and log-sum-exp of a piece."""
        reverse = self.rows.reverse
        q, lse = self.get(self.q, piece, reverse=reverse), self.get(self.lse, piece, reverse=reverse)
        k, v = self.get(self.k, piece), self.get(self.v, piece)
        if reverse:  # many blocks: what is read again and again lies close together
            k, v = k.contiguous(), v.contiguous()
        return q, k, v, self.values[piece.groups, piece.heads].flatten(0, 1), lse

    def part(self, x: Tensor, piece: _Piece) -> Tensor:
        """View (pieces, N, D) of (B, heads, N, D)."""
        part = x[piece.batch, piece.heads]
        return part.view(-1, *part.shape[2:])

    def put(self, x: Tensor, piece: _Piece, part: Tensor, *, reverse: bool = False) -> None:
        target = x[piece.batch, piece.heads]
        part = part.flip(1) if reverse else part
        target.copy_(part.reshape(target.shape))
