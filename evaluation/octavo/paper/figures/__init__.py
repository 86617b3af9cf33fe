"""Makes all figures of the paper's evaluation, each from the trials that it needs."""

from collections.abc import Callable
from typing import Final

from octavo.paper.figure import Figure
from octavo.paper.figures.basic_sampling import fig11, fig12
from octavo.paper.figures.blocks import fig18a, fig18b, fig19
from octavo.paper.figures.memory import fig2, fig13, table1
from octavo.paper.figures.requests import fig14, fig15, fig16, fig17
from octavo.paper.lab import Lab

FIGURES: Final[dict[str, Callable[[Lab], Figure]]] = {
    "table1": table1,
    "fig2": fig2,
    "fig11": fig11,
    "fig12": fig12,
    "fig13": fig13,
    "fig14": fig14,
    "fig15": fig15,
    "fig16": fig16,
    "fig17": fig17,
    "fig18a": fig18a,
    "fig18b": fig18b,
    "fig19": fig19,
}
