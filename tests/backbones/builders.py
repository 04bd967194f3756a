"""Small timm models of each family, with every parameter redrawn, and how their parts are compared."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch import Tensor, nn

from relpos2d import list_encodings, swap

#: family -> timm's name and what makes it small; heads of 8 and 16 channels, so that every rotary encoding fits
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"embed_dim": 48, "depth": 2, "num_heads": 3}),
    "deit3": ("deit3_small_patch16_224", {"embed_dim": 48, "depth": 2, "num_heads": 3}),
    "distilled": ("deit_tiny_distilled_patch16_224", {"embed_dim": 48, "depth": 2, "num_heads": 3}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 24, "depths": (2, 2, 1, 1), "num_heads": (3, 6, 6, 12), "drop_path_rate": 0.0},
    ),
    "swinv2": (
        "swinv2_tiny_window8_256",
        {"embed_dim": 24, "depths": (2, 2, 1, 1), "num_heads": (3, 6, 6, 12), "drop_path_rate": 0.0},
    ),
}
VITS = ("vit", "deit3", "distilled")
WINDOWED = ("swin", "swinv2")
NATIVE = {"swin": "table", "swinv2": "cpb"}
ENCODINGS = [info.name for info in list_encodings() if info.axes is None or 2 in info.axes]
ABSOLUTE = [info.name for info in list_encodings() if info.family == "absolute"]
RELATIVE = [name for name in ENCODINGS if name not in ABSOLUTE]


def build(family: str, *, seed: int = 1, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """timm's own small model of a family, in eval mode, every parameter redrawn from a seed."""
    name, small = SMALL[family]
    options = {"num_classes": 5, **small, **kwargs}
    key = (name, repr(sorted(options.items())))
    if key not in _built:
        _built[key] = timm.create_model(name, **options)
    model = copy.deepcopy(_built[key]).to(dtype)  # faster than to build it anew
    draw(model, seed)
    return model.eval()


_built: dict[tuple[str, str], nn.Module] = {}


def draw(model: nn.Module, seed: int) -> None:
    """Redraw every parameter of a model, norm weights and LayerScale too; the same for the same seed."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    torch.set_rng_state(state)


def swapped(family: str, encoding: Any, *, seed: int = 1, **kwargs: Any) -> Any:
    """A swapped small model whose new parameters are redrawn too, so that no encoding hides behind zeros."""
    swap_options = {key: kwargs.pop(key) for key in ("absolute", "mask_padding") if key in kwargs}
    model = swap(build(family, seed=seed, **kwargs), encoding, **swap_options)
    draw(model, seed + 1)
    return model


def images(height: int, width: int, *, batch: int = 2, seed: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64).to(dtype)


def native_name(name: str) -> str:
    """What timm calls a parameter that an encoding has taken over."""
    return name.replace("encoding.", "")


@contextlib.contextmanager
def timm_warnings() -> Iterator[None]:
    """timm's own resizing of a table warns about its use of torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)
        warnings.filterwarnings("ignore", "torch.searchsorted", UserWarning)
        yield
