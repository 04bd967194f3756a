"""What holds for every test: a fixed seed before it, and nothing of the compiler or of torch's switches left after it."""

import gc
from collections.abc import Generator, Iterator

import pytest
import torch

gc.disable()  # nothing of what is imported and collected is garbage, and looking for it takes a fifth of the time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-and-last", action="store_true", help="run each test with its first and its last parameters only"
    )


@pytest.hookimpl(trylast=True)  # markers have had their say
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--first-and-last"):
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = {item.nodeid for each in cases.values() for item in (each[0], each[-1])}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


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
