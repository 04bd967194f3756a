"""Imports go downward only, and names of files, encodings and tests agree."""

import ast
import importlib.util
from pathlib import Path

import pytest

from relpos2d import list_encodings

PACKAGE = Path(importlib.util.find_spec("relpos2d").submodule_search_locations[0])
TESTS = Path(__file__).parent

#: from the lowest room of the house to the highest; a room imports only from lower ones, or from itself
ROOMS = [
    *("eager", "positions", "interpolation", "rotation", "encoding", "attention", "scaling", "encodings"),
    *("tools", "backbones", "models", "cli"),
]


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path) -> set[str]:
    """Rooms of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "relpos2d" else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {room_of(name) for name in names if name.split(".")[0] in ("relpos2d", "train", "tests")}
        assert not any(name.split(".")[0] in ("train", "tests") for name in names), f"{path} imports upward"
    return found


MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", [m for m in MODULES if m != Path("__init__.py")], ids=str)
def test_imports_go_downward(path: Path) -> None:
    room = path.parts[0].removesuffix(".py")
    assert room in ROOMS, f"{room} is a new room: say in ROOMS on which floor it stands"
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for used in imports_of(PACKAGE / path):
        assert used in allowed, f"{path} imports relpos2d.{used}, which stands above it"


def test_file_name_is_encoding_name_is_test_name() -> None:
    files = {path.stem for path in (PACKAGE / "encodings").glob("*.py")} - {"__init__"}
    tests = {path.stem.removeprefix("test_") for path in (TESTS / "encodings").glob("test_*.py")}
    assert files == {info.name for info in list_encodings()}
    assert files <= tests
