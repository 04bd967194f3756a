"""What a swap did to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SwapReport:
    """What was kept, removed and added, and whether the function is the same as before.

    Args:
        family: of the backbone: "vit", "swin", "swinv2".
        encoding: what was asked for, as a name, a mapping or a list.
        absolute: what became of the absolute position embedding: "keep", "fade", "remove", or that there was none.
        num_attentions: attention modules that have an encoding now.
        taken_over: native position parameters that live on inside an encoding.
        same_function: the model computes what it computed before (no position it knew is lost, none is new).
        kept, removed, added: parameter names, as they were (kept, removed) and as they are (added).
        strength: at which each encoding of one attention starts, by name.
    """

    family: str
    encoding: str | Mapping[str, Any] | Sequence[Any]
    absolute: str
    num_attentions: int
    taken_over: list[str]
    same_function: bool
    kept: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    strength: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        def some(names: list[str]) -> str:
            return f"{len(names)}" + (f" ({names[0]}{', ...' if len(names) > 1 else ''})" if names else "")

        lines = [
            f"position encoding of {self.num_attentions} attentions ({self.family}): {self.encoding}",
            f"  function      {'the same as before' if self.same_function else 'changed'}",
            f"  strength      {', '.join(f'{name} {value:g}' for name, value in self.strength.items())}",
            f"  absolute      {self.absolute}",
            f"  kept          {some(self.kept)} parameters",
            f"  taken over    {', '.join(self.taken_over) or 'nothing'}",
            f"  removed       {some(self.removed)}",
            f"  added         {some(self.added)}",
        ]
        return "\n".join(lines)
