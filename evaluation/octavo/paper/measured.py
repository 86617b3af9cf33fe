"""Puts what was measured on the real engine (`make paper-measured`) beside what was simulated."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from octavo.paper.digits import DIGITS
from octavo.paper.figure import Figure, How, Kind, Panel, Results, Row, Series

Value = str | int | float | None


class MeasuredRows(Struct, frozen=True):
    """Holds a file of `make paper-measured`: rows of named values, whose names end with their units."""

    name: str
    title: str
    machine: dict[str, Value]
    settings: dict[str, Value]
    notes: list[str]
    rows: list[dict[str, Value]]

    @property
    def on(self) -> str:
        """Describes the machine in a few words."""
        machine, model = self.machine, self.settings.get("model")
        return f"{f'{model}, ' if model else ''}{machine['threads']} threads of {machine['cpu']}"

    def column(self, name: str, **where: Value) -> list[float]:
        """Returns a column's numbers in the rows that have these values."""
        rows = (row for row in self.rows if all(row[key] == value for key, value in where.items()))
        return [float(value) for row in rows if isinstance(value := row[name], int | float)]

    def series(self, label: str, name: str, by: str = "block_size", **where: Value) -> Series:
        """Returns one column over another."""
        return Series(label, self.column(name, **where), self.column(by, **where))


class Addition(Struct, frozen=True):
    """Holds what measurements add to a figure."""

    panels: list[Panel]
    rows: list[Row]


# The default, and the smallest that our CPU kernels take.
_BLOCK_SIZE: Final = 16
_CPU_BLOCKS: Final = "blocks of 16 and more run our CPU kernels, smaller ones a slower way"


def _row(digit: str, measured: MeasuredRows, value: float | None, text: str, why: str) -> Row:
    return Row(digit=digit, value=value, text=text, how=How.MEASURED, on=measured.on, why=why)


def _by_block_size(title: str, y_label: str, series: list[Series]) -> Panel:
    return Panel(
        title=title, x_label="block size, tokens", y_label=y_label, series=series, x_log=True, y_log=True, falls=True
    )


def _kernel(measured: MeasuredRows) -> Addition:
    """Shows the default block size, over contexts."""
    batches = sorted({(str(row["heads"]), int(row["batch"] or 0)) for row in measured.rows})
    ratios = measured.column("over_contiguous_x", block_size=_BLOCK_SIZE)
    series = [
        measured.series(
            f"{heads}, {batch} at once",
            "over_contiguous_x",
            "context",
            heads=heads,
            batch=batch,
            block_size=_BLOCK_SIZE,
        )
        for heads, batch in batches
    ]
    panel = Panel(
        title="blocks of 16",
        x_label="context, tokens",
        y_label="paged over contiguous, time",
        series=series,
        x_log=True,
    )
    why = "ours is on a CPU: least at short contexts, most at 32 sequences of 1,024 tokens"
    return Addition([panel], [_row("fig18a", measured, median(ratios), _span(ratios), why)])


def _beams(measured: MeasuredRows) -> Addition:
    panels, rows = [], []
    for dataset in dict.fromkeys(str(row["dataset"]) for row in measured.rows):
        widths, saved = measured.column("width", dataset=dataset), measured.column("saved_share", dataset=dataset)
        panels.append(
            Panel(
                title=f"(b) {dataset}, measured on a real model",
                x_label="beam width",
                y_label="blocks saved, %",
                kind=Kind.BARS,
                categories=[f"{width:g}" for width in widths],
                series=[Series("ours", [100 * share for share in saved])],
            )
        )
        for width, share in zip(widths, saved, strict=True):
            digit, why = f"fig15/{dataset}/beam/{width:g}", "another model and its texts decide how soon beams meet"
            # The paper says nothing of some widths.
            if digit in DIGITS:
                rows.append(_row(digit, measured, 100 * share, f"{100 * share:.1f} %", why))
    return Addition(panels, rows)


def _prefixes(measured: MeasuredRows) -> Addition:
    why = "over the same engine without sharing, not over Orca; a CPU is bound by computation, which sharing saves"
    rows = []
    for tokens in dict.fromkeys(int(row["prefix_tokens"] or 0) for row in measured.rows):
        (ratio,) = measured.column("over_unshared_x", prefix_tokens=tokens, variant="pinned")
        rows.append(_row(f"fig16/{tokens}", measured, ratio, f"{ratio:.2f}×", why))
    return Addition([], rows)


