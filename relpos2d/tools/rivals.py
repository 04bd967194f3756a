"""What a user would take in place of an encoding of ours: the same numbers from other packages, or from a few lines of torch."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.tools.cases import Case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rival:
    """What a user would take in place of an encoding of ours.

    Args:
        name: of its row.
        package: whose code it is; the rival is left out where it cannot be imported.
        same_as: the encoding of ours that computes the same.
        applies: whether it can do the work of a case.
        build: the attention, and its learned parameters.
    """

    name: str
    package: str
    same_as: str
    applies: Callable[[Case], bool]
    build: Callable[[Case, Tensor | None, torch.device, torch.dtype], tuple[Attention, list[nn.Parameter]]]


def rivals_of(case: Case) -> list[Rival]:
    """The rivals that can do the work of a case, whether or not their packages are there."""
    has_steps = any(step != 1 for grid in (case.queries, case.key_grid) for step in grid.step)
    return [] if has_steps else [rival for rival in RIVALS if rival.applies(case)]


def _gathered(
    case: Case, mask: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, list[nn.Parameter]]:
    """An index of all pairs, a gather in every call, a dense bias into the fused kernel."""
    index, num_rows = _offset_index(case, device)
    table = nn.Parameter(0.1 * torch.randn(num_rows, case.num_heads, device=device, dtype=dtype))
    added = _dense_mask(case, mask, device, dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = table[index.flatten()].unflatten(0, tuple(index.shape)).permute(2, 0, 1).contiguous().unsqueeze(0)
        return fused(q, k, v, bias if added is None else bias + added)

    return attention, [table]


def _cached(
    case: Case, mask: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, list[nn.Parameter]]:
    """The dense bias gathered once, with the mask in it, and kept: only the fused kernel is left to do."""
    index, num_rows = _offset_index(case, device)
    table = nn.Parameter(0.1 * torch.randn(num_rows, case.num_heads, device=device, dtype=dtype), requires_grad=False)
    bias = table[index].permute(2, 0, 1).contiguous().unsqueeze(0)
    added = _dense_mask(case, mask, device, dtype)
    bias = bias if added is None else bias + added
    return lambda q, k, v: fused(q, k, v, bias), [table]


def _timm_table(
    case: Case, mask: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, list[nn.Parameter]]:
    """The bias of timm's WindowAttention, fused or not as timm itself decides; without its projections."""
    module_class = imported("timm", "models.swin_transformer").WindowAttention
    width = case.num_heads * case.head_dim
    module = module_class(width, case.num_heads, window_size=case.queries.shape, device=device, dtype=dtype)
    table = module.relative_position_bias_table
    with torch.no_grad():
        table.add_(0.1 * torch.randn_like(table))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = module._get_rel_pos_bias()
        if module.fused_attn:
            return fused(q, k, v, bias if mask is None else bias + mask)
        scores = (q * module.scale) @ k.transpose(-2, -1) + bias
        if mask is not None:
            scores = scores + mask
        return scores.softmax(dim=-1) @ v

    return attention, [table]


def _timm_rope_axial(
    case: Case, mask: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, list[nn.Parameter]]:
    layers = imported("timm", "layers")
    options = {"temperature": 100.0, "in_pixels": False, "grid_indexing": "ij", "device": device}
    rope = layers.RotaryEmbeddingCat(case.head_dim, feat_shape=list(case.queries.shape), **options)

    def turn(x: Tensor) -> Tensor:
        return layers.apply_rot_embed_cat(x, rope.get_embed())

    return _rotary(case, mask, turn, turn), []


def _timm_rope_mixed(
    case: Case, mask: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, list[nn.Parameter]]:
    layers = imported("timm", "layers")
    width, shape = case.num_heads * case.head_dim, list(case.queries.shape)
    rope = layers.RotaryEmbeddingMixed(width, 1, case.num_heads, feat_shape=shape, grid_indexing="xy").to(device, dtype)
    num_prefix = case.queries.num_prefix_tokens

    def turned(x: Tensor, embed: Tensor) -> Tensor:
        if not num_prefix:
            return layers.apply_rot_embed_cat(x, embed)
        return torch.cat((x[:, :, :num_prefix], layers.apply_rot_embed_cat(x[:, :, num_prefix:], embed)), dim=2)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        embed = rope.get_embed()[0]  # learned, so that it is made once in each call
        return fused(turned(q, embed), turned(k, embed), v, mask, case.is_causal)

    return attention, [rope.freqs]


