"""A learned vector per place, the absolute embedding of ViT (arXiv:2010.11929)."""

from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.encoding import AbsoluteEncoding
from relpos2d.interpolation import read, resize, resize_matrices
from relpos2d.positions import Grid, Positions


class Learned(AbsoluteEncoding):
    """Add to each token a learned vector of its place; prefix tokens have one each.

    The vectors of the grid it was made for are kept; on another grid (`set_window_size`) they are resampled as timm does
    (bicubic, antialiased), at real coordinates read bilinearly.
    """

    name = "learned"
    formula = "x + E[p]"
    paper = "arXiv:2010.11929"

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
        self.pos_embed = nn.Parameter(torch.empty(1, positions.num_tokens, self.embed_dim, device=device, dtype=dtype))
        self.set_window_size(positions.shape)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def set_window_size(self, window_size: tuple[int, ...]) -> None:
        self.window = self._checked_window(window_size)
        self.window_size = self.window.shape
        keeps = self.window_size == self.positions.shape
        self.resize_matrices = None if keeps else resize_matrices(self.positions.shape, self.window_size, "antialias")

    def vectors(self, pos: Positions, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        num_prefix = self.positions.num_prefix_tokens
        prefix = self.pos_embed[0, :num_prefix].to(dtype)
        values = self.pos_embed[0, num_prefix:].to(dtype).unflatten(0, self.positions.shape)
        if self.resize_matrices is not None:
            values = resize(values, self.resize_matrices)
        window = self.window
        if isinstance(pos, Grid) and (pos.shape, pos.step, pos.origin) == (window.shape, window.step, window.origin):
            vectors = values.flatten(0, -2)
        else:
            vectors = read(values, pos.coords(device=device, dtype=dtype))
        if not num_prefix or not pos.num_prefix_tokens:
            return vectors
        if pos.num_prefix_tokens != num_prefix:
            raise ValueError(f"Learned: made for {num_prefix} prefix tokens, given {pos.num_prefix_tokens}")
        return torch.cat((prefix.expand(*vectors.shape[:-2], -1, -1), vectors), dim=-2)
