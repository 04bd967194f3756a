"""The benchmark: every encoding against attention without position and against what else a user would take, interleaved."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from torch import Tensor, nn

from relpos2d.attention import attend
from relpos2d.encoding import Encoding
from relpos2d.encodings import create_encoding, encoding_class, list_encodings
from relpos2d.tools.cases import Case, aligned, case_mask
from relpos2d.tools.memory import limited_memory, peak_bytes
from relpos2d.tools.plot import INK, MUTED, matplotlib_figure
from relpos2d.tools.rivals import Attention, Rival, fused, imported, rivals_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DTYPES = {str(dtype).split(".")[1]: dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
NO_POSITION = "no position"

#: one timing holds as many calls as fill this many seconds
SECONDS_PER_TIMING = 0.005

#: marks of the picture's axis
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)

#: role -> what the picture calls it, and its colour
COLOURS = {"ours": ("relpos2d", "#1f77b4"), "rival": ("what else one would take", "#d95f02")}
#: of the cases of a panel
MARKERS = "osD^vP<>X*ph"


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of all rounds, and the interval that holds the true median with probability `coverage`."""

    values: list[float]
    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass
class Result:
    """What one contestant of a case has shown.

    Args:
        name: of the encoding or of the rival.
        by: the package whose code it is.
        role: "baseline", "ours" or "rival".
        seconds: of one call, round by round.
        repeats: calls in one timing.
        ratios: by name of the contestant that it is compared to.
        peak_bytes: newly allocated at the highest point of a call; None: not asked for.
        way: the way that attend() took; empty: it does not tell.
        why: all that attend() told.
        error: what stopped it; empty: nothing did.
    """

    name: str
    by: str
    role: str
    seconds: list[float] = field(default_factory=list)
    repeats: int = 1
    ratios: dict[str, Ratio] = field(default_factory=dict)
    peak_bytes: int | None = None
    way: str = ""
    why: str = ""
    error: str = ""


@dataclass
class CaseResult:
    """All contestants of a case, those that are left out and why, and the order of each round."""

    case: Case
    work: str
    references: list[str]
    results: list[Result]
    left_out: dict[str, str]
    orders: list[list[str]]


@dataclass
class _Contestant:
    result: Result
    run: Callable[[], object]


def bench(
    cases: Sequence[Case],
    *,
    encodings: Sequence[str] | None = None,
    pairs: int = 9,
    threads: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rivals: bool = True,
    memory: bool = True,
    seed: int = 0,
    output: str | Path | None = None,
    plot: bool = True,
    command: Sequence[str] = (),
) -> Iterator[CaseResult]:
    """Run the cases one after the other; all contestants of a case take turns, in an order drawn anew for each round.

    Args:
        cases: from `choose_cases`, or your own.
        encodings: names, or several with + between them for their sum; by default every relative one.
        pairs: rounds that are timed; a number that is quoted wants at least 7.
        threads: of torch; its own choice by default.
        device: "cpu" or a CUDA device.
        dtype: of inputs and parameters.
        rivals: whether to measure what else a user would take.
        memory: whether to measure the peak memory of each contestant, outside of the timed rounds.
        seed: of inputs, parameters and orders.
        output: folder for bench.json and bench.png, both written anew after every case; None: nothing is written.
        plot: whether to draw bench.png.
        command: what is noted as the command in bench.json.

    Yields:
        The result of each case as it is ready. A contestant that fails has its error there and ends nothing.

    Raises:
        ValueError: no case, an unknown or absolute encoding, counts below 1, a device that is not there.
        ImportError: a picture is wanted and matplotlib is missing.
    """
    device = torch.device(device)
    if not cases:
        raise ValueError("bench: cases must hold at least one case")
    for label, count in (("pairs", pairs), ("threads", threads), *((f"batch of {c.name}", c.batch) for c in cases)):
        if count is not None and count < 1:
            raise ValueError(f"bench: {label}={count} must be at least 1")
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        there = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"bench: device={str(device)!r} is not there; allowed: {there}")
    if encodings is None:
        encodings = [info.name for info in list_encodings() if info.family != "absolute"]
    for name in (part for spec in encodings for part in spec.split("+")):
        if encoding_class(name).family == "absolute":
            raise ValueError(f"bench: encoding {name!r} is absolute and no part of attention; give relative ones")
    if output is not None and plot:
        matplotlib_figure("bench")
    return _run(
        cases,
        list(dict.fromkeys(encodings)),
        pairs=pairs,
        threads=threads,
        device=device,
        dtype=dtype,
        rivals=rivals,
        memory=memory,
        seed=seed,
        output=None if output is None else Path(output),
        plot=plot,
        command=list(command),
    )


