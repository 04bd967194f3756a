"""The console script `relpos2d`: list the encodings, check one, draw one, swap one into a model, time them all.

Exit codes: 0 all went well, 1 the check found a fault, 2 the input was wrong.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
import types
import typing
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import timm
import torch

from relpos2d.backbones import swap
from relpos2d.encoding import Encoding
from relpos2d.encodings import EncodingInfo, create_encoding, encoding_class, encoding_options, list_encodings
from relpos2d.positions import Grid
from relpos2d.tools.bench import DTYPES, bench, result_table
from relpos2d.tools.cases import MODES, cases_table, choose_cases
from relpos2d.tools.check import MAX_PLACES, CheckError, check
from relpos2d.tools.plot import plot_maps

COLUMNS = ("name", "family", "axes", "formula", "paper")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Wrong input is told in one line on stderr."""
    parser = _parser()
    try:
        # options come after flags too, which argparse alone does not allow
        args, rest = parser.parse_known_args(arguments)
        unknown = [word for word in rest if word.startswith("-") or "=" not in word or not hasattr(args, "options")]
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if rest:
            args.options += rest
        args.command = ["relpos2d", *(sys.argv[1:] if arguments is None else arguments)]
        args.run(args)
    except SystemExit as stop:  # argparse: 0 after --help and --version, 2 after an error it has told
        return int(stop.code or 0)
    except CheckError as fault:
        print(fault, file=sys.stderr)
        return 1
    except (ValueError, ImportError, OSError) as error:
        print(f"relpos2d: {error}", file=sys.stderr)
        return 2
    return 0


def encodings_table(*, markdown: bool = False) -> str:
    """The table of all encodings as aligned text, or as markdown with links: the one in the README."""
    rows = [_cells(info, markdown) for info in list_encodings()]
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
        return "\n".join(lines)
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (COLUMNS, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def _cells(info: EncodingInfo, markdown: bool) -> list[str]:
    axes = "any" if info.axes is None else ", ".join(map(str, info.axes))
    if not markdown:
        return [info.name, info.family, axes, info.formula, info.paper]
    # a bar ends a cell even inside backticks
    formula = info.formula.replace("|", "\\|")
    paper = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\1)", info.paper)
    return [f"`{info.name}`", info.family, axes, f"`{formula}`", paper]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="relpos2d",
        description="Relative position encodings for vision transformers.",
        epilog="exit codes: 0 all went well, 1 the check found a fault, 2 the input was wrong",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"relpos2d {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser("list", help="the table of encodings", allow_abbrev=False)
    command.add_argument("--markdown", action="store_true", help="as in the README, with links to the papers")
    command.set_defaults(run=_list)

    command = commands.add_parser("check", help="prove that an encoding is relative", allow_abbrev=False)
    _add_encoding_arguments(command)
    command.set_defaults(run=_check)

    command = commands.add_parser("plot", help="draw what each head makes of every key", allow_abbrev=False)
    _add_encoding_arguments(command, "picture")
    command.set_defaults(run=_plot)

    command = commands.add_parser("swap", help="put an encoding into a timm model and report", allow_abbrev=False)
    command.add_argument("model", metavar="MODEL", help="name of a timm model, with fresh weights")
    command.add_argument("name", metavar="ENCODING", help="name of an encoding, or several with + between them")
    command.add_argument("--absolute", choices=("keep", "fade", "remove"), help="what becomes of a ViT's embedding")
    command.add_argument("options", metavar="key=value", nargs="*", help="options of the encoding")
    command.set_defaults(run=_swap)

    command = commands.add_parser(
        "bench", help="time encodings against attention without position, and against others", allow_abbrev=False
    )
    _add_bench_arguments(command)
    command.set_defaults(run=_bench)
    return parser


def _add_encoding_arguments(command: argparse.ArgumentParser, picture: str = "") -> None:
    command.add_argument("name", metavar="NAME", help="name of an encoding, or several with + between them")
    if picture:
        command.add_argument(picture, metavar="OUT.png", help="the picture to write")
    command.add_argument("options", metavar="key=value", nargs="*", help="options of the encoding, as theta=10.0")
    command.add_argument("--grid", type=_shape, default=(5, 7), metavar="HxW", help="tokens along each axis [5x7]")
    command.add_argument("--prefix", type=_count(0, 64), default=1, metavar="N", help="class and register tokens [1]")
    command.add_argument("--heads", type=_count(1, 256), default=3, metavar="N", help="attention heads [3]")
    command.add_argument("--head-dim", type=_count(1, 1024), default=24, metavar="N", help="channels per head [24]")


