"""What an experiment has found: rows of named values, which a terminal shows as a table and a file keeps as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.bench.measured.machine import Machine

Value = str | int | float | None


@dataclass(frozen=True)
class Figure:
    """`name` becomes part of the file's name. All rows have the same keys, whose ends tell their units: `_ms`, `_us`,
    `_s`, `_per_s`, `_x` (a ratio), `_share`. `settings` say what was asked for, `notes` what to know of it."""

    name: str
    title: str
    machine: Machine
    settings: dict[str, Value]
    notes: list[str]
    rows: list[dict[str, Value]]

    def write(self, directory: Path) -> None:
        """Into `measured_NAME.json` there."""
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1)
        (directory / f"measured_{self.name}.json").write_text(text + "\n", encoding="utf-8")

    def to_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.title
        yield ", ".join(f"{name} {_cell(value)}" for name, value in self.settings.items())
        columns = [[name, *(_cell(row[name]) for row in self.rows)] for name in self.rows[0]]
        widths = [max(map(len, column)) for column in columns]
        for cells in zip(*columns, strict=True):
            first, *others = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            yield "  ".join([first, *(cell.strip().rjust(len(cell)) for cell in others)])
        yield from self.notes


def _cell(value: Value) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        case _:
            return str(value)
