"""Runs what a machine with a GPU is to show first, in ten minutes, by one command: `make gpu-first-hour`.

Lays out the carried packages, then compiles, tests and measures, in an order in which what is found first matters most.
Every step is a process of its own with a limit of time; what is missing is skipped with a line, and what fails or is
stopped loses nothing of the others. Writes one JSON (after every step) and one page of text. Needs nothing but Python.
"""

import argparse
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.gpu.served.carried import PACKAGES, WHEELS, misfit

ROOT = Path(__file__).parents[5]
_IMPORT_ROOTS = ("proto", "kernels", "worker", "scheduler", "frontend", "evaluation", "tests/support")
_TESTS = ("tests/kernels/triton", "tests/worker/gpu", "tests/worker/models/test_fused.py")
_KILL_AFTER_S = 5.0
# Of what a step has said, the page shows the end.
_SHOWN_LINES = 25
_MACHINE = """
import importlib.util, json, os, platform, torch
found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
         "cores": len(os.sched_getaffinity(0))}
for name in ("triton", "transformers"):
    found[name] = __import__(name).__version__ if importlib.util.find_spec(name) else "none"
found["gpus"] = torch.cuda.device_count()
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    found |= {"gpu": properties.name, "capability": properties.major * 10 + properties.minor,
              "multiprocessors": properties.multi_processor_count, "memory": properties.total_memory}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Step:
    """Describes a `command` of this repository that may take so many `seconds`. `modules`: what it cannot do without;
    `on_gpu`: nor without a GPU. `{out}` in it is where its JSON goes, `{seconds}` what is left of its time,
    `{capability}` the GPU's. `interpreted`: kernels run in Triton's interpreter."""

    name: str
    what: str
    command: tuple[str, ...]
    seconds: float
    modules: tuple[str, ...] = ()
    on_gpu: bool = True
    interpreted: bool = False


@dataclass
class StepEnd:
    """Holds the end of a step: "passed", "failed", "stopped" (by its limit) or "skipped", for a `reason`."""

    name: str
    what: str
    state: str = "skipped"
    reason: str = ""
    seconds: float = 0.0
    command: str = ""
    result: Any = None
    output: list[str] = field(default_factory=list)

    def line(self) -> str:
        return (
            f"{self.name:10} {self.state:8} {self.seconds:5.0f} s  {self.what}{': ' * bool(self.reason)}{self.reason}"
        )


def steps(*, rehearse: bool = False) -> list[Step]:
    """Lists the steps in their order. `rehearse` gives little of each, which needs no GPU."""
    python, pytest = (sys.executable,), (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    bench = (*python, "-m", "octavo.bench.gpu", "--out", "{out}", "--budget-s", "{seconds}")
    ahead = (*python, "-m", "octavo.kernels.triton.ahead")
    workers = ("-n", "6") if importlib.util.find_spec("xdist") else ()
    not_again = ("--deselect", "tests/kernels/triton/test_ahead.py")
    machine = Step("machine", "what is here", (*python, "-c", _MACHINE), 30.0, ("torch",), on_gpu=False)
    unpack = Step(
        "unpack", "carried packages", (*python, "-m", "octavo.bench.gpu.served.carried", "unpack"), 20.0, on_gpu=False
    )
    if rehearse:
        interpreted: dict[str, Any] = {"on_gpu": False, "interpreted": True}
        quick = (*bench, "--quick", "--device", "cpu", "--only")
        return [
            machine,
            unpack,
            Step("ahead", "one kernel compiles", (*ahead, "--only", "gate gelu fp32"), 60.0, ("triton",), on_gpu=False),
            Step("gpu", "tests of a GPU", (*pytest, "-m", "gpu", _TESTS[1]), 60.0, ("pytest", "torch"), on_gpu=False),
            Step(
                "tests", "some tests", (*pytest, f"{_TESTS[0]}/test_splits.py"), 60.0, ("pytest", "torch"), on_gpu=False
            ),
            Step(
                "layout", "pool, ragged batches", (*quick, "K10,K11,K13,S4"), 90.0, ("torch", "triton"), **interpreted
            ),
            Step("kernels", "kernels and moves", (*quick, "K8,K9,S1"), 60.0, ("torch", "triton"), **interpreted),
            Step("steps", "decode steps", (*quick, "R1"), 90.0, ("torch", "triton"), **interpreted),
        ]
    return [
        machine,
        unpack,
        Step("ahead", "every kernel compiles", (*ahead, "--capabilities", "{capability}"), 80.0, ("torch", "triton")),
        Step("gpu", "what needs one", (*pytest, "-x", "-m", "gpu", *_TESTS, *not_again), 90.0, ("pytest", "triton")),
        Step("tests", "all tests of kernels", (*pytest, *workers, *_TESTS, *not_again), 110.0, ("pytest", "triton")),
        Step("layout", "pool, ragged batches", (*bench, "--only", "K10,K11,K13,S4"), 75.0, ("triton",)),
        Step("kernels", "kernels and moves", (*bench, "--only", "K1,K4,K5,K6,K7,K8,K9,S1"), 110.0, ("triton",)),
        Step("steps", "decode steps", (*bench, "--only", "R1"), 140.0, ("triton", "msgspec")),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps and prints a page. Returns 1 if a step failed or was stopped."""
    parser = argparse.ArgumentParser(prog="make gpu-first-hour", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-first-hour.json"), help="the page goes beside it")
    parser.add_argument("--budget-s", type=float, default=580.0, help="of all steps together")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="these steps only")
    parser.add_argument("--rehearse", action="store_true", help="little of each step, on a machine without a GPU")
    options = parser.parse_args(arguments)
    listed = steps(rehearse=options.rehearse)
    if unknown := set(options.only) - {step.name for step in listed}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in listed)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done: list[StepEnd] = []
    for outcome in run(listed, options.budget_s, options.out.with_suffix(""), _environment(), options.only):
        print(outcome.line(), flush=True)
        done.append(outcome)
        _write(options.out, json.dumps({"steps": [asdict(each) for each in done]}, indent=1) + "\n")
        _write(options.out.with_suffix(".txt"), page(done))
    return 1 if any(outcome.state in ("failed", "stopped") for outcome in done) else 0