def _run(
    cases: Sequence[Case],
    encodings: list[str],
    *,
    pairs: int,
    threads: int | None,
    device: torch.device,
    dtype: torch.dtype,
    rivals: bool,
    memory: bool,
    seed: int,
    output: Path | None,
    plot: bool,
    command: list[str],
) -> Iterator[CaseResult]:
    threads_before = torch.get_num_threads()
    done: list[CaseResult] = []
    for number, case in enumerate(cases):
        torch.set_num_threads(threads or threads_before)
        try:
            # addresses of CUDA are reserved by the terabyte, so a limit is for the CPU only
            with limited_memory() if device.type == "cpu" else nullcontext(), torch.random.fork_rng():
                torch.manual_seed(seed)
                contestants, left_out = _contestants(case, encodings, rivals, device, dtype)
                orders = _measure(contestants, pairs, device, case.mode, random.Random(f"{seed} {case.name}"))
                if memory:
                    _measure_memory(contestants, device, case.mode)
            facts = _machine(device, dtype)
        finally:
            torch.set_num_threads(threads_before)
        results = [contestant.result for contestant in contestants]
        del contestants
        references = _compare(results, case)
        done.append(CaseResult(case, str(case), references, results, left_out, orders))
        if output is not None:
            report = {
                "command": command,
                "seed": seed,
                "pairs": pairs,
                "interval": "of the median, from the order statistics of the ratios",
                "machine": facts,
                "is_complete": number + 1 == len(cases),
                "cases": [_as_json(result) for result in done],
            }
            output.mkdir(parents=True, exist_ok=True)
            text = json.dumps(report, indent=1) + "\n"
            _write(output / "bench.json", partial(Path.write_text, data=text, encoding="utf-8"))
            if plot:
                _write(output / "bench.png", partial(draw, done))
        yield done[-1]


def median_ratio(values: Sequence[float]) -> Ratio:
    """The median and its interval from order statistics: of all intervals between the k-th lowest and the k-th highest value
    the narrowest that holds the true median with at least 95 %, whatever the distribution. Below 6 values there is none; then
    it is from the lowest to the highest, with the `coverage` that this has."""
    if not values:
        raise ValueError("median_ratio: values must hold at least one number")
    ordered, count = sorted(values), len(values)
    below, total = 1, 2**count
    rank, tail = 0, 1  # 2 tail / total: probability that the median lies outside of ordered[rank] .. ordered[-1 - rank]
    while 2 * rank + 2 < count:
        below = below * (count - rank) // (rank + 1)
        if 2 * (tail + below) > 0.05 * total:
            break
        rank, tail = rank + 1, tail + below
    middle = ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
    return Ratio(list(values), middle, ordered[rank], ordered[-1 - rank], 1 - 2 * tail / total)


def result_table(result: CaseResult, *, markdown: bool = False) -> str:
    """The rows of a case as aligned text or as markdown, with a line above that says what the work is."""
    has_way = any(row.way or row.error for row in result.results)
    has_memory = any(row.peak_bytes is not None for row in result.results)
    header = ["contestant", "by", "median ms", *(f"ratio to {name}" for name in result.references)]
    header += ["peak MB"] * has_memory + ["way"] * has_way
    rows = [header]
    for row in result.results:
        cells = [row.name, row.by, f"{1e3 * median_ratio(row.seconds).median:.3g}" if row.seconds else ""]
        for name in result.references:
            ratio = row.ratios.get(name)
            cells.append("1" if name == row.name and row.seconds else "" if ratio is None else str(ratio))
        if has_memory:
            cells.append("" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}")
        if has_way:
            cells.append(f"failed: {_shortened(row.error)}" if row.error else row.way)
        rows.append(cells)
    coverages = [ratio.coverage for row in result.results for ratio in row.ratios.values()]
    lines = [f"**{result.case.name}**: {result.work}" if markdown else f"{result.case.name}: {result.work}"]
    if coverages:
        rounds = max(len(row.seconds) for row in result.results)
        lines[0] += f"; medians of {rounds} rounds, intervals of {100 * min(coverages):.0f} %"
    if markdown:
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        rows.insert(1, ["---"] * len(header))
        lines += ["", *(f"| {' | '.join(row)} |" for row in rows)]
    else:
        lines.append(aligned(rows))
    left_out = [f"left out: {name} ({reason})" for name, reason in result.left_out.items()]
    return "\n".join([*lines, *([""] if markdown and left_out else []), *left_out])


