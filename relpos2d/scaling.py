"""How rotary encodings reach lengths they were not trained on: one small class a method, all behind the same three questions."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor


class Scaling:
    """What a method makes of the frequencies and of the length of the turned vectors; this one leaves both as they are.

    A subclass is a frozen dataclass whose fields are the options of its method, all checked when it is made.
    """

    kind: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    #: whether frequencies depend on the length of the sequence
    knows_length: ClassVar[bool] = False
    #: whether queries and keys at the same place become the same
    turns_alike: ClassVar[bool] = True

    def check_fits(self, theta: float, num_pairs: int) -> None:
        """Refuse an encoding to which the method cannot be applied.

        Raises:
            ValueError: too few pairs of channels, a theta without meaning here, or not one factor per pair.
        """

    def inv_freq(
        self, inv_freq: Float[Tensor, " pairs"], theta: float, length: Float[Tensor, "*batch"] | None
    ) -> Float[Tensor, "*batch pairs"]:
        """Radians per token of each pair.

        Args:
            inv_freq: those without scaling, theta^(-j / pairs).
            theta: their base.
            length: of the sequence, in tokens; () or one per sample. Given if `knows_length`.
        """
        return inv_freq

    def log_magnitude(
        self, coords: Float[Tensor, "*batch tokens 1"], role: Literal["query", "key"], num_pairs: int
    ) -> Float[Tensor, "*batch tokens pairs"] | None:
        """Logarithm of what each pair is multiplied with; None for 0 everywhere."""
        return None


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation (arXiv:2306.15595): all places are divided by `factor`."""

    kind = "linear"
    paper = "arXiv:2306.15595"

    factor: int | float

    def __post_init__(self) -> None:
        _check_number(self, "factor", least=1)

    def inv_freq(self, inv_freq: Tensor, theta: float, length: Tensor | None) -> Tensor:
        return inv_freq / self.factor


@dataclass(frozen=True)
class NtkScaling(Scaling):
    """NTK-aware scaling: theta becomes theta * factor^(d / (d - 2)), so that the slowest of d / 2 pairs is divided by `factor` and
    the fastest by nothing."""

    kind = "ntk"
    paper = "arXiv:2309.00071"

    factor: int | float

    def __post_init__(self) -> None:
        _check_number(self, "factor", least=1)

    def check_fits(self, theta: float, num_pairs: int) -> None:
        _check_two_pairs(self, num_pairs)

    def inv_freq(self, inv_freq: Tensor, theta: float, length: Tensor | None) -> Tensor:
        return _with_larger_theta(inv_freq, inv_freq.new_full((1,), self.factor))


