"""attend(): attention with any encoding, by the fastest way that is right."""

from relpos2d.attention.attend import attend
from relpos2d.attention.choice import BACKENDS, Explanation

__all__ = ["BACKENDS", "Explanation", "attend"]
