"""Any run of plans, two of them in flight on a device that keeps its tokens to itself, is answered as one by one."""

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.depth import deep
from octavo.testing.fakes.deferred import DeferredRunner
from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.testing.oracles.random_plans import BLOCK_SIZE, NUM_BLOCKS, NUM_CPU_BLOCKS, PARAMS, WINDOWS, Planner
from octavo.testing.oracles.worker_plans import EPOCH, INCARNATION
from octavo.wire.steps import (
    MAX_STEPS_IN_FLIGHT,
    BlockMoves,
    StepPlan,
    StepResult,
    StepTimes,
    ToWorker,
    WorkerUnregistered,
    WorkerWelcome,
)
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import DoneStep, Settle, nothing_pending
from octavo.worker.sequences import WorkItem


class WaitingRunner(SpoilableRunner):
    """One step after the other. `fails`: the next that is launched."""

    fails = False

    def launch(self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending) -> DoneStep:
        fails, self.fails = self.fails, False
        if fails:
            raise RuntimeError("the device stumbled")
        return super().launch(moves, items)


@dataclass
class Twins:
    """The same worker twice: one step after the other, and two in flight."""

    waiting: WaitingRunner
    deferred: DeferredRunner

    def __post_init__(self) -> None:
        self.runners = (self.waiting, self.deferred)
        self.protocols = [WorkerProtocol("w0", runner, count(INCARNATION).__next__) for runner in self.runners]
        self.tell(WorkerWelcome(EPOCH))

    @property
    def incarnation(self) -> int:
        return self.protocols[0].incarnation

    def tell(self, message: ToWorker) -> None:
        for protocol in self.protocols:
            protocol.receive(message)

    def run(self, step: StepPlan, *, fails: bool, to_spoil: list[int], is_ready: bool) -> None:
        for runner in self.runners:
            runner.fails, runner.to_spoil = fails, to_spoil
        self.tell(structs.replace(step, incarnation=self.incarnation))
        for runner in self.runners:
            runner.fails, runner.to_spoil = False, ()
        for launched in self.deferred.launched[-1:]:
            launched.is_ready = is_ready

    def answer(self) -> StepResult:
        """What both say."""
        assert all(protocol.busy for protocol in self.protocols)
        one, other = (structs.replace(p.answer(), times=StepTimes(0, 0, 0)) for p in self.protocols)
        assert one == other
        return one


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    return directory


@pytest.mark.parametrize("examples", [40, *deep(150)])
def test_two_in_flight_are_answered_as_one_after_the_other(directory: Path, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(seed=st.integers(0, 2**32), stumbles=st.booleans())
    def check(seed: int, stumbles: bool) -> None:
        answer_alike(directory, seed, stumbles)

    check()


def answer_alike(directory: Path, seed: int, stumbles: bool) -> None:
    """Whole steps fail, or sequences do: a step of which one twin knows that nothing is left cannot fail there."""
    memory: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "num_cpu_blocks": NUM_CPU_BLOCKS,
        "windows": WINDOWS,
    }
    twins = Twins(WaitingRunner(directory, **memory), DeferredRunner(directory, **memory))
    random = Random(seed)
    params = PARAMS[:-1] if stumbles else PARAMS
    planner, answered = Planner(random, params), 0
    for step_id in range(1, 40):
        if random.random() < 0.02:
            twins.tell(WorkerUnregistered(EPOCH))
            assert not twins.deferred.holds
            twins.tell(WorkerWelcome(EPOCH))
            planner, answered = Planner(random, params), 0
        while len(planner.outstanding) == MAX_STEPS_IN_FLIGHT or (planner.outstanding and random.random() < 0.3):
            answered = planner.learn(twins.answer())
        step = planner.next_plan(step_id, answered)
        spoiled = [i for i in planner.known if random.random() < 0.02 and not stumbles]
        fails, is_ready = stumbles and random.random() < 0.08, random.random() < 0.2
        twins.run(step, fails=fails, to_spoil=spoiled, is_ready=is_ready)
    while planner.outstanding:
        planner.learn(twins.answer())
    assert not any(protocol.busy for protocol in twins.protocols)
    assert twins.deferred.holds <= planner.known.keys()
