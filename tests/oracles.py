"""Attention and encodings as double loops over pairs, in float64, sharing no code with the library."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

#: (sample, head, query, key) -> what is added to the score, as a tensor that carries gradients or as a number
Number = Callable[[int, int, int, int], Tensor | float]


def redraw(module: nn.Module, std: float = 0.5) -> None:
    """Give every parameter new values of about `std`, so that nothing hides behind zeros; where a formula wants positive
    numbers (KERPLE) they are, and what decides up to where an encoding is relative (FIRE's L) stays."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, dtype=torch.float64) * std
            if name.endswith(("bias_p", "bias_a")):
                drawn = drawn.abs() + 0.2
            if not name.endswith("L_multiplier"):
                parameter.copy_(drawn)


def grid_places(shape: Sequence[int], step: Sequence[float], origin: Sequence[float]) -> list[tuple[float, ...]]:
    """The place of each token, row-major, by counting: the last axis runs fastest."""
    places: list[tuple[float, ...]] = [()]
    for size, distance, first in zip(shape, step, origin, strict=True):
        places = [(*place, first + distance * i) for place in places for i in range(size)]
    return places


def difference(query: tuple[float, ...], key: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(q - k for q, k in zip(query, key, strict=True))


def pair_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    number: Number = lambda b, h, i, j: 0.0,
    seen: Callable[[int, int, int, int], bool] = lambda b, h, i, j: True,
    value: Callable[[int, int, int, int], Tensor | float] = lambda b, h, i, j: 0.0,
) -> Tensor:
    """softmax over the keys a query sees, one pair at a time; `value` gives what joins the value of a pair."""
    batch, heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    rows = []
    for b in range(batch):
        for h in range(heads):
            for i in range(num_queries):
                keys = [j for j in range(num_keys) if seen(b, h, i, j)]
                if not keys:
                    rows.append(v[b, h, 0] * 0)
                    continue
                scores = torch.stack([scale * (q[b, h, i] * k[b, h, j]).sum() + number(b, h, i, j) for j in keys])
                weights = (scores - scores.max()).exp()
                weights = weights / weights.sum()
                rows.append(sum(w * (v[b, h, j] + value(b, h, i, j)) for w, j in zip(weights, keys, strict=True)))
    return torch.stack(rows).reshape(batch, heads, num_queries, v.shape[-1])


def turn(x: Tensor, angles: Sequence[Tensor | float], layout: str) -> Tensor:
    """One vector, its pairs of channels turned one by one."""
    half = len(x) // 2
    pairs = [(2 * j, 2 * j + 1) if layout == "interleaved" else (j, j + half) for j in range(half)]
    out = list(x)
    for (a, b), angle in zip(pairs, angles, strict=True):
        angle = torch.as_tensor(angle, dtype=x.dtype)
        out[a] = x[a] * torch.cos(angle) - x[b] * torch.sin(angle)
        out[b] = x[a] * torch.sin(angle) + x[b] * torch.cos(angle)
    return torch.stack(out)


def multilinear(read: Callable[[tuple[int, ...]], Tensor], place: tuple[float, ...]) -> Tensor:
    """A value between whole places, from those around it, one axis after the other."""
    if not place:
        return read(())
    low = math.floor(place[-1])
    share = place[-1] - low
    below = multilinear(lambda rest: read((*rest, low)), place[:-1])
    if share == 0:
        return below
    return below * (1 - share) + multilinear(lambda rest: read((*rest, low + 1)), place[:-1]) * share


def gradients(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a sum with fixed weights, so that no two entries of the output count alike."""
    weights = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).reshape(output.shape).to(output.dtype)
    return list(torch.autograd.grad((output * weights).sum(), list(inputs), retain_graph=True))
