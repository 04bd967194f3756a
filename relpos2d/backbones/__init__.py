"""swap() for timm models, and registered timm models that take `encoding=...`."""

from relpos2d.backbones import registry
from relpos2d.backbones.registry import register_backbone
from relpos2d.backbones.swap import SwapReport, swap

__all__ = ["SwapReport", "register_backbone", "registry", "swap"]
