"""FlexAttention from the numbers of the distinct offsets: equal to the explicit backend, and compiled no more often than needed."""

import warnings

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from relpos2d import Grid, attend, create_encoding
from relpos2d.attention import flex
from relpos2d.encoding import Encoding
from tests.attention.grids import GRIDS
from tests.oracles import gradients, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close

HEADS, HEAD_DIM, SCALE = 3, 6, 0.3


@pytest.fixture(autouse=True)
def warned() -> None:
    """The warning that the CPU is slow has been given, as in any process that went on after it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        flex._warn_unfused()


def build(name: str, queries: Grid, dtype: torch.dtype = torch.float64) -> Encoding:
    positions = Grid(*queries.shape, num_prefix_tokens=queries.num_prefix_tokens)
    parts = name.split("+")
    encoding = create_encoding(
        parts if len(parts) > 1 else name, num_heads=HEADS, head_dim=HEAD_DIM, positions=positions, dtype=dtype
    )
    redraw(encoding)
    return encoding


def draw(queries: Grid, keys: Grid, dtype: torch.dtype = torch.float64, batch: int = 2) -> list[Tensor]:
    sizes = (queries.num_tokens, keys.num_tokens, keys.num_tokens)
    return [torch.randn(batch, HEADS, size, HEAD_DIM, dtype=dtype, requires_grad=True) for size in sizes]


def compare(
    encoding: Encoding,
    queries: Grid,
    keys: Grid,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
) -> None:
    """Output and gradients of q, k, v, parameters, and of a mask that wants one, against the explicit backend."""
    qkv = draw(queries, keys, dtype, batch)
    numbers = encoding.numbers(queries, keys)
    assert (numbers is not None) == encoding.adds_numbers
    out = flex.attend(*qkv, numbers, mask=mask, is_causal=is_causal, scale=SCALE, lattice=queries.lattice(keys))
    if mask is not None and mask.ndim == 4 and mask.shape[0] not in (1, batch):
        mask = mask.repeat(batch // mask.shape[0], 1, 1, 1)
    options = {"mask": mask, "is_causal": is_causal, "scale": SCALE}
    expected = attend(*qkv, encoding, queries, keys, backend="explicit", **options)
    assert out.dtype == dtype
    assert_close(out, expected)
    inputs = [*qkv, *(p for p in encoding.parameters() if p.requires_grad)]
    inputs += [mask] if mask is not None and mask.requires_grad else []
    for got, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(got, wanted, dtype)


@pytest.mark.parametrize("grids", GRIDS)
def test_g5_equals_explicit_with_all_gradients(grids: str) -> None:
    queries, keys = GRIDS[grids]
    compare(build("table", queries), queries, keys)


@pytest.mark.parametrize("name", ["cpb", "alibi", "table+cpb", "none"])
def test_every_kind_of_encoding(name: str) -> None:
    queries = Grid(3, 4, num_prefix_tokens=1)
    compare(build(name, queries), queries, queries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_keep_their_precision(dtype: torch.dtype) -> None:
    queries = Grid(3, 4, num_prefix_tokens=1)
    compare(build("table", queries, torch.float32), queries, queries, dtype=dtype)


MASKS = {
    "key padding": torch.tensor([[True] * 4 + [False], [True] * 2 + [False] * 3])[:, None, None],
    "windows": torch.eye(5, dtype=torch.bool).logical_not()[None, None].repeat(2, 1, 1, 1),
    "half as many windows as samples": (torch.arange(25).view(1, 1, 5, 5) % torch.tensor([2, 3])[:, None, None, None])
    > 0,
    "heads": (torch.arange(75).view(1, 3, 5, 5) % 4) > 0,
    "added": torch.linspace(-2, 2, 25, dtype=torch.float64).view(5, 5),
    "added, some are -inf": torch.zeros(5, 5, dtype=torch.float64).masked_fill(torch.eye(5) > 0, float("-inf")),
    "added and trained": torch.linspace(-2, 2, 30, dtype=torch.float64).view(2, 3, 1, 5).requires_grad_(),
}


CAUSAL_TOO = ["half as many windows as samples", "added, some are -inf"]


@pytest.mark.parametrize(
    ("kind", "is_causal"), [*((kind, False) for kind in MASKS), *((kind, True) for kind in CAUSAL_TOO)]
)
def test_masks(kind: str, is_causal: bool) -> None:
    batch = 4 if kind.startswith("half") else 2
    compare(build("table", Grid(5)), Grid(5), Grid(5), MASKS[kind], is_causal, batch=batch)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (Grid(4, num_prefix_tokens=2), Grid(4, num_prefix_tokens=2)),
        (Grid(3, origin=2), Grid(5)),
        (Grid(2, origin=-1.5), Grid(5)),
        (Grid(6, step=1.5), Grid(7, step=2, origin=0.5)),
        (Grid(140), Grid(150, origin=-3)),
    ],
)
def test_causal_goes_by_coordinates(queries: Grid, keys: Grid) -> None:
    compare(build("table", queries), queries, keys, is_causal=True)


def test_causal_without_numbers() -> None:
    compare(build("none", Grid(5)), Grid(5), Grid(5), is_causal=True)


def test_query_without_keys_gives_zero() -> None:
    encoding, qkv = build("table", Grid(5)), draw(Grid(5), Grid(5))
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    for given in (mask, torch.zeros(5, 5, dtype=torch.float64).masked_fill(~mask, float("-inf"))):
        out = flex.attend(*qkv, encoding.numbers(Grid(5), Grid(5)), mask=given, is_causal=False, scale=SCALE)
        assert (out[:, :, 2] == 0).all()
        assert (out[:, :, 1] != 0).all()
        for gradient in gradients(out, [*qkv, *encoding.parameters()]):
            assert gradient.isfinite().all()


def test_g6_only_the_numbers_are_trained() -> None:
    encoding, queries = build("table", Grid(5)), Grid(5)
    qkv = [x.detach() for x in draw(queries, queries)]
    out = flex.attend(*qkv, encoding.numbers(queries, queries), mask=None, is_causal=False, scale=SCALE)
    expected = attend(*qkv, encoding, queries, scale=SCALE, backend="explicit")
    (got,), (wanted,) = (gradients(x, list(encoding.parameters())) for x in (out, expected))
    assert wanted.abs().max() > 0
    assert_close(got, wanted)


def test_after_inference_mode_comes_training() -> None:
    queries = Grid(6, num_prefix_tokens=1)
    with torch.inference_mode():
        q, k, v = (x.detach() for x in draw(queries, queries))
        numbers = build("table", queries).numbers(queries, queries)
        flex.attend(q, k, v, numbers, mask=None, is_causal=True, scale=SCALE)
    compare(build("table", queries), queries, queries, is_causal=True)


def test_no_index_of_pairs() -> None:
    rows, columns = flex.lines(Grid(30, 20), Grid(15, 10, step=2), torch.device("cpu"))
    assert rows.nbytes + columns.nbytes == 4 * (600 + 150)


def blocks(mask: torch_flex.BlockMask) -> list[Tensor]:
    """What is seen in part and what as a whole, as matrices of blocks, forward and turned about for the backward pass."""
    found = []
    for counts, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
        (mask.q_num_blocks, mask.q_indices),
        (mask.full_q_num_blocks, mask.full_q_indices),
    ):
        taken = torch.arange(indices.shape[-1]) < counts[..., None]
        found.append(torch.zeros(indices.shape).scatter_(-1, indices.long(), taken.float()))
    return found


@pytest.mark.parametrize(
    ("queries", "keys"), [(300, 300), (140, 400), (256, 384), (1, 300)], ids=lambda size: f"{size} tokens"
)
@pytest.mark.parametrize("num_prefix_tokens", [0, 3])
def test_blocks_are_those_that_torch_finds_among_all_pairs(queries: int, keys: int, num_prefix_tokens: int) -> None:
    grids = [
        Grid(queries, num_prefix_tokens=num_prefix_tokens, origin=60),
        Grid(keys, num_prefix_tokens=num_prefix_tokens),
    ]
    num_q, num_k = (grid.num_tokens for grid in grids)
    q, k = torch.zeros(2, 1, num_q, 1), torch.zeros(2, 1, num_k, 1)
    padding = torch.arange(num_k) < torch.tensor([200, 100])[:, None, None, None]
    square = (torch.arange(num_q)[:, None] // 50 != torch.arange(num_k) // 200)[None, None]
    found = [flex._causal_mask(*grids, torch.device("cpu"))]
    found += [
        flex._mask_of(mask, causal, q, k) for mask in (padding, square) for causal in (None, grids[0].lattice(grids[1]))
    ]
    for mask in found:
        samples, heads = mask.kv_num_blocks.shape[:2]
        torchs = torch_flex.create_block_mask(
            lambda b, h, i, j, seen=mask.mask_mod: seen(b, h, i, j), samples, heads, num_q, num_k, device="cpu"
        )
        for got, wanted in zip(blocks(mask), blocks(torchs), strict=True):
            assert torch.equal(got, wanted)


@pytest.fixture
def way_of_a_gpu(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, fresh_compiler: None) -> None:
    """CPU tensors go where those on a GPU go, up to the kernel."""
    if pytestconfig.getoption("jaxtyping_packages", None):
        pytest.skip("functions whose shapes are checked do not trace")
    monkeypatch.setattr(flex, "_unfused", flex._fused)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)


def compiling(monkeypatch: pytest.MonkeyPatch, backend: str) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend(backend)
    kernel = torch.compile(torch_flex.flex_attention, backend=counter)
    monkeypatch.setattr(flex, "_compiled", lambda: kernel)
    return counter


@pytest.mark.usefixtures("way_of_a_gpu")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # the compiler's own
def test_gradients_of_the_compiled_way(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = compiling(monkeypatch, "aot_eager")
    queries = Grid(3, 4, num_prefix_tokens=1)
    compare(build("table", queries, torch.float32), queries, queries, torch.ones(1), dtype=torch.float32)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("way_of_a_gpu")
def test_new_sizes_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first size as it is, the second for any size; other numbers, other grids and any number of axes need nothing new."""
    counter, counts = compiling(monkeypatch, "eager"), []
    for grid in (Grid(5), Grid(5), Grid(9), Grid(3, 4), Grid(2, 3, 2), Grid(3, 5, num_prefix_tokens=2), Grid(150)):
        q, k, v = (x.detach().float() for x in draw(grid, grid))
        numbers = build("table", grid, torch.float32).numbers(grid, grid)
        with torch.no_grad():
            out = flex.attend(q, k, v, numbers, mask=None, is_causal=False, scale=SCALE)
            assert_close(out, torch.softmax(SCALE * q @ k.mT + numbers.bias(), -1) @ v)
        counts.append(counter.frame_count)
    assert counts == [1, 1, 2, 2, 2, 2, 2]


