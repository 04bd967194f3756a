"""The work that the benchmark's contestants do: its cases, by name and by group."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from relpos2d.positions import Grid

MODES = ("forward", "training")

_GROUP_OF_KIND = {
    "windows": "windows",
    "sequence": "sequence",
    "image grid": "image",
    "decode": "decode",
    "model": "models",
}


@dataclass(frozen=True)
class Case:
    """One piece of work that all contestants do.

    Args:
        name: of the command line.
        kind: the panel of the picture it goes to.
        queries: places of the queries, and of the keys if `keys` is None.
        keys: places of the keys.
        batch: samples; images, where there are windows.
        num_windows: windows of an image along each axis; each is a sample of its own.
        is_shifted: with the mask of Swin's shifted windows, shifted by half a window.
        model: name of a timm model that is the work, in place of one attention.
        groups: names that choose it too, besides those that its kind and mode give.
        on_request: chosen by its name only.
    """

    name: str
    kind: str
    queries: Grid
    keys: Grid | None = None
    batch: int = 1
    num_heads: int = 8
    head_dim: int = 64
    mode: str = "forward"
    is_causal: bool = False
    num_windows: tuple[int, ...] = ()
    is_shifted: bool = False
    model: str = ""
    groups: tuple[str, ...] = ()
    on_request: bool = False

    @property
    def all_groups(self) -> tuple[str, ...]:
        """Every group that the case belongs to."""
        if self.on_request:
            return ()
        by_mode = ("training",) if self.mode == "training" and not self.model else ()
        causal = ("causal",) if self.is_causal else ()
        return (_GROUP_OF_KIND[self.kind], *by_mode, *causal, *self.groups, "all")

    @property
    def key_grid(self) -> Grid:
        return self.queries if self.keys is None else self.keys

    @property
    def num_samples(self) -> int:
        """Samples of one attention: images times windows."""
        return self.batch * math.prod(self.num_windows)

    def __str__(self) -> str:
        if self.model:
            return f"{self.model}, batch {self.batch}, {self.mode}"
        tokens = str(self.queries.num_tokens)
        if self.keys is not None:
            tokens += f" x {self.keys.num_tokens}"
        words = [f"{self.num_samples} x {self.num_heads} heads x {tokens} tokens x {self.head_dim} channels"]
        words += ["shifted"] if self.is_shifted else []
        words += ["causal"] if self.is_causal else []
        return ", ".join([*words, self.mode])


def standard_cases() -> list[Case]:
    """The cases of the command line, by name; in the order in which they run."""
    cases = []
    for side, quick in ((7, ("quick",)), (12, ())):
        window: dict[str, Any] = {
            "kind": "windows",
            "queries": Grid(side, side),
            "batch": 4,
            "num_windows": (8, 8),
            "num_heads": 3,
            "head_dim": 32,
        }
        name = f"windows-{side}x{side}"
        cases += [
            Case(name, groups=quick, **window),
            Case(f"{name}-shifted", is_shifted=True, **window),
            Case(f"{name}-training", mode="training", groups=quick, **window),
            Case(f"{name}-shifted-training", mode="training", is_shifted=True, **window),
        ]
    for length in (1024, 2048, 4096, 8192):
        quick = ("quick",) if length == 1024 else ()
        cases.append(Case(f"1d-{length}", "sequence", Grid(length), groups=quick))
        if length in (1024, 4096):
            cases.append(Case(f"1d-{length}-training", "sequence", Grid(length), mode="training"))
    cases.append(Case("1d-32768-training", "sequence", Grid(32768), mode="training", on_request=True))
    cases.append(Case("causal-1024", "sequence", Grid(1024), is_causal=True))
    cases.append(Case("causal-4096", "sequence", Grid(4096), is_causal=True))
    for side in (32, 64, 96):
        quick = ("quick",) if side == 32 else ()
        cases.append(Case(f"2d-{side}x{side}", "image grid", Grid(side, side), groups=quick))
        if side < 96:
            cases.append(Case(f"2d-{side}x{side}-training", "image grid", Grid(side, side), mode="training"))
    patches = Grid(14, 14, num_prefix_tokens=1)
    cases.append(Case("vit-14x14", "image grid", patches, num_heads=6))
    cases.append(Case("vit-14x14-batch8", "image grid", patches, batch=8, num_heads=6))
    cases.append(Case("decode-8192", "decode", Grid(1, origin=8191), Grid(8192), groups=("quick",)))
    for model, shape, num_heads in (
        ("swin_tiny_patch4_window7_224", (7, 7), 3),
        ("swinv2_tiny_window8_256", (8, 8), 3),
        ("vit_small_patch16_224", (14, 14), 6),
    ):
        for mode in MODES:
            short = model.split("_patch")[0].split("_window")[0]
            quick = ("quick",) if (short, mode) == ("swin_tiny", "forward") else ()
            name = f"{short}-{'evaluation' if mode == 'forward' else mode}"
            cases.append(
                Case(name, "model", Grid(*shape), model=model, mode=mode, batch=2, num_heads=num_heads, groups=quick)
            )
    return cases


def choose_cases(names: Sequence[str] = ("quick",), *, mode: str | None = None, batch: int | None = None) -> list[Case]:
    """The standard cases that names of cases and groups choose, each once, in their own order.

    Args:
        names: of cases or groups.
        mode: only cases that are "forward" or "training".
        batch: samples (images) in place of those of the case.

    Raises:
        ValueError: an unknown name (with the nearest right one), or nothing left to run.
    """
    cases = standard_cases()
    known = list(dict.fromkeys(name for case in cases for name in (*case.all_groups, case.name)))
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            nearest = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"bench: unknown case {name!r}; {nearest}`relpos2d bench --list` shows all")
    if mode is not None and mode not in MODES:
        raise ValueError(f"bench: mode={mode!r} must be one of {', '.join(MODES)}")
    chosen = [case for case in cases if {case.name, *case.all_groups} & set(names) and mode in (None, case.mode)]
    if not chosen:
        raise ValueError(f"bench: no case of {', '.join(names)} has mode={mode!r}")
    return chosen if batch is None else [replace(case, batch=batch) for case in chosen]


def cases_table() -> str:
    """Name, work and groups of every standard case, as aligned text."""
    rows = [["case", "work", "groups"]]
    rows += [[case.name, str(case), ", ".join(case.all_groups) or "(only by its name)"] for case in standard_cases()]
    return aligned(rows)


def case_mask(case: Case, device: torch.device | str, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of the windows of a case, (samples, 1, tokens, tokens); None without shifted windows.

    As in Swin: -100 where query and key lie on different sides of the seam that the shift makes in the image.
    """
    if not case.is_shifted:
        return None
    sides = []
    for count, size in zip(case.num_windows, case.queries.shape, strict=True):
        place = torch.arange(count * size, device=device).reshape(count, size)
        sides.append((place >= count * size - size // 2).long())
    rows, columns = sides  # (windows along the axis, tokens along the axis)
    region = 2 * rows[:, None, :, None] + columns[None, :, None, :]
    region = region.flatten(2).flatten(0, 1)
    differ = region[:, :, None] != region[:, None, :]
    return (-100.0 * differ.to(dtype)).repeat(case.batch, 1, 1).unsqueeze(1)


def aligned(rows: list[list[str]]) -> str:
    """Rows of cells as text, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
