"""Measures each case by each server in turns, beside what the machine gives meanwhile: `make bench` and `make
bench-peers`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.bench import instruction_sets
from octavo.bench.figures import FIGURES, CaseWork, LinearShapes, Yardsticks, grid
from octavo.bench.in_process import planned_steps
from octavo.bench.report import BenchReport, Runs, to_text
from octavo.bench.systems import Bench, MeasuredSystem
from octavo.bench.table import keep
from octavo.bench.workloads import NAMES, make_case, warm_up
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model

_ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints progress to stderr and the report to stdout, and writes JSON where asked."""
    options = _options(arguments)
    model = resolve_model(options.model)
    with Bench(model, options.dtype) as bench:
        if options.instruction_sets:
            print("\n".join(_instruction_sets(options, _work(options, model), bench)))
            return 0
        report = _measure(options, _work(options, model), bench)
    print(to_text(report))
    keep(report.to_json(), options.json)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="octavo.bench", description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL, help="a directory of the Llama family, or the bundled model")
    parser.add_argument("--cases", nargs="+", choices=list("abcde"), default=list("abcde"))
    parser.add_argument("--paths", nargs="*", choices=["alone", "whole"], default=["alone", "whole"])
    parser.add_argument("--dtype", choices=list(_ITEM_SIZES), default="bfloat16")
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="each of these numbers of threads")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the best run of each case counts")
    parser.add_argument(
        "--quick", action="store_true", help="tiny lengths: shows that everything runs, measures nothing"
    )
    parser.add_argument(
        "--instruction-sets",
        action="store_true",
        help="the worker alone by each instruction set that this machine has, beside torch, and nothing else",
    )
    parser.add_argument("--profile", action="store_true", help="what a decode step of 64 sequences spends its time on")
    parser.add_argument("--openvino", type=Path, metavar="PYTHON", help="run OpenVINO GenAI too, in this environment")
    parser.add_argument("--json", type=Path, help="write everything here too, every single run included")
    return parser.parse_args(arguments)


def _work(options: argparse.Namespace, model: Path) -> dict[str, CaseWork]:
    """Returns what each case computes in its first repetition, by the case's name."""
    shapes = LinearShapes.read(model)
    names = [name for name in NAMES if name[0] in options.cases]
    cases = [make_case(name, shapes.head[0], quick=options.quick) for name in names]
    steps = planned_steps(model, cases)
    weight_bytes = shapes.num_weights * _ITEM_SIZES[options.dtype]
    return {case.name: CaseWork(case, steps[case.name], weight_bytes) for case in cases}


def _measure(options: argparse.Namespace, work: dict[str, CaseWork], bench: Bench) -> BenchReport:
    """Measures in rounds: a machine's rate changes from minute to minute, so what is to be compared runs close
    together."""
    vocab_size = LinearShapes.read(bench.model).head[0]
    steps = [step for one in work.values() for step in one.steps]
    layer_rows, head_rows = grid(step.tokens for step in steps), grid(step.logit_rows for step in steps)
    yardsticks = [bench.yardsticks(threads) for threads in options.threads]
    measured = {one.threads: list[Yardsticks]() for one in yardsticks}
    systems = [(system, Runs(system.name, system.threads, system.start_s)) for system in _systems(options, bench)]
    for system, _ in systems:
        system.run(warm_up(vocab_size))
    for repetition in range(options.repeat):
        for one in yardsticks:
            measured[one.threads].append(one.measure(layer_rows, head_rows))
        for name in work:
            case = make_case(name, vocab_size, repetition, quick=options.quick)
            for system, runs in systems:
                run = system.run(case)
                runs.measurements.setdefault(name, []).append(run)
                print(
                    f"round {repetition + 1}: {name} by {runs.title}: {run.wall_s:.2f} s", file=sys.stderr, flush=True
                )
    for system, runs in systems:
        runs.memory.update(system.memory())
        runs.profile.update(system.profile() if options.profile else {})
    settings: dict[str, object] = {name: str(value) for name, value in vars(options).items()}
    return BenchReport(settings, work, measured, [runs for _, runs in systems])


def _instruction_sets(options: argparse.Namespace, work: dict[str, CaseWork], bench: Bench) -> list[str]:
    """Measures each instruction set in rounds, as `_measure` does, and returns the lines of the table."""
    threads, vocab_size = max(options.threads), LinearShapes.read(bench.model).head[0]
    several = instruction_sets.contenders(options.dtype)
    systems = [bench.alone(threads, one.name, **one.environment) for one in several]
    runs = {system.name: Runs(system.name, threads, system.start_s) for system in systems}
    for system in systems:
        system.run(warm_up(vocab_size))
    for repetition in range(options.repeat):
        for name in work:
            case = make_case(name, vocab_size, repetition, quick=options.quick)
            for system in systems:
                run = system.run(case)
                runs[system.name].measurements.setdefault(name, []).append(run)
                said = f"round {repetition + 1}: {name} by {system.name}: {run.wall_s:.2f} s"
                print(said, file=sys.stderr, flush=True)
    figures = [figure for figure in FIGURES if figure.case in work]
    return list(instruction_sets.table(several, work, figures, runs))


def _systems(options: argparse.Namespace, bench: Bench) -> Iterator[MeasuredSystem]:
    for threads in options.threads:
        if "alone" in options.paths:
            yield bench.alone(threads)
        if "whole" in options.paths:
            yield bench.whole(threads)
    if options.openvino:
        yield bench.openvino(max(options.threads), options.openvino)


if __name__ == "__main__":
    sys.exit(main())
