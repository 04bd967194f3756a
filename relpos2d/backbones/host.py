"""What the swapped modules of all families share: where an encoding lives, whose weights it takes over, how weights load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relpos2d.encoding import Combined, Encoding
from relpos2d.encodings import create_encoding, encoding_class
from relpos2d.positions import Grid

#: "rope_mixed", {"name": "rope_mixed", "theta": 10.0}, or a list of these
Spec = str | Mapping[str, Any] | Sequence[Any]


class Host(nn.Module):
    """A module of timm whose class has been exchanged for a subclass that owns an `encoding`.

    timm's own weights load strictly: those of the native position parameters go to the encoding that has taken their place
    or, where there is none, nowhere; what the encoding has beyond them keeps its values.
    """

    #: the encoding that computes what the module computed before, and that encoding's parameters
    native_encoding: ClassVar[str] = ""
    native_parameters: ClassVar[tuple[str, ...]] = ()
    #: entries of other people's checkpoints that are derived, not learned
    derived: ClassVar[tuple[str, ...]] = ()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in self.derived:
            state_dict.pop(prefix + name, None)
        encoding = getattr(self, "encoding", None)
        mine = [key for key in state_dict if key.startswith(prefix)]
        if encoding is not None and mine and not any(key.startswith(f"{prefix}encoding.") for key in mine):
            taken_over = find_part(encoding, self.native_encoding)
            still_own = dict(self.named_parameters())
            for key in mine:
                name = key[len(prefix) :]
                if name in self.native_parameters and name not in still_own:
                    value = state_dict.pop(key)
                    if taken_over is not None:
                        state_dict[f"{prefix}encoding.{taken_over[0]}{name}"] = value
            for name, value in encoding.state_dict().items():
                state_dict.setdefault(f"{prefix}encoding.{name}", value)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class HostModel(nn.Module):
    """A model of timm with encodings inside: it keeps weight decay away from them."""

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that must not decay: timm's own and all of the encodings."""
        return set(super().no_weight_decay()) | position_parameters(self)  # type: ignore[misc]


def position_parameters(model: nn.Module) -> set[str]:
    """Full names of the parameters of all encodings in a model that must not decay."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Encoding) and not _inside_encoding(path)
        for name in module.no_weight_decay()
    }


def _inside_encoding(path: str) -> bool:
    return ".parts." in f".{path}."


def find_part(encoding: Encoding, name: str) -> tuple[str, Encoding] | None:
    """The encoding of that name, itself or within a sum, with its path; None if it is not there."""
    if isinstance(encoding, Combined):
        for index, part in enumerate(encoding):
            if part.name == name:
                return f"parts.{index}.", part
        return None
    return ("", encoding) if encoding.name == name and name else None


def parts_of(encoding: Encoding) -> Iterator[Encoding]:
    """The encodings of a sum, or the one itself."""
    return iter(encoding) if isinstance(encoding, Combined) else iter((encoding,))


def split(spec: Spec, who: str = "swap") -> tuple[Spec | None, Spec | None]:
    """An encoding as the absolute part, which goes to the model, and the rest, which goes to each attention.

    Raises:
        ValueError: it is none; `who` stands in front.
    """
    if not isinstance(spec, str | Mapping | Sequence):
        raise ValueError(f"{who}: {spec!r} must be a name, a mapping with a name, or a list of these")
    members = [spec] if isinstance(spec, str | Mapping) else list(spec)
    for member in members:
        if not isinstance(member, str | Mapping):
            raise ValueError(f"{who}: {member!r} in {spec!r} must be a name or a mapping with a name")
    if not members:
        raise ValueError(f"{who}: an empty list is no encoding; use 'none'")
    absolute = [m for m in members if encoding_class(_name(m)).family == "absolute"]
    relative = [m for m in members if encoding_class(_name(m)).family != "absolute"]

    def one(items: list[Any]) -> Spec | None:
        return (items[0] if len(items) == 1 else items) if items else None

    return one(absolute), one(relative)


def _name(member: str | Mapping[str, Any]) -> str:
    return member if isinstance(member, str) else member.get("name", "")


def with_default(spec: Spec, name: str, **defaults: Any) -> Spec:
    """The same encoding with options for the member of that name, where it does not set them itself."""
    if isinstance(spec, str):
        return {"name": name, **defaults} if spec == name else spec
    if isinstance(spec, Mapping):
        return {**defaults, **spec} if spec.get("name") == name else spec
    return [with_default(member, name, **defaults) for member in spec]


def make(spec: Spec, num_heads: int, head_dim: int, positions: Grid, like: Tensor) -> Encoding:
    """create_encoding() on the device and in the dtype of a weight of the host."""
    return create_encoding(spec, num_heads, head_dim, positions, device=like.device, dtype=like.dtype)


def take_over(encoding: Encoding, name: str, source: Mapping[str, nn.Parameter]) -> bool:
    """Give a host's own position parameters to the encoding `name` if it is there and all of them fit.

    The parameters themselves move, so that an optimiser and requires_grad stay as they were.
    """
    found = find_part(encoding, name)
    if found is None or not source:
        return False
    target = dict(found[1].named_parameters())
    if any(key not in target or target[key].shape != value.shape for key, value in source.items()):
        return False
    for key, value in source.items():
        *path, leaf = key.split(".")
        found[1].get_submodule(".".join(path)).register_parameter(leaf, value)
    return True


def grid_of_native(module: nn.Module, name: str, spec: Spec | None, current: Grid) -> Grid:
    """The grid that a new encoding is made for: the current one, or that of the part `name` whose parameters it takes over."""
    encoding = getattr(module, "encoding", None)
    members = [spec] if isinstance(spec, str | Mapping) else list(spec or ())
    if not isinstance(encoding, Encoding) or name not in map(_name, members):
        return current
    found = find_part(encoding, name)
    return current if found is None else Grid(*found[1].positions.shape, num_prefix_tokens=current.num_prefix_tokens)


def native_source(module: nn.Module, name: str, parameters: Iterable[str]) -> dict[str, nn.Parameter]:
    """The native position parameters of a module, swapped before or not; empty if it has them no longer."""
    encoding = getattr(module, "encoding", None)
    holder: nn.Module = module
    if isinstance(encoding, Encoding):
        found = find_part(encoding, name)
        if found is None:
            return {}
        holder = found[1]
    owned = dict(holder.named_parameters())
    return {key: owned[key] for key in parameters if key in owned}


def exchange_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make a module an instance of a subclass of its own class, with all that it holds, hooks included."""
    assert issubclass(cls, type(module)) or issubclass(type(module), Host | HostModel)
    module.__class__ = cls


def felt(encoding: Encoding | None, name: str) -> tuple[float, bool]:
    """How much of the part `name` is felt, from 0 to 1, and whether any other part is felt."""
    if encoding is None:
        return 0.0, False
    whole = _strength(encoding) if isinstance(encoding, Combined) else 1.0
    found = find_part(encoding, name)
    native, others = 0.0, False
    for part in parts_of(encoding):
        strength = 0.0 if part.family == "none" else whole * _strength(part)
        if found is not None and part is found[1]:
            native = strength
        else:
            others = others or strength > 0
    return native, others


def _strength(encoding: Encoding) -> float:
    return encoding.initial_strength if encoding.strength.is_meta else float(encoding.strength)


def check_sizes(name: str, value: Any) -> None:
    """Refuse sizes (one number, or numbers in lists) below 1."""
    if value is None:
        return
    for size in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
        if isinstance(size, Sequence):
            check_sizes(name, size)
        elif not isinstance(size, int | torch.SymInt) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={value!r} must hold whole numbers of at least 1")
