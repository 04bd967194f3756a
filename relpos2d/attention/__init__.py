"""attend(): attention with any encoding, by the fastest backend that is right."""

from relpos2d.attention.attend import BACKENDS, attend

__all__ = ["BACKENDS", "attend"]
