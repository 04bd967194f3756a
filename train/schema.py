"""Typed nodes of a config: strict, closed, made from constructors where there is one, and told in plain words when wrong."""

import difflib
import inspect
import json
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model


class ConfigError(ValueError):
    """Everything that is wrong with a config, one problem a line."""

    def __init__(self, config: str, problems: list[str]):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"config {config}: {count}", *(f"  - {problem}" for problem in problems)]))


class Node(BaseModel):
    """One group of a config. Unknown keys are refused and values are not converted: `"3"` is no number, `3.5` no count."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def given(self) -> dict[str, Any]:
        """The keys that the config sets, without `name`: what goes on to a constructor with defaults of its own."""
        return {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set - {"name"}}


class AnyNode(Node):
    """Stands in for a group whose name is wrong, so that the other groups are checked all the same."""

    model_config = ConfigDict(extra="allow")


NodeT = TypeVar("NodeT", bound=Node)


def node_from_parameters(
    name: str, parameters: Mapping[str, inspect.Parameter], base: type[NodeT], leave_out: Iterable[str] = ()
) -> type[NodeT]:
    """A node called `name` whose keys are the parameters of a constructor, on top of the fields of `base`.

    Parameters that YAML cannot write (modules, functions, devices) are left out, as are those in `leave_out`.
    """
    fields: dict[str, Any] = {"name": (Literal[name], ...)}
    for key, parameter in parameters.items():
        if key in base.model_fields or key in leave_out or parameter.kind is parameter.VAR_KEYWORD:
            continue
        annotation = writable(parameter.annotation)
        if annotation is not None and is_writable(parameter.default):
            fields[key] = (annotation, ... if parameter.default is parameter.empty else parameter.default)
    return create_model(f"{base.__name__}[{name}]", __base__=base, **fields)


def is_writable(default: Any) -> bool:
    """Whether YAML can write a default."""
    if isinstance(default, tuple):
        return all(map(is_writable, default))
    return default in (inspect.Parameter.empty, None) or isinstance(default, (bool, int, float, str))


def writable(annotation: Any) -> Any:
    """The part of a type that YAML can write, or None: `float | Tensor` -> float, `str | type[Module]` -> str.

    What a mapping holds is for the constructor to judge: `Mapping[str, Any]` -> dict[str, Any].
    """
    if annotation in (int, float, str, bool, types.NoneType) or get_origin(annotation) is Literal:
        return annotation
    arguments = get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for part in map(writable, arguments) if part is not None]
        return Union[tuple(parts)] if set(parts) - {types.NoneType} else None  # noqa: UP007 (built from a list)
    if annotation in (dict, Mapping) or get_origin(annotation) in (dict, Mapping):
        return dict[str, Any]
    if get_origin(annotation) is tuple:
        members = tuple(part if part is Ellipsis else writable(part) for part in arguments)
        return tuple[members] if None not in members else None  # type: ignore[valid-type]
    return None


def validate(schema: type[NodeT], tree: dict[str, Any]) -> tuple[NodeT | None, list[str]]:
    """Checks a tree of plain values against a schema. Returns the node, or None and every problem in words."""
    try:
        return schema.model_validate_json(json.dumps(tree)), []  # JSON: a list may become a tuple, nothing else changes
    except ValidationError as error:
        found: dict[Any, list[Any]] = {}  # one line a path: a union of types reports once for each of its members
        for details in error.errors():
            path = key_path(details["loc"], tree)
            found.setdefault((path, details["type"] == "extra_forbidden"), []).append(details)
        return None, [describe(schema, path, details) for (path, _), details in found.items()]


def describe(schema: type[Node], path: tuple[str | int, ...], details: list[Any]) -> str:
    """One problem in words: the path, the value, what is allowed, the nearest right name."""
    where, value, kind = dotted(path), details[0]["input"], details[0]["type"]
    if kind == "extra_forbidden":
        siblings = sorted(fields_at(schema, path[:-1]))
        wanted = nearest(str(path[-1]), siblings)
        hint = f"did you mean {dotted((*path[:-1], wanted))}? " if wanted else ""
        return f"{where} = {value!r}: unknown key; {hint}Allowed here: {', '.join(siblings) or 'no keys'}"
    if kind == "missing":
        return f"{where}: missing; it has no default"
    if kind == "literal_error":
        expected = details[0]["ctx"]["expected"]
        wanted = nearest(str(value), [name.strip("' ") for name in expected.replace(" or ", ", ").split(",")])
        return f"{where} = {value!r}: must be {expected}" + (f"; did you mean {wanted}?" if wanted else "")
    if kind == "value_error":  # from a validator of ours, which knows better than we do what it was given
        message = details[0]["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    messages = dict.fromkeys(detail["msg"].removeprefix("Input ") for detail in details)
    return f"{where} = {value!r}: {', or '.join(messages)}"


def key_path(location: tuple[str | int, ...], tree: Any) -> tuple[str | int, ...]:
    """pydantic's location without the names of union members, which are no keys of the tree."""
    path: list[str | int] = []
    for position, key in enumerate(location):
        inside = key in tree if isinstance(tree, dict) else isinstance(tree, list) and isinstance(key, int)
        if inside and (isinstance(tree, dict) or int(key) < len(tree)):
            tree = tree[key]
        elif position < len(location) - 1 or not isinstance(tree, dict):
            continue
        path.append(key)
    return tuple(path)


def fields_at(schema: Any, path: tuple[str | int, ...]) -> list[str]:
    """The keys that the schema knows at a path."""
    for key in path:
        if isinstance(key, int):
            schema = get_args(schema)[key]
        else:
            schema = schema.model_fields[key].annotation
            nodes = [part for part in get_args(schema) if inspect.isclass(part) and issubclass(part, Node)]
            if get_origin(schema) is not tuple and nodes:  # an optional node
                schema = nodes[0]
    return list(schema.model_fields)


def dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar of `names`, if one is similar at all."""
    matches = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown_name(what: str, name: Any, names: Iterable[str], where: str = "") -> str:
    """`encoding = 'tabel': unknown encoding; did you mean table? Allowed: alibi, cpb, ...`"""
    names = sorted(names)
    wanted = nearest(str(name), names)
    hint = f"did you mean {wanted}? " if wanted else ""
    shown = names if len(names) <= 30 else [*names[:30], "..."]
    return f"{where or what} = {name!r}: unknown {what}; {hint}Allowed: {', '.join(shown) or 'none exist'}"
