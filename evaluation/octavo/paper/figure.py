"""Holds the results of an experiment: panels to draw, rows of the paper's digits beside ours, and further tables."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec import Struct


class How(StrEnum):
    """Says whether numbers come from a simulation, from real runs, or from arithmetic."""

    SIMULATED = "simulated"
    MEASURED = "measured"
    COMPUTED = "computed"
    NOT_RUN = "not run"


class Kind(StrEnum):
    """Says how a panel is drawn: curves, groups of bars, or bars on top of each other."""

    LINES = "lines"
    BARS = "bars"
    STACKED = "stacked"


class Series(Struct, frozen=True):
    """Holds one curve (`xs` and `ys`), or one bar for each of the panel's categories (`ys`; None: it has none).
    `paper`: the paper's digits."""

    label: str
    ys: Sequence[float | None]
    xs: Sequence[float] = []
    paper: bool = False


class Panel(Struct, frozen=True, kw_only=True):
    """Describes one pair of axes. `falls`: its curves are lowest at the right."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    kind: Kind = Kind.LINES
    categories: list[str] = []
    x_log: bool = False
    y_log: bool = False
    y_max: float | None = None
    falls: bool = False


class Row(Struct, frozen=True, kw_only=True):
    """Puts one of the paper's digits (`octavo.paper.digits`) beside ours. `value` is compared with the digit; `text` is
    what is shown. `on`: the machine of the measurement, or the settings of the simulation; `why`: the reason of a
    difference, or what decides the value."""

    digit: str
    text: str
    how: How
    on: str
    why: str
    value: float | None = None


class Table(Struct, frozen=True):
    """Shows more of what was found, as text."""

    title: str
    header: list[str]
    rows: list[list[str]]


class Figure(Struct, frozen=True, kw_only=True):
    """Holds a figure of the paper, as it came out here. `name` is that of its files; `notes` are what to know to read
    it."""

    name: str
    title: str
    notes: list[str] = []
    panels: list[Panel] = []
    rows: list[Row] = []
    tables: list[Table] = []


class Results(Struct, frozen=True):
    """Holds all figures, in the paper's order. `quick`: from traces so short that they only show that everything
    runs."""

    quick: bool
    figures: list[Figure]

    def write(self, path: Path) -> None:
        """Writes the results as JSON that people can read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read_results(path: Path) -> Results:
    """Reads what `Results.write` has written. Raises `OSError`, `msgspec.MsgspecError`."""
    return msgspec.json.decode(path.read_bytes(), type=Results)
