"""Peaks of known work to the byte, and a limit that raises instead of ending the process."""

import gc
import subprocess
import sys

import pytest
import torch

from relpos2d.tools.memory import available_bytes, limited_memory, peak_bytes
from tests.refusals import refuses


def test_a_product_holds_its_scores() -> None:
    q = torch.randn(2, 3, 129, 8)
    assert peak_bytes(lambda: q @ q.transpose(-1, -2)) == 2 * 3 * 129 * 129 * 4


def test_what_is_freed_before_the_next_counts_once() -> None:
    def one_after_the_other() -> torch.Tensor:
        first = torch.empty(1000)
        del first
        return torch.empty(600)

    def both() -> torch.Tensor:
        first, second = torch.empty(1000), torch.empty(600)
        return first[0] + second[0]

    assert peak_bytes(one_after_the_other) == 4000
    assert peak_bytes(both) == 6400 + 4


def test_what_was_there_before_does_not_count() -> None:
    held = [torch.empty(5000)]
    assert peak_bytes(lambda: held[0].neg_()) == 0
    assert peak_bytes(held.clear) == 0


def test_a_fused_kernel_holds_no_scores() -> None:
    q = torch.randn(1, 2, 1025, 8)
    scores = 2 * 1025 * 1025 * 4
    fused = peak_bytes(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert q.numel() * 4 <= fused < scores / 2
    assert peak_bytes(lambda: (q @ q.transpose(-1, -2)).softmax(-1) @ q) >= 2 * scores


def test_a_backward_counts_too_and_every_run_alike() -> None:
    x = torch.randn(100, 7, requires_grad=True)

    def step() -> torch.Tensor:
        (gradient,) = torch.autograd.grad((x.sin() * x.cos()).sum(), x)
        return gradient

    peaks = {peak_bytes(step) for _ in range(3)}
    assert len(peaks) == 1
    assert peaks.pop() >= 3 * 100 * 7 * 4


def test_garbage_of_others_is_not_taken_for_a_free() -> None:
    class Circle:
        def __init__(self) -> None:
            self.own, self.held = self, torch.empty(10_000)

    def makes_many_objects() -> torch.Tensor:
        assert not gc.isenabled()
        first = torch.empty(400)
        assert len([[] for _ in range(3 * gc.get_threshold()[0])])
        return torch.cat((first, torch.empty(100)))

    Circle()
    assert peak_bytes(makes_many_objects) == 1600 + 400 + 2000
    assert gc.isenabled()


def test_an_error_passes_through_and_the_next_call_is_right() -> None:
    def fails() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        peak_bytes(fails)
    assert gc.isenabled()
    assert peak_bytes(lambda: torch.empty(3)) == 12


def test_another_device_is_refused() -> None:
    with refuses("peak_bytes: device='meta' must be of the type cpu or cuda"):
        peak_bytes(lambda: None, "meta")
    assert gc.isenabled()


LIMITED = """
import torch
from relpos2d.tools.memory import limited_memory

size = 3 * 10**9
with limited_memory(0.0) as limit:
    assert limit == 0
    try:
        torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        assert "allocate" in str(error)
    else:
        raise AssertionError("three gigabytes beyond the limit")
torch.empty(size, dtype=torch.uint8)  # never touched, so that nothing is taken
with limited_memory(0.5) as limit:
    assert limit > 0
    torch.empty(1000)
"""


@pytest.mark.long
@pytest.mark.skipif(available_bytes() is None, reason="the system does not tell what is available")
def test_beyond_the_limit_an_allocation_raises() -> None:
    """In a process of its own: what lacks memory in the middle of an import stays broken for whoever comes next."""
    subprocess.run([sys.executable, "-c", LIMITED], check=True)


def test_a_share_is_between_0_and_1() -> None:
    with refuses("limited_memory: share=1.5 must be between 0 and 1"), limited_memory(1.5):
        pass
