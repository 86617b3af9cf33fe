"""How the benchmark starts the systems that it compares."""

from pathlib import Path

import pytest

from octavo.bench import systems
from octavo.bench.formats import read_format
from octavo.bench.in_process import ONE_STEP
from octavo.bench.systems import Bench
from octavo.bench.workloads import KV_CACHE_MEMORY
from octavo.scheduler.cli.serve import scheduler
from octavo.testbed.stack import Stack


class StackThatDoesNotStart(Stack):
    """Takes its settings, and starts no process."""

    def start_all(self, workers: int = 1) -> "StackThatDoesNotStart":
        return self


@pytest.mark.parametrize(
    ("form", "expected"), [("bf16", {"OCTAVO_DTYPE": "bfloat16"}), ("q4_0", {"OCTAVO_QUANTIZATION": "q4_0"})]
)
def test_all_processes_do_the_work_that_the_worker_alone_does(
    form: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Stack] = []

    def stack(model: Path, directory: Path, environment: dict[str, str]) -> Stack:
        asked.append(StackThatDoesNotStart(model, directory, environment))
        return asked[-1]

    monkeypatch.setattr(systems, "Stack", stack)
    with Bench(tmp_path, held_to="avx2") as bench:
        whole = bench.whole(2, read_format(form))
    # All that its processes are told beyond addresses: nothing that the worker alone has not.
    assert asked[0].environment == {
        **expected,
        "OCTAVO_THREADS": "2",
        "OCTAVO_KV_CACHE_MEMORY": str(KV_CACHE_MEMORY),
        "OCTAVO_SPECULATION": "off",
        "OCTAVO_CPU_KERNELS": "avx2",
    }
    assert "--speculation off" in whole.about
    # The scheduler reads it, and would guess tokens without it; the worker alone has no costs by which guesses pay.
    (option,) = [each for each in scheduler.params if each.envvar == "OCTAVO_SPECULATION"]
    assert option.default != "off"
    assert ONE_STEP.speculation == "auto"
