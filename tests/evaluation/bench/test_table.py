"""Tables of benchmarks are aligned, and findings are kept whole or not at all."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.bench.table import keep, line, table


@dataclass(frozen=True)
class Finding:
    name: str
    ms: float | None


def test_the_first_cell_stands_left_and_the_others_right() -> None:
    assert line(("some", "1.5 ms", "2"), (6, 8, 3)) == "some    1.5 ms  2"
    assert line(("some", "1", ""), (6, 3, 9)) == "some    1"


def test_columns_are_as_wide_as_their_cells() -> None:
    assert list(table([("", "ms", "ratio"), ("a long name", "12.5", "3")])) == [
        "               ms  ratio",
        "a long name  12.5      3",
    ]


def test_rows_of_different_lengths_are_no_table() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        list(table([("", "ms"), ("a",)]))


def test_findings_are_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    keep({"rows": [Finding("a", 1.5), Finding("b", None)]}, path)
    assert json.loads(path.read_text()) == {"rows": [{"name": "a", "ms": 1.5}, {"name": "b", "ms": None}]}
    keep([Finding("c", 2.0)], path)
    assert json.loads(path.read_text()) == [{"name": "c", "ms": 2.0}]
    assert [each.name for each in tmp_path.iterdir()] == ["found.json"]
    keep([], None)


def test_what_cannot_be_kept_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    keep([1], path)
    with pytest.raises(TypeError, match="object is nothing that JSON has"):
        keep([object()], path)
    assert json.loads(path.read_text()) == [1]
