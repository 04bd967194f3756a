"""Values kept on a lattice: change its size, or read them between its places. Shared by `table` and `learned`."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from timm.layers import resize_rel_pos_bias_table
from torch import Tensor


def resize_matrix(old_size: int, new_size: int, method: str) -> Float[Tensor, "new old"]:
    """What resizes one axis of a lattice: every method in use is linear in the values and works axis by axis.

    float32, on the CPU. To be made when a size is set and then kept, never while a model runs: under a tracer (compile,
    export) it would be a tensor of the tracer. Callers leave out a resize in which no axis changes. Where one axis changes
    and another does not, timm's function still moves the values of the other a little (its spacing is never quite even);
    so does this one.

    Args:
        method: "timm" for timm's resize_rel_pos_bias_table (sizes odd: 2 * window - 1); "bicubic" for torch's interpolate;
            "antialias" for the same with antialiasing, as timm resamples absolute embeddings.
    """
    # real numbers, also while a model is built on the meta device or in inference mode
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        identity = torch.eye(old_size, dtype=torch.float32)
        if method == "timm":
            warnings.simplefilter("ignore", UserWarning)  # timm's interpolation uses a deprecated way to index
            # equal columns, 3 becoming 5, since timm's function wants two axes and does nothing where none changes
            resized = resize_rel_pos_bias_table(
                identity.repeat_interleave(3, dim=0),
                new_window_size=((new_size + 1) // 2, 3),
                new_bias_shape=(new_size * 5, old_size),
                old_window_size=((old_size + 1) // 2, 2),
            )
            return resized[2::5].contiguous()
        # three equal columns again: antialiasing gives wrong values for images one pixel wide
        image = identity[None, :, :, None].expand(-1, -1, -1, 3).contiguous()
        resized = torch.nn.functional.interpolate(
            image, size=(new_size, 3), mode="bicubic", antialias=method == "antialias"
        )
        return resized[0, :, :, 1].T.contiguous()


def resize_matrices(old_sizes: Sequence[int], new_sizes: Sequence[int], method: str) -> tuple[Tensor, ...]:
    """One `resize_matrix` per axis."""
    return tuple(resize_matrix(old, new, method) for old, new in zip(old_sizes, new_sizes, strict=True))


def resize(values: Float[Tensor, "... channels"], matrices: Sequence[Tensor]) -> Float[Tensor, "... channels"]:
    """Values (*old sizes, channels) on the new lattice (*new sizes, channels), one matrix per axis; at least in float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    resized = values.to(dtype)
    device = values.device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else contextlib.nullcontext():
        for axis, matrix in enumerate(matrices):
            matrix = matrix.to(device=resized.device, dtype=dtype)
            resized = torch.tensordot(resized, matrix, dims=([axis], [1])).movedim(-1, axis)
    return resized


def read(
    values: Float[Tensor, "*sizes channels"], places: Float[Tensor, "*batch axes"]
) -> Float[Tensor, "*batch channels"]:
    """Values (*sizes, channels) at real places (..., axes) counted from the first entry: multilinear, clamped outside."""
    sizes = values.shape[:-1]
    limit = torch.tensor([size - 1 for size in sizes], device=places.device, dtype=places.dtype)
    inside = places.clamp(min=torch.zeros_like(limit), max=limit)
    flat = values.reshape(-1, values.shape[-1])
    total: Tensor | None = None
    for corner, weight in corners(inside):
        index = torch.zeros_like(corner[..., 0], dtype=torch.long)
        for axis, size in enumerate(sizes):
            index = index * size + corner[..., axis].long().clamp(max=size - 1)
        part = flat[index] * weight.unsqueeze(-1).to(torch.promote_types(flat.dtype, torch.float32))
        total = part if total is None else total + part
    assert total is not None
    return total


def corners(places: Float[Tensor, "... axes"]) -> Iterator[tuple[Float[Tensor, "... axes"], Float[Tensor, ...]]]:
    """The whole places around each real place, with their multilinear weights (which add up to 1)."""
    low = places.floor()
    share = places - low
    for upper in itertools.product((0, 1), repeat=places.shape[-1]):
        up = torch.tensor(upper, device=places.device, dtype=places.dtype)
        yield low + up, (share * up + (1 - share) * (1 - up)).prod(dim=-1)
