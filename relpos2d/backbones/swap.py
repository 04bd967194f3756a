"""swap(): replace the position encoding of an existing timm model and keep all its other weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from timm.models._features import FeatureGetterNet
from torch import nn

from relpos2d.backbones.host import Spec
from relpos2d.backbones.report import SwapReport
from relpos2d.backbones.swin import SwinFamily
from relpos2d.backbones.swinv2 import SwinV2Family
from relpos2d.backbones.vit import VitFamily
from relpos2d.encoding import Encoding
from relpos2d.encodings import encoding_class, encoding_options

FAMILIES = (VitFamily, SwinV2Family, SwinFamily)

Model = TypeVar("Model", bound=nn.Module)


def swap(
    model: Model, encoding: Spec, *, absolute: str | None = None, mask_padding: bool = False, **options: Any
) -> Model:
    """Replace the position encoding of a timm model, in place; everything else stays as it is.

    Device, dtype, training mode and requires_grad of what stays do not change. Where the new encoding is the one that the
    model had (table in Swin, cpb in Swin V2, learned in ViT), its parameters are taken over. A second swap replaces the first.

    Args:
        model: a timm VisionTransformer, SwinTransformer or SwinTransformerV2, or a feature extractor made from one.
        encoding: a name, a mapping with `name` and options, or a list of these for their sum.
        absolute: what becomes of a ViT's absolute embedding: "keep", "fade" (kept, times the buffer `absolute_strength`, which
            starts at 1) or "remove". By default it is kept beside a relative encoding and removed for an absolute one.
        mask_padding: in windows that are not full, hide the padding; timm lets it be attended to.
        **options: options of the encoding, for example theta=10.0 or strength=0.0.

    Returns:
        The model, with `swap_report`.

    Raises:
        ValueError: a model without a known attention (the message lists the families), an unknown encoding or option.
    """
    if options:
        encoding = _with_options(encoding, options)
    host = model.model if isinstance(model, FeatureGetterNet) else model
    family = next((family for family in FAMILIES if family.matches(host)), None)
    if family is None:
        known = "; ".join(family.description for family in FAMILIES)
        raise ValueError(
            f"swap: {type(host).__name__} has no attention that is known here; families that can be swapped: {known}"
        )
    before = {id(p): name for name, p in model.named_parameters()}
    report = family.swap(host, encoding, absolute=absolute, mask_padding=mask_padding)
    after = {id(p): name for name, p in model.named_parameters()}
    report.kept = [name for key, name in before.items() if key in after]
    report.removed = [name for key, name in before.items() if key not in after]
    report.added = [name for key, name in after.items() if key not in before]
    report.strength = _strengths(host)
    saved = getattr(model, "_model_args", {})
    if "encoding" in saved:  # a registered model: what is saved with it must name the encoding that it has now
        kept = {key: value for key, value in saved.items() if key not in options_of(saved["encoding"])}
        given = {"absolute": absolute, "mask_padding": mask_padding}
        model._model_args = {**kept, **given, "encoding": encoding}  # type: ignore[assignment]
    model.swap_report = report  # type: ignore[assignment]
    return model


def options_of(encoding: Spec) -> dict[str, Any]:
    """The options that an encoding takes; none for a sum, whose members have their own."""
    if not isinstance(encoding, str | Mapping):
        return {}
    return dict(encoding_options(encoding_class(encoding if isinstance(encoding, str) else encoding.get("name", ""))))


def _with_options(encoding: Spec, options: dict[str, Any]) -> Spec:
    if isinstance(encoding, str):
        return {"name": encoding, **options}
    if isinstance(encoding, dict):
        return {**encoding, **options}
    raise ValueError(f"swap: give the options {sorted(options)} to the members of the list, one by one")


def _strengths(model: nn.Module) -> dict[str, float]:
    """Strength of each encoding of one attention, and of the absolute one."""
    strengths: dict[str, float] = {}
    for module in model.modules():
        if isinstance(module, Encoding) and not module.strength.is_meta:
            strengths.setdefault(module.name, float(module.strength))
    return strengths


__all__ = ["FAMILIES", "SwapReport", "swap"]