def draw(results: Sequence[CaseResult], path: str | Path) -> None:
    """One panel for each kind of case: ratio to no position and its interval, a row for each contestant, on a log axis.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure_class = matplotlib_figure("bench")
    kinds = list(dict.fromkeys(result.case.kind for result in results))
    panels = [[result for result in results if result.case.kind == kind] for kind in kinds]
    sizes = []
    for panel in panels:
        num_rows = len({row.name for result in panel for row in result.results})
        sizes.append(num_rows * max(0.24, 0.05 * len(panel)) + 0.7 + 0.17 * math.ceil(len(panel) / 3))
    num_columns = min(2, len(panels))
    heights = [max(sizes[i : i + num_columns]) for i in range(0, len(sizes), num_columns)]
    figure = figure_class(figsize=(5.5 * num_columns, sum(heights) + 0.5), layout="constrained")
    axes = figure.subplots(len(heights), num_columns, squeeze=False, height_ratios=heights)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel)
    for unused in list(axes.flat)[len(panels) :]:
        unused.set_axis_off()
    styles: dict[str, Any] = {"marker": "o", "markersize": 4}
    figure.legend(
        handles=[
            axes.flat[0].plot([], [], color=colour, label=label, **styles)[0] for label, colour in COLOURS.values()
        ],
        title="time as a ratio to attention without position: median and interval",
        title_fontsize=9,
        fontsize=8,
        ncols=2,
        frameon=False,
        loc="outside upper center",
    )
    figure.savefig(path, dpi=160, format="png")


def _draw_panel(axis: Axes, results: Sequence[CaseResult]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    compared = [(result, row) for result in results for row in result.results if NO_POSITION in row.ratios]
    rows = list(dict.fromkeys(row.name for _, row in compared))
    for result, row in compared:
        index, ratio = results.index(result), row.ratios[NO_POSITION]
        y = rows.index(row.name) + (index + 0.5) / len(results) * 0.8 - 0.4
        style: dict[str, Any] = {"color": COLOURS[row.role][1]}
        axis.plot([ratio.low, ratio.high], [y, y], linewidth=1.1, solid_capstyle="butt", **style)
        axis.plot(ratio.median, y, marker=MARKERS[index % len(MARKERS)], markersize=4, markeredgewidth=0, **style)
    for index, result in enumerate(results):
        style = {"marker": MARKERS[index % len(MARKERS)], "color": MUTED, "linestyle": ""}
        axis.plot([], [], markersize=4, label=result.case.name, **style)
    axis.legend(fontsize=6.5, ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.45, 0.0), borderaxespad=2.8)
    axis.axvline(1.0, color=INK, linewidth=0.8)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    low, high = min(low, 0.92), max(high, 1.3)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    while len(ticks) > 9:  # every second one; 1 stays
        ticks = ticks[ticks.index(1) % 2 :: 2]
    axis.set_xlim(low, high)
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylim(max(1, len(rows)) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)), rows)
    axis.tick_params(labelsize=7.5, length=2, colors=INK)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.set_title(results[0].case.kind, fontsize=9.5, color=INK, loc="left")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _contestants(
    case: Case, encodings: list[str], with_rivals: bool, device: torch.device, dtype: torch.dtype
) -> tuple[list[_Contestant], dict[str, str]]:
    """Baseline first, then ours, then the rivals; and those that are left out, with the reason."""
    entrants: list[tuple[Result, Callable[[Result], Callable[[], object]]]] = []
    left_out: dict[str, str] = {}
    if case.model:
        images = _images(case, device, dtype)
        entrants.append((Result(NO_POSITION, "relpos2d", "baseline"), partial(_our_model, case, "none", images)))
    else:
        inputs = _inputs(case, device, dtype)
        mask = case_mask(case, device, dtype)
        entrants.append((Result(NO_POSITION, "torch", "baseline"), partial(_no_position, case, inputs, mask)))
    for name in encodings:
        axes = [encoding_class(part).axes for part in name.split("+")]
        if case.model and name == "none":
            continue  # the baseline is this
        if any(allowed is not None and case.key_grid.num_axes not in allowed for allowed in axes):
            left_out[name] = f"no meaning on {case.key_grid.num_axes} axes"
            continue
        if case.model:
            entrants.append((Result(name, "relpos2d", "ours"), partial(_our_model, case, name, images)))
        else:
            entrants.append((Result(name, "relpos2d", "ours"), partial(_our_work, case, name, inputs, mask)))
    if case.model and with_rivals:
        entrants.append((Result("timm", "timm", "rival"), partial(_their_model, case, images)))
    for rival in rivals_of(case) if with_rivals else ():
        try:
            imported(rival.package)
        except ImportError:
            left_out[rival.name] = f"{rival.package} is not installed"
            continue
        result = Result(rival.name, rival.package.replace("_", "-"), "rival")
        entrants.append((result, partial(_rival_work, case, rival, inputs, mask)))

    contestants = []
    for result, make in entrants:
        try:
            contestants.append(_Contestant(result, make(result)))
        except Exception as error:
            result.error = _told(error)
            contestants.append(_Contestant(result, lambda: None))
    return contestants, left_out


def _inputs(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    lengths = (case.queries.num_tokens, case.key_grid.num_tokens, case.key_grid.num_tokens)
    sizes = [(case.num_samples, case.num_heads, length, case.head_dim) for length in lengths]
    needs_grad = case.mode == "training"
    q, k, v = (torch.randn(size, device=device, dtype=dtype).requires_grad_(needs_grad) for size in sizes)
    return q, k, v


def _images(case: Case, device: torch.device, dtype: torch.dtype) -> Tensor:
    cfg = timm.get_pretrained_cfg(case.model)
    assert cfg is not None
    return torch.randn(case.batch, *cfg.input_size, device=device, dtype=dtype)


def _attention_work(
    case: Case, attention: Attention, inputs: tuple[Tensor, Tensor, Tensor], parameters: Iterable[Tensor]
) -> Callable[[], object]:
    """A forward, or a forward and the gradients of q, k, v and the parameters."""
    if case.mode == "forward":
        return lambda: attention(*inputs)
    q, _, v = inputs
    wanted = [*inputs, *(parameter for parameter in parameters if parameter.requires_grad)]
    upstream = torch.randn(*q.shape[:3], v.shape[-1], device=q.device, dtype=q.dtype)
    return lambda: torch.autograd.grad(attention(*inputs), wanted, upstream, allow_unused=True)


def _no_position(
    case: Case, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, result: Result
) -> Callable[[], object]:
    return _attention_work(case, lambda q, k, v: fused(q, k, v, mask, case.is_causal), inputs, [])


def _rival_work(
    case: Case, rival: Rival, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, result: Result
) -> Callable[[], object]:
    attention, parameters = rival.build(case, mask, inputs[0].device, inputs[0].dtype)
    return _attention_work(case, attention, inputs, parameters)


def _our_work(
    case: Case, name: str, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, result: Result
) -> Callable[[], object]:
    q = inputs[0]
    encoding = our_encoding(case, name, q.device, q.dtype)
    # the windows of one image: attend() repeats it for all images, as a swapped Swin has it
    mask = None if mask is None else mask[: math.prod(case.num_windows)]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, encoding, case.queries, case.keys, mask=mask, is_causal=case.is_causal)

    with torch.set_grad_enabled(case.mode == "training"):
        _, explanation = attend(
            *inputs, encoding, case.queries, case.keys, mask=mask, is_causal=case.is_causal, explain=True
        )
    result.way, result.why = explanation.way, str(explanation)
    return _attention_work(case, attention, inputs, encoding.parameters())


def our_encoding(case: Case, name: str, device: torch.device | str, dtype: torch.dtype) -> Encoding:
    """An encoding for the work of a case, its learned parameters moved away from zero."""
    encoding = create_encoding(_spec(name), case.num_heads, case.head_dim, case.key_grid, device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoding.train(case.mode == "training")


def _our_model(case: Case, name: str, images: Tensor, result: Result) -> Callable[[], object]:
    return _model_work(case, timm.create_model(f"relpos2d_{case.model}", encoding=_spec(name)), images)


def _their_model(case: Case, images: Tensor, result: Result) -> Callable[[], object]:
    return _model_work(case, timm.create_model(case.model), images)


def _model_work(case: Case, model: nn.Module, images: Tensor) -> Callable[[], object]:
    """A forward, or a forward and the gradients of all parameters, of a whole model."""
    model = model.to(images).train(case.mode == "training")
    if case.mode == "forward":
        return lambda: model(images)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return lambda: torch.autograd.grad(model(images).float().square().mean(), parameters, allow_unused=True)


def _spec(name: str) -> str | list[str]:
    return name.split("+") if "+" in name else name


def _measure(
    contestants: list[_Contestant], pairs: int, device: torch.device, mode: str, rng: random.Random
) -> list[list[str]]:
    """Warm every contestant up, then time all of them in each round; returns the order of each round."""
    with torch.set_grad_enabled(mode == "training"):
        for contestant in contestants:
            _attempt(contestant, _warm_up, device)
        orders = []
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            for _ in range(pairs):
                order = [contestant for contestant in contestants if not contestant.result.error]
                rng.shuffle(order)
                for contestant in order:
                    _attempt(contestant, _time, device)
                orders.append([contestant.result.name for contestant in order])
        finally:
            if was_enabled:
                gc.enable()
    return orders


def _warm_up(contestant: _Contestant, device: torch.device) -> None:
    contestant.run()  # caches, and what is compiled
    once = _seconds(contestant.run, 1, device)
    if once < SECONDS_PER_TIMING:
        once = _seconds(contestant.run, 5, device)
    contestant.result.repeats = max(1, math.ceil(SECONDS_PER_TIMING / max(once, 1e-6)))


def _time(contestant: _Contestant, device: torch.device) -> None:
    result = contestant.result
    result.seconds.append(_seconds(contestant.run, result.repeats, device))


def _seconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one call, as the mean of `repeats` calls in a row."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3 / repeats
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - begin) / repeats


def _measure_memory(contestants: list[_Contestant], device: torch.device, mode: str) -> None:
    with torch.set_grad_enabled(mode == "training"):
        for contestant in contestants:
            _attempt(contestant, _weigh, device)


def _weigh(contestant: _Contestant, device: torch.device) -> None:
    contestant.result.peak_bytes = peak_bytes(contestant.run, device)


def _attempt(
    contestant: _Contestant, action: Callable[[_Contestant, torch.device], object], device: torch.device
) -> None:
    """Do it; if that fails, the contestant is out, and its error is what remains."""
    if contestant.result.error:
        return
    try:
        action(contestant, device)
    except Exception as error:
        contestant.result.error = _told(error)
        contestant.result.seconds = []
        contestant.run = lambda: None


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip()


def _compare(results: list[Result], case: Case) -> list[str]:
    """Fill in the ratios, round by round; returns the names that contestants are compared to."""
    references = [
        row for row in results if row.seconds and (row.role == "baseline" or (case.model and row.role == "rival"))
    ]
    for reference in references:
        for row in results:
            if row is not reference and row.seconds:
                values = [own / its for own, its in zip(row.seconds, reference.seconds, strict=True)]
                row.ratios[reference.name] = median_ratio(values)
    return [reference.name for reference in references]


def _machine(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    packages = ("relpos2d", "timm", "transformers", "x-transformers", "rotary-embedding-torch")
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {package: version(package) for package in packages},
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "device_type": device.type,
        "dtype": str(dtype).split(".")[1],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _as_json(result: CaseResult) -> dict[str, Any]:
    case = result.case
    facts = {key: value for key, value in vars(case).items() if key not in ("groups", "on_request")}
    return {
        **facts,
        "queries": str(case.queries),
        "keys": str(case.key_grid),
        "work": result.work,
        "references": result.references,
        "results": [asdict(row) for row in result.results],
        "left_out": result.left_out,
        "orders": result.orders,
    }


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write aside, then rename, so that what is there is always whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _shortened(text: str, length: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."
