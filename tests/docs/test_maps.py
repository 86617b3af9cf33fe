"""The README.md of every import root is a map: a heading for each folder, a row for each module, and nothing else."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_ROOTS = ("proto", "kernels", "frontend", "scheduler", "worker", "evaluation")
# A heading `## `scheduler/core/` ...` names a folder below ROOT/octavo/, a row `| `events.py` | ... |` a module in it.
_HEADING = re.compile(r"^#+ `([\w./-]+/)`")
_ROW = re.compile(r"^\| `([\w.-]+\.(?:py|proto))` \| \S")


def mapped(readme: str) -> set[str]:
    found, folder = set[str](), ""
    for line in readme.splitlines():
        if heading := _HEADING.match(line):
            folder = heading[1]
        elif row := _ROW.match(line):
            assert f"{folder}{row[1]}" not in found, f"{folder}{row[1]} is told twice"
            found.add(f"{folder}{row[1]}")
    return found


def modules(portions: Path) -> set[str]:
    """Hand-written modules and .proto files below `portions`; an `__init__.py` is told by its folder's heading."""
    return {
        path.relative_to(portions).as_posix()
        for pattern in ("*.py", "*.proto")
        for path in portions.rglob(pattern)
        if "_pb2" not in path.name and path.name != "__init__.py"
    }


@pytest.mark.parametrize("root", IMPORT_ROOTS)
def test_each_module_is_in_its_map_and_each_row_is_a_module(root: str) -> None:
    readme = (ROOT / root / "README.md").read_text(encoding="utf-8")
    told, there = mapped(readme), modules(ROOT / root / "octavo")
    assert sorted(there - told) == [], "not in the map"
    assert sorted(told - there) == [], "in the map alone"


def test_a_map_is_read_by_folder() -> None:
    rows = ("# X", "## `a/` One", "| file | what |", "|---|---|", "| `b.py` | does b |", "### `a/c/` Two")
    text = "\n".join((*rows, "| `d.proto` | says d |", "| `e.py` |  |"))
    assert mapped(text) == {"a/b.py", "a/c/d.proto"}
