"""Pictures of encodings: what each head makes of every key, seen from a query in the middle of the grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos2d.encoding import Combined, Encoding
from relpos2d.encodings import create_encoding
from relpos2d.positions import Grid
from relpos2d.tools.check import fixed_projections

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.image import AxesImage

INK = "#222222"
MUTED = "#777777"


def bias_map(encoding: Encoding, grid: Grid) -> Float[Tensor, "heads *shape"]:
    """What each head makes of every key, for the query in the middle of the grid: (heads, H, W) on an image.

    The query stands at index (H // 2, W // 2). For an encoding of numbers the map holds the numbers. For a rotation it holds
    the score of a unit query and an equal unit key, with the same energy in each pair of channels, divided by their score
    at offset 0: the mean over pairs of cos(angle), 1 at the middle and 1 everywhere at strength 0. For vectors it holds
    what they add to the score of such a query and key at scale 1; what they share with a host is made by fixed projections.
    A Combined encoding has the sum of these, `none` zeros.

    Returns:
        A float32 tensor on the CPU, without gradient.

    Raises:
        ValueError: an absolute encoding, which has no map of offsets, or a grid with other axes.
    """
    if not _is_relative(encoding):
        raise ValueError(
            f"bias_map: {type(encoding).__name__} is absolute; it adds to the tokens and has no map of offsets"
        )
    if grid.num_axes != encoding.positions.num_axes:
        raise ValueError(
            f"bias_map: {grid} has {grid.num_axes} axes, {type(encoding).__name__} is made for {encoding.positions}"
        )
    keys = Grid(*grid.shape, step=grid.step, origin=grid.origin)
    middle = [o + s * (size // 2) for o, s, size in zip(grid.origin, grid.step, grid.shape, strict=True)]
    query = Grid(*[1] * grid.num_axes, step=grid.step, origin=middle)
    like: dict[str, Any] = {
        "device": encoding.strength.device,
        "dtype": torch.promote_types(encoding.strength.dtype, torch.float32),
    }
    unit = torch.full((1, encoding.num_heads, 1, encoding.head_dim), encoding.head_dim**-0.5, **like)
    q, k = unit, unit.expand(-1, -1, keys.num_places, -1)
    project = fixed_projections(encoding, unit)
    with torch.no_grad():
        total = torch.zeros(1, encoding.num_heads, 1, keys.num_places, **like)
        for part in (encoding.bias(query, keys), encoding.score(q, k, query, keys, 1.0, project)):
            total = total if part is None else total + part
        if _turns(encoding):
            # both at once: where the length of a sequence counts, that of query and keys together
            turned_q, turned_k = encoding.rotate_both(q, k, query, keys)
            scores = (turned_q @ turned_k.transpose(-2, -1)).unflatten(-1, grid.shape)
            at_query = scores[(..., *[size // 2 for size in grid.shape])]
            total = total + scores.flatten(3) / at_query.unsqueeze(-1)
    return total[0, :, 0].float().cpu().unflatten(-1, grid.shape)


def plot_maps(
    source: nn.Module | Sequence[Encoding] | Mapping[str, Encoding],
    path: str | Path,
    *,
    grid: Grid | None = None,
    title: str = "",
    max_layers: int = 12,
    max_heads: int = 8,
) -> None:
    """Draw the maps of every relative encoding, a row per layer and a column per head, as one picture.

    A row has its own colour bar. Numbers of both signs are coloured around 0, others from their least to their largest. With
    one axis the map is a strip, with three it is the slice at the query's place on the first.

    Args:
        source: a model, one encoding, several, or several by name.
        path: the picture; its suffix says the format (.png).
        grid: where to look; by default the window or grid of each encoding.
        title: line above the picture.
        max_layers: rows at most; of more layers as many are drawn, evenly spread from first to last.
        max_heads: columns at most; the first heads are drawn.

    Raises:
        ValueError: no relative encoding in the source, or counts below 1.
        ImportError: matplotlib is missing.
    """
    if max_layers < 1 or max_heads < 1:
        raise ValueError(f"plot_maps: max_layers={max_layers} and max_heads={max_heads} must be at least 1")
    figure_class = matplotlib_figure("plot_maps")
    layers = _layers(source)
    if not layers:
        raise ValueError("plot_maps: there is no relative encoding to draw; swap() puts one into a model")
    chosen = _spread_evenly(list(layers.items()), max_layers)
    rows = [(name, _as_images(bias_map(layer, grid or _own_grid(layer)))) for name, layer in chosen]
    num_columns = min(max_heads, max(len(images) for _, images in rows))
    panel_width = 1.35
    heights = [min(2.4, max(0.45, panel_width * images.shape[1] / images.shape[2])) for _, images in rows]
    figure = figure_class(
        figsize=(1.3 + panel_width * num_columns + 0.9, sum(heights) + 0.3 * len(rows) + (0.35 if title else 0.1)),
        layout="constrained",
    )
    axes = figure.subplots(len(rows), num_columns, squeeze=False, height_ratios=heights)
    for row, (name, images) in enumerate(rows):
        num_heads, scale = len(images), _colour_scale(images)
        for head, panel in enumerate(axes[row]):
            if head >= num_heads:
                panel.set_axis_off()
                continue
            image = _draw(panel, images[head], scale)
            panel.set_title(f"head {head}", fontsize=7, color=MUTED, pad=2)
        label = name if num_heads <= num_columns else f"{name}\n{num_columns} of {num_heads} heads"
        axes[row, 0].set_ylabel(label, fontsize=7.5, color=INK, rotation=0, ha="right", va="center", labelpad=6)
        _colour_bar(figure, image, list(axes[row]), aspect=max(5, 9 * heights[row]), shrink=0.9)
    if len(layers) > len(chosen):
        title = f"{title}  ({len(chosen)} of {len(layers)} layers)".strip()
    if title:
        figure.suptitle(title, fontsize=10, color=INK)
    figure.savefig(path, dpi=160)


def plot_encodings(path: str | Path, *, grid: Grid | None = None, seed: int = 4) -> None:
    """Draw three encodings side by side, four heads each: ALiBi, a continuous bias and a mixed rotation.

    Parameters are drawn so that heads differ as they do after training; fresh ones would be nearly flat.

    Args:
        path: the picture; its suffix says the format (.png).
        grid: two axes; by default 15 x 21.
        seed: of the parameters; the global random state is left alone.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure_class = matplotlib_figure("plot_encodings")
    grid = Grid(15, 21) if grid is None else grid
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # of eight heads the first four: their slopes are steep enough to be seen at one scale
        alibi = create_encoding("alibi", 8, 32, grid)
        cpb = create_encoding("cpb", 4, 32, grid, hidden_dim=64)
        rope_mixed = create_encoding("rope_mixed", 4, 32, grid)
        with torch.no_grad():
            for parameter, spread in zip(cpb.parameters(), (2.5, 1.5, 0.12), strict=True):
                parameter.copy_(torch.randn_like(parameter) * spread)
            for parameter in rope_mixed.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.28)
    blocks = (
        (alibi, "alibi: a fixed number", "the further, the less"),
        (cpb, "cpb: a learned number", "an MLP of the log offset"),
        (rope_mixed, "rope_mixed: a rotation", "q and k turn along learned directions"),
    )
    figure = figure_class(figsize=(11, 3.3), layout="constrained")
    parts: Any = figure.subfigures(1, 3, wspace=0.04)
    for block, (encoding, title, subtitle) in zip(parts, blocks, strict=True):
        images = _as_images(bias_map(encoding, grid))[:4]
        scale = _colour_scale(images)
        axes = block.subplots(2, 2)
        for panel, image in zip(axes.flat, images, strict=True):
            drawn = _draw(panel, image, scale)
        block.suptitle(title, fontsize=11, color=INK, fontweight="bold")
        bar = _colour_bar(block, drawn, list(axes.flat), location="bottom", aspect=36, shrink=0.94)
        bar.set_label(subtitle, fontsize=9, color=MUTED)
    figure.savefig(path, dpi=160)


