"""Is it really relative? Gives every place the same query and the same key and looks at what an encoding makes of the pairs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from relpos2d.encoding import Encoding, Projections
from relpos2d.positions import Grid, Points, Positions

MAX_PLACES = 2500

#: allowed error as a share of the differences that the encoding itself makes between offsets
RELATIVE_TOLERANCE = 1e-5
#: allowed error, and the least difference that counts, as a share of the largest score; all is computed in float64
ROUNDING = 1e-12


class CheckError(ValueError):
    """An encoding lacks a property of a relative encoding.

    Attributes:
        encoding: class name of the encoding.
        property_name: what it lacks, as in the table of the report.
    """

    def __init__(self, encoding: Encoding, grid: Grid, property_name: str, details: str) -> None:
        self.encoding, self.property_name = type(encoding).__name__, property_name
        super().__init__(f"check: {self.encoding} on {grid} fails at '{property_name}': {details}")


@dataclass(frozen=True)
class CheckedProperty:
    """One line of a report: the largest error that was measured and what was allowed, or only an observation."""

    name: str
    error: float | None = None
    allowed: float | None = None
    observation: str = ""


@dataclass
class CheckReport:
    """What `check` measured; printed as a table. It exists only if every property holds."""

    encoding: str
    grid: Grid
    properties: list[CheckedProperty] = field(default_factory=list)

    def __getitem__(self, name: str) -> CheckedProperty:
        """The line of a property, by its name in the table."""
        return {line.name: line for line in self.properties}[name]

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.properties)
        lines = [f"{self.encoding} on {self.grid}: all properties hold", ""]
        lines.append(f"  {'property':<{width}}  {'largest error':>13}  {'allowed':>8}")
        for line in self.properties:
            if line.error is None:
                lines.append(f"  {line.name:<{width}}  {line.observation:>13}")
            else:
                lines.append(f"  {line.name:<{width}}  {line.error:>13.1e}  {line.allowed:>8.1e}")
        return "\n".join(lines)


def check(encoding: Encoding, grid: Grid) -> CheckReport:
    """Prove on a grid that an encoding is relative, or name the pair of tokens at which it is not.

    The encoding is left as it is: a float64 copy on the CPU is examined, first with its own parameters and strength, then with
    parameters redrawn, so that zeros hide nothing, at the strengths 1, 0.5 and 0. Use a grid with sides that differ: on a
    square one an exchange of its sides can go unseen.

    The properties: scores and gradients are finite; patch-patch scores depend on the offset alone (also at half strength) and
    are not constant (but for `none`); Points at the places of the grid give the same; what is added to the scores is
    constant within each block of prefix tokens; rotations leave prefix tokens unturned; at strength 0 nothing remains;
    a gradient reaches every parameter. An encoding that is blind to the direction of an offset, like ALiBi, is relative;
    the report mentions it.

    Args:
        encoding: any encoding, also a Combined one.
        grid: where to look; its prefix tokens are examined too.

    Raises:
        CheckError: a property does not hold; absolute encodings among others. It is a ValueError.
        ValueError: no encoding, no grid, axes that do not fit, fewer than 2 or more than 2500 places, or an encoding on the
            meta device.
    """
    _check_arguments(encoding, grid)
    given = copy.deepcopy(encoding).to("cpu", torch.float64).train()
    drawn = _redrawn(given)
    probe = _Probe(encoding, grid)
    probe.is_not_absolute(drawn)
    probe.is_relative(given, "depends on the offset alone")
    probe.is_relative(drawn, "the same, parameters redrawn")
    drawn.set_strength(0.5)
    probe.is_relative(drawn, "the same, at strength 0.5")
    drawn.set_strength(0.0)
    probe.is_nothing(drawn, "strength 0 adds nothing")
    drawn.set_strength(1.0)
    probe.tells_offsets_apart(drawn)
    probe.points_equal_grid(drawn)
    probe.prefix_blocks_are_constant(drawn)
    probe.prefix_is_not_turned(drawn)
    probe.gradient_reaches_all(drawn)
    return probe.report


class _Probe:
    """The same query and the same key for every place of a grid, and the questions asked with them."""

    def __init__(self, encoding: Encoding, grid: Grid) -> None:
        self.encoding, self.grid = encoding, grid
        self.report = CheckReport(type(encoding).__name__, grid)
        self.num_prefix = grid.num_prefix_tokens
        self.scale = encoding.head_dim**-0.5
        self.generator = torch.Generator().manual_seed(0)
        # two samples: no encoding may mix them up
        shape = (2, encoding.num_heads, 1, encoding.head_dim)
        self.query, self.key = self._draw(*shape), self._draw(*shape)
        self.direction = self._draw(encoding.head_dim)
        self.project = fixed_projections(encoding, self.query)
        self.index = list(itertools.product(*map(range, grid.shape)))
        self.offset_ids = _offset_ids(grid)

    def is_not_absolute(self, encoding: Encoding) -> None:
        name = "adds nothing to the tokens"
        num_heads, num_tokens = encoding.num_heads, self.grid.num_tokens
        token = self.query.flatten(1)[:, None].expand(-1, num_tokens, -1)
        with torch.no_grad():
            embedded = encoding.embed(token, self.grid)
        if torch.equal(embedded, token):
            return
        heads = embedded.unflatten(-1, (num_heads, -1)).transpose(1, 2)
        scores = self.scale * heads @ heads.transpose(-2, -1)
        parts = [type(part).__name__ for part in encoding.modules() if getattr(part, "family", "") == "absolute"]
        who = parts[0] if parts else type(encoding).__name__
        details = f"{who} is absolute, it adds to each token a vector of its place"
        if torch.isfinite(scores).all():
            differing = _worst_group(self._patches(scores), self.offset_ids)
            details += f", so that with the same token at every place {self._tell(*differing)}"
        raise self._error(name, details)

    def is_relative(self, encoding: Encoding, name: str) -> None:
        largest, allowed = 0.0, 0.0
        for what, values in self._pairs(encoding, self.grid):
            self._require_finite(values, f"the {what}")
            patches = self._patches(values)
            limit = _allowed(patches)
            worst = _worst_group(patches, self.offset_ids)
            if worst[-1] > limit:
                raise self._error(name, f"the {what} of pairs with one offset differ: {self._tell(*worst)}")
            largest, allowed = max(largest, worst[-1]), max(allowed, limit)
        self._passed(name, largest, allowed)

    def is_nothing(self, encoding: Encoding, name: str) -> None:
        expected = {"score": self.scale * (self.query * self.key).sum(-1, keepdim=True), "value": torch.zeros(())}
        largest, allowed = 0.0, ROUNDING * float(expected["score"].abs().max())
        for what, values in self._pairs(encoding, self.grid):
            reference = expected[what].to(values).expand_as(values)
            difference = (values - reference).abs()
            sample, head, row, column = _argmax(difference)
            largest = max(largest, float(difference.max()))
            if not largest <= allowed:
                at = (sample, head, row, column)
                raise self._error(
                    name,
                    f"the {what} of {self._pair(row, column)} in head {head} is {_number(values[at])}, "
                    f"without the encoding it is {_number(reference[at])}",
                )
        self._passed(name, largest, allowed)

    def tells_offsets_apart(self, encoding: Encoding) -> None:
        name = "tells offsets apart"
        by_offset = [_by_offset(self._patches(v), self.offset_ids) for _, v in self._pairs(encoding, self.grid)]
        # (kinds of pairs, samples, heads, offsets): nonzero where an offset is told from no offset
        none_at = by_offset[0].shape[-1] // 2
        differences = torch.stack([values - values[..., none_at, None] for values in by_offset])
        least = ROUNDING * max(float(values.abs().max()) for values in by_offset)
        felt = differences.abs() > least
        num_heads = int(felt.any(-1).any(1).any(0).sum())
        if not num_heads and not _is_none(encoding):
            value = _number(by_offset[0][0, 0, none_at])
            near, far = self._pair(self.num_prefix, self.num_prefix), self._pair(self.num_prefix, -1)
            raise self._error(name, f"all scores are equal: {near} and {far} in head 0 both have {value}")
        along = [axis for axis, line in enumerate(_lines(felt.any(0).any(0).any(0), self.grid)) if line.any()]
        mirrored = [values - values.flip(-1) for values in by_offset]
        has_direction = any(float(values.abs().max()) > least for values in mirrored)
        self._observed(name, f"{num_heads} of {encoding.num_heads} heads")
        self._observed("  along the axes", ", ".join(map(str, along)) or "none")
        self._observed("  tells d from -d", "yes" if has_direction else "no")

    def points_equal_grid(self, encoding: Encoding) -> None:
        name = "Points equal Grid"
        places = self.grid.coords(dtype=torch.float64).expand(len(self.query), -1, -1)
        points = Points(places, num_prefix_tokens=self.num_prefix)
        largest, allowed = 0.0, 0.0
        both = zip(self._pairs(encoding, self.grid), self._pairs(encoding, points), strict=True)
        for (what, on_grid), (_, at_points) in both:
            self._require_finite(at_points, f"the {what} with Points")
            limit = _allowed(self._patches(on_grid))
            difference = (on_grid - at_points).abs()
            at = _argmax(difference)
            if difference[at] > limit:
                raise self._error(
                    name,
                    f"the {what} of {self._pair(at[2], at[3])} in head {at[1]} is {_number(on_grid[at])} "
                    f"with Grid and {_number(at_points[at])} with Points",
                )
            largest, allowed = max(largest, float(difference.max())), max(allowed, limit)
        self._passed(name, largest, allowed)

    def prefix_blocks_are_constant(self, encoding: Encoding) -> None:
        name = "constant within prefix blocks"
        if not self.num_prefix:
            return
        with torch.no_grad():
            added = self._added(encoding, self.grid)
        if added is None:
            return
        self._require_finite(added, "what is added to the scores")
        limit = _allowed(added)
        prefix, patches = slice(0, self.num_prefix), slice(self.num_prefix, None)
        blocks = {
            "prefix to patch": (prefix, patches),
            "patch to prefix": (patches, prefix),
            "prefix to prefix": (prefix, prefix),
        }
        largest = 0.0
        for block_name, (rows, columns) in blocks.items():
            block = added[..., rows, columns]
            spread = block.amax((-2, -1)) - block.amin((-2, -1))
            sample, head = _argmax(spread)
            if spread[sample, head] > limit:
                chosen = block[sample, head]
                told = []
                for row, column in (_argmax(chosen), _argmax(-chosen)):
                    pair = self._pair(row + (rows.start or 0), column + (columns.start or 0))
                    told.append(f"{pair} has {_number(chosen[row, column])}")
                raise self._error(name, f"in the block {block_name}, head {head}: {' but '.join(told)}")
            largest = max(largest, float(spread.max()))
        self._passed(name, largest, limit)

    def prefix_is_not_turned(self, encoding: Encoding) -> None:
        name = "prefix tokens are not turned"
        if not self.num_prefix:
            return
        x = self._draw(1, encoding.num_heads, self.grid.num_tokens, encoding.head_dim)
        largest, allowed = 0.0, ROUNDING * float(x.abs().max())
        for role in ("query", "key"):
            with torch.no_grad():
                turned = encoding.rotate(x, self.grid, role)
            self._require_finite_tokens(turned, role)
            difference = (turned - x)[:, :, : self.num_prefix].abs()
            at = _argmax(difference)
            if difference[at] > allowed:
                raise self._error(
                    name,
                    f"the {role} of {self._token(at[2])} in head {at[1]}, channel {at[3]}, goes in as {_number(x[at])} "
                    f"and comes out as {_number(turned[at])}",
                )
            largest = max(largest, float(difference.max()))
        self._passed(name, largest, allowed)

    def gradient_reaches_all(self, encoding: Encoding) -> None:
        name = "a gradient reaches every parameter"
        parameters = {n: p for n, p in encoding.named_parameters() if p.requires_grad}
        # prefix terms need prefix tokens, whether or not this grid has them
        grid = self.grid
        own_prefix = encoding.positions.num_prefix_tokens
        grid = Grid(*grid.shape, num_prefix_tokens=max(own_prefix, self.num_prefix), step=grid.step, origin=grid.origin)
        grads = self._grads(encoding, grid, parameters)
        if parameters and grads is None:
            raise self._error(name, f"the scores have no gradient at all, so {', '.join(parameters)} cannot learn")
        grads = grads or {}
        # terms for the parts of a text need tokens with types
        silent = {n: p for n, p in parameters.items() if n not in grads}
        if silent:
            grads |= self._grads(encoding, _with_types(grid), silent) or {}
        for parameter_name in parameters:
            if parameter_name not in grads:
                raise self._error(name, f"none reaches {parameter_name}")
            if not torch.isfinite(grads[parameter_name]).all():
                raise self._error(name, f"that of {parameter_name} is not finite")
        self._observed(name, f"{len(parameters)} of {len(parameters)}" if parameters else "it has none")

    def _grads(self, encoding: Encoding, pos: Positions, parameters: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The gradients, those that are not zero, of a sum over all pairs; None if it has none at all."""
        with torch.enable_grad():
            parts = [(values * self._draw(*values.shape)).sum() for _, values in self._pairs(encoding, pos, grad=True)]
            total = torch.stack(parts).sum()
            if not parameters or not total.requires_grad:
                return None
            grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        return {name: g for name, g in zip(parameters, grads, strict=True) if g is not None and g.any()}

    # What is examined ------------------------------------------------------------------------------------------------

    def _pairs(
        self, encoding: Encoding, pos: Positions, *, grad: bool = False
    ) -> list[tuple[str, Float[Tensor, "2 heads tokens tokens"]]]:
        """What the encoding makes of each pair: the score, and the value vectors (one number each) where it has any."""
        with torch.set_grad_enabled(grad):
            q, k = (x.expand(-1, -1, pos.num_tokens, -1) for x in (self.query, self.key))
            content = encoding.content(q, k)
            turned_q = encoding.rotate(q if content is None else q + content * encoding.strength, pos, "query")
            scores = self.scale * turned_q @ encoding.rotate(k, pos, "key").transpose(-2, -1)
            added = self._added(encoding, pos)
            found = [("score", scores if added is None else scores + added)]
            columns = []
            for key in range(pos.num_tokens):
                # all attention to one key: the output is the vector of the pair
                weights = q.new_zeros(*q.shape[:-1], pos.num_tokens)
                weights[..., key] = 1.0
                vectors = encoding.value(weights, pos, pos)
                if vectors is None:
                    return found
                columns.append(vectors @ self.direction)
            # a list and no generator: one that pauses inside would leave gradients switched off for its caller
            return [*found, ("value", torch.stack(columns, dim=-1))]

    def _added(self, encoding: Encoding, pos: Positions) -> Float[Tensor, "2 heads tokens tokens"] | None:
        """Numbers and vectors: what is added to the scores, without the product of turned queries and keys."""
        q, k = (x.expand(-1, -1, pos.num_tokens, -1) for x in (self.query, self.key))
        parts = [encoding.bias(pos, pos), encoding.score(q, k, pos, pos, self.scale, self.project)]
        shape = (len(q), encoding.num_heads, pos.num_tokens, pos.num_tokens)
        given = [part.to(torch.float64).expand(shape) for part in parts if part is not None]
        return torch.stack(given).sum(0) if given else None

    def _patches(self, values: Float[Tensor, "2 heads tokens tokens"]) -> Float[Tensor, "2 heads places places"]:
        return values[..., self.num_prefix :, self.num_prefix :]

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    # What is said ----------------------------------------------------------------------------------------------------

    def _passed(self, name: str, error: float, allowed: float) -> None:
        self.report.properties.append(CheckedProperty(name, error, allowed))

    def _observed(self, name: str, observation: str) -> None:
        self.report.properties.append(CheckedProperty(name, observation=observation))

    def _error(self, name: str, details: str) -> CheckError:
        return CheckError(self.encoding, self.grid, name, details)

    def _require_finite(self, values: Tensor, what: str) -> None:
        bad = ~torch.isfinite(values)
        if bad.any():
            at = _argmax(bad.to(torch.uint8))
            raise self._error(
                "finite", f"{what} of {self._pair(at[2], at[3])} in head {at[1]} is {_number(values[at])}"
            )

    def _require_finite_tokens(self, x: Tensor, role: str) -> None:
        bad = ~torch.isfinite(x)
        if bad.any():
            at = _argmax(bad.to(torch.uint8))
            raise self._error("finite", f"the {role} of {self._token(at[2])} in head {at[1]} becomes {_number(x[at])}")

    def _tell(self, head: int, first: tuple[int, int], second: tuple[int, int], a: float, b: float, _: float) -> str:
        p = self.num_prefix
        one, other = (self._pair(query + p, key + p) for query, key in (first, second))
        coords = [self._coordinates(place) for place in first]
        offset = _tuple([q - k for q, k in zip(*coords, strict=True)])
        return f"in head {head} {one} has {_number(a)} but {other} has {_number(b)}, both at offset {offset}"

    def _pair(self, row: int, column: int) -> str:
        return f"{self._token(row)} -> {self._token(column)}"

    def _token(self, token: int) -> str:
        token %= self.grid.num_tokens
        if token < self.num_prefix:
            return f"prefix {token}"
        return _tuple(self._coordinates(token - self.num_prefix))

    def _coordinates(self, place: int) -> list:
        grid = self.grid
        return [o + s * i for o, s, i in zip(grid.origin, grid.step, self.index[place], strict=True)]


