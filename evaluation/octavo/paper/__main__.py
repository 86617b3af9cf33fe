"""Runs `make paper`: all simulations, all figures, and the page."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from octavo.paper.figure import Figure, Results, draw, read_results
from octavo.paper.figures import FIGURES
from octavo.paper.lab import Lab
from octavo.paper.measured import with_measured
from octavo.paper.page import page

_ROOT: Final = Path(__file__).parents[3]
_BUILD: Final = _ROOT / "build" / "paper"


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(FIGURES)), help="Run these; keep the others as they are.")
@click.option("--quick", is_flag=True, help="Traces so short that only the running is tried; writes below build/paper.")
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True, help="Processes.")
@click.option("--draw-only", is_flag=True, help="Simulate nothing: draw what was simulated and measured before.")
def main(only: tuple[str, ...], quick: bool, jobs: int, draw_only: bool) -> None:
    """Runs the paper's experiments; writes docs/paper.md, and docs/paper/ with its figures."""
    docs = _BUILD / "quick" if quick else _ROOT / "docs"
    store = docs / "paper" / "simulated.json"
    if draw_only:
        results = _read(store)
    else:
        results = _read(store) if store.exists() else Results(quick, [])
        with Lab(_BUILD / "trials", jobs=jobs, quick=quick) as lab:
            # Each is kept once it is there: all of them take an hour.
            for figure in simulate(lab, [name for name in FIGURES if not only or name in only]):
                results = merged(Results(quick, [figure]), results)
                results.write(store)
    write_page(results, docs, measured=_ROOT / "docs" / "paper")
    click.echo(f"Wrote {docs / 'paper.md'}")


def simulate(lab: Lab, names: list[str]) -> Iterator[Figure]:
    """Yields these figures, one after the other, and reports its progress on stderr."""
    for name in names:
        began = time.monotonic()
        print(f"{name}:", file=sys.stderr, flush=True)
        yield FIGURES[name](lab)
        print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def merged(new: Results, old: Results) -> Results:
    """Returns all figures in their order, the new ones before the old ones of the same name."""
    figures = {figure.name: figure for results in (old, new) for figure in results.figures}
    return Results(new.quick, [figures[name] for name in FIGURES if name in figures])


def write_page(results: Results, docs: Path, measured: Path) -> None:
    """Draws everything, with what `measured` holds of the real engine."""
    complete = with_measured(results, measured)
    for figure in complete.figures:
        if figure.panels:
            draw(figure, docs / "paper")
    (docs / "paper.md").write_text(page(complete), encoding="utf-8")


def _read(store: Path) -> Results:
    try:
        return read_results(store)
    except OSError as error:
        raise click.ClickException(f"nothing was simulated before: {error}") from error


if __name__ == "__main__":
    main()
