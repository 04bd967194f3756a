"""Turning pairs of channels by angles (RoPE, arXiv:2104.09864) in as few passes over the memory as it can be done."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos2d.eager import runs_eagerly


class Rotation:
    """Turns pairs of channels by given angles; made once, it turns any number of tensors.

    Called in plain PyTorch it passes over the memory as seldom as it can: one complex product for interleaved pairs, three
    passes for halves. Under a compiler or an exporter, which fuse by themselves and know no complex numbers, and under
    torch.func it is `turn`, the plain formula that the other is held to.

    Args:
        angles: (*batch, heads or 1, tokens, pairs), in radians.
        layout: "interleaved" or "half".
        magnitudes: broadcast against the angles, what turned pairs are multiplied with (xPos, YaRN); None: 1. With a gradient, the
            plain formula is used.
    """

    def __init__(
        self,
        angles: Float[Tensor, "*batch heads tokens pairs"],
        layout: str,
        magnitudes: Float[Tensor, "..."] | None = None,
    ) -> None:
        self.layout, self.dtype = layout, angles.dtype
        self.angles, self.magnitudes, self.factors = angles, magnitudes, None
        if runs_eagerly() and not (magnitudes is not None and magnitudes.requires_grad):
            with torch.no_grad():
                self.factors = _factors(*_cos_and_sin(angles, magnitudes), layout)

    @property
    def nbytes(self) -> int:
        return self.angles.nbytes if self.factors is None else self.factors.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x (B, heads, tokens, head_dim), turned at the precision of the angles, in the dtype of x."""
        wide = x if x.dtype == self.dtype else x.to(self.dtype)
        if self.factors is None:
            turned = turn(wide, self.angles, self.layout, self.magnitudes)
        elif torch.is_grad_enabled() and (wide.requires_grad or self.angles.requires_grad):
            turned = _Turn.apply(wide, self.angles, self.factors, self.layout)
        else:
            turned = _turn_by_factors(wide, self.factors, self.layout)
        return turned if turned.dtype == x.dtype else turned.to(x.dtype)


def turn(x: Tensor, angles: Tensor, layout: str, magnitudes: Tensor | None = None) -> Tensor:
    """Turn each pair (a, b) of channels: (a cos - b sin, a sin + b cos), times its magnitude. The reference, in real arithmetic."""
    cos, sin = _cos_and_sin(angles, magnitudes)
    if layout == "interleaved":
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class _Turn(torch.autograd.Function):
    """Its backward is the turn by the opposite angles, so that of the sizes of x nothing is kept; for the gradient of angles the
    turned vectors are, which attention keeps anyway. Every backward is made of differentiable parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, factors: Tensor, layout: str) -> Tensor:
        turned = _turn_by_factors(x, factors, layout)
        ctx.layout, ctx.shape = layout, x.shape
        ctx.save_for_backward(factors, angles, turned if ctx.needs_input_grad[1] else None)
        return turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        factors, angles, turned = ctx.saved_tensors
        grad_x = grad_angles = None
        if ctx.needs_input_grad[0]:
            # the angles matter to a second derivative only
            opposite = -angles if torch.is_grad_enabled() else angles
            grad_x = _Turn.apply(grad, opposite, _opposite(factors, ctx.layout), ctx.layout).sum_to_size(ctx.shape)
        if ctx.needs_input_grad[1]:
            # a pair (a, b) moves along (-b, a) as its angle grows
            if ctx.layout == "interleaved":
                grad, turned = (torch.view_as_complex(t.contiguous().unflatten(-1, (-1, 2))) for t in (grad, turned))
                grad_angles = (grad * turned.conj()).sum_to_size(angles.shape).imag
            else:
                products = turned * grad.roll(grad.shape[-1] // 2, -1)
                first, second = products.sum_to_size(*angles.shape[:-1], grad.shape[-1]).chunk(2, dim=-1)
                grad_angles = first - second
        return grad_x, grad_angles, None, None


def _cos_and_sin(angles: Tensor, magnitudes: Tensor | None) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if magnitudes is None else (cos * magnitudes, sin * magnitudes)


def _factors(cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """cos + i sin; for halves two tensors of head_dim, [cos cos] to multiply x with, [-sin sin] for x with its halves swapped."""
    if layout == "interleaved":
        return torch.complex(cos, sin)
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def _opposite(factors: Tensor, layout: str) -> Tensor:
    if layout == "interleaved":
        return factors.conj_physical()
    cos, sin = factors
    return torch.stack((cos, -sin))


def _turn_by_factors(x: Tensor, factors: Tensor, layout: str) -> Tensor:
    if layout == "interleaved":
        return (_as_complex(x) * factors).view(x.dtype)
    cos, sin = factors
    x = x.expand(torch.broadcast_shapes(x.shape, cos.shape))
    return x.roll(x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)


def _as_complex(x: Tensor) -> Tensor:
    """Neighbours as one complex number, by a view that knows no gradients; a copy of what begins at an odd place or lies apart."""
    if x.stride(-1) != 1 or x.storage_offset() % 2 or any(stride % 2 for stride in x.stride()[:-1]):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(x.dtype.to_complex())
