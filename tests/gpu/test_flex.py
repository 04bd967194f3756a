"""The compiled FlexAttention kernel against the explicit backend in float32: output and all gradients."""

import copy

import pytest
import torch
from torch import Tensor

from relpos2d import Grid, attend, create_encoding, list_encodings
from relpos2d.attention import flex
from relpos2d.encoding import Encoding

# the compiler looks at captured tensors that are no leaves
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

DEVICE = "cuda"
HEADS, HEAD_DIM = 3, 24
# as a relative RMS error; float32 products may be tf32
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}
NAMES = [info.name for info in list_encodings() if info.family == "number"]


@pytest.fixture(scope="module", autouse=True)
def one_compiler_for_all() -> None:
    """Sizes of earlier tests are known, as in a process that goes on, so that most cases compile nothing new."""
    torch._dynamo.reset()


def build(name: str | list[str], positions: Grid) -> Encoding:
    encoding = create_encoding(name, num_heads=HEADS, head_dim=HEAD_DIM, positions=positions, device=DEVICE)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(std=0.3)
    return encoding


def compare(
    encoding: Encoding,
    queries: Grid,
    keys: Grid,
    dtype: torch.dtype,
    mask: Tensor | None = None,
    is_causal: bool = False,
    batch: int = 2,
) -> None:
    reference = copy.deepcopy(encoding)
    sizes = (queries.num_tokens, keys.num_tokens, keys.num_tokens)
    qkv = [torch.randn(batch, HEADS, n, HEAD_DIM, device=DEVICE, dtype=dtype, requires_grad=True) for n in sizes]
    qkv32 = [x.detach().float().requires_grad_() for x in qkv]
    added = mask is not None and mask.requires_grad
    mask32 = mask.detach().clone().requires_grad_() if added else mask
    numbers = encoding.numbers(queries, keys)
    assert numbers is not None
    assert flex.obstacle(*qkv, numbers, mask, 0.0) is None

    out = flex.attend(*qkv, numbers, mask=mask, is_causal=is_causal, scale=HEAD_DIM**-0.5)
    expected = attend(*qkv32, reference, queries, keys, mask=mask32, is_causal=is_causal, backend="explicit")
    assert out.dtype == dtype
    weight = torch.randn_like(expected)
    (out.float() * weight).sum().backward()
    (expected * weight).sum().backward()

    sides = [(qkv, qkv32), (encoding.parameters(), reference.parameters())] + ([([mask], [mask32])] if added else [])
    pairs = [(out, expected)] + [(a.grad, b.grad) for x, y in sides for a, b in zip(x, y, strict=True)]
    for got, wanted in pairs:
        assert got is not None
        assert wanted is not None
        assert (got.float() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm() + 1e-5


GRIDS = {
    "one axis": (Grid(37), Grid(37)),
    "two axes, more than one block": (Grid(11, 17), Grid(11, 17)),
    "three axes": (Grid(3, 5, 7), Grid(3, 5, 7)),
    "prefix": (Grid(9, 15, num_prefix_tokens=5), Grid(9, 15, num_prefix_tokens=5)),
    "pooled keys": (Grid(13, 10, num_prefix_tokens=1), Grid(13, 10, num_prefix_tokens=1).pool(2)),
    "shifted origin": (Grid(30, origin=4), Grid(41, origin=-2)),
    "one query": (Grid(1, origin=300), Grid(301)),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("grids", GRIDS)
def test_grids(grids: str, dtype: torch.dtype) -> None:
    queries, keys = GRIDS[grids]
    largest = Grid(*map(max, queries.shape, keys.shape), num_prefix_tokens=queries.num_prefix_tokens)
    compare(build("table", largest), queries, keys, dtype)


@pytest.mark.parametrize("name", [*NAMES, ["table", "alibi"]], ids=str)
def test_encodings(name: str | list[str]) -> None:
    grid = Grid(9, 15, num_prefix_tokens=1)
    compare(build(name, grid), grid, grid, torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["none", "key padding", "windows", "added", "added and trained"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks(is_causal: bool, kind: str, dtype: torch.dtype) -> None:
    grid, n = Grid(150, num_prefix_tokens=2), 152
    place = torch.arange(n, device=DEVICE)
    mask = {
        "none": None,
        "key padding": place < torch.tensor([n - 5, 40], device=DEVICE)[:, None, None, None],
        "windows": (place[:, None] % 3 != place % torch.tensor([4, 5], device=DEVICE)[:, None, None, None])
        | (place == 0),
        "added": torch.randn(1, HEADS, n, n, device=DEVICE),
        "added and trained": torch.randn(2, 1, 1, n, device=DEVICE, requires_grad=True),
    }[kind]
    compare(build("table", grid), grid, grid, dtype, mask, is_causal)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(Grid(1, origin=299), Grid(300)), (Grid(140, step=2), Grid(200, origin=-7, num_prefix_tokens=1))],
)
def test_causal_goes_by_coordinates(queries: Grid, keys: Grid) -> None:
    compare(build("alibi", Grid(300)), queries, keys, torch.float32, is_causal=True)


def test_query_without_keys_gives_zero() -> None:
    grid = Grid(150)
    q, k, v = torch.randn(3, 2, HEADS, 150, HEAD_DIM, device=DEVICE).unbind()
    qkv = [x.requires_grad_() for x in (q, k, v)]
    encoding = build("table", grid)
    mask = torch.ones(150, 150, dtype=torch.bool, device=DEVICE)
    mask[7] = False
    out = flex.attend(*qkv, encoding.numbers(grid, grid), mask=mask, is_causal=False, scale=0.2)
    assert (out[:, :, 7] == 0).all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in [*qkv, *encoding.parameters()])


def test_g6_only_the_numbers_are_trained() -> None:
    grid = Grid(150)
    q, k, v = torch.randn(3, 2, HEADS, 150, HEAD_DIM, device=DEVICE).unbind()
    encoding = build("table", grid)
    out = flex.attend(q, k, v, encoding.numbers(grid, grid), mask=None, is_causal=False, scale=HEAD_DIM**-0.5)
    expected = attend(q, k, v, encoding, grid, backend="explicit")
    weight = torch.randn_like(out)
    (got,), (wanted,) = (torch.autograd.grad((x * weight).sum(), list(encoding.parameters())) for x in (out, expected))
    assert (got - wanted).norm() <= TOLERANCE[torch.float32] * wanted.norm()


def test_inside_a_compiled_model() -> None:
    grid = Grid(9, 15, num_prefix_tokens=1)
    encoding = build("table", grid)
    q, k, v = torch.randn(3, 2, HEADS, grid.num_tokens, HEAD_DIM, device=DEVICE).unbind()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex.attend(q, k, v, encoding.numbers(grid, grid), mask=None, is_causal=False, scale=0.2)

    got = torch.compile(layer, fullgraph=True)(q, k, v)
    wanted = layer(q, k, v)
    assert (got - wanted).norm() <= TOLERANCE[torch.float32] * wanted.norm()


def test_memory_grows_with_tokens_not_pairs() -> None:
    """The scores of 8 * 8192 * 8192 pairs are 2 GiB; forward and backward do with a small part of that."""
    grid = Grid(8192)
    q, k, v = (torch.randn(1, 8, 8192, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    encoding = create_encoding("table", num_heads=8, head_dim=64, positions=grid, device=DEVICE)
    for _ in range(2):  # compiling measures kernels on tensors of its own
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = flex.attend(q, k, v, encoding.numbers(grid, grid), mask=None, is_causal=True, scale=0.125)
        out.float().sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2**28
