"""Measures the ceilings of this machine's GPU, then every goal beside them: `python -m octavo.bench.gpu --out
FILE.json`.

Everything runs with random weights and downloads nothing; what is missing is skipped with a line. `--dry-run` tells
what would be measured, by nominal rates, and which peers are here; it needs no GPU.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from octavo.bench.gpu import attention, caches, exactness, peers, steps
from octavo.bench.gpu.cases import Budget, CaseResult, GpuCase, chosen, in_order, run_all, time_limit
from octavo.bench.gpu.ceilings import measure_ceilings
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.report import GpuReport, plan_text, progress
from octavo.bench.gpu.served import serving
from octavo.bench.gpu.shapes import LARGE_MODELS

_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "vllm", "msgspec", "pyzmq", "grpcio")
NO_DEVICE = 3
# What a case that fitted into the budget may take beyond it.
_GRACE_S = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Progress goes to stderr, the table to stdout, everything to the file. 1: a case failed; 3: there is no device."""
    options = _options(arguments)
    try:
        cases = chosen(all_cases(quick=options.quick, large=options.large_model), options.only)
    except ValueError as error:
        print(f"octavo.bench.gpu: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(plan_text(cases, peers.found()))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"octavo.bench.gpu: no CUDA device: this torch ({torch.__version__}) finds none", file=sys.stderr)
        return NO_DEVICE
    return _measure(options, cases)


def all_cases(*, quick: bool, large: str = LARGE_MODELS[0]) -> list[GpuCase]:
    """Lists all cases, the most wanted first. `large` names the model of 8B."""
    kernels = [*attention.cases(quick=quick), *caches.cases(quick=quick)]
    whole = [*steps.cases(large, quick=quick), *serving.cases(large, quick=quick), *exactness.cases(quick=quick)]
    return in_order([*kernels, *whole])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="octavo.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write everything as JSON, case by case")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], metavar="K1,K4,...", help="these goals only"
    )
    parser.add_argument("--large-model", choices=LARGE_MODELS, default=LARGE_MODELS[0], help="shapes of the 8B model")
    parser.add_argument("--budget-s", type=float, default=540.0, help="cases that do not fit in this are skipped")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes and a tiny model: shows that everything runs, measures nothing"
    )
    parser.add_argument("--dry-run", action="store_true", help="list cases, floors and peers, and measure nothing")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: with --quick and TRITON_INTERPRET=1, a rehearsal",
    )
    return parser.parse_args(arguments)


def _measure(options: argparse.Namespace, cases: list[GpuCase]) -> int:
    budget = Budget(options.budget_s)
    machine = GpuMachine(torch.device(options.device), budget, quick=options.quick)
    torch.manual_seed(0)
    report = GpuReport(_settings(options, machine.device), peers.found())
    with torch.inference_mode():
        machine.rates, report.ceilings = measure_ceilings(machine)
    report.rates = machine.rates

    def measure(case: GpuCase) -> CaseResult:
        with time_limit(budget.left() + _GRACE_S):
            return case.run(machine)

    for outcome in run_all(cases, budget, machine.rates, measure, machine.holds):
        report.outcomes.append(outcome)
        print(progress(outcome), file=sys.stderr, flush=True)
        if options.out:
            report.write(options.out)
    machine.release()
    print(report.to_text())
    return 1 if any(outcome.failed for outcome in report.outcomes) else 0


def _settings(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    given = {name: str(value) for name, value in vars(options).items()}
    versions = {name: _version(name) for name in _PACKAGES}
    return {**given, "versions": versions, "python": platform.python_version(), **_device(device)}


def _device(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        return {"gpu": "none"}
    properties = torch.cuda.get_device_properties(device)
    return {"gpu": properties.name, "multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
