"""Every way of attend() equals the explicit one, forward and gradients; which way is taken, why, and what it holds."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from relpos2d import Encoding, Grid, NumberEncoding, attend, create_encoding, list_encodings
from relpos2d.attention import choice, fused
from relpos2d.attention.choice import Explanation
from relpos2d.encoding import Term
from relpos2d.encodings import encoding_class
from relpos2d.positions import Positions
from relpos2d.tools.memory import peak_bytes
from tests.oracles import redraw
from tests.refusals import refuses
from tests.tolerances import assert_close

HEADS, DIM = 3, 8


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small grids take the ways of large ones."""
    monkeypatch.setattr(choice, "FEW_KEYS", 0)
    monkeypatch.setattr(choice, "MAX_DENSE_BYTES", 0)
    monkeypatch.setattr(fused, "BLOCK", 60)
    monkeypatch.setattr(fused, "BLOCK_KEYS", 12)
    monkeypatch.setattr(fused, "PIECE", 100)
    monkeypatch.setattr(fused, "SCRATCH_BYTES", 5000)
    for name, value in (("FULL_CALL", 9), ("FULL_BLOCK", 4), ("SMALL_CALL", 5), ("SMALL_BLOCK", 2)):
        monkeypatch.setattr(fused, name, value)


def qkv(q_pos: Positions, k_pos: Positions, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sizes = (q_pos.num_tokens, k_pos.num_tokens, k_pos.num_tokens)
    return [torch.randn(batch, HEADS, n, DIM, dtype=dtype, requires_grad=True) for n in sizes]


def made(name: Any, positions: Grid, dtype: torch.dtype = torch.float64) -> Encoding:
    encoding = create_encoding(name, HEADS, DIM, positions, dtype=dtype)
    redraw(encoding)
    return encoding


def assert_equals_explicit(encoding: Encoding, q_pos: Positions, k_pos: Positions, way: str, **options: Any) -> None:
    """Output and gradients; parameters of prefix tokens that one side has not are left out by both."""
    q, k, v = qkv(q_pos, k_pos)
    out, explanation = attend(q, k, v, encoding, q_pos, k_pos, explain=True, **options)
    assert explanation.way == way, str(explanation)
    expected = attend(q, k, v, encoding, q_pos, k_pos, backend="explicit", **options)
    assert_close(out, expected)
    weight = torch.randn_like(out)
    leaves = [q, k, v, *encoding.parameters()]
    ours, theirs = (torch.autograd.grad((x * weight).sum(), leaves, allow_unused=True) for x in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_close(a, b)
    with torch.no_grad():
        assert_close(attend(q, k, v, encoding, q_pos, k_pos, **options), expected)


@dataclass(frozen=True)
class Situation:
    """Places, and what else is asked of attention among them."""

    queries: Grid
    keys: Grid
    way: str
    options: dict[str, Any] = field(default_factory=dict)
    make_mask: Callable[[int, int], Tensor] | None = None

    def mask(self) -> dict[str, Tensor]:
        if self.make_mask is None:
            return {}
        return {"mask": self.make_mask(self.queries.num_tokens, self.keys.num_tokens)}


def padded(queries: int, keys: int) -> Tensor:
    """Each sample hides other keys."""
    seen = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    seen[0, ..., -3:] = False
    seen[1, ..., 1] = False
    return seen


SITUATIONS = {
    "line": Situation(Grid(11), Grid(11), "view"),
    "part of a line": Situation(Grid(4, origin=5), Grid(13), "view"),
    "grid": Situation(Grid(5, 3), Grid(5, 3), "bands"),
    "grid and crop": Situation(Grid(3, 2, origin=(1, 1)), Grid(5, 4), "bands"),
    "finer columns": Situation(Grid(4, 3, step=(1, 2)), Grid(4, 6), "bands"),
    "prefix": Situation(Grid(5, 3, num_prefix_tokens=2), Grid(5, 3, num_prefix_tokens=2), "bands"),
    "prefix of a line": Situation(Grid(9, num_prefix_tokens=1), Grid(9, num_prefix_tokens=1), "view"),
    "prefix queries only": Situation(Grid(4, 3, num_prefix_tokens=1), Grid(4, 3), "bands"),
    "prefix keys only": Situation(Grid(4, 3), Grid(4, 3, num_prefix_tokens=2), "bands"),
    "causal": Situation(Grid(11), Grid(11), "view", {"is_causal": True}),
    "causal with prefix": Situation(
        Grid(7, num_prefix_tokens=2), Grid(7, num_prefix_tokens=2), "view", {"is_causal": True}
    ),
    "next tokens": Situation(Grid(3, origin=8), Grid(11), "view", {"is_causal": True}),
    "padding": Situation(Grid(4, 3), Grid(4, 3), "bands", {}, padded),
    "padding and prefix": Situation(Grid(9, num_prefix_tokens=2), Grid(9, num_prefix_tokens=2), "view", {}, padded),
    "causal padding": Situation(Grid(9), Grid(9), "view", {"is_causal": True}, padded),
    "scale 0": Situation(Grid(4, 3), Grid(4, 3), "bands", {"scale": 0.0}),
    "negative scale": Situation(Grid(4, 3), Grid(4, 3), "bands", {"scale": -0.4}, padded),
    "scale 0 and padding": Situation(Grid(4, 3), Grid(4, 3), "dense", {"scale": 0.0}, padded),
    "causal, prefix queries only": Situation(Grid(5, num_prefix_tokens=2), Grid(5), "view", {"is_causal": True}),
    "tenths": Situation(
        Grid(3, step=Fraction(1, 10), origin=Fraction(3, 10)),
        Grid(8, step=Fraction(1, 10)),
        "view",
        {"is_causal": True},
    ),
    "thirds": Situation(
        Grid(6, step=Fraction(1, 3), origin=Fraction(1, 3)), Grid(9, step=Fraction(1, 3)), "view", {"is_causal": True}
    ),
    "video": Situation(Grid(3, 2, 3), Grid(3, 2, 3), "bands"),
    "one row": Situation(Grid(1, 9), Grid(1, 9), "view"),
    "one column": Situation(Grid(9, 1), Grid(9, 1), "view"),
}

NUMBERS = [info.name for info in list_encodings() if info.family == "number"]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS.keys())
@pytest.mark.parametrize("name", [*NUMBERS, ["table", "rope_axial"]], ids=str)
def test_lattice_equals_explicit(name: Any, situation: Situation) -> None:
    queries, keys = situation.queries, situation.keys
    axes = queries.num_axes
    names = [name] if isinstance(name, str) else name
    for info in list_encodings():
        if info.name in names and info.axes is not None and axes not in info.axes:
            pytest.skip(f"{info.name} has no meaning on {axes} axes")
    if "rope_axial" in names and DIM % (2 * axes):
        pytest.skip(f"{DIM} channels cannot be shared out among {axes} axes")
    prefix = max(queries.num_prefix_tokens, keys.num_prefix_tokens)
    encoding = made(name, Grid(*keys.shape, num_prefix_tokens=prefix))
    options = situation.options | situation.mask()
    assert_equals_explicit(encoding, queries, keys, situation.way, **options)


@pytest.mark.parametrize(
    "name",
    [
        *(n for n in NUMBERS if encoding_class(n).axes != (1,)),
        "none",
        "rope_axial",
        "rope_mixed",
        ["cpb", "rope_mixed"],
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", [0, 2])
def test_windows_equal_explicit(name: Any, prefix: int) -> None:
    grid = Grid(3, 5, num_prefix_tokens=prefix)
    shift = -100.0 * (torch.rand(2, 1, grid.num_tokens, grid.num_tokens) > 0.7).double()
    assert_equals_explicit(made(name, grid), grid, grid, "dense", mask=shift)
    silent = name in ("none", "rope_axial", "rope_mixed")
    assert_equals_explicit(made(name, grid), grid, grid, "no mask" if silent else "dense")


@pytest.mark.parametrize("backend", ["auto", "explicit", "sdpa"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_a_mask_of_the_windows_of_one_image_is_that_of_all_images(backend: str, kind: torch.dtype) -> None:
    grid = Grid(2, 3)
    encoding = made("table", grid)
    q, k, v = qkv(grid, grid, batch=6)
    mask = torch.rand(3, 1, 6, 6) > 0.3
    mask[1, 0, 2] = False  # a query that sees nothing
    mask[2, 0, :, 1] = False  # a key that nobody sees
    given = mask if kind == torch.bool else torch.zeros(3, 1, 6, 6).double().masked_fill(~mask, float("-inf"))
    out = attend(q, k, v, encoding, grid, mask=given, backend=backend)
    expected = attend(q, k, v, encoding, grid, mask=given.repeat(2, 1, 1, 1), backend="explicit")
    assert_close(out, expected)
    leaves = [q, k, v, *encoding.parameters()]
    weight = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), leaves) for x in (out, expected)), strict=True):
        assert_close(a, b)


def test_a_mask_for_no_whole_number_of_images_is_refused() -> None:
    grid = Grid(2, 3)
    q, k, v = qkv(grid, grid, batch=6)
    with refuses(r"attend: mask has shape \(4, 1, 6, 6\), allowed is what broadcasts to \(6, 3, 6, 6\)"):
        attend(q, k, v, made("table", grid), grid, mask=torch.zeros(4, 1, 6, 6))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("backend", ["auto", "explicit"])
def test_g3_nan_in_padded_keys_reaches_nobody(backend: str) -> None:
    grid = Grid(9, num_prefix_tokens=1)
    encoding = made("table", grid)
    q, k, v = qkv(grid, grid)
    mask = padded(10, 10)
    clean = attend(q, k, v, encoding, grid, mask=mask, backend=backend)
    dirty = [x.masked_fill(~mask.transpose(-1, -2), float("nan")) for x in (k, v)]
    out = attend(q, *dirty, encoding, grid, mask=mask, backend=backend)
    assert_close(out, clean)
    for gradient in torch.autograd.grad(out.sum(), [q, k, v, *encoding.parameters()]):
        assert gradient.isfinite().all()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_sample_of_padding_alone_gives_0_and_finite_gradients(dtype: torch.dtype) -> None:
    grid = Grid(9)
    encoding = made("table", grid, torch.float32)
    q, k, v = qkv(grid, grid, dtype=dtype)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1] = False
    out, explanation = attend(q, k, v, encoding, grid, mask=mask, explain=True)
    assert explanation.way == ("dense" if dtype == torch.float16 else "view")  # no float16 hides a key by its score
    assert out[1].abs().max() == 0
    assert out[0].abs().min() > 0
    for gradient in torch.autograd.grad(out.float().sum(), [q, k, v, *encoding.parameters()]):
        assert gradient.isfinite().all()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", [Grid(33, num_prefix_tokens=1), Grid(5, 7)], ids=str)