@pytest.mark.usefixtures("way_of_a_gpu")
def test_inside_a_compiled_model() -> None:
    """In one graph, the block mask included, and nothing of the tracing stays in a cache."""
    grid = Grid(7, num_prefix_tokens=1)
    encoding, qkv = build("table", grid, torch.float32), draw(grid, grid, torch.float32)
    options = {"mask": torch.arange(8) < 6, "is_causal": True, "scale": SCALE}

    def layer(*qkv: Tensor) -> Tensor:
        return flex.attend(*qkv, encoding.numbers(grid, grid), **options)

    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(*qkv)
    expected = attend(*qkv, encoding, grid, backend="explicit", **options)
    inputs = [*qkv, *encoding.parameters()]
    for got, wanted in zip([out, *gradients(out, inputs)], [expected, *gradients(expected, inputs)], strict=True):
        assert_close(got, wanted)
    assert type(flex.lines(grid, grid, torch.device("cpu"))[0]) is Tensor


def test_cpu_warns_once() -> None:
    flex._warn_unfused.cache_clear()
    q, k, v = (x.detach() for x in draw(Grid(4), Grid(4)))
    with pytest.warns(RuntimeWarning, match="backend 'flex' has a fused kernel only on GPUs"):
        flex.attend(q, k, v, None, mask=None, is_causal=False, scale=SCALE)
    out = flex.attend(q, k, v, None, mask=None, is_causal=False, scale=SCALE)
    assert_close(out, torch.softmax(SCALE * q @ k.mT, -1) @ v)


