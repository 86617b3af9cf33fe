"""Runs the scheduler alone: the production core and one replica that answers at once, having computed nothing."""

import random
from collections.abc import Iterator
from functools import partial

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import (
    DiskAnswered,
    Effect,
    FrontendJoined,
    ReplicaJoined,
    RequestsAborted,
    RequestSubmitted,
    SendToFrontend,
    SendToReplica,
    StepAnswered,
)
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.steps_in_flight import OutstandingStep
from octavo.scheduler.kv.census import BlockCensus
from octavo.scheduler.kv.manager import paged_memory
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.costs import StepCosts
from octavo.wire.requests import CacheKey, Rejected, Request
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import (
    BlocksFetched,
    Candidates,
    FurtherTokens,
    KVDisk,
    KVGroup,
    ModelInfo,
    SampledToken,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimes,
    WorkerHello,
)

VOCAB_SIZE = 1 << 16
_FRONTEND = 1
_INCARNATION = 1
_MODEL = ModelInfo("none", "fingerprint", "none", VOCAB_SIZE, max_model_len=1 << 20)
STEP_S = 0.01


def hello(
    num_blocks: int,
    block_size: int,
    num_cpu_blocks: int = 0,
    costs: StepCosts | None = None,
    kv_disk: KVDisk | None = None,
) -> WorkerHello:
    """Makes the hello of a worker with one KV group."""
    return WorkerHello(
        schema_version=SCHEMA_VERSION,
        worker_id="instant",
        incarnation=_INCARNATION,
        process=_INCARNATION,
        model=_MODEL,
        device="none",
        world_size=1,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        block_size=block_size,
        kv_bytes_per_token=0,
        kv_groups=[KVGroup(window=0)],
        costs=costs,
        kv_disk=kv_disk,
    )


def make_request(
    request_id: str,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    model_fingerprint: str = _MODEL.fingerprint,
) -> Request:
    """Makes a request as a frontend submits it first."""
    return Request(
        request_id=request_id,
        attempt=1,
        resubmitted=False,
        model_fingerprint=model_fingerprint,
        prompt_token_ids=prompt_token_ids,
        generated=[],
        sampling=sampling,
        priority=0,
        tenant="",
        cache_key=CacheKey(),
        age_ms=0,
    )


class SchedulerAlone:
    """Runs one core, one replica, one frontend. Tokens are random, so that no two sequences hold the same by chance.

    The parts of a step are apart, so that each can be timed: `schedule`, then `next_result`, which is the replica's,
    then `accept`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        num_cpu_blocks: int = 0,
        costs: StepCosts | None = None,
        kv_disk: KVDisk | None = None,
        seed: int = 0,
        census: BlockCensus | None = None,
    ) -> None:
        self.core = Scheduler(config, epoch=1, make_memory=partial(paged_memory, census=census))
        self._random = random.Random(seed)
        self._now = 0.0
        self.core.handle(FrontendJoined(_FRONTEND), 0.0)
        self.core.handle(ReplicaJoined(hello(num_blocks, block_size, num_cpu_blocks, costs, kv_disk)), 0.0)

    @property
    def replica(self) -> Replica:
        return self.core.replicas[_INCARNATION]

    def draw_tokens(self, count: int) -> list[int]:
        """Draws `count` random tokens."""
        return self._random.choices(range(VOCAB_SIZE), k=count)

    def submit(self, request: Request) -> None:
        """Raises `RuntimeError` if the request is refused."""
        for effect in self.core.handle(RequestSubmitted(_FRONTEND, request), self._now):
            if isinstance(effect, SendToFrontend) and isinstance(effect.message, Rejected):
                raise RuntimeError(f"{request.request_id} was rejected: {effect.message.detail}")

    def abort(self, request_id: str) -> None:
        self.core.handle(RequestsAborted(_FRONTEND, [request_id]), self._now)

    def schedule(self) -> list[Effect]:
        """Asks the core for a plan."""
        return self.core.schedule(self._now)

    def next_result(self) -> StepResult:
        """Makes the replica's result of its oldest plan, which must exist."""
        step = self.replica.outstanding[0]
        sampled, further = self.chosen(step)
        return StepResult(
            epoch=self.core.epoch,
            incarnation=_INCARNATION,
            step_id=step.step_id,
            outcome=StepOutcome.DONE,
            sampled=sampled,
            candidates=[self._candidates(group, beam.placement.sequence_id) for group, beam in step.beams],
            prompt_logprobs=[],
            failed=[],
            times=self.times(step),
            detail="",
            further=further,
        )

    def chosen(self, step: OutstandingStep) -> tuple[list[SampledToken], list[FurtherTokens]]:
        """Draws the tokens that sequences choose in a step; takes guesses for wrong."""
        tokens = self.draw_tokens(len(step.samplers))
        return [
            SampledToken(s.placement.sequence_id, token) for (_, s), token in zip(step.samplers, tokens, strict=True)
        ], []

    def times(self, step: OutstandingStep) -> StepTimes:
        """Says what a step has taken of the replica."""
        return StepTimes(0, 0, 0)

    def accept(self, result: StepResult, seconds: float = STEP_S) -> list[Effect]:
        """Gives the core a result, so many seconds after the one before it."""
        self._now += seconds
        return self.core.handle(StepAnswered(_INCARNATION, result), self._now)

    def find_nothing_on_disk(self) -> None:
        """Plans and runs steps for as long as they have the disk fetch something, which it does not find."""
        while fetching := [plan for plan in plans(self.schedule()) if plan.disk is not None and plan.disk.fetch]:
            for plan in fetching:
                assert plan.disk is not None
                self.accept(self.next_result())
                self.answer_from_disk(plan.step_id, [False] * len(plan.disk.fetch))

    def answer_from_disk(self, step_id: int, found: list[bool]) -> None:
        """Tells the core which of the contents that a step has fetched the disk had."""
        answer = BlocksFetched(self.core.epoch, _INCARNATION, step_id, found)
        self.core.handle(DiskAnswered(_INCARNATION, answer), self._now)

    def run(self) -> Iterator[list[StepPlan]]:
        """Runs all that was submitted, as many steps in flight as are allowed; yields the plans when they are made."""
        while self.core.groups:
            yield [plan for _ in range(self.core.config.max_steps_in_flight) for plan in plans(self.schedule())]
            self.accept(self.next_result())
        while self.replica.outstanding:
            self.accept(self.next_result())

    def _candidates(self, group: SequenceGroup, sequence_id: int) -> Candidates:
        """Draws candidates. A beam's most probable token has a logprob of -Exp(1), each next one is less likely by
        another Exp(1)."""
        assert group.search is not None
        count, logprob, logprobs = group.search.num_candidates, 0.0, []
        for _ in range(count):
            logprob -= self._random.expovariate(1.0)
            logprobs.append(logprob)
        return Candidates(sequence_id, self._random.sample(range(VOCAB_SIZE), count), logprobs)


def the_plan(effects: list[Effect]) -> StepPlan:
    """Returns the plan among the effects of `schedule`. Raises `ValueError` if there is not exactly one."""
    (plan,) = plans(effects)
    return plan


def plans(effects: list[Effect]) -> list[StepPlan]:
    """Returns all plans among the effects of `schedule`."""
    return [e.message for e in effects if isinstance(e, SendToReplica) and isinstance(e.message, StepPlan)]
