"""Makes Figs. 11 and 12: the lengths of the requests; and basic sampling, three models and two datasets."""

from random import Random
from statistics import fmean
from typing import Final

from octavo.paper.figure import Figure, How, Panel, Row, Series, Table
from octavo.paper.figures.common import (
    ALL,
    ALPACA,
    MAX,
    MODELS,
    ORACLE,
    SHAREGPT,
    SIGMAS,
    TITLES,
    Rates,
    curves,
    guess,
    rates_of,
    simulated,
    span,
    times,
)
from octavo.paper.lab import Lab
from octavo.paper.setups import LENGTHS
from octavo.paper.systems import FASTER_TRANSFORMER, VLLM
from octavo.paper.trial import Trial

# -- lengths ----------------------------------------------------------------------------------------------------------


_COUNT: Final = 50_000
_BIN: Final = {SHAREGPT: 50, ALPACA: 10}
_MOST: Final = {SHAREGPT: 2000, ALPACA: 300}
_WHY: Final = "drawn with this mean; a little is lost where prompt and output are cut to 2,048 tokens together"


def fig11(_: Lab) -> Figure:
    """Draws many."""
    panels, rows = [], []
    for dataset in (SHAREGPT, ALPACA):
        random = Random(0)
        inputs, outputs = zip(*(LENGTHS[dataset].draw(random) for _ in range(_COUNT)), strict=True)
        panels.append(_panel(dataset, inputs, outputs))
        rows += [_length_row(dataset, "input", fmean(inputs)), _length_row(dataset, "output", fmean(outputs))]
    return Figure(
        name="fig11",
        title="Figure 11: lengths of inputs and outputs",
        notes=["Only the means are the paper's; the shape is assumed. Values of 1,024 and above are one bin's."],
        panels=panels,
        rows=rows,
    )