@dataclass(frozen=True)
class DynamicNtkScaling(Scaling):
    """NTK-aware scaling that grows with the sequence: nothing up to `original_length` L0, at length L as with the factor
    factor * L / L0 - (factor - 1)."""

    kind = "dynamic_ntk"
    paper = "arXiv:2309.00071"
    knows_length = True

    factor: int | float
    original_length: int

    def __post_init__(self) -> None:
        _check_number(self, "factor", least=1)
        _check_number(self, "original_length", least=1, whole=True)

    def check_fits(self, theta: float, num_pairs: int) -> None:
        _check_two_pairs(self, num_pairs)

    def inv_freq(self, inv_freq: Tensor, theta: float, length: Tensor | None) -> Tensor:
        assert length is not None
        times = (length.to(inv_freq) / self.original_length).clamp(min=1).unsqueeze(-1)
        return _with_larger_theta(inv_freq, self.factor * times - (self.factor - 1))


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN (arXiv:2309.00071): pairs that turn more than `beta_fast` times within `original_length` stay, those that turn less than
    `beta_slow` times are divided by `factor`, with a ramp in between; turned vectors are multiplied with `attention_factor`.

    Args:
        factor: how much longer sequences become.
        original_length: tokens of the sequences the weights were trained on.
        attention_factor: of queries and of keys, so that its square acts on scores; None: 0.1 log(factor) + 1.
        truncate: whether the ramp begins and ends at whole pairs.
    """

    kind = "yarn"
    paper = "arXiv:2309.00071"

    factor: int | float
    original_length: int
    beta_fast: int | float = 32.0
    beta_slow: int | float = 1.0
    attention_factor: int | float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_number(self, "factor", least=1)
        _check_number(self, "original_length", least=1, whole=True)
        _check_number(self, "beta_slow", above=0)
        _check_number(self, "beta_fast", above=self.beta_slow)
        if self.attention_factor is not None:
            _check_number(self, "attention_factor", above=0)
        if not isinstance(self.truncate, bool):
            raise ValueError(f"scaling yarn: truncate={self.truncate!r} must be true or false")

    def check_fits(self, theta: float, num_pairs: int) -> None:
        if theta <= 1:
            raise ValueError(f"scaling yarn: needs theta above 1, the encoding has theta={theta}")

    def inv_freq(self, inv_freq: Tensor, theta: float, length: Tensor | None) -> Tensor:
        num_pairs = len(inv_freq)

        def turning(times: int | float) -> float:
            """The pair, as a real number, that turns so many times within the original length."""
            return num_pairs * math.log(self.original_length / (2 * math.pi * times)) / math.log(theta)

        first, last = turning(self.beta_fast), turning(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num_pairs - 1)
        if first == last:
            last += 0.001  # as the reference does; a ramp without width is a step
        pairs = torch.arange(num_pairs, device=inv_freq.device, dtype=inv_freq.dtype)
        share = ((pairs - first) / (last - first)).clamp(0, 1)
        return inv_freq * (1 - share) + inv_freq / self.factor * share

    def log_magnitude(self, coords: Tensor, role: Literal["query", "key"], num_pairs: int) -> Tensor | None:
        default = 0.1 * math.log(self.factor) + 1
        return _everywhere(default if self.attention_factor is None else self.attention_factor, coords, num_pairs)


@dataclass(frozen=True)
class LongRopeScaling(Scaling):
    """LongRoPE (arXiv:2402.13753): each pair is divided by a factor of its own, found by search: by `short_factor` up to
    `original_length`, by `long_factor` beyond; turned vectors are multiplied with `attention_factor`.

    Args:
        short_factor, long_factor: one number per pair of channels.
        original_length: tokens of the sequences the weights were trained on.
        factor: how much longer sequences become; it only sets the attention factor.
        attention_factor: of queries and of keys; None: sqrt(1 + log(factor) / log(original_length)).
    """

    kind = "longrope"
    paper = "arXiv:2402.13753"
    knows_length = True

    short_factor: Sequence[int | float]
    long_factor: Sequence[int | float]
    original_length: int
    factor: int | float | None = None
    attention_factor: int | float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            given = getattr(self, name)
            if not isinstance(given, list | tuple) or not given or not all(_is_number(f) and f > 0 for f in given):
                raise ValueError(
                    f"scaling longrope: {name}={given!r} must hold positive numbers, one per pair of channels"
                )
            object.__setattr__(self, name, tuple(given))
        _check_number(self, "original_length", least=2, whole=True)
        if self.factor is None and self.attention_factor is None:
            raise ValueError("scaling longrope: give factor (how much longer sequences become), or attention_factor")
        if self.factor is not None:
            _check_number(self, "factor", least=1)
        if self.attention_factor is not None:
            _check_number(self, "attention_factor", above=0)

    def check_fits(self, theta: float, num_pairs: int) -> None:
        for name in ("short_factor", "long_factor"):
            given = len(getattr(self, name))
            if given != num_pairs:
                raise ValueError(f"scaling longrope: {name} has {given} numbers, the encoding turns {num_pairs} pairs")

    def inv_freq(self, inv_freq: Tensor, theta: float, length: Tensor | None) -> Tensor:
        assert length is not None
        is_long = (length > self.original_length).to(inv_freq.device).unsqueeze(-1)
        return inv_freq / torch.where(
            is_long, inv_freq.new_tensor(self.long_factor), inv_freq.new_tensor(self.short_factor)
        )

    def log_magnitude(self, coords: Tensor, role: Literal["query", "key"], num_pairs: int) -> Tensor | None:
        magnitude = self.attention_factor
        if magnitude is None:
            assert self.factor is not None
            magnitude = math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return _everywhere(magnitude, coords, num_pairs)


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Llama 3 (arXiv:2407.21783): pairs that turn more than `high_freq_factor` times within `original_length` stay, those that turn
    less than `low_freq_factor` times are divided by `factor`, with a mixture in between."""

    kind = "llama3"
    paper = "arXiv:2407.21783"

    factor: int | float
    low_freq_factor: int | float
    high_freq_factor: int | float
    original_length: int

    def __post_init__(self) -> None:
        _check_number(self, "factor", least=1)
        _check_number(self, "low_freq_factor", above=0)
        _check_number(self, "high_freq_factor", above=self.low_freq_factor)
        _check_number(self, "original_length", least=1, whole=True)

    def inv_freq(self, inv_freq: Tensor, theta: float, length: Tensor | None) -> Tensor:
        times = self.original_length * inv_freq / (2 * math.pi)
        share = ((times - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return inv_freq / self.factor * (1 - share) + inv_freq * share


@dataclass(frozen=True)
class XposScaling(Scaling):
    """xPos (arXiv:2212.10554): the product of pair j fades with the distance d of a key in the past, by z_j^(d / scale_base),
    z_j = (j / n + 0.4) / 1.4.

    Made for causal attention: towards the future the product grows without bound. At place p queries are multiplied with
    z_j^(p / scale_base) and keys are divided by it; half precision, whose numbers end at 65504 (float16), wants places around 0
    for long sequences: Grid(n, origin=-n // 2).
    """

    kind = "xpos"
    paper = "arXiv:2212.10554"
    turns_alike = False

    scale_base: int | float = 512.0

    def __post_init__(self) -> None:
        _check_number(self, "scale_base", above=0)

    def log_magnitude(self, coords: Tensor, role: Literal["query", "key"], num_pairs: int) -> Tensor | None:
        pairs = torch.arange(num_pairs, device=coords.device, dtype=coords.dtype)
        logarithms = ((pairs / num_pairs + 0.4) / 1.4).log() * (coords / self.scale_base)
        return logarithms if role == "query" else -logarithms


KINDS: dict[str, type[Scaling]] = {
    cls.kind: cls
    for cls in (
        LinearScaling,
        NtkScaling,
        DynamicNtkScaling,
        YarnScaling,
        LongRopeScaling,
        Llama3Scaling,
        XposScaling,
    )
}

#: what transformers calls rope_type, and what we call kind
TRANSFORMERS_KINDS = {
    "linear": "linear",
    "dynamic": "dynamic_ntk",
    "yarn": "yarn",
    "longrope": "longrope",
    "llama3": "llama3",
}
#: entries of transformers without a field of that name here
ORIGINAL_LENGTH, MSCALES = "original_max_position_embeddings", ("mscale", "mscale_all_dim")


def make_scaling(given: Mapping[str, Any] | Scaling | None) -> Scaling | None:
    """A scaling from a mapping with its `kind` and its fields, as in {"kind": "linear", "factor": 4.0}.

    Raises:
        ValueError: an unknown kind or field (with the nearest right name), a missing one, or a value that is not allowed.
    """
    if given is None or isinstance(given, Scaling):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"scaling={given!r} must be a mapping with a kind; kinds: {', '.join(KINDS)}")
    options = dict(given)
    if "kind" not in options:
        raise ValueError(f"scaling={options} needs a kind; kinds: {', '.join(KINDS)}")
    kind = options.pop("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"scaling: kind={kind!r} is unknown; {_nearest(kind, KINDS)}kinds: {', '.join(KINDS)}")
    cls: Any = KINDS[kind]
    allowed = {field.name: field.default is MISSING for field in fields(cls)}
    for name in options:
        if name not in allowed:
            raise ValueError(
                f"scaling {kind}: has no field {name!r}; {_nearest(name, allowed)}fields: {', '.join(allowed)}"
            )
    missing = [name for name, needed in allowed.items() if needed and name not in options]
    if missing:
        raise ValueError(f"scaling {kind}: needs {', '.join(missing)}")
    scaling: Scaling = cls(**options)
    return scaling


def scaling_from_transformers(
    rope_parameters: Mapping[str, Any] | None, max_length: int | None = None
) -> Scaling | None:
    """The scaling that a transformers config describes; None for plain RoPE.

    Its `rope_theta` and `partial_rotary_factor` are no part of a scaling: they are theta and rotary_dim / head_dim of the encoding.

    Args:
        rope_parameters: the config's `rope_parameters`, or `rope_scaling` as it was called before.
        max_length: the config's `max_position_embeddings`; "dynamic" needs it, others where their own entries are missing.
            An `original_max_position_embeddings` of "default", "linear" or "dynamic" is not read, as in transformers.

    Raises:
        ValueError: an unknown rope_type (with the nearest right name) or entry, a missing one, or a value that is not allowed.
    """
    given = {name: value for name, value in (rope_parameters or {}).items() if value is not None}
    key = "rope_type" if "rope_type" in given or "type" not in given else "type"
    rope_type = given.pop(key, "default")
    for name in ("type", "rope_theta", "partial_rotary_factor"):
        given.pop(name, None)
    known = ["default", *TRANSFORMERS_KINDS]
    if not isinstance(rope_type, str) or rope_type not in known:
        raise ValueError(f"{key} {rope_type!r} is unknown; {_nearest(rope_type, known)}known: {', '.join(known)}")
    who = f"{key} {rope_type!r}"
    if rope_type in ("default", "linear", "dynamic"):  # transformers reads it for none of these
        given.pop(ORIGINAL_LENGTH, None)
    cls: Any = Scaling if rope_type == "default" else KINDS[TRANSFORMERS_KINDS[rope_type]]
    needed = {} if cls is Scaling else {field.name: field.default is MISSING for field in fields(cls)}
    has_length = needed.pop("original_length", False)
    own_length = has_length and rope_type != "dynamic"
    entries = [*needed, *([ORIGINAL_LENGTH] if own_length else []), *(MSCALES if rope_type == "yarn" else [])]
    for name in given:
        if name not in entries:
            hint = f"; {_nearest(name, entries)}entries: {', '.join(entries)}" if entries else ""
            raise ValueError(f"{who} has no entry {name!r}{hint}")
    if cls is Scaling:
        return None

    # what the lengths say where no entry does
    length, length_name = given.pop(ORIGINAL_LENGTH, None), ORIGINAL_LENGTH
    if has_length and length is None:
        length, length_name = max_length, "max_length"
    for name, value in (("max_length", max_length), (length_name, length)):
        if value is not None and not (_is_number(value) and isinstance(value, int) and value >= 1):
            raise ValueError(f"{who}: {name}={value!r} must be a whole number of at least 1")
    factor_name = "factor"
    if rope_type in ("yarn", "longrope") and "factor" not in given and length is not None and max_length is not None:
        given["factor"], factor_name = max_length / length, f"max_length / {length_name}"
    missing = [name for name, is_needed in needed.items() if is_needed and name not in given]
    if has_length and length is None:
        missing.append(f"{ORIGINAL_LENGTH} or max_length" if own_length else "max_length")
    if missing:
        raise ValueError(f"{who}: needs {', '.join(missing)}")

    scales = [given.pop(name, 0) for name in MSCALES]
    for name, scale in zip(MSCALES, scales, strict=True):
        if not (_is_number(scale) and scale >= 0):
            raise ValueError(f"{who}: {name}={scale!r} must be a number of at least 0")
    options = {**given, "original_length": length} if has_length else given
    scaling = _made(cls, options, who, {"factor": factor_name, "original_length": length_name})
    if isinstance(scaling, YarnScaling) and all(scales) and scaling.attention_factor is None:
        one, other = (0.1 * scale * math.log(scaling.factor) + 1 for scale in scales)
        return replace(scaling, attention_factor=one / other)
    return scaling


def _made(cls: Any, options: dict[str, Any], who: str, their_names: Mapping[str, str]) -> Scaling:
    """A scaling whose refusals speak of `who` and of the names that a transformers config has."""
    try:
        scaling: Scaling = cls(**options)
    except ValueError as error:
        told = str(error).replace(f"scaling {cls.kind}:", f"{who}:", 1)
        for ours, theirs in their_names.items():
            told = told.replace(f": {ours}=", f": {theirs}=", 1)
        raise ValueError(told) from None
    return scaling


def _with_larger_theta(inv_freq: Tensor, times: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch pairs"]:
    """With theta * times^(d / (d - 2)) for theta, d = 2 n channels: pair j of n becomes slower by times^(j / (n - 1))."""
    num_pairs = len(inv_freq)
    powers = torch.arange(num_pairs, device=inv_freq.device, dtype=inv_freq.dtype) / (num_pairs - 1)
    return inv_freq / times**powers


def _everywhere(magnitude: int | float, coords: Tensor, num_pairs: int) -> Tensor | None:
    if magnitude == 1:
        return None
    return torch.full_like(coords, math.log(magnitude)).expand(*coords.shape[:-1], num_pairs)


def _check_two_pairs(scaling: Scaling, num_pairs: int) -> None:
    if num_pairs < 2:
        raise ValueError(f"scaling {scaling.kind}: needs at least 2 pairs of channels, the encoding turns {num_pairs}")


def _check_number(
    scaling: Scaling,
    name: str,
    *,
    least: int | float | None = None,
    above: int | float | None = None,
    whole: bool = False,
) -> None:
    value = getattr(scaling, name)
    fits = _is_number(value) and (not whole or isinstance(value, int))
    if not (fits and (least is None or value >= least) and (above is None or value > above)):
        what = "whole number" if whole else "number"
        limit = f"of at least {least}" if least is not None else f"above {above}"
        raise ValueError(f"scaling {scaling.kind}: {name}={value!r} must be a {what} {limit}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _nearest(name: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""