def _lucidrains_rope(
    case: Case, mask: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, list[nn.Parameter]]:
    module = imported("rotary_embedding_torch")
    shape = case.key_grid.shape
    rope = module.RotaryEmbedding(case.head_dim // len(shape), theta=100, cache_max_seq_len=max(shape)).to(device)
    if len(shape) > 1:
        freqs = rope.get_axial_freqs(*shape).flatten(0, -2)
        turn = lambda x: module.apply_rotary_emb(freqs, x)  # noqa: E731
        return _rotary(case, mask, turn, turn), []
    first = int(case.queries.origin[0])
    turn_query = lambda x: rope.rotate_queries_or_keys(x, offset=first)  # noqa: E731
    return _rotary(case, mask, turn_query, rope.rotate_queries_or_keys), []


def _transformers_t5(
    case: Case, mask: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, list[nn.Parameter]]:
    """T5's bias, computed in every call and handed to the fused kernel as a dense mask."""
    module = imported("transformers", "models.t5.modeling_t5")
    config = imported("transformers").T5Config(
        d_model=case.head_dim, d_kv=case.head_dim, num_heads=case.num_heads, is_decoder=case.is_causal
    )
    t5 = module.T5Attention(config, has_relative_attention_bias=True, layer_idx=0).to(device, dtype)
    num_queries, num_keys = case.queries.num_tokens, case.key_grid.num_tokens
    added = _dense_mask(case, mask, device, dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = t5.compute_bias(num_queries, num_keys, device=device, past_seen_tokens=num_keys - num_queries)
        return fused(q, k, v, bias if added is None else bias + added)

    return attention, [t5.relative_attention_bias.weight]


def _x_transformers_alibi(
    case: Case, mask: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, list[nn.Parameter]]:
    """The dense bias of x-transformers, which it keeps after the first call."""
    alibi = imported("x_transformers", "x_transformers").AlibiPositionalBias(case.num_heads).to(device, dtype)
    num_queries, num_keys = case.queries.num_tokens, case.key_grid.num_tokens
    added = _dense_mask(case, mask, device, dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = alibi(num_queries, num_keys).to(dtype).unsqueeze(0)
        return fused(q, k, v, bias if added is None else bias + added)

    return attention, []


def imported(package: str, module: str = "") -> Any:
    """The package, or a module of it; ImportError where it is not there."""
    with warnings.catch_warnings():  # some of them script functions, which torch has deprecated
        warnings.simplefilter("ignore")
        importlib.import_module(package)
        return importlib.import_module(f"{package}.{module}" if module else package)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """Torch's own attention; `mask` is added to the scores, (samples, heads, queries, keys) or what expands to that."""
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)


def _dense_mask(case: Case, mask: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """What someone with a dense bias adds to it: the mask of the windows, or that of the future."""
    if not case.is_causal:
        return mask
    length = case.queries.num_tokens
    return torch.full((length, length), float("-inf"), device=device, dtype=dtype).triu(1)


def _offset_index(case: Case, device: torch.device) -> tuple[Tensor, int]:
    """Row of a table for each pair of tokens, as Swin lays it out, with BEiT's three rows for prefix tokens at its end."""
    sizes = case.key_grid.shape
    offsets = case.queries.coords(device=device)[:, None] - case.key_grid.coords(device=device)[None]
    index = torch.zeros(offsets.shape[:2], dtype=torch.long, device=device)
    for axis, size in enumerate(sizes):
        index = index * (2 * size - 1) + offsets[..., axis].long() + size - 1
    num_rows = math.prod(2 * size - 1 for size in sizes)
    num_prefix = case.key_grid.num_prefix_tokens
    if not num_prefix:
        return index, num_rows
    whole = index.new_full((case.queries.num_tokens, case.key_grid.num_tokens), num_rows + 2)
    whole[:num_prefix, num_prefix:] = num_rows
    whole[num_prefix:, :num_prefix] = num_rows + 1
    whole[num_prefix:, num_prefix:] = index
    return whole, num_rows + 3


def _rotary(
    case: Case, mask: Tensor | None, turn_query: Callable[[Tensor], Tensor], turn_key: Callable[[Tensor], Tensor]
) -> Attention:
    """Fused attention around rotations of the tokens behind the prefix."""
    num_prefix = case.queries.num_prefix_tokens

    def turned(x: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
        if not num_prefix:
            return turn(x)
        return torch.cat((x[:, :, :num_prefix], turn(x[:, :, num_prefix:])), dim=2)

    return lambda q, k, v: fused(turned(q, turn_query), turned(k, turn_key), v, mask, case.is_causal)


def _is_attention(case: Case) -> bool:
    return not case.model


def _is_window(case: Case) -> bool:
    return case.kind == "windows" and case.key_grid.num_axes == 2


def _is_image(case: Case) -> bool:
    return not case.model and case.key_grid.num_axes == 2 and case.keys is None


def _is_sequence(case: Case) -> bool:
    return not case.model and case.key_grid.num_axes == 1 and not case.key_grid.num_prefix_tokens


RIVALS = [
    Rival("table, gathered in each call", "torch", "table", _is_attention, _gathered),
    Rival("table, kept as a dense bias", "torch", "table", lambda c: _is_attention(c) and c.mode == "forward", _cached),
    Rival("timm WindowAttention's bias", "timm", "table", _is_window, _timm_table),
    Rival("timm RotaryEmbeddingCat", "timm", "rope_axial", _is_image, _timm_rope_axial),
    Rival("timm RotaryEmbeddingMixed", "timm", "rope_mixed", _is_image, _timm_rope_mixed),
    Rival("rotary-embedding-torch", "rotary_embedding_torch", "rope_axial", _is_attention, _lucidrains_rope),
    Rival("x-transformers ALiBi", "x_transformers", "alibi", _is_sequence, _x_transformers_alibi),
    Rival("transformers T5 bias", "transformers", "t5", _is_sequence, _transformers_t5),
]
