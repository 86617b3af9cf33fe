"""Prints the tables of benchmarks, and keeps their findings as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Returns one line of a table: the first cell to the left of its column, the others to the right of theirs."""
    first, *others = zip(cells, widths, strict=False)
    return "".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table whose columns are as wide as their cells, two blanks apart; its first row are heads.

    All rows have the same number of cells.
    """
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    yield from (line(row, [first, *(width + 2 for width in others)]) for row in rows)


def keep(findings: Any, path: Path | None) -> None:
    """Writes `findings` as JSON where a user has asked for it; dataclasses within become objects.

    The file is written whole or not at all, for a call may be cut off at any moment.
    """
    if path is None:
        return
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(findings, indent=1, default=_plain) + "\n", encoding="utf-8")
    partial.replace(path)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON has")
