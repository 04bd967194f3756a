"""All encodings by name: one file each, found by its name; file name = name in configs = name of its test."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from relpos2d.encoding import Combined, Encoding
from relpos2d.positions import Grid

_classes: dict[str, type[Encoding]] = {}


@dataclass(frozen=True)
class EncodingInfo:
    """One line of the table of encodings. `axes`: on how many axes it has a meaning, None for any."""

    name: str
    family: str
    axes: tuple[int, ...] | None
    formula: str
    paper: str


def register_encoding(cls: type[Encoding]) -> type[Encoding]:
    """Make a class known under its `name`; as a decorator, for encodings that live outside this package.

    Raises:
        ValueError: no name, or one that another class has.
    """
    if not cls.name:
        raise ValueError(f"register_encoding: {cls.__name__} needs a class attribute `name`")
    known = _classes.setdefault(cls.name, cls)
    if known is not cls:
        raise ValueError(f"register_encoding: the name {cls.name!r} belongs to {known.__module__}.{known.__name__}")
    return cls


def list_encodings() -> list[EncodingInfo]:
    """One entry per encoding, sorted by family and name."""
    infos = [EncodingInfo(c.name, c.family, c.axes, c.formula, c.paper) for c in _classes.values()]
    return sorted(infos, key=lambda info: (info.family, info.name))


def encoding_class(name: str) -> type[Encoding]:
    """The class behind a name.

    Raises:
        ValueError: an unknown name; the message names the nearest.
    """
    if name not in _classes:
        raise ValueError(f"unknown encoding {name!r}; {_nearest(name, _classes)}known: {', '.join(sorted(_classes))}")
    return _classes[name]


def encoding_options(cls: type[Encoding]) -> dict[str, inspect.Parameter]:
    """The keyword-only options of a constructor that a user may set, with annotations and defaults."""
    parameters = inspect.signature(cls.__init__, eval_str=True).parameters.values()
    return {
        p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in ("device", "dtype")
    }


def create_encoding(
    encoding: str | Mapping[str, Any] | Sequence[Any],
    num_heads: int,
    head_dim: int,
    positions: Grid,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Encoding:
    """Make an encoding from its name, from a mapping with `name` and options, or the sum of a list of these.

    Args:
        encoding: "rope_mixed", {"name": "rope_mixed", "theta": 10.0}, or ["table", "rope_axial"].
        num_heads: attention heads.
        head_dim: channels of one head.
        positions: the grid it is made for.
        **options: options of its constructor, over those of the mapping.

    Raises:
        ValueError: an unknown name or option (with the nearest right name), or what the constructor refuses.
    """
    sizes: dict[str, Any] = {"device": device, "dtype": dtype}
    if isinstance(encoding, Mapping):
        options = {**encoding, **options}
        encoding = options.pop("name", "")
    if isinstance(encoding, str):
        cls = encoding_class(encoding)
        allowed = encoding_options(cls)
        for option in options:
            if option not in allowed:
                raise ValueError(
                    f"encoding {encoding!r} has no option {option!r}; "
                    f"{_nearest(option, allowed)}options: {', '.join(allowed)}"
                )
        made = cls(num_heads, head_dim, positions, **options, **sizes)
        return made
    if not isinstance(encoding, Sequence):
        raise ValueError(f"create_encoding: {encoding!r} must be a name, a mapping with a name, or a list of these")
    if not isinstance(positions, Grid):
        raise ValueError(f"create_encoding: positions={positions!r} must be a Grid, for example Grid(14, 14)")
    strength = options.pop("strength", 1.0)
    if options:
        raise ValueError(f"create_encoding: give the options {sorted(options)} to the members of the list, one by one")
    places = Grid(*positions.shape, step=positions.step, origin=positions.origin)
    parts = [create_encoding(part, num_heads, head_dim, places, **sizes) for part in encoding]
    return Combined(*parts, positions=positions, strength=strength)


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def _discover() -> None:
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        named = [cls for cls in own if issubclass(cls, Encoding) and "name" in vars(cls)]
        if [cls.name for cls in named] != [module_info.name]:
            raise ValueError(
                f"{module.__name__}: needs one class with name = {module_info.name!r}, as the file is called; "
                f"it has {', '.join(f'{cls.__name__} with {cls.name!r}' for cls in named) or 'none'}"
            )
        register_encoding(named[0])


_discover()