def test_d2_low_precision(grid: Grid, dtype: torch.dtype) -> None:
    encoding = made("table", grid, torch.float32)
    q, k, v = qkv(grid, grid, dtype=dtype)
    out = attend(q, k, v, encoding, grid)
    exact = attend(*(x.double() for x in (q, k, v)), encoding.double(), grid, backend="explicit")
    assert out.dtype == dtype
    assert_close(out.double(), exact, dtype)


def test_f4_step_by_step_is_the_whole_sequence() -> None:
    full = Grid(300)
    encoding = made("table", full)
    q, k, v = qkv(full, full, batch=1)
    with torch.no_grad():
        whole, explanation = attend(q, k, v, encoding, full, is_causal=True, explain=True)
        assert explanation.way == "view"
        for t in (0, 1, 7, 260, 299):
            step, _ = attend(
                q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], encoding,
                Grid(1, origin=t), Grid(t + 1), is_causal=True, explain=True,
            )  # fmt: skip
            assert_close(step, whole[:, :, t : t + 1])


class PullsAndPushes(Encoding):
    """A vector for each offset that meets the query, and one that meets the value."""

    family = "vector"

    def __init__(self, *sizes: Any, meets: tuple[str, ...] = ("query", "value"), **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.meets = meets
        self.rows = nn.Parameter(torch.randn(len(meets), self.num_heads, 9, self.head_dim, dtype=torch.float64))

    def terms(self) -> list[Term]:
        def bucket(offsets: Tensor) -> Tensor:
            return offsets.sum(-1).clamp(-4, 4) + 4

        return [Term(rows, meets, bucket) for rows, meets in zip(self.rows, self.meets, strict=True)]


class TestMemoryLimit:
    @pytest.mark.parametrize("meets", [("query",), ("query", "value"), ("key",)])
    @pytest.mark.parametrize("is_grid", [True, False])
    def test_blocks_equal_the_whole(self, is_grid: bool, meets: tuple[str, ...]) -> None:
        grid = Grid(4, 3, num_prefix_tokens=1)
        positions: Positions = grid if is_grid else grid.points(2)
        encoding = PullsAndPushes(HEADS, DIM, grid, meets=meets)
        q, k, v = qkv(grid, grid)
        mask = torch.rand(2, 1, 13, 13) > 0.3
        limit = 27000
        out, explanation = attend(q, k, v, encoding, positions, mask=mask, memory_limit=limit, explain=True)
        assert explanation.way == "blocks"
        assert 1 <= explanation.num_rows < (4 if is_grid else 12)
        assert explanation.num_bytes <= limit
        expected = attend(q, k, v, encoding, positions, mask=mask, backend="explicit")
        leaves = [q, k, v, *encoding.parameters()]
        assert_close(out, expected)
        weight = torch.randn_like(out)
        for a, b in zip(*(torch.autograd.grad((x * weight).sum(), leaves) for x in (out, expected)), strict=True):
            assert_close(a, b)

    @pytest.mark.parametrize("meets", [("query",), ("key", "value")])
    def test_vectors_never_store_the_scores_of_all_pairs(self, meets: tuple[str, ...]) -> None:
        grid = Grid(1024)
        encoding = PullsAndPushes(HEADS, DIM, grid, meets=meets).float()
        q, k, v = qkv(grid, grid, batch=1, dtype=torch.float32)
        scores = HEADS * 1024 * 1024 * 4

        def step() -> None:
            attend(q, k, v, encoding, grid, memory_limit=scores // 2).sum().backward()

        assert peak_bytes(step) < scores

    def test_the_slower_way_is_taken_and_told(self) -> None:
        grid = Grid(200)
        encoding = made("table", grid)
        q, k, v = (x.detach() for x in qkv(grid, grid))
        with torch.no_grad():
            free, told = attend(q, k, v, encoding, grid, explain=True)
            kept, limited = attend(q, k, v, encoding, grid, memory_limit=told.num_bytes // 2, explain=True)
        assert told.way == "dense"
        assert limited.way == "view"
        assert f"more than memory_limit={told.num_bytes // 2}" in limited.why
        assert limited.num_bytes <= told.num_bytes // 2
        assert_close(kept, free)

    def test_too_little_says_what_each_way_needs(self) -> None:
        grid = Grid(16, 16)
        q, k, v = qkv(grid, grid)
        text = (
            r"attend: memory_limit=1000 bytes is less than each way needs: sdpa \(dense\) \d+, sdpa \(bands\) \d+, "
            r"explicit \(whole\) \d+, explicit \(blocks\) \d+"
        )
        with refuses(text):
            attend(q, k, v, made("table", grid), grid, memory_limit=1000)
        with refuses(r"attend: memory_limit=1000 bytes is less than each way needs: explicit \(whole\) \d+"):
            attend(q, k, v, made("table", grid), grid, memory_limit=1000, backend="explicit")
        with refuses("attend: memory_limit=-1 must be a number of bytes, at least 0"):
            attend(q, k, v, made("table", grid), grid, memory_limit=-1)

    @pytest.mark.parametrize(
        ("positions", "name", "options"),
        [
            (Grid(1500), "table", {}),
            (Grid(1500), "alibi", {}),
            (Grid(1500), "table", {"is_causal": True}),
            (Grid(40, 37), "table", {}),
            (Grid(14, 14, num_prefix_tokens=1), "table", {}),
            (Grid(300), "none", {"mask": torch.ones(300, 300, dtype=torch.bool)}),
            (Grid(1500), "table", {"mask": torch.ones(1, 1, 1, 1500, dtype=torch.bool)}),
            (Grid(32, 32), ["table", "rope_axial"], {"mask": torch.ones(1, 1, 1, 1024, dtype=torch.bool)}),
            (Grid(1024, num_prefix_tokens=64), "table", {}),
            (Grid(500), "table", {"mask": torch.ones(500, 500, dtype=torch.bool)}),
            (Grid(500), "rope_axial", {"dropout_p": 0.1}),
            (Grid(500), "table", {"dropout_p": 0.1}),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("training", [False, True])
    def test_what_is_told_is_an_upper_bound(
        self, positions: Grid, name: Any, options: dict[str, Any], training: bool
    ) -> None:
        encoding = made(name, positions, torch.float32)
        q, k, v = qkv(positions, positions, batch=1, dtype=torch.float32)
        tokens = q.numel() * 4

        def step() -> Explanation:
            out, explanation = attend(q, k, v, encoding, positions, explain=True, **options)
            if training:
                out.sum().backward()
            return explanation

        with torch.set_grad_enabled(training):
            explanation = step()
            used = peak_bytes(step)
        # every attention returns an output, and keeps q, k, v, output and gradients of all these
        assert used <= explanation.num_bytes + (12 if training else 2) * tokens + 2**16


def limited(shape: tuple[int, ...]) -> Tensor:
    return torch.ones(shape, dtype=torch.bool).tril()


CHOICES: dict[str, tuple[Any, Positions, Positions | None, dict[str, Any], str, str]] = {
    "a window": ("table", Grid(7, 7), None, {}, "dense", "costs less than a view"),
    "a shifted window": ("table", Grid(7, 7), None, {"mask": torch.zeros(2, 1, 49, 49)}, "dense", "only hide keys"),
    "rotation alone": ("rope_axial", Grid(8, 8), None, {}, "no mask", "nothing is added"),
    "rotation, causal": ("rope_axial", Grid(64), None, {"is_causal": True}, "is_causal", "in the order of places"),
    "a long line": ("table", Grid(600), None, {}, "view", "per distinct offset"),
    "a long line, causal": ("alibi", Grid(600), None, {"is_causal": True}, "view", "per distinct offset"),
    "a large grid": ("table", Grid(24, 25), None, {}, "bands", "per distinct offset"),
    "padding on a line": ("table", Grid(600), None, {"mask": torch.ones(2, 1, 1, 600).bool()}, "view", "offset"),
    "any mask on a line": ("table", Grid(600), None, {"mask": limited((600, 600))}, "dense", "only hide keys"),
    "decoding": ("table", Grid(1, origin=599), Grid(600), {"is_causal": True}, "view", "per distinct offset"),
    "points": ("table", Grid(8, 8).points(2), None, {}, "dense", "Points have no lattice"),
    "vectors that meet values": ("values", Grid(8, 8), None, {}, "whole", "need the weights"),
    "pooled keys": ("table", Grid(24, 26), Grid(24, 26).pool(2), {}, "dense", "unequal steps"),
}


@pytest.mark.parametrize("situation", CHOICES.values(), ids=CHOICES.keys())
def test_the_choice_and_its_reason(
    situation: tuple[Any, Positions, Positions | None, dict[str, Any], str, str],
) -> None:
    name, q_pos, k_pos, options, way, why = situation
    k_pos = q_pos if k_pos is None else k_pos
    grid = Grid(8) if q_pos.num_axes == 1 else Grid(8, 8)
    encoding = PullsAndPushes(HEADS, DIM, grid) if name == "values" else made(name, grid)
    for training in (False, True):
        q, k, v = (x.requires_grad_(training) for x in (y.detach() for y in qkv(q_pos, k_pos)))
        with torch.set_grad_enabled(training):
            out, explanation = attend(q, k, v, encoding, q_pos, k_pos, explain=True, **options)
        assert out.shape == q.shape
        assert explanation.way == way, str(explanation)
        assert why in explanation.why
        text = str(explanation)
        assert text.startswith(f"{explanation.backend}, {way}: ")
        assert "\n" not in text


@pytest.mark.usefixtures("fresh_compiler")
def test_a_traced_graph_takes_no_fused_way() -> None:
    grid = Grid(600)
    encoding = made("table", grid)
    q, k, v = qkv(grid, grid)

    def traced(q: Tensor) -> tuple[Tensor, str]:
        out, explanation = attend(q, k, v, encoding, grid, explain=True)
        return out, f"{explanation.backend}: {explanation.why}"

    out, told = torch.compile(traced, backend="eager", fullgraph=True)(q)
    assert told.startswith("explicit: a compiler or an exporter follows")
    assert_close(out, attend(q, k, v, encoding, grid, backend="explicit"))


def test_values_of_another_size_take_another_way() -> None:
    grid = Grid(600)
    encoding = made("table", grid)
    q, k, _ = qkv(grid, grid)
    v = torch.randn(2, HEADS, 600, 5, dtype=torch.float64)
    out, explanation = attend(q, k, v, encoding, grid, explain=True)
    assert "values of 8 channels" in explanation.why
    assert_close(out, attend(q, k, v, encoding, grid, backend="explicit"))


def test_prepared_numbers_take_the_same_way() -> None:
    grid = Grid(600, num_prefix_tokens=1)
    encoding = made("table", grid)
    q, k, v = qkv(grid, grid)
    out, explanation = attend(q, k, v, encoding.prepare(grid), grid, explain=True)
    assert explanation.way == "view"
    assert_close(out, attend(q, k, v, encoding, grid, backend="explicit"))


def test_g6_only_the_numbers_want_a_gradient() -> None:
    grid = Grid(24, 25)
    encoding = made("table", grid)
    q, k, v = (x.detach() for x in qkv(grid, grid))
    out, explanation = attend(q, k, v, encoding, grid, explain=True)
    assert explanation.way == "bands"
    expected = attend(q, k, v, encoding, grid, backend="explicit")
    weight = torch.randn_like(out)
    for a, b in zip(
        *(torch.autograd.grad((x * weight).sum(), encoding.parameters()) for x in (out, expected)), strict=True
    ):
        assert_close(a, b)


FLEX_SITUATIONS = (
    "grid and crop",
    "finer columns",
    "prefix",
    "causal with prefix",
    "padding and prefix",
    "next tokens",
)


@pytest.mark.filterwarnings("ignore:attend:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*flex:RuntimeWarning")
@pytest.mark.parametrize("situation", [SITUATIONS[name] for name in FLEX_SITUATIONS], ids=FLEX_SITUATIONS)
@pytest.mark.parametrize("name", ["table", "alibi"])
def test_flex_through_the_door(name: str, situation: Situation) -> None:
    queries, keys = situation.queries, situation.keys
    prefix = max(queries.num_prefix_tokens, keys.num_prefix_tokens)
    encoding = made(name, Grid(*keys.shape, num_prefix_tokens=prefix))
    options = situation.options | situation.mask()
    q, k, v = qkv(queries, keys)
    out, explanation = attend(q, k, v, encoding, queries, keys, backend="flex", explain=True, **options)
    assert (explanation.backend, explanation.way) == ("flex", "score_mod")
    expected = attend(q, k, v, encoding, queries, keys, backend="explicit", **options)
    assert_close(out, expected)
    leaves, weight = [q, k, v, *encoding.parameters()], torch.randn_like(out)
    for a, b in zip(
        *(torch.autograd.grad((x * weight).sum(), leaves, allow_unused=True) for x in (out, expected)), strict=True
    ):
        if b is not None:
            assert a is not None
            assert_close(a, b)


class TestLowrank:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("prefix", [0, 1])
    def test_causal_alibi_is_told_exact(self, prefix: int, masked: bool) -> None:
        grid = Grid(20, num_prefix_tokens=prefix)
        encoding = made("alibi", grid).requires_grad_(False)
        q, k, v = qkv(grid, grid)
        options: dict[str, Any] = {"is_causal": True}
        if masked:
            options["mask"] = torch.rand(2, 1, 20 + prefix, 20 + prefix) > 0.3
            options["mask"][0, 0, 5] = False
        out, told = attend(q, k, v, encoding, grid, backend="lowrank", explain=True, **options)
        assert (told.backend, told.way) == ("lowrank", "factors")
        assert told.error < 0.01
        expected = attend(q, k, v, encoding, grid, backend="explicit", **options)
        assert (out - expected).abs().max() <= 4 * told.error + 1e-9
        if told.error > 0:
            assert f"bias wrong by at most {told.error:.1e}" in str(told)

    def test_is_never_chosen_by_itself(self) -> None:
        grid = Grid(600)
        encoding = made("alibi", grid)
        q, k, v = qkv(grid, grid)
        assert attend(q, k, v, encoding, grid, is_causal=True, explain=True)[1].backend == "sdpa"


@pytest.mark.parametrize(
    ("backend", "change", "text"),
    [
        ("flex", {"dropout_p": 0.1}, "backend 'flex' has no dropout of attention weights"),
        ("flex", {"q_pos": "points"}, "backend 'flex' needs Grids whose offsets are a lattice"),
        ("flex", {"name": "vectors"}, "backend 'flex' has no vectors that meet the content of pairs"),
        ("lowrank", {"name": "rope_axial"}, "backend 'lowrank' needs an encoding of numbers"),
        ("lowrank", {"name": "table"}, "backend 'lowrank' factors the numbers once and gives them no gradient"),
        ("lowrank", {"q_pos": "points"}, "backend 'lowrank' needs an encoding of numbers between Grids"),
        ("sdpa", {"name": "vectors"}, "backend 'sdpa' has no weights to give to PullsAndPushes, use 'explicit'"),
    ],
)
def test_a_backend_that_cannot_do_it_says_so(backend: str, change: dict[str, Any], text: str) -> None:
    grid = Grid(3, 4)
    name = change.pop("name", "alibi")
    encoding = PullsAndPushes(HEADS, DIM, grid) if name == "vectors" else made(name, grid)
    positions: Positions = grid.points(2) if change.pop("q_pos", None) else grid
    with refuses(f"attend: {text}"):
        attend(*qkv(grid, grid), encoding, positions, backend=backend, **change)


def test_a_dtype_without_a_fast_way_is_right_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(600)
    encoding = made("table", grid)
    q, k, v = qkv(grid, grid)
    expected = attend(q, k, v, encoding, grid)
    monkeypatch.setattr(fused, "DTYPES", (torch.float32,))
    choice.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="no fused kernel on cpu knows torch.float64"):
        out, explanation = attend(q, k, v, encoding, grid, explain=True)
    assert explanation.way in ("dense", "whole")
    assert_close(out, expected)
    attend(q, k, v, encoding, grid)  # a second warning would be an error


@pytest.mark.parametrize("name", ["none", "rope_axial"])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_with_a_scale_that_turns_scores_round(name: str, scale: float) -> None:
    grid = Grid(16)
    encoding = made(name, grid)
    q, k, v = qkv(grid, grid)
    out = attend(q, k, v, encoding, grid, is_causal=True, scale=scale)
    assert_close(out, attend(q, k, v, encoding, grid, is_causal=True, scale=scale, backend="explicit"))


@pytest.mark.usefixtures("tiny")
def test_a_key_that_half_precision_cannot_hide_is_hidden_another_way() -> None:
    queries, keys = Grid(1, step=600, origin=9000), Grid(16, step=600)
    encoding = made("alibi", keys)
    q, k, v = qkv(queries, keys, dtype=torch.float16)
    mask = (torch.arange(16) < 2).expand(2, 1, 1, 16)
    out, explanation = attend(q, k, v, encoding, queries, keys, mask=mask, explain=True)
    assert explanation.way == "dense"
    exact = attend(*(x.double() for x in (q, k, v)), encoding, queries, keys, mask=mask, backend="explicit")
    assert_close(out.double(), exact, torch.float16)


def test_a_mask_of_keys_alone_is_not_spread_over_pairs() -> None:
    grid = Grid(1024)
    encoding = create_encoding("rope_axial", HEADS, DIM, grid)
    q, k, v = (x.detach() for x in qkv(grid, grid, dtype=torch.float32))
    mask = torch.ones(2, 1, 1, 1024, dtype=torch.bool)
    used = peak_bytes(lambda: attend(q, k, v, encoding, grid, mask=mask))
    assert used < 0.5 * 1024 * 1024 * 4  # a mask of one head of one sample, were it spread


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:FutureWarning"
)  # torch's own, on its way to a forward derivative
@pytest.mark.parametrize("positions", [Grid(3, 4), Grid(600)], ids=str)
def test_torch_func_and_forward_mode(positions: Grid) -> None:
    encoding = made("table", positions)
    q, k, v = (x.detach() for x in qkv(positions, positions, batch=1))
    direction = torch.randn_like(q)

    def by(backend: str) -> tuple[Tensor, Tensor]:
        def total(q: Tensor) -> Tensor:
            return attend(q, k, v, encoding, positions, backend=backend).square().sum()

        return torch.func.grad(total)(q), torch.func.jvp(total, (q,), (direction,))[1]

    for ours, theirs in zip(by("auto"), by("explicit"), strict=True):
        assert_close(ours, theirs)


class TestKept:
    """Evaluation uses what it made before; whatever changes, the result is that of a new one."""

    def assert_as_explicit(self, encoding: Encoding, grid: Grid, mask: Tensor | None = None) -> None:
        q, k, v = (x.detach() for x in qkv(grid, grid, batch=4))
        fresh = copy.deepcopy(encoding)
        with torch.no_grad():
            for _ in range(3):
                out = attend(q, k, v, encoding, grid, mask=mask)
            expected = attend(q, k, v, fresh, grid, mask=mask, backend="explicit")
        assert_close(out, expected)

    @pytest.mark.parametrize("name", ["table", "cpb", "alibi", ["table", "cpb"]], ids=str)
    def test_made_once_and_never_stale(self, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        grid = Grid(3, 4)
        encoding = made(name, grid)
        mask = -100.0 * (torch.rand(2, 1, 12, 12) > 0.6).double()
        self.assert_as_explicit(encoding, grid, mask)
        q, k, v = (x.detach() for x in qkv(grid, grid, batch=4))
        with torch.no_grad():
            kept = attend(q, k, v, encoding, grid, mask=mask)
            with monkeypatch.context() as context:
                context.setattr(
                    sys.modules["relpos2d.attention.attend"], "_all_added", None
                )  # would stumble if it were made again
                assert torch.equal(attend(q, k, v, encoding, grid, mask=mask), kept)
        mask[1, 0, 3] = -7.0
        self.assert_as_explicit(encoding, grid, mask)
        self.assert_as_explicit(encoding, grid)
        for parameter in encoding.parameters():
            parameter.data.mul_(1.5)
        self.assert_as_explicit(encoding, grid, mask)
        encoding.set_strength(0.3)
        self.assert_as_explicit(encoding, grid, mask)

    def test_c5_training_after_inference_mode(self) -> None:
        grid = Grid(3, 4)
        encoding = made("alibi", grid)
        q, k, v = qkv(grid, grid)
        with torch.inference_mode():
            for _ in range(3):
                attend(q, k, v, encoding, grid)
        attend(q, k, v, encoding, grid).sum().backward()
        assert q.grad is not None

    def test_autocast_makes_numbers_of_its_own(self) -> None:
        grid = Grid(3, 4)
        encoding = made("cpb", grid, torch.float32)
        fresh = copy.deepcopy(encoding)
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                rough = encoding.bias(grid, grid)
            assert torch.equal(encoding.bias(grid, grid), fresh.bias(grid, grid))
            assert not torch.equal(rough, encoding.bias(grid, grid))

    def test_an_exchanged_module_inside_is_seen(self) -> None:
        grid = Grid(3, 4)
        encoding: Any = made("cpb", grid)
        with torch.no_grad():
            before = encoding.bias(grid, grid)
            encoding.cpb_mlp[1] = nn.GELU()
            assert not torch.equal(encoding.bias(grid, grid), before)

    def test_encodings_of_others_are_asked_each_time(self) -> None:
        class Listed(NumberEncoding):
            slopes: ClassVar[list[float]] = [1.0]

            def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
                return self.slopes[0] * offsets[..., :1].expand(*offsets.shape[:-1], self.num_heads)

        encoding = Listed(HEADS, DIM, Grid(5))
        with torch.no_grad():
            before = encoding.bias(Grid(5), Grid(5))
            Listed.slopes[0] = 2.0
            assert_close(encoding.bias(Grid(5), Grid(5)), 2 * before)


def test_prepared_numbers_are_never_asked_for_again() -> None:
    grid = Grid(3, 4)
    encoding = made("table", grid)
    prepared = encoding.prepare(grid)
    encoding.set_strength(0.0)
    q, k, v = qkv(grid, grid)
    with refuses(r"attend: memory_limit=100 bytes is less than each way needs: explicit \(whole\) \d+$"):
        attend(q, k, v, prepared, grid, memory_limit=100, backend="explicit")


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("grid", [Grid(600), Grid(24, 25)], ids=str)
def test_checkpointing_drops_the_same_weights_again(grid: Grid, use_reentrant: bool) -> None:
    encoding = made("table", grid)
    q, k, v = qkv(grid, grid)
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(3)

        def attended(q: Tensor) -> Tensor:
            return attend(q, k, v, encoding, grid, dropout_p=0.3)

        out = checkpoint(attended, q, use_reentrant=use_reentrant) if checkpointed else attended(q)
        q.grad = None
        out.square().sum().backward()
        grads.append(q.grad.clone())
    assert torch.equal(*grads)
