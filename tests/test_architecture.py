"""Which room may import which, read from the source (the rule stands in CONTRIBUTING.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "core": set(),
    "quantize": {"core"},
    "placement": {"core"},
    "calibrate": {"core"},
    "packs": {"core", "quantize", "placement", "calibrate"},
    "fidelity": {"core", "quantize", "placement", "calibrate", "packs"},
    "cli": {"core", "quantize", "placement", "calibrate", "packs", "fidelity"},
}


def imported_rooms(file: Path, room: str) -> set[str]:
    """Rooms that a file imports, relatively or as moefit.*."""
    depth = len(file.relative_to(ROOT / room).parts)  # dots that lead to the package's top
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("moefit")]
            assert not names, f"{file}: imports inside the package are relative, found {names}"
        if not isinstance(node, ast.ImportFrom):
            continue
        assert not (node.level == 0 and (node.module or "").startswith("moefit")), f"{file}: use a relative import"
        above = node.level - depth
        if room == "core" or above < 1:
            continue
        assert above == 1, f"{file}: leaves the package"
        first = (node.module or "").split(".")[0]
        targets = [first] if first else [alias.name for alias in node.names]
        rooms |= {t if t in MAY_IMPORT else "core" for t in targets}
    return rooms - {room}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        forbidden = imported_rooms(file, room) - MAY_IMPORT[room]
        assert not forbidden, f"{file.relative_to(ROOT)} imports {sorted(forbidden)}"


def test_placement_does_not_import_torch() -> None:
    """But where a .pt file is read, inside that function; tests/placement imports the whole room without torch."""
    for file in (ROOT / "placement").rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module or ""} if isinstance(node, ast.ImportFrom) and not node.level else set()
        may = {"torch"} if file.name == "torchfile.py" else set()
        assert not {name for name in names if name.split(".")[0] == "torch"} - may, file


def test_no_file_is_too_long() -> None:
    for room in [*MAY_IMPORT, "tests", "benchmarks", "examples"]:
        for file in (ROOT / room).rglob("*.py"):
            assert len(file.read_text().splitlines()) <= 500, file
