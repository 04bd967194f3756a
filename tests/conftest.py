"""What holds for every test: a fixed seed before it, and nothing of the compiler or of torch's switches left after it."""

import gc
from collections.abc import Generator, Iterator

import pytest
import torch

gc.disable()  # nothing of what is imported and collected is garbage, and looking for it takes a fifth of the time


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end, so that garbage is looked for only in what tests have made."""
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(20260)
    yield
    left_behind = not torch.is_grad_enabled() or torch.get_default_dtype() != torch.float32
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    assert not left_behind, "gradients are left switched off, or the default dtype changed, for whoever comes next"


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """torch.empty gives memory filled with NaN, so that a value nobody has set shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
