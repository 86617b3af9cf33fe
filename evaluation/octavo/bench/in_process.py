"""Runs the production scheduler's core and a runner in one process, step by step, with no socket between them."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from octavo.bench.figures import StepRows
from octavo.bench.measurement import CpuMeter, Measurement, TokenTimes, measured
from octavo.bench.parts.scheduler_alone import make_request
from octavo.bench.workloads import Case, CaseRequest
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import (
    Effect,
    Event,
    FrontendJoined,
    PrefixPinned,
    ReplicaJoined,
    RequestSubmitted,
    SendToFrontend,
    SendToReplica,
    StepAnswered,
)
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.steps_in_flight import ReplicaStats
from octavo.wire.costs import StepCosts
from octavo.wire.requests import Delta, Deltas, Prefix, Rejected, Request
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMoves, StepPlan, WorkerHello
from octavo.worker.fake.runner import FakeRunner
from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.loan import Payload
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import BlockContents, LaunchedStep, Runner, Settle, StepOutput, nothing_pending
from octavo.worker.sequences import WorkItem


class ObservedRunner:
    """Notes the steps of `runner`, which does the work; `steps` are those since they were last taken away."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.model = runner.model
        self.device = runner.device
        self.kernels = runner.kernels
        self.num_blocks = runner.num_blocks
        self.num_cpu_blocks = runner.num_cpu_blocks
        self.block_size = runner.block_size
        self.kv_bytes_per_token = runner.kv_bytes_per_token
        self.kv_cache_dtype = runner.kv_cache_dtype
        self.kv_groups = runner.kv_groups
        self.world_size = runner.world_size
        self.draft_model = runner.draft_model
        self.steps: list[StepRows] = []

    def launch(self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending) -> LaunchedStep:
        if items:
            self.steps.append(step_shape(items))
        return self._runner.launch(moves, items, settle)

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        return self.launch(moves, items).output()

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._runner.forget(sequence_ids)

    @property
    def kv_identity(self) -> StoreIdentity:
        return self._runner.kv_identity

    def read_blocks(self, block_ids: Sequence[int]) -> BlockContents:
        return self._runner.read_blocks(block_ids)

    def fill_cpu_block(self, block_id: int, payload: Payload) -> None:
        self._runner.fill_cpu_block(block_id, payload)

    def peek_blocks(self, block_ids: Sequence[int], *, in_cpu: bool) -> list[Payload] | None:
        return self._runner.peek_blocks(block_ids, in_cpu=in_cpu)

    def take_steps(self) -> list[StepRows]:
        steps, self.steps = self.steps, []
        return steps

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes of all blocks on the device, which the runner allocates when it is made."""
        return self.num_blocks * self.block_size * self.kv_bytes_per_token // len(self.kv_groups)


def step_shape(items: list[WorkItem]) -> StepRows:
    """Counts the tokens and the logit rows of a step. All choosers of one row share it."""
    return StepRows(sum(item.num_tokens for item in items), sum(1 for item in items if item.choosers))


_FRONTEND = 1
_INCARNATION = 1
ONE_STEP = SchedulerConfig(max_steps_in_flight=1)


class LocalReplica:
    """Runs one replica. No plan is made before the result of the previous plan; `hear` receives every delta."""

    def __init__(
        self,
        runner: Runner,
        hear: Callable[[Delta], None],
        config: SchedulerConfig = ONE_STEP,
        costs: StepCosts | None = None,
    ) -> None:
        self.fingerprint = runner.model.fingerprint
        self.core = Scheduler(config, epoch=1)
        self._hear = hear
        self._protocol = WorkerProtocol("bench", runner, lambda: _INCARNATION, costs)
        self._plans: deque[StepPlan] = deque()
        self._began = time.perf_counter()
        hello = self._protocol.beat()
        assert isinstance(hello, WorkerHello)
        self._handle(FrontendJoined(_FRONTEND))
        self._handle(ReplicaJoined(hello))

    @property
    def replica(self) -> Replica:
        return self.core.replicas[_INCARNATION]

    @property
    def is_idle(self) -> bool:
        """Tells whether all that was submitted is done."""
        return not self.core.groups

    def now(self) -> float:
        """Seconds since this was made."""
        return time.perf_counter() - self._began

    def submit(self, request: Request) -> None:
        """Raises `RuntimeError` if the request is refused."""
        self._handle(RequestSubmitted(_FRONTEND, request))

    def pin(self, prefix: Prefix) -> None:
        """Pins `prefix`, which the next step computes. Raises `RuntimeError` if the core refuses it."""
        if refusal := self.core.pin_refusal(prefix):
            raise RuntimeError(refusal)
        self._handle(PrefixPinned(prefix))

    def step(self) -> float:
        """Plans and computes one step, which there must be; the seconds that the scheduler took of it."""
        planned = time.perf_counter()
        self._perform(self.core.schedule(self.now()))
        computed = time.perf_counter()
        self._protocol.receive(self._plans.popleft())
        result = self._protocol.answer()
        answered = time.perf_counter()
        self._handle(StepAnswered(_INCARNATION, result))
        return computed - planned + time.perf_counter() - answered

    def _handle(self, event: Event) -> None:
        self._perform(self.core.handle(event, self.now()))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendToReplica(_, StepPlan() as plan):
                    self._plans.append(plan)
                case SendToReplica(_, message):
                    self._protocol.receive(message)
                case SendToFrontend(_, Deltas(_, deltas)):
                    for delta in deltas:
                        self._hear(delta)
                case SendToFrontend(_, Rejected() as rejected):
                    raise RuntimeError(f"{rejected.request_id} was rejected: {rejected.detail}")


class InProcess:
    """Drives one replica step by step: no plan is made before the result of the previous plan."""

    def __init__(self, runner: Runner) -> None:
        self._engine = LocalReplica(runner, self._hear)
        self._streams: dict[str, TokenTimes] = {}
        self._began = 0.0

    def run(self, case: Case) -> Measurement:
        """Submits all of the case's requests at once, and serves them."""
        meter, steps = CpuMeter({"worker": os.getpid()}), self._stats().steps
        self.submit(case)
        stage_s = self.advance()
        wall, cpu, steps = self._now(), meter.cpu_s(), self._stats().steps - steps
        return measured(case, wall, list(self._streams.values()), steps, stage_s, cpu)

    def submit(self, case: Case) -> None:
        """Submits a case. Nothing may be running."""
        self._began = self._engine.now()
        self._streams = {f"{case.name}-{i}": TokenTimes() for i in range(len(case.jobs))}
        for request_id, job in zip(self._streams, case.jobs, strict=True):
            self._engine.submit(
                make_request(request_id, job.prompt_token_ids, _sampling(job), self._engine.fingerprint)
            )

    @property
    def is_idle(self) -> bool:
        """Tells whether all that was submitted is done."""
        return self._engine.is_idle

    def advance(self, num_steps: int | None = None) -> dict[str, float]:
        """Runs so many steps, or until all is done; the seconds that each stage took."""
        before, scheduling, left = self._stats(), 0.0, num_steps
        while not self.is_idle and left != 0:
            scheduling += self._engine.step()
            left = None if left is None else left - 1
        after = self._stats()
        return {
            "scheduler": scheduling,
            "prepare": (after.prepare_us - before.prepare_us) / 1e6,
            "model": (after.model_us - before.model_us) / 1e6,
            "sample": (after.sample_us - before.sample_us) / 1e6,
        }

    def _hear(self, delta: Delta) -> None:
        self._streams[delta.request_id].arrived(len(delta.token_ids), self._now())

    def _now(self) -> float:
        return self._engine.now() - self._began

    def _stats(self) -> ReplicaStats:
        return replace(self._engine.replica.stats)


def _sampling(job: CaseRequest) -> SamplingParams:
    return SamplingParams(
        temperature=job.temperature, num_sequences=job.num_sequences, seed=1, max_tokens=job.num_tokens
    )


_NUM_BLOCKS = 4096


def planned_steps(model: Path, cases: Sequence[Case]) -> dict[str, list[StepRows]]:
    """Returns the steps of each case, by name, when a worker alone serves `cases` one after the other."""
    runner = ObservedRunner(FakeRunner(model, block_size=16, num_blocks=_NUM_BLOCKS))
    engine = InProcess(runner)
    planned = {}
    for case in cases:
        engine.run(case)
        planned[case.name] = runner.take_steps()
    return planned
