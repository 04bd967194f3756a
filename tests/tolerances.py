"""How close is equal: one table by dtype, used by every comparison of numbers."""

import torch
from torch import Tensor

#: dtype of the less precise side -> (relative, absolute)
TOLERANCES = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (6e-2, 6e-2),
}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal shapes, and values within the tolerance of `dtype` (that of the actual values unless given)."""
    relative, absolute = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute, check_dtype=False)