def matplotlib_figure(who: str) -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{who}: needs matplotlib; pip install 'relpos2d[plot]' brings it") from error
    # a figure that no window system and no global state knows of
    return Figure


def _layers(source: nn.Module | Sequence[Encoding] | Mapping[str, Encoding]) -> dict[str, Encoding]:
    """Encodings by name; of a model the relative ones, without those that are parts of a Combined one."""
    if isinstance(source, Encoding):
        return {_label(source): source}
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, nn.Module):
        return {f"{index}: {_label(encoding)}": encoding for index, encoding in enumerate(source)}
    encodings = {name: module for name, module in source.named_modules() if isinstance(module, Encoding)}
    inside = {id(part) for m in encodings.values() for part in m.modules() if part is not m}
    return {
        name.removesuffix(".encoding"): encoding
        for name, encoding in encodings.items()
        if id(encoding) not in inside and _is_relative(encoding)
    }


def _is_relative(encoding: Encoding) -> bool:
    return not any(getattr(module, "family", "") == "absolute" for module in encoding.modules())


def _label(encoding: Encoding) -> str:
    return encoding.name or type(encoding).__name__


def _own_grid(encoding: Encoding) -> Grid:
    """The grid an encoding is used on now: that of its window, if it has one."""
    modules = [encoding, *(module for module in encoding.modules() if isinstance(module, Encoding))]
    sizes: list[Any] = [getattr(module, "window_size", None) for module in modules]
    sizes = [size for size in sizes if isinstance(size, tuple)]
    return Grid(*sizes[0]) if sizes else Grid(*encoding.positions.shape)