def test_what_cannot_be() -> None:
    q, k, v = (x.detach() for x in draw(Grid(4), Grid(4)))
    with refuses("is_causal needs numbers or a lattice"):
        flex.attend(q, k, v, None, mask=None, is_causal=True, scale=SCALE)
    with refuses("one axis, the positions have 2"):
        flex.attend(q, k, v, None, mask=None, is_causal=True, scale=SCALE, lattice=Grid(2, 2).lattice(Grid(2, 2)))
    with refuses(r"the first size of mask \(3, 1, 1, 4\) must divide 2 samples"):
        flex.attend(q, k, v, None, mask=torch.ones(3, 1, 1, 4), is_causal=False, scale=SCALE)


def test_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in draw(Grid(4), Grid(4)))
    assert flex.obstacle(q, k, v, None, None, 0.0) is None
    assert "dropout_p=0.1" in flex.obstacle(q, k, v, None, None, 0.1)
    assert "empty" in flex.obstacle(q[:0], k[:0], v[:0], None, None, 0.0)
    assert "meta" in flex.obstacle(q.to("meta"), k.to("meta"), v.to("meta"), None, None, 0.0)

    def on_gpu(dtype: torch.dtype = torch.float32, head_dim: int = 32) -> str | None:
        with FakeTensorMode():
            x = torch.empty(2, HEADS, 5, head_dim, device="cuda", dtype=dtype)
        return flex.obstacle(x, x, x, None, None, 0.0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: name)
    assert on_gpu() is None
    assert "float64 on cuda, only for torch.float32, torch.float16, torch.bfloat16" in on_gpu(dtype=torch.float64)
    assert "head_dim=8, only for 16 and more" in on_gpu(head_dim=8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert "compute capability 8.0" in on_gpu()
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: None)
    assert "needs triton" in on_gpu()
