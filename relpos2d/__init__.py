"""2D relative positions for vision transformers: one interface to every encoding, and timm backbones that use it."""

from relpos2d.attention import attend
from relpos2d.backbones import SwapReport, swap
from relpos2d.encoding import Combined, Encoding, NumberEncoding, RotaryEncoding, convert_rotary_layout
from relpos2d.encodings import create_encoding, list_encodings, register_encoding
from relpos2d.positions import Grid, Points, join
from relpos2d.tools.check import CheckError, CheckReport, check

__all__ = [
    "CheckError",
    "CheckReport",
    "Combined",
    "Encoding",
    "Grid",
    "NumberEncoding",
    "Points",
    "RotaryEncoding",
    "SwapReport",
    "attend",
    "check",
    "convert_rotary_layout",
    "create_encoding",
    "join",
    "list_encodings",
    "register_encoding",
    "swap",
]
