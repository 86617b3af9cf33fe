"""Runs the paper's experiments on the real engine, on this machine's CPU: `make paper-measured` and `make
ablations`."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from octavo.bench.measured import ablations, beams, block_sizes, kernel, preemption, prefixes
from octavo.bench.measured.experiment import Findings, Options
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model

EXPERIMENTS: Final[dict[str, Callable[[Options], Iterator[Findings]]]] = {
    "kernel": kernel.measure,
    "block-sizes": block_sizes.measure,
    "preemption": preemption.measure,
    "beams": beams.measure,
    "prefixes": prefixes.measure,
    "ablations": ablations.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each figure, and writes JSON where asked; progress goes to stderr."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if unknown := set(given.experiments) - set(EXPERIMENTS):
        parser.error(f"there is no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    options = Options(resolve_model(given.model), given.dtype, given.threads, given.quick)
    for name in given.experiments or EXPERIMENTS:
        began = time.perf_counter()
        for figure in EXPERIMENTS[name](options):
            print(f"{figure.to_text()}\n", flush=True)
            if given.json:
                figure.write(given.json)
        print(f"{name} took {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="octavo.bench.measured", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)}; else all")
    parser.add_argument("--model", default=BUNDLED_MODEL, help="a directory, or the bundled model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="tiny lengths: shows that everything runs, measures nothing"
    )
    parser.add_argument("--json", type=Path, metavar="DIRECTORY", help="write each figure here too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