def fixed_projections(encoding: Encoding, like: Tensor) -> Projections:
    """Stand-ins for a host's projections of queries and of keys, always the same; on the device and in the dtype of `like`."""
    channels = encoding.num_heads * encoding.head_dim
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(2, channels, channels, generator=generator, dtype=torch.float64) * channels**-0.5
    of_query, of_key = weights.to(like)
    return (lambda x: x @ of_query), (lambda x: x @ of_key)


def _with_types(grid: Grid, num_places: int = 4) -> Points:
    """The first places of a grid for two samples, their types 0 and 1 in turn."""
    places = grid.coords(dtype=torch.float64)[:num_places].expand(2, -1, -1)
    types = (torch.arange(places.shape[1]) % 2).expand(2, -1)
    return Points(places, num_prefix_tokens=grid.num_prefix_tokens, token_types=types)


def _check_arguments(encoding: Encoding, grid: Grid) -> None:
    if not isinstance(encoding, Encoding):
        raise ValueError(f"check: {encoding!r} is no encoding; create_encoding makes one")
    if not isinstance(grid, Grid):
        raise ValueError(f"check: grid={grid!r} must be a Grid, for example Grid(5, 7)")
    if grid.num_axes != encoding.positions.num_axes:
        raise ValueError(
            f"check: {grid} has {grid.num_axes} axes, {type(encoding).__name__} is made for {encoding.positions}"
        )
    if not 2 <= grid.num_places <= MAX_PLACES:
        raise ValueError(f"check: {grid} has {grid.num_places} places, allowed are 2 to {MAX_PLACES}")
    if any(tensor.is_meta for tensor in (*encoding.parameters(), *encoding.buffers())):
        raise ValueError(f"check: {type(encoding).__name__} is on the meta device and has no values yet")