def _block_sizes(measured: MeasuredRows) -> Addition:
    datasets = dict.fromkeys(str(row["dataset"]) for row in measured.rows)
    series = [measured.series(each, "normalised_latency_ms", dataset=each) for each in datasets]
    panel = _by_block_size("measured on the CPU worker", "normalised latency, ms/token", series)
    return Addition([panel], [_best_sizes(measured, dataset) for dataset in datasets])


def _best_sizes(measured: MeasuredRows, dataset: str) -> Row:
    sizes, latencies = (measured.column(name, dataset=dataset) for name in ("block_size", "normalised_latency_ms"))
    good = [size for size, each in zip(sizes, latencies, strict=True) if each <= 1.1 * min(latencies)]
    text = f"{good[0]:g} to {good[-1]:g}" if len(good) > 1 else f"{good[0]:g}"
    return _row(f"fig18b/{dataset}", measured, None, text, f"within 10 % of the least latency; {_CPU_BLOCKS}")


def _overheads(measured: MeasuredRows) -> Addition:
    columns = {
        "recompute": "recompute_ms",
        "swap in": "swap_in_ms",
        "swap out": "swap_out_ms",
        "swap in + out": "swap_both_ms",
    }
    series = [measured.series(label, name) for label, name in columns.items()]
    panel = _by_block_size("(a) measured on the CPU worker", "milliseconds", series)
    swaps, sizes = measured.column("swap_both_ms"), measured.column("block_size")
    kept = [each for size, each in zip(sizes, measured.column("recompute_ms"), strict=True) if size >= _BLOCK_SIZE]
    (default,) = measured.column("swap_both_ms", block_size=_BLOCK_SIZE)
    text = (
        f"recompute {min(kept):.0f} to {max(kept):.0f} ms from blocks of {_BLOCK_SIZE} on;"
        f" swap {swaps[0] / default:.1f}× as long at blocks of {sizes[0]:g} as of {_BLOCK_SIZE}"
    )
    why = "both pools are in the same memory: a swap is a copy, and recomputing needs a CPU's flops"
    return Addition([panel], [_row("fig19/steep", measured, None, text, f"{why}; {_CPU_BLOCKS}")])


def _preemption(measured: MeasuredRows) -> Addition:
    series = [measured.series(mode, f"{mode}_s") for mode in ("recompute", "swap")]
    panel = _by_block_size("(b) measured on the CPU worker", "seconds for all requests", series)
    ratios = [1 / ratio for size in (16, 32, 64) for ratio in measured.column("swap_over_recompute_x", block_size=size)]
    why = "recomputing needs a CPU's flops, swapping only copies"
    return Addition([panel], [_row("fig19/end", measured, median(ratios), _span(ratios), why)] if ratios else [])


def _span(ratios: Iterable[float]) -> str:
    ratios = sorted(ratios)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}×"


# By figure: the files that add to it, how, and the digit that is said not to have been measured without them.
_ADDITIONS: Final[dict[str, list[tuple[str, Callable[[MeasuredRows], Addition], str]]]] = {
    "fig15": [("beams", _beams, "fig15/alpaca/beam/2")],
    "fig16": [("prefixes", _prefixes, "fig16/80")],
    "fig18a": [("kernel", _kernel, "fig18a")],
    "fig18b": [("block_sizes", _block_sizes, "fig18b/sharegpt")],
    "fig19": [("preemption_overheads", _overheads, "fig19/steep"), ("preemption", _preemption, "fig19/end")],
}


def with_measured(results: Results, directory: Path) -> Results:
    """Returns the results with what the directory's `measured_*.json` add. Raises `msgspec.MsgspecError` on files of
    another kind."""
    return Results(results.quick, [_complete(figure, directory) for figure in results.figures])


def _complete(figure: Figure, directory: Path) -> Figure:
    for name, add, digit in _ADDITIONS.get(figure.name, []):
        path = directory / f"measured_{name}.json"
        if path.exists():
            addition = add(msgspec.json.decode(path.read_bytes(), type=MeasuredRows))
        else:
            addition = Addition([], [_not_run(digit)])
        figure = replace(figure, panels=figure.panels + addition.panels, rows=figure.rows + addition.rows)
    return figure


def _not_run(digit: str) -> Row:
    return Row(digit=digit, text="", how=How.NOT_RUN, on="the real engine", why="`make paper-measured` measures it")
