"""Measures each case by each server in turns, beside what the machine gives meanwhile: `make bench` and `make
bench-peers`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.bench import formats, instruction_sets
from octavo.bench.figures import FIGURES, CaseWork, LinearShapes, Yardsticks, grid
from octavo.bench.formats import Format, read_format
from octavo.bench.in_process import planned_steps
from octavo.bench.report import ALONE, LLAMA_CPP, OPENVINO, PLAIN, WHOLE, BenchReport, Runs, to_text
from octavo.bench.systems import Bench, MeasuredSystem
from octavo.bench.table import keep
from octavo.bench.whole import token_cost
from octavo.bench.workloads import NAMES, make_case, warm_up
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model

_PEERS = ("openvino", "llama.cpp")
# What is asked of a system, where that is not every case.
_CASES_OF = {LLAMA_CPP: ("a", "b", "c")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints progress to stderr and the report to stdout, and writes JSON where asked."""
    options = _options(arguments)
    model = resolve_model(options.model)
    with Bench(model, options.peers, options.held_to) as bench:
        if options.instruction_sets:
            print("\n".join(_instruction_sets(options, _work(options, model), bench)))
            return 0
        report = _measure(options, _work(options, model), bench)
    if "whole" in options.paths:
        # Once all else has ended, which would take CPU time of its own.
        report.token_costs.extend(token_cost.measure(model, token_cost.usual_loads(quick=options.quick)))
    print(to_text(report))
    keep(report.to_json(), options.json)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="octavo.bench", description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL, help="a directory of the Llama family, or the bundled model")
    parser.add_argument("--cases", nargs="+", choices=list("abcde"), default=list("abcde"))
    parser.add_argument("--paths", nargs="*", choices=["alone", "whole"], default=["alone", "whole"])
    parser.add_argument(
        "--formats",
        nargs="+",
        type=_format,
        default=[read_format(PLAIN)],
        metavar="FORMAT",
        help=f"of weights: {', '.join(formats.NAMES)}; NAME/int8 has keys and values in int8 (default: {PLAIN})",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="each of these numbers of threads")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the best run of each case counts")
    parser.add_argument(
        "--quick", action="store_true", help="tiny lengths: shows that everything runs, measures nothing"
    )
    parser.add_argument(
        "--instruction-sets",
        action="store_true",
        help="the worker alone, in the first format, by each instruction set that this machine has, beside torch, and"
        " nothing else",
    )
    parser.add_argument(
        "--held-to", default="", metavar="SET", help="hold Octavo's kernels and llama.cpp to an instruction set: avx2"
    )
    parser.add_argument("--profile", action="store_true", help="what a decode step of 64 sequences spends its time on")
    parser.add_argument("--peers", type=Path, metavar="PYTHON", help="run peers too, in this environment")
    parser.add_argument(
        "--beside", nargs="*", choices=_PEERS, default=list(_PEERS), help="which peers (default: all of them)"
    )
    parser.add_argument("--json", type=Path, help="write everything here too, every single run included")
    options = parser.parse_args(arguments)
    if options.held_to and options.peers and "openvino" in options.beside:
        parser.error("OpenVINO is not held to an instruction set here; add --beside llama.cpp")
    return options


