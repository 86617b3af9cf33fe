"""`make house`: the figures by which the sources are kept in order, each beside its goal."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .figures import Figure, measure
from .tree import REPOSITORY


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; with `--list` what one figure counts."""
    parser = argparse.ArgumentParser(prog="make house", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures and what they count there")
    parser.add_argument("--list", metavar="FIGURE", help="print what a figure counts instead; part of its name will do")
    parser.add_argument("--checkout", metavar="DIR", type=Path, default=REPOSITORY, help="another checkout to measure")
    options = parser.parse_args(arguments)
    figures = measure(options.checkout)
    if options.json:
        options.json.write_text(encoded(figures), encoding="utf-8")
    if options.list is None:
        print(table(figures))
        return 0
    chosen = [figure for figure in figures if options.list in figure.name]
    if not chosen:
        parser.error(f"no figure has {options.list!r} in its name")
    for figure in chosen:
        print(f"{figure.name}: {number(figure.value)}", *figure.places, sep="\n  ")
    return 0


def table(figures: Sequence[Figure]) -> str:
    """Returns the figures as a table in Markdown."""
    rows = [("figure", "now", "goal", ""), ("---", "---:", "---:", "---")]
    for figure in figures:
        goal = "" if figure.goal is None else f"<= {number(figure.goal)}"
        rows.append((figure.name, number(figure.value), goal, figure.note))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("| " + " | ".join([*map(str.ljust, row, widths), row[3]]) + " |" for row in rows)


def number(value: float) -> str:
    return f"{value:,}"


def encoded(figures: Sequence[Figure]) -> str:
    """Returns the figures as JSON, by their names."""
    by_name = {
        figure.name: {"value": figure.value, "goal": figure.goal, "note": figure.note, "places": list(figure.places)}
        for figure in figures
    }
    return json.dumps(by_name, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
