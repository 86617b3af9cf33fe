"""The scheduler's core with fake replicas and a frontend's journal around it: no process, no socket, no real clock."""

import json
import zlib
from collections import deque
from pathlib import Path

import msgspec

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.event_log import Began, Handled, Planned, Recorder, Scheduled, write_nothing
from octavo.scheduler.events import (
    Effect,
    Event,
    FrontendJoined,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaLost,
    RequestsAborted,
    RequestSubmitted,
    SendToFrontend,
    SendToReplica,
    StepAnswered,
    Tick,
)
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import SequenceGroup
from octavo.wire import history
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.requests import Deltas, FinishReason, Rejected, Request, ToFrontend
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import SampledToken, StepOutcome, StepPlan, StepResult, StepTimes, ToWorker, WorkerHello
from octavo.worker.fake_runner import FakeRunner, FakeVocabulary, expected_tokens
from octavo.worker.sequences import SequenceTable

FRONTEND = 7
VOCABULARY = FakeVocabulary(size=1000)
FINGERPRINT = "fingerprint"
_NO_TIMES = StepTimes(0, 0, 0)


def make_request(
    request_id: str,
    prompt_length: int,
    max_tokens: int,
    *,
    shared: int = 0,
    seed: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> Request:
    """A greedy request. Its prompt begins with `shared` tokens that are everybody's; the others differ from those of
    every other id."""
    own = (zlib.crc32(f"{request_id}:{i}".encode()) for i in range(prompt_length - shared))
    return Request(
        request_id=request_id,
        attempt=1,
        resubmitted=False,
        model_fingerprint=FINGERPRINT,
        prompt_token_ids=[*range(shared), *(token % VOCABULARY.size for token in own)],
        generated_token_ids=[],
        sampling=SamplingParams(0.0, 0, 1.0, seed, max_tokens, list(stop_token_ids)),
        age_ms=0,
    )


def reference_tokens(request: Request) -> list[int]:
    """What the fake model generates for `request` when nothing goes wrong, stop tokens applied."""
    tokens = expected_tokens(request.prompt_token_ids, request.sampling, 0, request.sampling.max_tokens, VOCABULARY)
    ends = [i for i, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


class FakeReplica:
    """A worker without its shell: runs plans in order when told to."""

    def __init__(self, directory: Path, incarnation: int, num_blocks: int, block_size: int) -> None:
        self.runner = FakeRunner(directory, block_size=block_size, num_blocks=num_blocks)
        self.hello = WorkerHello(
            schema_version=SCHEMA_VERSION,
            worker_id=f"worker-{incarnation}",
            incarnation=incarnation,
            model=msgspec.structs.replace(self.runner.model, fingerprint=FINGERPRINT),
            device="fake",
            rank=0,
            world_size=1,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_bytes_per_token=4,
        )
        self.table = SequenceTable(
            vocab_size=self.runner.model.vocab_size,
            max_model_len=self.runner.model.max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        self.received: list[ToWorker] = []
        self.plans: deque[StepPlan] = deque()
        self._failed_step_id = 0

    def take(self, message: ToWorker) -> None:
        self.received.append(message)
        if isinstance(message, StepPlan):
            self.plans.append(message)

    def execute(self, *, fail: bool = False) -> StepResult:
        """Runs the oldest plan, or fails it; plans made without knowing of a failure are skipped."""
        plan = self.plans.popleft()
        if plan.answered_step_id < self._failed_step_id:
            self.table.discard(plan)
            return self._result(plan, StepOutcome.SKIPPED, [])
        if fail:
            self.table.discard(plan)
            self._failed_step_id = plan.step_id
            return self._result(plan, StepOutcome.FAILED, [])
        items = self.table.apply(plan)
        sampled = self.runner.execute(items).sampled
        self.table.complete(items, sampled)
        ids = [item.sequence.sequence_id for item in items if item.samples]
        return self._result(plan, StepOutcome.DONE, list(map(SampledToken, ids, sampled)))

    def _result(self, plan: StepPlan, outcome: StepOutcome, sampled: list[SampledToken]) -> StepResult:
        return StepResult(plan.epoch, plan.incarnation, plan.step_id, outcome, sampled, _NO_TIMES, "")


class Cluster:
    """One core, any replicas, one frontend. Checks every invariant after every event."""

    def __init__(self, directory: Path, record: Recorder = write_nothing, **config: int | float) -> None:
        self.record = record
        self.core = Scheduler(SchedulerConfig(**config), epoch=99)  # type: ignore[arg-type]
        self.now = 0.0
        self.replicas: dict[int, FakeReplica] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.rejected: dict[str, Rejected] = {}
        self.to_frontend: list[ToFrontend] = []
        self._directory = directory
        record(Began(SCHEMA_VERSION, self.core.epoch, self.core.config))
        self.handle(FrontendJoined(FRONTEND))

    @property
    def groups(self) -> dict[str, SequenceGroup]:
        """All that the core holds, by request id."""
        return {group.request.request_id: group for group in self.core.groups}

    def handle(self, event: Event) -> None:
        self.record(Handled(self.now, event))
        self._perform(self.core.handle(event, self.now))

    def schedule(self) -> None:
        self.record(Scheduled(self.now))
        self._perform(self.core.schedule(self.now))

    def join(self, incarnation: int = 1, *, num_blocks: int = 64, block_size: int = 4) -> FakeReplica:
        replica = FakeReplica(self._directory, incarnation, num_blocks, block_size)
        self.replicas[incarnation] = replica
        self.handle(ReplicaJoined(replica.hello))
        return replica

    def leave(self, incarnation: int) -> None:
        self.handle(ReplicaLeft(incarnation, "test"))

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.tokens.setdefault(request.request_id, list(request.generated_token_ids))
            self.handle(RequestSubmitted(FRONTEND, request))

    def abort(self, request_id: str) -> None:
        self.handle(RequestsAborted(FRONTEND, [request_id]))

    def step(self, *, fail: bool = False) -> None:
        """Plans as far ahead as allowed, then every replica answers its oldest plan."""
        for _ in range(self.core.config.max_steps_in_flight):
            self.schedule()
        self.now += 0.01
        for incarnation, replica in list(self.replicas.items()):
            if replica.plans:
                self.handle(StepAnswered(incarnation, replica.execute(fail=fail)))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.handle(Tick())

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is held; fails if that takes more than `max_steps`."""
        for _ in range(max_steps):
            if not self.core.groups and not any(replica.plans for replica in self.replicas.values()):
                return
            self.step()
        raise AssertionError(f"{len(self.core.groups)} requests still held after {max_steps} steps")

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendToReplica(replica_id, message):
                    if isinstance(message, StepPlan):
                        self.record(Planned(message))
                        tokens = sum(work.num_tokens for work in message.work)
                        assert tokens <= self.core.config.max_num_batched_tokens, "a step beyond its budget"
                    self.replicas[replica_id].take(message)
                case SendToFrontend(_, message):
                    self._take(message)
                case ReplicaLost(replica_id):
                    del self.replicas[replica_id]
        self.core.check()

    def _take(self, message: ToFrontend) -> None:
        self.to_frontend.append(message)
        if isinstance(message, Rejected):
            self.rejected[message.request_id] = message
        if not isinstance(message, Deltas):
            return
        for delta in message.deltas:
            tokens = self.tokens[delta.request_id]
            assert delta.request_id not in self.finished, "a delta after the end"
            assert delta.start_index == len(tokens), "a token lost or sent twice"
            assert delta.previous_hash == history.extend(history.EMPTY, tokens)
            tokens += delta.token_ids
            if delta.finish_reason:
                self.finished[delta.request_id] = delta.finish_reason


def write_fake_model(directory: Path, max_model_len: int = 4096) -> Path:
    """The least a fake replica needs of a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": VOCABULARY.size, "max_position_embeddings": max_model_len}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
