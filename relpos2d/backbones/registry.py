"""timm models with `encoding=...`, registered under relpos2d_*: built and loaded by timm's own entry points, then swapped."""

from __future__ import annotations

import difflib
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from timm.layers import Format
from timm.models import (
    FeatureDictNet,
    FeatureListNet,
    generate_default_cfgs,
    is_model,
    load_pretrained,
    load_state_dict,
    model_entrypoint,
    parse_model_name,
    register_model,
)
from timm.models._features import FeatureGetterNet
from timm.models._registry import get_arch_pretrained_cfgs
from torch import Tensor, nn

from relpos2d.backbones.host import Spec, check_sizes, exchange_class
from relpos2d.backbones.swap import options_of, swap

#: registered name -> timm's model, and the encoding that leaves it as it is
SOURCES = {
    **{f"relpos2d_vit_{size}_patch16_224": (f"vit_{size}_patch16_224", "none") for size in ("tiny", "small", "base")},
    "relpos2d_deit3_small_patch16_224": ("deit3_small_patch16_224", "none"),
    **{
        f"relpos2d_swin_{size}_patch4_window7_224": (f"swin_{size}_patch4_window7_224", "table")
        for size in ("tiny", "small", "base")
    },
    **{
        f"relpos2d_swinv2_{size}_window8_256": (f"swinv2_{size}_window8_256", "cpb")
        for size in ("tiny", "small", "base")
    },
}

#: options of swap() that go through the arguments of a registered model
SWAP_OPTIONS = ("absolute", "mask_padding")


def _source_cfgs(name: str, source: str) -> dict[str, Any]:
    """The pretrained configurations of timm's model under our name, hub ids completed to timm's own name first."""
    cfgs = {}
    for source_name, cfg in get_arch_pretrained_cfgs(source).items():
        tag = source_name.removeprefix(source)
        cfgs[name + tag] = replace(cfg, architecture=name)
    return cfgs


default_cfgs = generate_default_cfgs(
    {key: cfg for name, (source, _) in SOURCES.items() for key, cfg in _source_cfgs(name, source).items()}
)


def _build(
    name: str,
    pretrained: bool = False,
    *,
    encoding: Spec | None = None,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    pretrained_model_args: dict[str, Any] | None = None,
    cache_dir: Any = None,
    **kwargs: Any,
) -> nn.Module:
    source, native = SOURCES[name]
    encoding = native if encoding is None else encoding
    for size in ("img_size", "patch_size", "window_size"):
        check_sizes(f"{name}: {size}", kwargs.get(size))
    known = options_of(encoding)
    options = {key: kwargs.pop(key) for key in list(kwargs) if key in known or key in SWAP_OPTIONS}
    takes_any_size = kwargs.get("features_only") and not kwargs.keys() & {"strict_img_size", "dynamic_img_size"}
    if takes_any_size:
        kwargs["dynamic_img_size"] = True

    cfg = {"pretrained_cfg": pretrained_cfg, "pretrained_cfg_overlay": pretrained_cfg_overlay, "cache_dir": cache_dir}
    origin = {**_as_dict(pretrained_cfg), **(pretrained_cfg_overlay or {})}
    weights = _local_weights(origin) if pretrained else None
    # saved by us: its arguments name the encoding, its weights are those of the swapped model
    ours = pretrained and (
        "encoding" in (pretrained_model_args or {}) or any(".encoding." in f".{key}" for key in weights or ())
    )
    if weights is not None and not ours:
        _check_weights(name, source, origin.get("file"), weights, kwargs)
    try:
        model = model_entrypoint(source)(
            pretrained=pretrained and not ours, pretrained_model_args=pretrained_model_args, **cfg, **kwargs
        )
        model = swap(model, encoding, **options)
        if takes_any_size:
            host: Any = model.model if isinstance(model, FeatureGetterNet) else model
            host.patch_embed.dynamic_img_pad = True
        if type(model) in CHANNELS_FIRST and model.output_fmt == Format.NHWC:
            exchange_class(model, CHANNELS_FIRST[type(model)])
            model.output_fmt = Format.NCHW
        model.pretrained_cfg["architecture"] = name
        if ours:
            _load_ours(model, in_chans=kwargs.get("in_chans", 3), cache_dir=cache_dir)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in kwargs:
            raise
        close = difflib.get_close_matches(unknown[1], [*known, *SWAP_OPTIONS], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"{name}: unknown argument {unknown[1]!r}; {hint}options of {encoding!r}: {', '.join(known) or 'none'}; "
            f"of swap(): {', '.join(SWAP_OPTIONS)}; the others go to timm's {source}"
        ) from error
    except RuntimeError as error:
        if not pretrained or "loading state_dict" not in str(error):
            raise
        raise ValueError(f"{name}: the weights in {origin.get('file', 'the hub')} do not fit: {error}") from error
    # what is saved with the model must name the encoding also where it is the default
    model._model_args = {**getattr(model, "_model_args", {}), "encoding": encoding, **options}
    return model


class ChannelsFirstDict(FeatureDictNet):
    """timm's FeatureDictNet around a model with channels last: what makes (B, C, H, W) of its maps, as libraries want them."""

    def _collect(self, x: Tensor) -> dict[str, Tensor]:
        return OrderedDict((name, y.permute(0, 3, 1, 2).contiguous()) for name, y in super()._collect(x).items())


class ChannelsFirstList(ChannelsFirstDict, FeatureListNet):
    """timm's FeatureListNet around a model with channels last; see ChannelsFirstDict."""