def _redrawn(encoding: Encoding) -> Encoding:
    """A copy at full strength with parameters drawn anew: signs are kept (some must stay positive), zeros are filled."""
    drawn = copy.deepcopy(encoding)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drawn.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(torch.where(parameter == 0, 0.1 * noise, parameter * (0.3 * noise).exp()))
    for module in drawn.modules():
        if isinstance(module, Encoding):
            module.set_strength(1.0)
    return drawn


def _is_none(encoding: Encoding) -> bool:
    parts = getattr(encoding, "parts", None)
    return all(_is_none(part) for part in parts) if parts is not None else encoding.name == "none"


def _offset_ids(grid: Grid) -> Tensor:
    """(places, places): a number for each distinct offset; offsets d and -d have numbers that mirror one another."""
    index = torch.tensor(list(itertools.product(*map(range, grid.shape))))
    ids = torch.zeros(len(index), len(index), dtype=torch.long)
    for axis, size in enumerate(grid.shape):
        ids = ids * (2 * size - 1) + (index[:, None, axis] - index[None, :, axis] + size - 1)
    return ids


def _lines(by_offset: Shaped[Tensor, "offsets"], grid: Grid) -> list[Tensor]:
    """For each axis what belongs to the offsets along it alone."""
    lattice = by_offset.unflatten(0, [2 * size - 1 for size in grid.shape])
    centre = [size - 1 for size in grid.shape]
    return [lattice[tuple([*centre[:axis], slice(None), *centre[axis + 1 :]])] for axis in range(grid.num_axes)]


