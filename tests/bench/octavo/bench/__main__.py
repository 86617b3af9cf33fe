"""`make bench`: runs the cases both ways and prints what they took."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from octavo.bench import whole_system
from octavo.bench.measurement import Measurement
from octavo.bench.workloads import all_cases, warm_up
from octavo.testing.stack import Stack
from octavo.wire.model_directory import BUNDLED_MODEL, resolve_model


def main() -> int:
    """Prints text to stdout as results come, and writes JSON where asked."""
    options = _options()
    model = resolve_model(options.model)
    results: list[Measurement] = []
    print(f"{options.model}, {options.dtype}, {options.threads} threads, best of {options.repeat}\n", flush=True)
    if "alone" in options.paths:
        results += _alone(options, model)
    start_s = None
    if "whole" in options.paths:
        start_s, measurements = _whole(options, model)
        results += measurements
    if options.json:
        settings = {"model": options.model, "dtype": options.dtype, "threads": options.threads, "start_s": start_s}
        report = {"settings": settings, "results": [result.to_json() for result in results]}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="octavo.bench", description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--cases", nargs="+", choices=list(all_cases()), default=list(all_cases()))
    parser.add_argument("--paths", nargs="+", choices=["alone", "whole"], default=["alone", "whole"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser.parse_args()


def _alone(options: argparse.Namespace, model: Path) -> list[Measurement]:
    # Only this path needs torch in this process.
    from octavo.bench.in_process import InProcess
    from octavo.worker.model_runner import ModelRunner

    engine = InProcess(ModelRunner(model, dtype=options.dtype, threads=options.threads))
    engine.run(warm_up())
    return [_best([engine.run(all_cases()[name]) for _ in range(options.repeat)]) for name in options.cases]


def _whole(options: argparse.Namespace, model: Path) -> tuple[float, list[Measurement]]:
    environment = {
        "OCTAVO_DTYPE": options.dtype,
        "OCTAVO_THREADS": str(options.threads),
        # A repeated case must not find its own prompts.
        "OCTAVO_PREFIX_CACHE": "false",
    }
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        Stack(model, Path(directory), environment) as stack,
    ):
        stack.start_all()
        start_s = time.perf_counter() - began
        print(f"the whole stack was ready after {start_s:.1f} s\n", flush=True)
        whole_system.run(stack, warm_up())
        runs = [[whole_system.run(stack, all_cases()[name]) for _ in range(options.repeat)] for name in options.cases]
        return start_s, [_best(repeated) for repeated in runs]


def _best(runs: list[Measurement]) -> Measurement:
    """The run that the machine disturbed least; the spread is told beside it."""
    best = max(runs, key=lambda run: run.output_tokens_per_s)
    rates = ", ".join(f"{run.output_tokens_per_s:.1f}" for run in runs)
    print(f"{best.to_text()}\n  all runs: {rates} output tokens/s\n", flush=True)
    return best


if __name__ == "__main__":
    sys.exit(main())