def _add_bench_arguments(command: argparse.ArgumentParser) -> None:
    yes_or_no = argparse.BooleanOptionalAction
    command.add_argument("cases", metavar="CASE", nargs="*", default=["quick"], help="case or group of cases [quick]")
    command.add_argument("--list", action="store_true", help="show the cases and groups, run nothing")
    command.add_argument("--mode", choices=MODES, help="only cases that are this")
    command.add_argument("--encodings", metavar="NAME", nargs="+", help="of ours only these; a sum has + between them")
    command.add_argument("--pairs", type=_count(1, 10_000), default=9, metavar="N", help="timed rounds [9]")
    command.add_argument("--threads", type=_count(1, 1024), metavar="N", help="of torch [its own choice]")
    command.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")
    command.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of inputs and parameters [float32]")
    command.add_argument(
        "--batch", type=_count(1, 100_000), metavar="N", help="samples, images of windows [the case's]"
    )
    command.add_argument("--rivals", action=yes_or_no, default=True, help="measure what else one would take, too")
    command.add_argument("--memory", action=yes_or_no, default=True, help="measure the peak memory, too")
    command.add_argument("--plot", action=yes_or_no, default=True, help="draw bench.png")
    command.add_argument("--seed", type=_count(0, 10**9), default=0, metavar="N", help="of numbers and orders [0]")
    command.add_argument("--markdown", action="store_true", help="tables as markdown")
    command.add_argument("--output", default="runs/bench", metavar="DIR", help="for bench.json, bench.png [runs/bench]")


def _list(args: argparse.Namespace) -> None:
    print(encodings_table(markdown=args.markdown))


def _check(args: argparse.Namespace) -> None:
    encoding = _encoding(args)
    print(check(encoding, encoding.positions))


def _plot(args: argparse.Namespace) -> None:
    encoding = _encoding(args)
    plot_maps({args.name: encoding}, args.picture, grid=Grid(*args.grid))
    print(f"wrote {args.picture}")


def _swap(args: argparse.Namespace) -> None:
    if not timm.is_model(args.model):
        close = difflib.get_close_matches(args.model.split(".")[0], timm.list_models(), n=1)
        raise ValueError(f"unknown timm model {args.model!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    spec, options = _spec(args)
    model = timm.create_model(args.model, pretrained=False)
    print(swap(model, spec, absolute=args.absolute, **options).swap_report)


def _bench(args: argparse.Namespace) -> None:
    if args.list:
        print(cases_table())
        return
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise ValueError(f"bench: device={args.device!r} is not there; allowed: cpu, cuda") from None
    results = bench(
        choose_cases(args.cases, mode=args.mode, batch=args.batch),
        encodings=args.encodings,
        pairs=args.pairs,
        threads=args.threads,
        device=device,
        dtype=DTYPES[args.dtype],
        rivals=args.rivals,
        memory=args.memory,
        seed=args.seed,
        output=args.output,
        plot=args.plot,
        command=args.command,
    )
    for result in results:
        print(result_table(result, markdown=args.markdown), end="\n\n", flush=True)
    print(f"wrote {args.output}/bench.json" + (f" and {args.output}/bench.png" if args.plot else ""))


def _encoding(args: argparse.Namespace) -> Encoding:
    spec, options = _spec(args)
    positions = Grid(*args.grid, num_prefix_tokens=args.prefix)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_encoding(spec, args.heads, args.head_dim, positions, **options)


def _spec(args: argparse.Namespace) -> tuple[str | list[str], dict[str, Any]]:
    """What create_encoding takes: a name or a list of names, and the options, their types checked."""
    options: dict[str, Any] = {}
    for word in args.options:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is no option; write key=value")
        if key in options:
            raise ValueError(f"option {key!r} is given twice")
        options[key] = _value(value)
    if "+" in args.name:
        return args.name.split("+"), options
    allowed = encoding_options(encoding_class(args.name))
    for key, value in options.items():
        if key in allowed and not _fits(value, allowed[key].annotation):
            kind = getattr(allowed[key].annotation, "__name__", None) or str(allowed[key].annotation)
            raise ValueError(f"option {key}={value!r} of {args.name!r} must be of the type {kind}")
    return args.name, options


def _value(text: str) -> Any:
    """A number, a tuple, True, False or None, as in Python; else the text itself."""
    text = {"true": "True", "false": "False", "null": "None"}.get(text, text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _fits(value: Any, annotation: Any) -> bool:
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in members)
    if origin is typing.Literal:
        return value in members
    if origin in (tuple, list):
        return isinstance(value, (tuple, list)) and all(_fits(entry, members[0]) for entry in value)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(annotation, type) or isinstance(value, annotation)


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(x[0-9]+){0,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no grid; write 5x7 (height x width), 35 or 3x5x7")
    shape = tuple(int(size) for size in text.split("x"))
    num_places = 1
    for size in shape:
        num_places *= size
    if not 1 <= num_places <= MAX_PLACES:
        raise argparse.ArgumentTypeError(f"{text} has {num_places} places, allowed are 1 to {MAX_PLACES}")
    return shape


def _count(least: int, most: int) -> typing.Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} to {most}")
        return int(text)

    return parse


def _version() -> str:
    try:
        return metadata.version("relpos2d")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
