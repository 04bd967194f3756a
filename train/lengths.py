"""`python -m train.lengths RUN...`: how the perplexity of language models changes with the length that they read at once."""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from torch import Tensor, nn

from relpos2d import Encoding
from train.compare import COLOURS, group_runs, mean_and_deviation
from train.data.description import check_same_tokenizer
from train.report import FAINT, readable, save
from train.restore import Restored, restore, to_device
from train.tasks.language_modeling import perplexity, text_windows
from train.tasks.texts import next_token_losses
from train.tool import positive, run_command, run_tool

TOKENS_AT_ONCE = 8192
STYLES = ("-", "--", ":", "-.")
DEFAULT_LENGTHS = (1, 2, 4, 8, 16, 32)  # times the length of training


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.lengths",
        description="Perplexity of trained language models on the same test text, read in windows of each length that do not "
        "overlap. Runs that differ in nothing but the seed are one row: mean and standard deviation over the seeds.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs of language_modeling")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        metavar="N",
        help="in tokens (default: 1, 2, 4 ... 32 times the training's)",
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw the table there")
    parser.add_argument(
        "--max-tokens", type=positive, default=65536, metavar="N", help="read at most so many (default: 65536)"
    )
    parser.add_argument(
        "--memory-limit", type=positive, metavar="BYTES", help="of each attention, as attend() takes it"
    )
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1, ...")
    return run_tool(lengths, parser.parse_args(arguments))


def lengths(given: argparse.Namespace) -> int:
    device = to_device(given.device)
    read_test = test_texts()
    rows: dict[str, Row] = {}
    for label, folders in group_runs([Path(run) for run in given.runs]).items():
        for folder in folders:
            restored = restored_language_model(folder)
            own = restored.description.max_length
            row = rows.setdefault(label, Row(own, with_places_of_its_own(restored)))
            tokens = read_test(restored)[: given.max_tokens + 1].to(device)
            restored.model.to(device)
            for length in given.lengths or [own * times for times in DEFAULT_LENGTHS]:
                try:
                    loss = mean_loss(restored.model, tokens, length, given.memory_limit)
                    row.perplexities.setdefault(length, []).append(perplexity(loss))
                except ValueError as error:
                    row.refusals[length] = " ".join(str(error).split())
    ordered = sorted({length for row in rows.values() for length in (*row.perplexities, *row.refusals)})
    print(table(rows, ordered))
    for note in notes(rows):
        print(f"\n{note}")
    if given.picture:
        print(f"\npicture {readable(draw(rows, Path(given.picture)))}")
    return 0


@dataclass
class Row:
    """What is known of the runs of one config.

    Attributes:
        trained: the length of training.
        with_places: absolute encodings that have learned something for each place.
        perplexities: by length, one a run.
        refusals: what was said at a length.
    """

    trained: int
    with_places: list[str]
    perplexities: dict[int, list[float]] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)

    def cell(self, length: int) -> str:
        return "refused" if length in self.refusals else mean_and_deviation(self.perplexities.get(length, []))


def restored_language_model(folder: Path) -> Restored:
    """The trained model of a run.

    Raises:
        ValueError: the run is of another task.
    """
    restored = restore(folder)
    if restored.config.task != "language_modeling":
        raise ValueError(f"{folder}: is a run of {restored.config.task}; wanted: runs of language_modeling")
    return restored


