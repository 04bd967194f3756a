"""Another image size or window for a trained model, and what each of its encodings makes of it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from relpos2d.backbones.swin import StageHost
from relpos2d.encoding import Combined, Encoding

Size = tuple[int, ...] | None  # none: a formula


def set_image_size(model: nn.Module, height: int, width: int) -> list[str]:
    """Goes to another size through timm's own set_input_size; the same size leaves the model alone.

    Returns:
        One line for each thing that depends on the size: from what to what, and by which rule.

    Raises:
        ValueError: the patches of the model do not divide the size.
    """
    embed: Any = model.patch_embed
    if (height, width) == tuple(embed.img_size):
        return []
    patch_height, patch_width = embed.patch_size
    if height % patch_height or width % patch_width:
        raise ValueError(
            f"image size {height}x{width}: must be a multiple of the model's patches, {patch_height}x{patch_width} pixels"
        )
    before = sizes(model)
    model.set_input_size(img_size=(height, width))  # type: ignore[operator]
    return changes(before, sizes(model))


def set_windows(model: nn.Module, window_size: int | tuple[int, int] | None) -> list[str]:
    """Goes to windows that are the same for images of every size, as a detector wants them: always shifted, never cut to the image.

    Args:
        model: a swapped Swin or a feature extractor made from one.
        window_size: of all stages; None keeps the largest that a stage has.

    Returns:
        As set_image_size.
    """
    stages = [module for module in model.modules() if isinstance(module, StageHost)]
    blocks = [block for stage in stages for block in stage.blocks]
    if window_size is None:
        window_size = max((tuple(block.window_size) for block in blocks), key=lambda window: window[0] * window[1])
    before = sizes(model)
    for stage in stages:
        stage.set_input_size(stage.input_resolution, window_size, always_partition=True)  # type: ignore[operator]
    return changes(before, sizes(model))


def changes(before: Sequence[tuple[str, str, Size]], after: Sequence[tuple[str, str, Size]]) -> list[str]:
    """What `sizes` said before and after, each thing with how often it is there; what stayed as it was says so."""
    lines = (line(*was, now) for was, (*_, now) in zip(before, after, strict=True))
    return [text + (f" ({count} times)" if count > 1 else "") for text, count in Counter(lines).items()]


def sizes(model: Any) -> list[tuple[str, str, Size]]:
    """What depends on the size of the image: its name, the rule that it follows, and its size now."""
    found: list[tuple[str, str, Size]] = [
        ("image", "", tuple(model.patch_embed.img_size)),
        ("patches", "", tuple(model.patch_embed.grid_size)),
    ]
    if getattr(model, "pos_embed", None) is not None:
        found.append(("pos_embed", "resampled as timm does", tuple(model.patch_embed.grid_size)))
    found += [
        ("window", "", tuple(module.window_size))
        for module in model.modules()
        if hasattr(module, "window_size") and hasattr(module, "shift_size")
    ]
    encodings: list[Any] = [module for module in model.modules() if isinstance(module, Encoding)]
    for module in encodings:
        if isinstance(module, Combined) or module.family == "none":
            continue
        if not hasattr(module, "resize_matrices"):
            found.append((module.name, "a formula, evaluated at the new places", None))
        elif module.family == "absolute":
            found.append((module.name, "resampled as timm does", tuple(module.window_size)))
        else:
            offsets = tuple(2 * side - 1 for side in module.window_size)
            found.append((f"{module.name} of offsets", f"resize={module.resize}", offsets))
    return found


def line(name: str, rule: str, before: Size, after: Size) -> str:
    if before is None or after is None:
        return f"{name}: {rule}"
    if before == after:
        return f"{name}: {by(before)} as in training"
    return f"{name}: {by(before)} -> {by(after)}" + (f", {rule}" if rule else "")


def by(size: Sequence[int]) -> str:
    """`7x11`"""
    return "x".join(map(str, size))