CHANNELS_FIRST: dict[type, type] = {FeatureDictNet: ChannelsFirstDict, FeatureListNet: ChannelsFirstList}


def register_backbone(name: str, model: str, **options: Any) -> None:
    """Register one of our models with its options under another name in timm, for libraries that hand on nothing but a name.

    A saved configuration of such a library holds the name alone: whoever loads it registers the same first.

        register_backbone("swin_tiny_rope", "relpos2d_swin_tiny_patch4_window7_224", encoding="rope_mixed", theta=10.0)
        DetrConfig(backbone_config=TimmBackboneConfig(backbone="swin_tiny_rope", out_indices=[3]))

    Args:
        name: the new name, without a dot, which begins a tag of weights.
        model: one of `SOURCES`.
        **options: arguments of that model; what is given to timm.create_model beside the name comes before them.

    Raises:
        ValueError: a name that timm has, or has with other options, a model that is none of ours.
    """
    if model not in SOURCES:
        close = difflib.get_close_matches(model, SOURCES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"register_backbone: model={model!r} must be one of {', '.join(SOURCES)}{hint}")
    if not name or "." in name or parse_model_name(name)[0] is not None:
        raise ValueError(f"register_backbone: name={name!r} must be a name of timm, without a tag or a source")
    given = (model, options)
    if name in _registered and _registered[name] == given:
        return
    if is_model(name):
        was = f"it is {_registered[name][0]} with {_registered[name][1]}" if name in _registered else "timm has it"
        raise ValueError(f"register_backbone: name={name!r} is taken: {was}")
    _registered[name] = given

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return _build(model, pretrained, **{**options, **kwargs})

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"{model} with {options}."
    register_model(create)
    __all__.remove(name)  # where timm has put it


_registered: dict[str, tuple[str, dict[str, Any]]] = {}


def _load_ours(model: Any, in_chans: int, cache_dir: Any) -> None:
    """Load the weights of a swapped model into one, or into a feature extractor made from one."""
    target: Any = model.model if isinstance(model, FeatureGetterNet) else model
    if isinstance(model, FeatureGetterNet | FeatureDictNet):
        num_classes, select = 0, feature_weights
    else:
        num_classes, select = target.num_classes, None
    load_pretrained(
        target,
        pretrained_cfg=model.pretrained_cfg,
        num_classes=num_classes,
        in_chans=in_chans,
        filter_fn=select,
        cache_dir=cache_dir,
    )


def feature_weights(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Those of a whole model that a feature extractor has, by its names: layers.0.* are layers_0.* there."""
    children = {name for name, child in model.named_children() if child.state_dict()}
    chosen = {}
    for key, weight in weights.items():
        first, dot, rest = key.partition(".")
        second, _, last = rest.partition(".")
        if first not in children and f"{first}_{second}" in children:  # timm takes sequences apart
            key, first = f"{first}_{second}.{last}", f"{first}_{second}"
        if first in children or (not dot and hasattr(model, first)):
            chosen[key] = weight
    return chosen


def _as_dict(pretrained_cfg: Any) -> dict[str, Any]:
    if pretrained_cfg is None or isinstance(pretrained_cfg, str):
        return {}
    return dict(pretrained_cfg) if isinstance(pretrained_cfg, Mapping) else pretrained_cfg.to_dict()


def _local_weights(cfg: dict[str, Any]) -> dict[str, Any] | None:
    """The weights that a configuration names, where they are at hand."""
    weights = cfg.get("state_dict")
    file = cfg.get("file")
    if weights is None and file and Path(file).is_file() and not cfg.get("custom_load"):
        weights = load_state_dict(file)
    for key in ("model", "state_dict"):
        weights = weights.get(key, weights) if weights else weights
    return weights


def _check_weights(name: str, source: str, file: str | None, weights: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Refuse local weights of another architecture, which timm would load in part or not at all without a word."""
    with_meta = {**kwargs, "device": "meta"}
    for option in ("features_only", "out_indices", "feature_cls"):
        with_meta.pop(option, None)
    expected = model_entrypoint(source)(pretrained=False, **with_meta).state_dict()
    present = sum(key in weights for key in expected)
    who = f"{name}: the weights in {file or 'state_dict'} are of another architecture"
    if present < len(expected) / 2:
        raise ValueError(
            f"{who}: they hold {present} of the {len(expected)} parameters of {source} "
            f"(theirs begin with {', '.join(list(weights)[:3])})"
        )
    # with another number of classes timm does not load strictly; what it fits to the model lies outside the blocks
    missing = [
        key for key in expected if _block(key) and key not in weights and not key.endswith((".gamma", "_bias_table"))
    ]
    foreign = {_block(key) for key in weights} - {_block(key) for key in expected}
    if missing or foreign:
        what = f"they lack {missing[0]}" if missing else f"{source} has no {min(map(str, foreign))}"
        raise ValueError(f"{who}: {what}")


def _block(key: str) -> str | None:
    """The block that a parameter belongs to, None if to no block."""
    found = re.match(r"(layers\.\d+\.)?blocks\.\d+", key)
    return found and found[0]


def _entry_point(name: str) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return _build(name, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"timm's {SOURCES[name][0]} with `encoding=...`; by default as timm has it ({SOURCES[name][1]})."
    return create


for _name in SOURCES:
    globals()[_name] = register_model(_entry_point(_name))

__all__ = ["SOURCES", "register_backbone", *SOURCES]