def _turns(encoding: Encoding) -> bool:
    own = [m for m in encoding.modules() if isinstance(m, Encoding) and not isinstance(m, Combined)]
    return any(type(module).rotate is not Encoding.rotate for module in own)


def _spread_evenly(items: list, count: int) -> list:
    if len(items) <= count:
        return items
    if count == 1:
        return items[:1]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _as_images(maps: Float[Tensor, "heads *shape"]) -> Float[Tensor, "heads height width"]:
    if maps.ndim == 2:
        return maps.unsqueeze(1)
    while maps.ndim > 3:
        maps = maps[:, maps.shape[1] // 2]
    return maps


def _colour_scale(images: Tensor) -> dict[str, Any]:
    low, high = float(images.min()), float(images.max())
    if low < 0 < high:
        reach = max(-low, high)
        return {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach}
    if math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-12):
        low, high = low - 0.5, high + 0.5
    return {"cmap": "viridis", "vmin": low, "vmax": high}


def _draw(panel: Axes, image: Float[Tensor, "height width"], scale: dict[str, Any]) -> AxesImage:
    height, width = image.shape
    drawn = panel.imshow(image.numpy(), aspect="auto" if height == 1 else "equal", interpolation="nearest", **scale)
    panel.plot(width // 2, height // 2, marker="s", markersize=2.6, color="white", mec=INK, mew=0.7)
    panel.set_xticks([])
    panel.set_yticks([])
    for spine in panel.spines.values():
        spine.set_visible(False)
    return drawn


def _colour_bar(figure: Figure | SubFigure, drawn: AxesImage, panels: list[Axes], **options: Any) -> Any:
    from matplotlib.ticker import MaxNLocator

    bar = figure.colorbar(drawn, ax=panels, pad=0.02, **options)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(4)
    bar.update_ticks()
    bar.ax.tick_params(labelsize=7, colors=MUTED, length=2)
    return bar
