"""Shifted-window attention as a loop over pairs of tokens of the image: no window is cut out, nothing is rolled or padded."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def table_number(encoding: Any, dy: int, dx: int) -> Tensor:
    """(heads,) the row of a Swin V1 table for one offset."""
    height, width = encoding.window_size
    return encoding.relative_position_bias_table[(dy + height - 1) * (2 * width - 1) + dx + width - 1]


def continuous_number(encoding: Any, dy: int, dx: int) -> Tensor:
    """(heads,) the bias of Swin V2 for one offset."""
    windows = encoding.pretrained_window_size if encoding.pretrained_window_size[0] else encoding.window_size
    scaled = [8 * d / max(w - 1, 1) for d, w in zip((dy, dx), windows, strict=True)]
    coords = [math.copysign(math.log2(1 + abs(s)) / 3, s) for s in scaled]
    first, last = encoding.cpb_mlp[0], encoding.cpb_mlp[2]
    hidden = (first.weight @ torch.tensor(coords, dtype=first.weight.dtype) + first.bias).clamp(min=0)
    return 16 / (1 + torch.exp(-(last.weight @ hidden)))


def project(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v (tokens, heads, head_dim) and the scale of the scores."""
    if hasattr(attention, "logit_scale"):
        bias = torch.cat((attention.q_bias, torch.zeros_like(attention.q_bias), attention.v_bias))
        q, k, v = (x @ attention.qkv.weight.T + bias).unflatten(-1, (3, attention.num_heads, -1)).unbind(-3)
        temperature = attention.logit_scale.clamp(max=math.log(100)).exp().flatten()
        return F.normalize(q, dim=-1) * temperature[:, None], F.normalize(k, dim=-1), v, 1.0
    q, k, v = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).unbind(-3)
    return q, k, v, q.shape[-1] ** -0.5


def window_attention(block: Any, x: Tensor) -> Tensor:
    """What block._attn should give for one image (height, width, channels) if padding is invisible.

    The image lies in the upper left corner of as many whole windows as it takes. A token at row r stands, after the shift, at
    r - shift; rows above 0 come round from the other side of those windows. Two tokens meet if they are in the same window and
    neither or both have come round.
    """
    height, width, _ = x.shape
    attention, encoding = block.attn, block.attn.encoding
    formula = continuous_number if hasattr(encoding, "cpb_mlp") else table_number
    numbers: dict[tuple[int, int], Tensor] = {}

    def number(dy: int, dx: int) -> Tensor:
        if (dy, dx) not in numbers:
            numbers[dy, dx] = formula(encoding, dy, dx)
        return numbers[dy, dx]

    def place(index: int, size: int, window: int, shift: int) -> tuple[int, int, int]:
        turns, shifted = divmod(index - shift, math.ceil(size / window) * window)
        return turns, shifted // window, shifted

    rows = [place(r, height, block.window_size[0], block.shift_size[0]) for r in range(height)]
    columns = [place(c, width, block.window_size[1], block.shift_size[1]) for c in range(width)]
    tokens = [(row, column) for row in rows for column in columns]
    q, k, v, scale = project(attention, x.reshape(height * width, -1))
    outputs = []
    for i, (row, column) in enumerate(tokens):
        seen = [j for j, (r, c) in enumerate(tokens) if r[:2] == row[:2] and c[:2] == column[:2]]
        scores = [
            scale * (q[i] * k[j]).sum(-1) + number(row[2] - tokens[j][0][2], column[2] - tokens[j][1][2]) for j in seen
        ]
        weights = torch.stack(scores).softmax(dim=0)
        outputs.append((weights[..., None] * v[seen]).sum(dim=0).flatten())
    return attention.proj(torch.stack(outputs)).reshape(height, width, -1)