def _panel(dataset: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Panel:
    return Panel(
        title=TITLES[dataset],
        x_label="tokens",
        y_label="density",
        falls=True,
        series=[_histogram("input", inputs, dataset), _histogram("output", outputs, dataset)],
    )


def _histogram(label: str, lengths: tuple[int, ...], dataset: str) -> Series:
    """Returns the share of lengths per token, by the middles of the bins."""
    width, counts = _BIN[dataset], [0] * (_MOST[dataset] // _BIN[dataset])
    for length in lengths:
        if length < _MOST[dataset]:
            counts[length // width] += 1
    middles = [width * (index + 0.5) for index in range(len(counts))]
    return Series(label, [count / width / len(lengths) for count in counts], middles)


def _length_row(dataset: str, side: str, mean: float) -> Row:
    digit = f"fig11/{dataset}/{side}"
    return Row(digit=digit, value=mean, text=f"{mean:.1f}", how=How.COMPUTED, on="50,000 drawn requests", why=_WHY)


# -- one sequence -----------------------------------------------------------------------------------------------------


# About what vLLM sustains, by panel.
_GUESSES: Final = {
    ("opt-13b", SHAREGPT): 2.4,
    ("opt-66b", SHAREGPT): 0.9,
    ("opt-175b", SHAREGPT): 2.5,
    ("opt-13b", ALPACA): 42.0,
    ("opt-66b", ALPACA): 20.0,
    ("opt-175b", ALPACA): 22.0,
}
# Traces shorter than the paper's hour move all systems' knees up alike, by a few percent.
_SECONDS: Final = {SHAREGPT: 900.0, ALPACA: 300.0}
_HOUR_S: Final = 3600.0
_ON: Final = "production scheduler, OPT-13B, 66B and 175B on A100s"
_SHAREGPT_PANELS: Final = [panel for panel in _GUESSES if panel[1] == SHAREGPT]
_COMPARED: Final = (MAX, ORACLE, VLLM)


def fig12(lab: Lab) -> Figure:
    """Compares all systems, and shows how much depends on the spread and on the traces' length."""
    trials = [_trial(system, panel) for panel in _GUESSES for system in ALL]
    knees = lab.search(trials)
    panels, rates = [], dict[tuple[str, str], Rates]()
    for number, panel in enumerate(_GUESSES):
        part = slice(number * len(ALL), (number + 1) * len(ALL))
        title = f"({'abcdef'[number]}) {panel[0].upper()}, {TITLES[panel[1]]}"
        panels.append(curves(title, trials[part], knees[part]))
        rates[panel] = rates_of(trials[part], knees[part])
    return Figure(
        name="fig12",
        title="Figure 12: normalised latency by request rate, one sample per request",
        notes=[
            f"Traces of {_SECONDS[SHAREGPT] / 60:g} minutes (ShareGPT) and {_SECONDS[ALPACA] / 60:g} minutes (Alpaca);"
            " the last table has an hour beside them."
        ],
        panels=panels,
        rows=_rows(rates),
        tables=[_table(rates), _sensitivity(lab), _by_seconds(lab)],
    )


def _trial(system: str, panel: tuple[str, str], sigma: float = 1.0, seconds: float | None = None) -> Trial:
    setup, dataset = panel
    return Trial(system, setup, dataset, guess(system, _GUESSES[panel]), seconds or _SECONDS[dataset], sigma=sigma)


def _rows(rates: dict[tuple[str, str], Rates]) -> list[Row]:
    over = {
        system: [rates[panel][VLLM] / rates[panel][system] for panel in _SHAREGPT_PANELS]
        for system in (ORACLE, MAX, FASTER_TRANSFORMER)
    }
    compute_bound = rates["opt-175b", ALPACA]
    ratio = compute_bound[VLLM] / compute_bound[ORACLE]
    return [
        _row("oracle", over[ORACLE], max(over[ORACLE]), "memory and how long steps take"),
        _row("max", over[MAX], max(over[MAX]), "memory and how long steps take; what outputs leave of 2,048 slots"),
        _row(
            "ft",
            over[FASTER_TRANSFORMER],
            max(over[FASTER_TRANSFORMER]),
            "the longest output of a batch; ours neither pads prompts nor goes on with ended sequences",
        ),
        simulated(
            "fig12/f",
            ratio,
            times(ratio),
            MODELS["opt-175b"],
            "60.1K slots are enough for Orca too, whose prompts join a step; the first vLLM's have steps of their own,"
            " which read all weights again",
        ),
    ]


def _row(name: str, ratios: list[float], value: float, why: str) -> Row:
    return simulated(f"fig12/sharegpt/{name}", value, span(ratios), _ON, why)


def _table(rates: dict[tuple[str, str], Rates]) -> Table:
    rows = [
        [f"{setup.upper()}, {TITLES[dataset]}", *(f"{of[system]:.3g}" for system in ALL), times(of[VLLM] / of[ORACLE])]
        for (setup, dataset), of in rates.items()
    ]
    return Table("Requests per second that are sustained", ["", *ALL, f"{VLLM} over {ORACLE}"], rows)


def _sensitivity(lab: Lab) -> Table:
    """Shows the sensitivity of OPT-13B's results to the assumed spread."""
    panels = [("opt-13b", SHAREGPT), ("opt-13b", ALPACA)]
    trials = [
        _trial(system, panel, sigma, _SECONDS[panel[1]] / 2)
        for panel in panels
        for sigma in SIGMAS
        for system in _COMPARED
    ]
    found = iter(lab.search(trials, curve=()))
    rows = []
    for _, dataset in panels:
        for sigma in SIGMAS:
            of = {system: next(found).rate for system in _COMPARED}
            rows.append([f"{TITLES[dataset]}, sigma × {sigma:g}", *_compared(of)])
    return Table("Requests per second that OPT-13B sustains, by spread (traces half as long)", _HEADER, rows)


def _by_seconds(lab: Lab) -> Table:
    panel = ("opt-13b", SHAREGPT)
    lengths = (_SECONDS[SHAREGPT], _HOUR_S)
    trials = [_trial(system, panel, seconds=each) for each in lengths for system in _COMPARED]
    found = iter(lab.search(trials, curve=()))
    rows = [
        [f"{each / 60:g} minutes", *_compared({system: next(found).rate for system in _COMPARED})] for each in lengths
    ]
    return Table("The same, OPT-13B on ShareGPT, by the trace's length", _HEADER, rows)


_HEADER: Final = ["", *_COMPARED, f"{VLLM} over {MAX}", f"{VLLM} over {ORACLE}"]


def _compared(of: Rates) -> list[str]:
    rates = [f"{of[system]:.3g}" for system in _COMPARED]
    return [*rates, times(of[VLLM] / of[MAX]), times(of[VLLM] / of[ORACLE])]
