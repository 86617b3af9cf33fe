"""Writes docs/paper.md: the table of digits, then every figure."""

from collections.abc import Iterator
from typing import Final

from octavo.paper.digits import DIGITS
from octavo.paper.figure import Figure, Results, Row, Table
from octavo.paper.lab import LIMIT_S

_HEAD: Final = f"""\
# The paper's evaluation, from our own code

`make paper` writes this page. The vLLM paper (Kwon et al., *Efficient Memory Management for Large Language Model
Serving with PagedAttention*, SOSP 2023) compares vLLM with Orca and FasterTransformer. Here are its figures again.

*Simulated*: the production scheduler and block manager in virtual time. In place of workers there is a replica that
takes as long as arithmetic says: bytes to read and products to compute over what the GPU's data sheet gives, times
fixed efficiencies, with the overhead of a step that a Python server of 2023 had. The baselines are the same scheduler
with other memory. Orca reserves contiguous memory for each sequence by a buddy allocator: for as many tokens as the
model allows (Max), for the next power of two of the true output (Pow2), or for the true output (Oracle); requests join
between iterations. FasterTransformer computes the earliest requests as one batch, with memory as in Orca (Max), until
all of them have ended. *Measured*: the real engine, on what the row says. *Computed*: arithmetic alone.

The traces' lengths are lognormal with the paper's means. The spread is not published: sigma is 1.12 and 1.02 for
ShareGPT's inputs and outputs, 0.72 and 0.88 for Alpaca's; lengths are kept between 4 and 1,024 tokens, and at most
2,048 together. Requests come as a Poisson process. Normalised latency is the mean over requests of end-to-end latency
over output length; a rate is *sustained* while that is at most {LIMIT_S:g} s per token. All requests of a trace are
waited for. Every simulation is deterministic for its seed.
"""

_QUICK: Final = "**From a quick run, which shows only that everything runs: its traces are too short.**\n"


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    return "\n".join(_page(results))


def _page(results: Results) -> Iterator[str]:
    yield _HEAD
    if results.quick:
        yield _QUICK
    yield "## The paper's digits beside ours\n"
    yield from _digits([row for figure in results.figures for row in figure.rows])
    for figure in results.figures:
        yield f"\n## {figure.title}\n"
        yield from _figure(figure)


def _figure(figure: Figure) -> Iterator[str]:
    if figure.panels:
        yield f"![{figure.title}](paper/{figure.name}.svg)\n"
    for note in figure.notes:
        yield f"{note}\n"
    for table in figure.tables:
        yield f"{table.title}\n"
        yield from _markdown(table)
        yield ""


def _digits(rows: list[Row]) -> Iterator[str]:
    header = ["figure", "what", "paper", "ours", "difference", "how", "on", "why it differs, or what decides it"]
    yield from _markdown(Table("", header, [_cells(row) for row in rows]))


def _cells(row: Row) -> list[str]:
    digit = DIGITS[row.digit]
    return [digit.figure, digit.what, digit.text, row.text, _difference(row), row.how.value, row.on, row.why]


def _difference(row: Row) -> str:
    difference = None if row.value is None else DIGITS[row.digit].difference(row.value)
    if difference is None:
        return ""
    return f"{100 * difference:+.0f} %" if difference else "within"


def _markdown(table: Table) -> Iterator[str]:
    for cells in (table.header, ["---"] * len(table.header), *table.rows):
        yield f"| {' | '.join(cells)} |"
