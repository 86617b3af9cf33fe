"""Makes Fig. 11: the lengths of the requests."""

from random import Random
from statistics import fmean
from typing import Final

from octavo.paper.figure import Figure, How, Panel, Row, Series
from octavo.paper.figures.common import ALPACA, SHAREGPT, TITLES
from octavo.paper.lab import Lab
from octavo.paper.setups import LENGTHS

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
        rows += [_row(dataset, "input", fmean(inputs)), _row(dataset, "output", fmean(outputs))]
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


def _row(dataset: str, side: str, mean: float) -> Row:
    digit = f"fig11/{dataset}/{side}"
    return Row(digit=digit, value=mean, text=f"{mean:.1f}", how=How.COMPUTED, on="50,000 drawn requests", why=_WHY)
