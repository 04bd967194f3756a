"""The benchmark on tiny cases: what it measures is the same work, and what it writes holds all of it. No time is asserted."""

import gc
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from relpos2d import Grid, list_encodings
from relpos2d.cli import main
from relpos2d.tools import bench as bench_module
from relpos2d.tools import cases as cases_module
from relpos2d.tools.bench import bench, draw, median_ratio, our_encoding, result_table
from relpos2d.tools.cases import Case
from relpos2d.tools.memory import available_bytes
from relpos2d.tools.rivals import RIVALS, imported, rivals_of
from tests.refusals import refuses
from tests.tools.small_cases import CAUSAL, DECODE, IMAGE, PREFIX, SEQUENCE, SHIFTED, SMALL


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> Iterator[None]:
    """The benchmark collects garbage before each case; what these packages hold would be looked through each time."""
    for rival in RIVALS:
        imported(rival.package)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "SECONDS_PER_TIMING", 1e-6)


@pytest.mark.parametrize(
    ("count", "rank"),
    # ranks from tables of the sign test at 95 %
    [(6, 0), (7, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (20, 5), (50, 17)],
)
def test_the_interval_of_known_numbers(count: int, rank: int) -> None:
    values = [float(i) for i in range(count)]
    random.Random(3).shuffle(values)
    ratio = median_ratio(values)
    assert ratio.values == values
    assert ratio.median == (count - 1) / 2
    assert (ratio.low, ratio.high) == (rank, count - 1 - rank)
    outside = 2 * sum(math.comb(count, i) for i in range(rank + 1)) / 2**count
    assert ratio.coverage == pytest.approx(1 - outside)
    assert ratio.coverage >= 0.95


def test_few_values_have_a_range_and_say_how_little_it_covers() -> None:
    ratio = median_ratio([1.5, 1.0, 3.0])
    assert (ratio.median, ratio.low, ratio.high, ratio.coverage) == (1.5, 1.0, 3.0, 0.75)
    assert str(ratio) == "1.50 [1.00, 3.00]"
    assert median_ratio([2.0]).coverage == 0.0
    with refuses("median_ratio: values must hold at least one number"):
        median_ratio([])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """Three kinds of cases, forward and training, measured in two rounds."""
    folder = tmp_path_factory.mktemp("bench") / "deep"
    training = Case("small-training", "windows", Grid(3, 5), num_windows=(1, 2), mode="training", **SMALL)
    cases = [SHIFTED, training, CAUSAL]
    options = {"encodings": ["table", "rope_axial", "table+rope_axial"], "pairs": 2, "threads": 1, "seed": 5}
    return folder, list(bench(cases, output=folder, command=["relpos2d", "bench"], **options))


def test_the_json_holds_every_contestant(report: tuple[Path, list]) -> None:
    folder, results = report
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.png"]
    told = json.loads((folder / "bench.json").read_text())
    assert told["command"] == ["relpos2d", "bench"]
    assert (told["seed"], told["pairs"], told["is_complete"]) == (5, 2, True)
    machine = told["machine"]
    assert (machine["threads"], machine["dtype"], machine["device_type"]) == (1, "float32", "cpu")
    assert machine["torch"] == torch.__version__
    assert [case["name"] for case in told["cases"]] == ["small-shifted", "small-training", "small-causal"]
    for case, result in zip(told["cases"], results, strict=True):
        names = [row["name"] for row in case["results"]]
        assert names[:4] == ["no position", "table", "rope_axial", "table+rope_axial"]
        assert names[4:] == [rival.name for rival in rivals_of(result.case)]
        assert [sorted(order) for order in case["orders"]] == [sorted(names)] * 2
        baseline = case["results"][0]
        assert baseline["ratios"] == {}
        for row in case["results"]:
            assert (len(row["seconds"]), row["error"]) == (2, "")
            assert row["peak_bytes"] > 0
            if row is not baseline:
                expected = [own / its for own, its in zip(row["seconds"], baseline["seconds"], strict=True)]
                assert row["ratios"]["no position"]["values"] == expected
    assert told["cases"][0]["queries"] == "Grid(3, 5)"
    assert told["cases"][0]["is_shifted"]


def test_training_computes_the_gradient_of_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: dict[int, list] = {}
    real = torch.autograd.grad

    def spy(output: Tensor, inputs: list[Tensor], *rest: object, **options: object) -> tuple:
        gradients = real(output, inputs, *rest, **options)
        wanted[len(inputs)] = [None if g is None else g.shape for g in gradients]
        return gradients

    monkeypatch.setattr(torch.autograd, "grad", spy)
    case = Case("t", "image grid", Grid(3, 5, num_prefix_tokens=1), mode="training", **SMALL)
    (result,) = bench([case], encodings=["table"], pairs=1, rivals=False, memory=False)
    assert not any(row.error for row in result.results)
    qkv = [torch.Size((1, 2, 16, 8))] * 3
    assert wanted[3] == qkv
    assert wanted[5][:3] == qkv
    assert sorted(wanted[5][3:]) == [torch.Size((3, 2)), torch.Size((45, 2))]
    # nothing is recorded for a backward that nobody asks for
    seen = []
    monkeypatch.setattr(bench_module, "attend", lambda q, *rest, **options: seen.append(torch.is_grad_enabled()) or q)
    list(bench([IMAGE], encodings=["table"], pairs=1, rivals=False, memory=False))
    assert set(seen) == {False}


def test_the_picture_is_drawn(report: tuple[Path, list], tmp_path: Path) -> None:
    folder, results = report
    for path in (folder / "bench.png", tmp_path / "one.png"):
        if not path.exists():
            draw(results[:1], path)
        with Image.open(path) as image:
            assert image.format == "PNG"
            colours = {colour for _, colour in image.convert("RGB").getcolors(2**24)}
        assert {(0x1F, 0x77, 0xB4), (0xD9, 0x5F, 0x02)} <= colours


def test_the_table_shows_every_row(report: tuple[Path, list]) -> None:
    result = report[1][0]
    lines = result_table(result).splitlines()
    assert lines[0].startswith(
        "small-shifted: 12 x 2 heads x 15 tokens x 8 channels, shifted, forward; medians of 2 rounds"
    )
    assert lines[0].endswith("intervals of 50 %")
    assert lines[1].split("  ")[0] == "contestant"
    assert "ratio to no position" in lines[1]
    assert "peak MB" in lines[1]
    assert len(lines) == 2 + len(result.results)
    assert str(result.results[1].ratios["no position"]) in lines[3]

    markdown = result_table(result, markdown=True).splitlines()
    rows = [line for line in markdown if line.startswith("|")]
    assert len(rows) == 2 + len(result.results)
    assert {line.count("|") for line in rows} == {rows[0].count("|")}
    assert rows[1].startswith("| --- |")


def test_what_fails_is_a_row_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(q: Tensor, *rest: object, **options: object) -> Tensor:
        raise torch.OutOfMemoryError("needs 99 | GB")

    monkeypatch.setattr(bench_module, "attend", too_much)
    odd = Case("odd", "image grid", Grid(3, 5), num_heads=2, head_dim=6)  # 6 channels do not go into 2 axes of pairs
    first, second = bench([odd, IMAGE], encodings=["table", "rope_axial"], pairs=2, output=tmp_path, plot=False)
    errors = {row.name: row.error for row in first.results}
    assert errors["table"] == "OutOfMemoryError: needs 99 | GB"
    assert "head_dim=6 must be a multiple of 4" in errors["rope_axial"]
    assert errors["no position"] == errors["table, gathered in each call"] == ""
    assert [order.count("table") for order in first.orders] == [0, 0]
    told = json.loads((tmp_path / "bench.json").read_text())
    assert told["cases"][0]["results"][1]["error"] == errors["table"]
    assert told["cases"][0]["results"][1]["seconds"] == []
    assert len(told["cases"]) == 2
    assert "failed: OutOfMemoryError: needs 99 | GB" in result_table(first)
    assert "needs 99 \\| GB" in result_table(second, markdown=True)
    draw([first], tmp_path / "with-errors.png")


def test_what_fails_in_a_later_round_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = bench_module._time, []

    def failing(contestant: bench_module._Contestant, device: torch.device) -> None:
        calls.append(contestant.result.name)
        if contestant.result.name == "table" and calls.count("table") == 2:
            raise RuntimeError("late")
        real(contestant, device)

    monkeypatch.setattr(bench_module, "_time", failing)
    (result,) = bench([IMAGE], encodings=["table", "alibi"], pairs=3, rivals=False)
    rows = {row.name: row for row in result.results}
    assert rows["table"].error == "RuntimeError: late"
    assert rows["table"].ratios == {}
    assert len(rows["alibi"].ratios["no position"].values) == 3


LIMITED = """
import relpos2d.tools.bench as bench_module
from relpos2d import Grid
from relpos2d.tools.cases import Case
from relpos2d.tools.memory import available_bytes, limited_memory

share = min(1.0, 5e8 / available_bytes())
bench_module.limited_memory = lambda: limited_memory(share)
long = Case("long", "sequence", Grid(12_000), num_heads=1, head_dim=4)
(result,) = bench_module.bench([long], encodings=[], pairs=1, memory=False)
errors = {row.name: row.error for row in result.results}
assert errors["no position"] == "", errors
assert "can't allocate memory" in errors["table, gathered in each call"], errors
assert "no position" in [row.name for row in result.results if row.seconds]
"""


@pytest.mark.long
@pytest.mark.skipif(available_bytes() is None, reason="the system does not tell what is available")
def test_too_much_memory_is_a_row_and_not_the_end_of_the_process() -> None:
    """In a process of its own: a package whose import fails for want of memory stays broken for whoever comes next."""
    subprocess.run([sys.executable, "-c", LIMITED], check=True)


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [module for module in sys.modules if module.split(".")[0] == "x_transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "x_transformers", None)
    (result,) = bench([SEQUENCE], encodings=["alibi"], pairs=1, memory=False)
    assert result.left_out == {"x-transformers ALiBi": "x_transformers is not installed"}
    assert "left out: x-transformers ALiBi (x_transformers is not installed)" in result_table(result)
    assert "x-transformers ALiBi" not in [row.name for row in result.results]
    assert "transformers T5 bias" in [row.name for row in result.results]


def test_an_encoding_without_meaning_on_the_axes_is_left_out() -> None:
    cube = Case("cube", "image grid", Grid(2, 3, 2), **SMALL)
    (result,) = bench([cube], encodings=["alibi", "table"], pairs=1, rivals=False, memory=False)
    assert [row.name for row in result.results] == ["no position", "table"]
    assert result.left_out == {"alibi": "no meaning on 3 axes"}


def test_orders_are_drawn_from_the_seed() -> None:
    options = {"pairs": 6, "rivals": False, "memory": False, "encodings": ["table", "alibi", "none"]}

    def orders(seed: int) -> list[list[str]]:
        return next(bench([IMAGE], seed=seed, **options)).orders

    first = orders(0)
    assert orders(0) == first
    assert orders(1) != first
    assert len({tuple(order) for order in first}) > 1
    assert all(sorted(order) == ["alibi", "no position", "none", "table"] for order in first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_contestant_takes_every_dtype(dtype: torch.dtype) -> None:
    cases = [replace(case, mode="training") for case in (SHIFTED, CAUSAL, PREFIX, DECODE)] + [SEQUENCE]
    for result in bench(cases, pairs=1, dtype=dtype, memory=False):
        assert [row.error for row in result.results] == [""] * len(result.results)
        assert set(result.left_out.values()) <= {"no meaning on 2 axes"}
        assert result.case.queries.num_axes == 2 or not result.left_out


def test_nothing_of_the_process_is_changed() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    results = bench([IMAGE], encodings=["table"], pairs=1, threads=threads + 1, seed=9)
    next(results)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_learned_numbers_are_not_zero() -> None:
    for info in list_encodings():
        if info.family == "absolute" or info.axes == (1,):
            continue
        for name, parameter in our_encoding(PREFIX, info.name, "cpu", torch.float32).named_parameters():
            assert parameter.abs().max() > 0.01, (info.name, name)


def test_the_way_that_attend_took_is_told() -> None:
    (result,) = bench([SEQUENCE], encodings=["table"], pairs=1, rivals=False)
    assert result.results[1].way == "dense"
    assert result.results[1].why.startswith("sdpa, dense: ")
    table = result_table(result).splitlines()
    assert table[1].endswith("way")
    assert table[3].endswith("dense")


@pytest.mark.parametrize("mode", ["forward", "training"])
def test_whole_models_are_compared_to_timm_too(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    real = bench_module.timm.create_model

    def small(name: str, **options: object) -> torch.nn.Module:
        built.append((name, options))
        return real(name, img_size=32, depth=2, **options)

    monkeypatch.setattr(bench_module.timm, "create_model", small)
    monkeypatch.setattr(bench_module, "_images", lambda case, device, dtype: torch.randn(case.batch, 3, 32, 32))
    case = Case("vit", "model", Grid(2, 2), model="vit_tiny_patch16_224", mode=mode)
    (result,) = bench([case], encodings=["none", "table"], pairs=1)
    assert [(row.name, row.by, row.role, row.error) for row in result.results] == [
        ("no position", "relpos2d", "baseline", ""),
        ("table", "relpos2d", "ours", ""),
        ("timm", "timm", "rival", ""),
    ]
    assert built == [
        ("relpos2d_vit_tiny_patch16_224", {"encoding": "none"}),
        ("relpos2d_vit_tiny_patch16_224", {"encoding": "table"}),
        ("vit_tiny_patch16_224", {}),
    ]
    assert result.references == ["no position", "timm"]
    assert set(result.results[1].ratios) == {"no position", "timm"}
    assert "ratio to timm" in result_table(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["windows-7x8"], "unknown case 'windows-7x8'; did you mean 'windows-7x7'"),
        (["sequnce"], "unknown case 'sequnce'; did you mean 'sequence'"),
        (["decode", "--mode", "training"], "no case of decode has mode='training'"),
        (["--encodings", "tabel"], "unknown encoding 'tabel'; did you mean 'table'"),
        (["--encodings", "sincos"], "encoding 'sincos' is absolute"),
        (["--device", "cpuda"], "device='cpuda' is not there; allowed: cpu"),
        (["--device", "meta"], "device='meta' is not there; allowed: cpu"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--pairs", "0"], "'0' must be a whole number from 1"),
        (["--theta", "3"], "unrecognized arguments: --theta"),
    ],
)
def test_wrong_input_is_told_before_anything_runs(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_module, "_run", lambda *args, **options: pytest.fail("it runs"))
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_counts_below_one_are_refused() -> None:
    with refuses("bench: cases must hold at least one case"):
        bench([])
    with refuses("bench: pairs=0 must be at least 1"):
        bench([IMAGE], pairs=0)
    with refuses("bench: batch of small=0 must be at least 1"):
        bench([Case("small", "image grid", Grid(3, 5), batch=0)])


def test_the_command_prints_a_table_and_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases_module, "standard_cases", lambda: [IMAGE])
    folder = tmp_path / "out"
    arguments = ["bench", "image", "--encodings", "table", "--pairs", "2", "--no-rivals", "--no-plot", "--no-memory"]
    assert main([*arguments, "--output", str(folder), "--seed", "3", "--dtype", "float64", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["small-image:", "contestant", "no"]
    assert "peak MB" not in out
    assert f"wrote {folder}/bench.json\n" in out
    told = json.loads((folder / "bench.json").read_text())
    assert told["command"][:3] == ["relpos2d", "bench", "image"]
    assert (told["seed"], told["machine"]["dtype"]) == (3, "float64")
    assert [row["name"] for row in told["cases"][0]["results"]] == ["no position", "table"]
    assert told["cases"][0]["results"][1]["peak_bytes"] is None
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["case", "work", "groups"]


def test_without_matplotlib_it_stops_before_it_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"bench: needs matplotlib; pip install 'relpos2d\[plot\]' brings it"):
        bench([IMAGE], output=tmp_path)
    assert not list(tmp_path.iterdir())
    next(bench([IMAGE], output=tmp_path, encodings=[], rivals=False, pairs=1, plot=False))
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_a_run_that_is_killed_leaves_the_cases_it_measured(tmp_path: Path) -> None:
    results = bench([IMAGE, SEQUENCE], output=tmp_path, encodings=[], rivals=False, pairs=1, plot=False)
    next(results)
    told = json.loads((tmp_path / "bench.json").read_text())
    assert ([case["name"] for case in told["cases"]], told["is_complete"]) == (["small-image"], False)
    next(results)
    told = json.loads((tmp_path / "bench.json").read_text())
    assert ([case["name"] for case in told["cases"]][1], told["is_complete"]) == ("small-sequence", True)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