def run(
    listed: Sequence[Step],
    budget_s: float,
    results: Path,
    environment: dict[str, str],
    only: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[StepEnd]:
    """Runs the steps and yields the outcome of each. A step writes to files whose names begin with that of
    `results`."""
    end = clock() + budget_s
    machine: dict[str, Any] = {}
    for step in listed:
        left = end - clock()
        if reason := _obstacle(step, left, machine, environment, only):
            yield StepEnd(step.name, step.what, reason=reason)
            continue
        began = clock()
        outcome = _run(
            step, min(step.seconds, left), results.with_name(f"{results.name}-{step.name}.json"), machine, environment
        )
        outcome.seconds = clock() - began
        if step.name == "machine" and isinstance(outcome.result, dict):
            machine = outcome.result
        yield outcome


def _obstacle(
    step: Step, left: float, machine: dict[str, Any], environment: dict[str, str], only: Sequence[str]
) -> str | None:
    if only and step.name not in only:
        return "not asked for"
    if left < min(5.0, step.seconds):
        return f"{max(0.0, left):.0f} s are left"
    if step.name == "unpack":
        return misfit(ROOT / WHEELS)
    if missing := [name for name in step.modules if not _is_there(name, environment)]:
        return f"{', '.join(missing)} cannot be imported"
    if step.on_gpu and not machine.get("gpus"):
        return "there is no GPU, or torch finds none"
    return None


def _is_there(name: str, environment: dict[str, str]) -> bool:
    """Tells whether the steps' own processes find a module, without running any of it."""
    importlib.invalidate_caches()
    paths = [*environment["PYTHONPATH"].split(os.pathsep), *filter(None, sys.path)]
    return importlib.machinery.PathFinder.find_spec(name, paths) is not None


def _run(step: Step, seconds: float, out: Path, machine: dict[str, Any], environment: dict[str, str]) -> StepEnd:
    # A bench reports what it skips because it does not fit; what is stopped may go unreported.
    values = {
        "out": str(out.absolute()),
        "seconds": f"{0.9 * seconds:.0f}",
        "capability": str(machine.get("capability")),
    }
    command = [values.get(word[1:-1], word) if word[:1] == "{" else word for word in step.command]
    out.unlink(missing_ok=True)
    environment = environment | ({"TRITON_INTERPRET": "1"} if step.interpreted else {})
    outcome = StepEnd(step.name, step.what, command=" ".join(word for word in command if "\n" not in word))
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds)
        outcome.state = "passed" if process.returncode == 0 else "failed"
        outcome.reason = "" if process.returncode == 0 else f"it ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        said = _stop(process)
        outcome.state, outcome.reason = "stopped", f"it was given {seconds:.0f} s"
    outcome.output = said.splitlines()
    outcome.result = _result(out, said)
    if step.name == "gpu" and process.returncode == 5:
        # pytest's word for it.
        outcome.state, outcome.reason = "skipped", "no test was selected"
    return outcome


def _stop(process: "subprocess.Popen[str]") -> str:
    """Stops the process with all that it has started, and returns what it has said."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            said, _ = process.communicate(timeout=_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            continue
        return said
    return ""


def _result(out: Path, said: str) -> Any:
    """Returns what a step has written to `out`, or printed as its last line, read as JSON. None means neither."""
    try:
        return json.loads(out.read_text(encoding="utf-8") if out.exists() else said.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None


def page(done: Sequence[StepEnd]) -> str:
    """Formats all steps on a line each, then what each has said, as far as a page holds it."""
    lines = [outcome.line() for outcome in done]
    for outcome in done:
        if outcome.output and outcome.name != "machine":
            lines += ["", f"-- {outcome.name}: {outcome.command}", *outcome.output[-_SHOWN_LINES:]]
        elif outcome.result is not None:
            lines += ["", *(f"{name}: {value}" for name, value in outcome.result.items())]
    return "\n".join(lines) + "\n"


def _environment() -> dict[str, str]:
    """Returns the steps' environment: carried packages first, if they are for this Python, then this tree, then what
    was there."""
    carried = [] if misfit(ROOT / WHEELS) else [str(ROOT / PACKAGES)]
    roots = [*carried, *(str(ROOT / root) for root in _IMPORT_ROOTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, roots)), "OMP_NUM_THREADS": "4"}
    environment.pop("TRITON_INTERPRET", None)
    return environment


def _write(path: Path, text: str) -> None:
    """Writes the file whole or not at all: this process may be ended at any moment."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