def _by_offset(values: Float[Tensor, "... places places"], offset_ids: Tensor) -> Float[Tensor, "... offsets"]:
    """Of each offset the largest value among its pairs."""
    num_offsets = int(offset_ids.max()) + 1
    flat = values.flatten(-2)
    start = flat.new_full((*flat.shape[:-1], num_offsets), float("-inf"))
    return start.scatter_reduce(-1, offset_ids.flatten().expand_as(flat), flat, "amax")


def _worst_group(
    values: Float[Tensor, "2 heads places places"], offset_ids: Tensor
) -> tuple[int, tuple[int, int], tuple[int, int], float, float, float]:
    """Where pairs of one offset differ most: head, the two pairs, their values, the difference."""
    spread = _by_offset(values, offset_ids) + _by_offset(-values, offset_ids)
    sample, head, group = _argmax(spread)
    chosen = values[sample, head]
    members = offset_ids == group
    high = _argmax(chosen.masked_fill(~members, float("-inf")))
    low = _argmax(-chosen.masked_fill(~members, float("inf")))
    a, b = float(chosen[high]), float(chosen[low])
    return head, (high[0], high[1]), (low[0], low[1]), a, b, a - b


def _allowed(values: Tensor) -> float:
    """The error to allow: a share of the differences between the values of a head, but at least their rounding."""
    spread = float((values.amax((-2, -1)) - values.amin((-2, -1))).max())
    return max(RELATIVE_TOLERANCE * spread, ROUNDING * max(1.0, float(values.abs().max())))


def _argmax(values: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(values.argmax(), values.shape))


def _number(value: float | Tensor) -> str:
    return f"{float(value):.6g}"


def _tuple(coordinates: list) -> str:
    inner = ", ".join(map(str, coordinates))
    return f"({inner},)" if len(coordinates) == 1 else f"({inner})"
