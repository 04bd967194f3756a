"""Each backend by itself, with what attend() hands it."""

import pytest
import torch

from relpos2d.attention import explicit, sdpa
from tests.tolerances import assert_close


@pytest.mark.parametrize("shape", [(6, 5), (1, 1, 6, 5), (2, 1, 6, 5), (3, 6, 5), (2, 3, 6, 5), (1, 1, 1, 5)])
def test_mask_may_leave_out_dimensions(shape: tuple[int, ...]) -> None:
    q = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64)
    mask = torch.randn(shape, dtype=torch.float64)
    expected = (0.3 * q @ k.transpose(-1, -2) + mask).softmax(-1) @ v
    assert_close(sdpa.attend(q, k, v, mask, 0.3, 0.0), expected)
    assert_close(explicit.attend(q, k, v, mask, 0.3, 0.0, lambda weights: None), expected)


def test_no_mask() -> None:
    q, k, v = torch.randn(3, 2, 3, 6, 4, dtype=torch.float64)
    expected = (0.3 * q @ k.transpose(-1, -2)).softmax(-1) @ v
    assert_close(sdpa.attend(q, k, v, None, 0.3, 0.0), expected)
    assert_close(explicit.attend(q, k, v, None, 0.3, 0.0, lambda weights: None), expected)


def test_weights_join_the_output() -> None:
    q, k, v = torch.randn(3, 2, 3, 6, 4, dtype=torch.float64)
    rows = torch.randn(6, 4, dtype=torch.float64)
    out = explicit.attend(q, k, v, None, 0.3, 0.0, lambda weights: weights @ rows)
    assert_close(out, (0.3 * q @ k.transpose(-1, -2)).softmax(-1) @ (v + rows))


def test_d8_scores_are_scaled_before_they_are_multiplied() -> None:
    q = torch.full((1, 1, 2, 64), 120.0, dtype=torch.float16)
    k = torch.full((1, 1, 2, 64), 10.0, dtype=torch.float16)  # 120 * 10 * 64 is more than float16 holds
    v = torch.randn(1, 1, 2, 64).half()
    out = explicit.attend(q, k, v, None, 64**-0.5, 0.0, lambda weights: None)
    assert out.isfinite().all()
    assert out.dtype == torch.float16