def test_texts() -> Callable[[Restored], Tensor]:
    """Reads the test text of a run, once for all runs with the same data, which all must have.

    Raises (when called):
        ValueError: other data or another tokenizer than the first run's, or than the run's own.
    """
    first: dict[str, Any] = {}

    def read(restored: Restored) -> Tensor:
        about = restored.description
        if first and first["tokenizer"] != about.tokenizer:
            raise ValueError(
                f"{restored.folder}: its test text or tokenizer is another than that of {first['folder']}; perplexities of "
                f"different tokens cannot be compared"
            )
        if not first:
            data: Any = restored.config.data.load(restored.config.seed)
            check_same_tokenizer(data.tokenizer, about)
            first.update(tokenizer=about.tokenizer, folder=restored.folder, tokens=data.test.tokens)
        return first["tokens"]

    return read


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: Tensor, length: int, memory_limit: int | None = None) -> float:
    """Mean cross entropy in nats of all tokens but the first, each read once, in windows of a length.

    Raises:
        ValueError: the model or its encoding refuses the length.
    """
    total, count = 0.0, 0
    for batch in batched(text_windows(tokens, length), max(1, TOKENS_AT_ONCE // length)):
        counts = torch.full((len(batch),), batch.shape[1] - 1, device=batch.device)
        losses = next_token_losses(model(batch[:, :-1], memory_limit=memory_limit), batch, counts)
        total, count = total + float(losses.sum(dtype=torch.float64)), count + int(counts.sum())
    return total / count


def batched(windows: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Windows of the same length, at most `size` at a time."""
    for _, same in groupby(windows, key=len):
        members = list(same)
        for start in range(0, len(members), size):
            yield torch.stack(members[start : start + size])


def table(rows: Mapping[str, Row], ordered: Sequence[int]) -> str:
    """Markdown: a row a config, a column a length."""
    lines = [["perplexity at", *(f"{length:,}" for length in ordered)], ["---"] * (len(ordered) + 1)]
    lines += [[label, *map(row.cell, ordered)] for label, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def notes(rows: Mapping[str, Row]) -> Iterator[str]:
    """What the table does not tell: the length of training, what was refused, and absolute places that were never learned."""
    for length, labels in grouped((row.trained, label) for label, row in rows.items()):
        yield f"trained at {length:,} tokens: {', '.join(labels)}"
    for label, row in rows.items():
        for text, at in grouped((text, f"{length:,}") for length, text in sorted(row.refusals.items())):
            yield f"refused: {label} at {', '.join(at)}: {text}"
        beyond = [f"{length:,}" for length in sorted(row.perplexities) if length > row.trained]
        if row.with_places and beyond:
            yield (
                f"{label} at {', '.join(beyond)}: {' and '.join(row.with_places)} knows the {row.trained:,} places of training "
                f"alone; every token beyond them is given the position of the last one"
            )


def with_places_of_its_own(restored: Restored) -> list[str]:
    """The absolute encodings of a model that have parameters: they know no place beyond those of training."""
    found = {
        module.name: None
        for module in restored.model.modules()
        if isinstance(module, Encoding) and module.family == "absolute" and any(True for _ in module.parameters())
    }
    return list(found)


def grouped(pairs: Iterable[tuple[Any, str]]) -> list[tuple[Any, list[str]]]:
    """The second members by their first, in order of appearance."""
    found: dict[Any, list[str]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return list(found.items())


def draw(rows: Mapping[str, Row], path: Path) -> Path:
    """Perplexity against length, both logarithmic: mean over the seeds as a line, lowest to highest as a band."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for length in sorted({row.trained for row in rows.values()}):
        axes.axvline(length, color=FAINT, linewidth=6, zorder=0)
        axes.annotate("training", (length, 0.99), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=8)
    for number, (label, row) in enumerate(rows.items()):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        found = {n: [v for v in values if math.isfinite(v)] for n, values in sorted(row.perplexities.items())}
        found = {n: values for n, values in found.items() if values}
        at = list(found)
        means = [sum(v) / len(v) for v in found.values()]
        axes.plot(at, means, color=colour, linestyle=style, label=label, marker="o", markersize=3, linewidth=1.4)
        axes.fill_between(
            at, [min(v) for v in found.values()], [max(v) for v in found.values()], color=colour, alpha=0.15
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({length for row in rows.values() for length in row.perplexities}))
    axes.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
    for formats in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formats(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.set(xlabel="tokens read at once", ylabel="perplexity on the test text")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return save(figure, path)


if __name__ == "__main__":
    run_command(main)