def _format(name: str) -> Format:
    try:
        return read_format(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _work(options: argparse.Namespace, model: Path) -> dict[str, CaseWork]:
    """Returns what each case computes in its first repetition, by the case's name."""
    vocab_size = LinearShapes.read(model).head[0]
    names = [name for name in NAMES if name[0] in options.cases]
    cases = [make_case(name, vocab_size, quick=options.quick) for name in names]
    steps = planned_steps(model, cases)
    return {case.name: CaseWork(case, steps[case.name]) for case in cases}


def _measure(options: argparse.Namespace, work: dict[str, CaseWork], bench: Bench) -> BenchReport:
    """Measures in rounds: a machine's rate changes from minute to minute, so what is to be compared runs close
    together."""
    vocab_size = LinearShapes.read(bench.model).head[0]
    steps = [step for one in work.values() for step in one.steps]
    layer_rows, head_rows = grid(step.tokens for step in steps), grid(step.logit_rows for step in steps)
    yardsticks = [bench.yardsticks(threads, options.formats[0]) for threads in options.threads]
    measured = {one.threads: list[Yardsticks]() for one in yardsticks}
    systems = list(_systems(options, bench))
    for system, runs in systems:
        # The programs of the others warm up by themselves.
        if runs.name not in _CASES_OF:
            system.run(warm_up(vocab_size))
    for repetition in range(options.repeat):
        for one in yardsticks:
            measured[one.threads].append(one.measure(layer_rows, head_rows))
        for name in work:
            case = make_case(name, vocab_size, repetition, quick=options.quick)
            for system, runs in systems:
                if name in _CASES_OF.get(runs.name, NAMES):
                    run = system.run(case)
                    runs.measurements.setdefault(name, []).append(run)
                    said = f"round {repetition + 1}: {name} by {runs.title}: {run.wall_s:.2f} s"
                    print(said, file=sys.stderr, flush=True)
    for system, runs in systems:
        runs.memory.update(system.memory())
        runs.profile.update(system.profile() if options.profile else {})
    settings: dict[str, object] = {name: str(value) for name, value in vars(options).items()}
    return BenchReport(settings, work, measured, [runs for _, runs in systems])


def _instruction_sets(options: argparse.Namespace, work: dict[str, CaseWork], bench: Bench) -> list[str]:
    """Measures each instruction set in rounds, as `_measure` does, and returns the lines of the table."""
    form, threads, vocab_size = options.formats[0], max(options.threads), LinearShapes.read(bench.model).head[0]
    several = instruction_sets.contenders(bf16=form.name == PLAIN)
    systems = {one.name: bench.alone(threads, form, **one.environment) for one in several}
    runs = {name: Runs(name, threads, system.start_s, form.name) for name, system in systems.items()}
    for system in systems.values():
        system.run(warm_up(vocab_size))
    for repetition in range(options.repeat):
        for name in work:
            case = make_case(name, vocab_size, repetition, quick=options.quick)
            for contender, system in systems.items():
                run = system.run(case)
                runs[contender].measurements.setdefault(name, []).append(run)
                said = f"round {repetition + 1}: {name} by {contender}: {run.wall_s:.2f} s"
                print(said, file=sys.stderr, flush=True)
    figures = [figure for figure in FIGURES if figure.case in work]
    return list(instruction_sets.table(several, work, figures, runs))


def _systems(options: argparse.Namespace, bench: Bench) -> Iterator[tuple[MeasuredSystem, Runs]]:
    """Starts what is to be measured; yields each system with the record of its runs."""

    def started(system: MeasuredSystem, name: str, form: Format, called: str) -> tuple[MeasuredSystem, Runs]:
        peers, size = {OPENVINO: form.openvino, LLAMA_CPP: form.gguf}, bench.weight_bytes(form)
        return system, Runs(name, system.threads, system.start_s, called, size, peers, system.about)

    for threads in options.threads:
        for form in options.formats:
            if "alone" in options.paths:
                yield started(bench.alone(threads, form), ALONE, form, form.name)
            if "whole" in options.paths:
                yield started(bench.whole(threads, form), WHOLE, form, form.name)
    if options.peers:
        threads = max(options.threads)
        # The first of ours that a peer's format is nearest to tells how large it is.
        if "openvino" in options.beside:
            for kind, form in {form.openvino: form for form in reversed(options.formats)}.items():
                yield started(bench.openvino(threads, kind), OPENVINO, form, kind)
        if "llama.cpp" in options.beside:
            for kind, form in {form.gguf: form for form in reversed(options.formats)}.items():
                yield started(bench.llama_cpp(threads, kind), LLAMA_CPP, form, kind)


if __name__ == "__main__":
    sys.exit(main())
