"""The steps that the production scheduler makes of cases, found without a model."""

from collections.abc import Sequence
from pathlib import Path

from octavo.bench.floors import StepShape
from octavo.bench.in_process import InProcess
from octavo.bench.parts.observed import ObservedRunner
from octavo.bench.workloads import Case
from octavo.worker.fake.runner import FakeRunner

_NUM_BLOCKS = 4096


def planned_steps(model: Path, cases: Sequence[Case]) -> dict[str, list[StepShape]]:
    """By case, of `cases` served one after the other by a worker alone."""
    runner = ObservedRunner(FakeRunner(model, block_size=16, num_blocks=_NUM_BLOCKS))
    engine = InProcess(runner)
    planned = {}
    for case in cases:
        engine.run(case)
        planned[case.name] = runner.take_steps()
    return planned
