"""Holds the results of an experiment, panels to draw, rows of the paper's digits beside ours, and further tables; and
draws them as files: SVG for the page, PNG for everything else."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import matplotlib
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from msgspec import Struct

# -- results ----------------------------------------------------------------------------------------------------------


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


# -- drawing ----------------------------------------------------------------------------------------------------------


# Okabe and Ito's colours, which those who see few colours can tell apart; a system has the same in all figures.
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_OF_SYSTEM: Final = {
    "FasterTransformer": ("#7f7f7f", "x"),
    "Orca (Max)": ("#cc79a7", "^"),
    "Orca (Pow2)": ("#e69f00", "s"),
    "Orca (Oracle)": ("#d55e00", "D"),
    "vLLM": ("#0072b2", "o"),
}
_MOST_COLUMNS: Final = 3
_STYLE: Final[Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    # The same bytes for the same data.
    "svg.hashsalt": "octavo",
    "svg.fonttype": "none",
}


def draw(figure: Figure, directory: Path) -> list[Path]:
    """Writes `NAME.svg` and `NAME.png` there; which they are."""
    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        canvas = _canvas(figure)
        svg, png = (directory / f"{figure.name}.{kind}" for kind in ("svg", "png"))
        canvas.savefig(svg, metadata={"Date": None, "Creator": None})
        canvas.savefig(png, dpi=130, metadata={"Software": None})
    # Some lines of an SVG end with blanks.
    svg.write_text("".join(f"{line.rstrip()}\n" for line in svg.read_text("utf-8").splitlines()), encoding="utf-8")
    return [svg, png]


def _canvas(figure: Figure) -> Canvas:
    columns = min(_MOST_COLUMNS, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    canvas = Canvas(figsize=(max(4.2 * columns, 5.5), 3.1 * rows + 0.3), layout="constrained")
    grid = canvas.subplots(rows, columns, squeeze=False)
    places: list[Axes] = list(grid.flat)
    for axes, panel in zip(places, figure.panels, strict=False):
        draw_panel(axes, panel)
    for axes in places[len(figure.panels) :]:
        axes.remove()
    canvas.suptitle(figure.title, fontsize=10.5)
    return canvas


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draws it with its legend."""
    {Kind.LINES: _lines, Kind.BARS: _bars, Kind.STACKED: _stacked}[panel.kind](axes, panel)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.x_log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.y_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0, top=panel.y_max)
    if panel.kind is Kind.STACKED:
        axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    elif len(panel.series) > 1:
        axes.legend(fontsize=7.5, loc="upper right" if panel.falls else "upper left")


def _lines(axes: Axes, panel: Panel) -> None:
    others = cycle(zip(_COLOURS, "osD^vPX", strict=True))
    for series in panel.series:
        colour, marker = _OF_SYSTEM.get(series.label) or next(others)
        axes.plot(
            series.xs, _drawn(series), label=series.label, color=colour, marker=marker, markersize=3.5, linewidth=1.3
        )


def _bars(axes: Axes, panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    for number, (series, colour) in enumerate(zip(panel.series, cycle(_COLOURS))):
        places = [place + (number - (len(panel.series) - 1) / 2) * width for place in range(len(panel.categories))]
        bars = axes.bar(places, _drawn(series), width * 0.92, label=series.label, color=colour)
        if series.paper:
            for bar in bars:
                bar.set(facecolor="white", edgecolor="#555555", hatch="////")
        names = ["" if value is None else f"{value:.3g}" for value in series.ys]
        axes.bar_label(bars, names, fontsize=6.5, padding=1)
    # Room for the legend.
    axes.margins(y=0.25)
    _name_categories(axes, panel)


def _stacked(axes: Axes, panel: Panel) -> None:
    bottoms = [0.0] * len(panel.categories)
    for series, colour in zip(panel.series, cycle(_COLOURS)):
        values = _drawn(series)
        bars = axes.bar(range(len(panel.categories)), values, 0.65, bottom=bottoms, label=series.label, color=colour)
        names = [f"{value:.3g}" if value >= 3 else "" for value in values]
        axes.bar_label(bars, names, label_type="center", fontsize=7, color="white")
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    _name_categories(axes, panel)


def _drawn(series: Series) -> list[float]:
    return [0.0 if value is None else value for value in series.ys]


def _name_categories(axes: Axes, panel: Panel) -> None:
    axes.set_xticks(range(len(panel.categories)), panel.categories, fontsize=7.5)
    axes.grid(visible=False, axis="x")
