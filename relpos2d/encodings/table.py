"""A learned number per offset and head: Swin (arXiv:2103.14030), BEiT (arXiv:2106.08254), Video Swin (arXiv:2106.13230)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from relpos2d.encoding import NumberEncoding
from relpos2d.interpolation import read, resize, resize_matrices
from relpos2d.positions import Grid, OffsetLattice

RESIZE_METHODS = ("timm", "bicubic", "clamp")


class OffsetTable(NumberEncoding):
    """Look the number up in a table with a row per whole offset, row-major: (dy, dx) is row (dy + H - 1) (2 W - 1) + dx + W - 1.

    The table of the window it was made for is kept; `set_window_size` changes only how it is read, so that going back
    gives the original. Fractional offsets are read bilinearly, offsets beyond the window as those on its edge.

    Args:
        resize: how a table is read for another window: "timm" (timm's own function; with one or three axes the same, axis by
            axis), "bicubic", or "clamp": offsets keep their meaning in tokens.
        max_distance: the table holds offsets from -max_distance to max_distance on each axis, whatever the window is, and is
            never resized; offsets beyond are read as those on its edge. None: the offsets of the window.

    Raises:
        ValueError: an unknown way to resize, or one for a table that is never resized; a distance below 1.
    """

    name = "table"
    formula = "T_h[d]"
    paper = "arXiv:2103.14030"
    keeps = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        positions: Grid,
        *,
        resize: str = "timm",
        max_distance: int | None = None,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_heads, head_dim, positions, strength=strength, device=device, dtype=dtype)
        if resize not in RESIZE_METHODS:
            raise ValueError(f"OffsetTable: resize={resize!r} must be one of {', '.join(RESIZE_METHODS)}")
        if max_distance is not None:
            if max_distance < 1:
                raise ValueError(f"OffsetTable: max_distance={max_distance} must be at least 1")
            if resize != "timm":
                raise ValueError(
                    f"OffsetTable: resize={resize!r} has no meaning with max_distance={max_distance}, whose table is never "
                    "resized; give one of the two"
                )
        self.resize, self.max_distance = resize, max_distance
        reaches = [size - 1 if max_distance is None else max_distance for size in positions.shape]
        self.table_shape = tuple(2 * reach + 1 for reach in reaches)
        self.set_window_size(positions.shape)
        self.relative_position_bias_table = nn.Parameter(
            torch.empty(math.prod(self.table_shape), num_heads, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def set_window_size(self, window_size: tuple[int, ...]) -> None:
        self.window = self._checked_window(window_size)
        self.window_size = self.window.shape
        sizes = tuple(2 * size - 1 for size in self.window_size)
        keeps = sizes == self.table_shape or self.resize == "clamp" or self.max_distance is not None
        self.resize_matrices = None if keeps else resize_matrices(self.table_shape, sizes, self.resize)

    def table(self) -> Tensor:
        """The table (*offsets along each axis, heads) as it is read at the current window."""
        table = self.relative_position_bias_table.unflatten(0, self.table_shape)
        return table if self.resize_matrices is None else resize(table, self.resize_matrices)

    def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
        table = self.table()
        centre = torch.tensor([size // 2 for size in table.shape[:-1]], device=offsets.device, dtype=offsets.dtype)
        return read(table, offsets + centre)

    def _on_lattice(self, lattice: OffsetLattice) -> Tensor:
        # a size that an exporter keeps open is equal to none
        is_open = not all(isinstance(size, int) for size in lattice.shape)
        if not is_open and _same_places(lattice.queries, self.window) and _same_places(lattice.keys, self.window):
            table = self.table()
            if table.shape[:-1] == lattice.shape:
                # nothing to look up: the distinct offsets of the window are the table
                return table.movedim(-1, 0)
        return super()._on_lattice(lattice)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key = prefix + "relative_position_bias_table"
        saved = state_dict.get(key)
        if saved is not None:
            own, num_axes = self.relative_position_bias_table, len(self.table_shape)
            resizes = self.max_distance is None
            holds_prefix = len(saved) == len(own) + 3 or (resizes and _side(len(saved) - 3, num_axes) is not None)
            if self.prefix_bias is not None and prefix + "prefix_bias" not in state_dict and holds_prefix:
                # BEiT keeps [class -> patch, patch -> class, class -> class] as the last rows of the table
                saved, state_dict[prefix + "prefix_bias"] = saved[:-3], saved[-3:]
            side = _side(len(saved), num_axes)
            # a table of another window is resized; one whose window is unknown is left for the loader to refuse
            if resizes and saved.shape != own.shape and saved.shape[1:] == own.shape[1:] and side is not None:
                old_shape = (side,) * num_axes
                method = "timm" if self.resize == "clamp" else self.resize
                matrices = resize_matrices(old_shape, self.table_shape, method)
                saved = resize(saved.unflatten(0, old_shape), matrices).flatten(0, -2).to(saved.dtype)
            state_dict[key] = saved
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        how = f"resize={self.resize!r}" if self.max_distance is None else f"max_distance={self.max_distance}"
        return f"{super().extra_repr()}, window_size={self.window_size}, {how}"


def _same_places(positions: Grid, window: Grid) -> bool:
    return (positions.shape, positions.step, positions.origin) == (
        window.shape,
        window.step,
        window.origin,
    )


def _side(num_rows: int, num_axes: int) -> int | None:
    """The side of a table of a window with equal sides, None if this number of rows makes no such table."""
    side = round(max(num_rows, 0) ** (1 / num_axes))
    return side if side % 2 and side**num_axes == num_rows else None
