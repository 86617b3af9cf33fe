"""Joins the scheduler's core, fake replicas and a frontend's journal: no process, no socket, no real clock."""

import json
import zlib
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import (
    DiskAnswered,
    Effect,
    Event,
    FrontendJoined,
    LossCause,
    PrefixGivenUp,
    PullAnswered,
    ReplicaDismissed,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaLost,
    ReplicaMovedOn,
    ReplicaStalled,
    RequestsAborted,
    RequestSubmitted,
    SchedulerObserver,
    SendToFrontend,
    SendToReplica,
    StepAnswered,
    Tick,
)
from octavo.scheduler.core.explain import describe, explain
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.kv.census import BlockCensus
from octavo.scheduler.kv.manager import paged_memory
from octavo.scheduler.server.event_log import Began, Handled, Planned, Record, Recorder, Scheduled
from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.testing.oracles.cache_resets import CacheResetWatch
from octavo.testing.oracles.mechanisms import MechanismWatch
from octavo.testing.oracles.notice_book import NoticeBook
from octavo.testing.oracles.router_index import RouterIndex
from octavo.testing.promises import Promises
from octavo.wire import history
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.costs import StepCosts
from octavo.wire.requests import (
    CacheKey,
    Delta,
    Deltas,
    FinishReason,
    GeneratedSequence,
    Notice,
    Notices,
    Rejected,
    Request,
    ToFrontend,
)
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import (
    BlockContent,
    BlockServer,
    BlocksFetched,
    BlocksPulled,
    Ending,
    KVDisk,
    Predecessor,
    PullBlocks,
    SequenceFailure,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimes,
    ToWorker,
    WorkerHello,
    WorkerRole,
)
from octavo.worker.fake.faults import parse_faults
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens
from octavo.worker.kv_store.identity import block_name
from octavo.worker.kv_store.loan import Payload
from octavo.worker.runner import Runner, StepOutput
from octavo.worker.sequence_table import SequenceTable

FRONTEND = 7
VOCABULARY = FakeVocabulary(size=1000)
FINGERPRINT = "fingerprint"
_NO_TIMES = StepTimes(0, 0, 0)
_NO_OUTPUT = StepOutput([], [], [], [], _NO_TIMES)


def write_nothing(record: Record) -> None:
    """Records nothing of a core whose events no test looks at."""


def make_request(
    request_id: str,
    prompt_length: int,
    max_tokens: int,
    *,
    shared: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    priority: int = 0,
    tenant: str = "",
    salt: str = "",
    **sampling: Any,
) -> Request:
    """A greedy request unless `sampling` says otherwise. Its prompt begins with `shared` tokens that are everybody's;
    the others differ from those of every other id."""
    own = (zlib.crc32(f"{request_id}:{i}".encode()) for i in range(prompt_length - shared))
    return Request(
        request_id=request_id,
        attempt=1,
        resubmitted=False,
        model_fingerprint=FINGERPRINT,
        prompt_token_ids=[*range(shared), *(token % VOCABULARY.size for token in own)],
        generated=[],
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=list(stop_token_ids), **sampling),
        priority=priority,
        tenant=tenant,
        cache_key=CacheKey(salt=salt),
        age_ms=0,
    )


def resubmitted(request: Request, *generated: list[int], **changes: Any) -> Request:
    """The request as its frontend sends it again, after what its sequences have generated."""
    known = [GeneratedSequence(list(token_ids), finished=False) for token_ids in generated]
    changes = {"attempt": request.attempt + 1, "resubmitted": True, **changes}
    return msgspec.structs.replace(request, generated=known, **changes)


def reference_tokens(request: Request, index: int = 0) -> list[int]:
    """Returns the tokens that the fake model generates for a sequence of `request` when nothing goes wrong, stop tokens
    applied."""
    sampling = request.sampling
    tokens = expected_tokens(request.prompt_token_ids, sampling, index, sampling.max_tokens, VOCABULARY)
    ends = [i for i, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def ended(process: int, ending: Ending = Ending.CRASHED) -> Predecessor:
    """Describes the end of a process as the next process of its name reports it: by default a crash."""
    return Predecessor(process, ending, "signal SIGSEGV" if ending is Ending.CRASHED else "signal SIGKILL")


class FakeDisk(dict[bytes, bytes]):
    """Blocks by their names, as the workers of one machine find them."""


class FakeReplica:
    """A worker without its shell, with any runner: runs plans in order when told to. It keeps blocks on `disk`, which
    `read` reads whenever it is told to."""

    def __init__(
        self,
        runner: Runner,
        incarnation: int,
        costs: StepCosts | None = None,
        process: int | None = None,
        disk: FakeDisk | None = None,
        kv_disk: KVDisk | None = None,
        is_read: bool = False,
    ) -> None:
        self.runner = runner
        self.disk = disk
        self.to_pull: deque[PullBlocks] = deque()
        self.to_read: deque[tuple[StepPlan, list[BlockContent]]] = deque()
        self.hello = WorkerHello(
            schema_version=SCHEMA_VERSION,
            worker_id=f"worker-{incarnation}",
            incarnation=incarnation,
            process=incarnation if process is None else process,
            model=msgspec.structs.replace(runner.model, fingerprint=FINGERPRINT),
            device="fake",
            world_size=1,
            num_blocks=runner.num_blocks,
            num_cpu_blocks=runner.num_cpu_blocks,
            block_size=runner.block_size,
            kv_bytes_per_token=runner.kv_bytes_per_token,
            kv_groups=runner.kv_groups,
            costs=costs,
            draft_model=runner.draft_model,
            kv_disk=None if disk is None else kv_disk or KVDisk(),
            block_server=BlockServer(str(incarnation), runner.kv_identity.directory_name) if is_read else None,
        )
        self.table = SequenceTable(
            vocab_size=runner.model.vocab_size,
            max_model_len=runner.model.max_model_len,
            num_blocks=runner.num_blocks,
            num_cpu_blocks=runner.num_cpu_blocks,
            block_size=runner.block_size,
            kv_groups=runner.kv_groups,
            on_forget=runner.forget,
        )
        self.received: list[ToWorker] = []
        self.plans: deque[StepPlan] = deque()
        self._failed_step_id = 0

    def take(self, message: ToWorker) -> None:
        self.received.append(message)
        if isinstance(message, StepPlan):
            self.plans.append(message)
        elif isinstance(message, PullBlocks):
            self.to_pull.append(message)

    @property
    def may_pull(self) -> bool:
        """Tells whether there is a pull whose step is done, so that nothing reads any more what it writes to."""
        return bool(self.to_pull) and all(plan.step_id > self.to_pull[0].after_step_id for plan in self.plans)

    def pull(self, source: "FakeReplica | None") -> BlocksPulled:
        """Copies what the oldest pull names from that replica, which is gone if there is none."""
        pull = self.to_pull.popleft()
        blocks = [move.source for move in pull.moves]
        if source is not None and (payloads := source.runner.peek_blocks(blocks, in_cpu=pull.from_cpu)) is not None:
            for move, payload in zip(pull.moves, payloads, strict=True):
                self.runner.fill_cpu_block(move.target, payload)
        return BlocksPulled(pull.epoch, pull.incarnation, pull.pull_id, source is not None)

    def execute(
        self,
        *,
        fail: bool = False,
        starve: bool = False,
        spoil: Collection[int] = (),
        spoil_output: Collection[int] = (),
    ) -> StepResult:
        """Runs the oldest plan, with NaN in the first slot that it fills of the sequences `spoil`, and with nothing but
        NaN for those in `spoil_output`, whose slots are sound; or fails it, or finds no memory for it, as a runner may
        too. Plans made without knowing of a failure are skipped, and so is what they have of a sequence that failed."""
        plan = self.plans.popleft()
        if self.disk is not None and plan.disk is not None and plan.disk.clear:
            self.disk.clear()
        if plan.answered_step_id < self._failed_step_id:
            self.table.discard(plan)
            return self._result(plan, StepOutcome.SKIPPED, _NO_OUTPUT)
        if fail or starve:
            return self._fail(plan, StepOutcome.FAILED if fail else StepOutcome.OUT_OF_MEMORY)
        items = self.table.apply(plan)
        self._store(plan)
        if isinstance(self.runner, SpoilableRunner):
            self.runner.to_spoil, self.runner.to_fail = spoil, spoil_output
        try:
            output = self.runner.execute(plan.moves, items)
        except MemoryError:
            return self._fail(plan, StepOutcome.OUT_OF_MEMORY)
        self.table.begin(items)
        self.table.complete(items, output)
        failed = self.table.failures(plan)
        if plan.disk is not None and plan.disk.fetch:
            self.to_read.append((plan, plan.disk.fetch))
        return self._result(plan, StepOutcome.DONE, output, list(failed.values()))

    def _store(self, plan: StepPlan) -> None:
        if plan.disk is None or not plan.disk.store:
            return
        assert self.disk is not None, "a plan is for a worker with a disk"
        contents = plan.disk.store
        read = self.runner.read_blocks([each.block_id for each in contents])
        for content, parts in zip(contents, read.blocks(), strict=True):
            if read.is_sound(parts):
                self.disk[block_name(content.value, content.kv_group)] = b"".join(parts)

    def read(self) -> BlocksFetched:
        """Reads what the oldest step that is done has the disk fetch."""
        assert self.disk is not None
        plan, contents = self.to_read.popleft()
        payloads: list[Payload | None] = [self.disk.get(block_name(each.value, each.kv_group)) for each in contents]
        for content, payload in zip(contents, payloads, strict=True):
            if payload is not None:
                self.runner.fill_cpu_block(content.block_id, payload)
        found = [payload is not None for payload in payloads]
        return BlocksFetched(plan.epoch, plan.incarnation, plan.step_id, found)

    def _fail(self, plan: StepPlan, outcome: StepOutcome) -> StepResult:
        self.table.discard(plan)
        self._failed_step_id = plan.step_id
        return self._result(plan, outcome, _NO_OUTPUT)

    def _result(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        output: StepOutput,
        failed: Sequence[SequenceFailure] = (),
    ) -> StepResult:
        return StepResult(
            plan.epoch,
            plan.incarnation,
            plan.step_id,
            outcome,
            output.sampled,
            output.candidates,
            output.prompt_logprobs,
            list(failed),
            # The clock on the wall is none of the tests'.
            StepTimes(0, 0, 0, output.times.grammars),
            "",
            output.further,
            output.proposed,
            output.pooled,
        )


Stream = tuple[str, int]


class Cluster:
    """Runs one core, any replicas, one frontend. Checks every invariant after every event.

    `streams` holds the tokens of each request's sequences, by request id and sequence index; `tokens` those of each
    request's first; `pooled` the outputs of requests for one; `notices` what each was told besides. A router follows
    what is cached, if `is_routed`. The `drafter` guesses for the core, if any is given.
    """

    def __init__(
        self,
        directory: Path,
        record: Recorder = write_nothing,
        observer: SchedulerObserver | None = None,
        mechanisms: MechanismWatch | None = None,
        is_routed: bool = True,
        drafter: Drafter | None = None,
        **config: Any,
    ) -> None:
        self.record = record
        self._drafter = drafter
        self._mechanisms = mechanisms
        self.router = RouterIndex() if is_routed else None
        self.begin(SchedulerConfig(**config), 99, observer)
        self.now = 0.0
        # In `step` and `run`.
        self.disks_answer = self.pulls_answer = True
        self.replicas: dict[int, FakeReplica] = {}
        self.streams: dict[Stream, list[int]] = {}
        self.ended: dict[Stream, FinishReason] = {}
        self.deltas: dict[Stream, list[Delta]] = defaultdict(list)
        self.rejected: dict[str, Rejected] = {}
        self.pooled: dict[str, bytes] = {}
        self.notices: dict[str, list[Notice]] = defaultdict(list)
        self.to_frontend: list[ToFrontend] = []
        self.given_up: list[PrefixGivenUp] = []
        self.standstills: list[ReplicaStalled | ReplicaMovedOn] = []
        self.promises = Promises()
        self._notice_book = NoticeBook()
        self._resets = CacheResetWatch()
        self._directory = directory
        record(Began(SCHEMA_VERSION, self.core.epoch, self.core.config))
        self.handle(FrontendJoined(FRONTEND))

    def begin(self, config: SchedulerConfig, epoch: int, observer: SchedulerObserver | None = None) -> None:
        """Runs a core that knows nothing yet, in place of one before."""
        self.census = BlockCensus() if self.router else None
        memory = partial(paged_memory, census=self.census)
        self.core = Scheduler(config, epoch, observer, memory, drafter=self._drafter)
        if self.router:
            self.router.cell_restarted()

    @property
    def groups(self) -> dict[str, SequenceGroup]:
        """All that the core holds, by request id."""
        return {group.request.request_id: group for group in self.core.groups}

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {request_id: tokens for (request_id, index), tokens in self.streams.items() if index == 0}

    @property
    def finished(self) -> dict[str, FinishReason]:
        """Returns the finish reason of each request's first sequence."""
        return {request_id: reason for (request_id, index), reason in self.ended.items() if index == 0}

    def outputs(self, request_id: str) -> list[list[int]]:
        """Returns the tokens of all sequences of a request, in order of their index."""
        return [tokens for (name, _), tokens in sorted(self.streams.items()) if name == request_id]

    def handle(self, event: Event) -> None:
        self.record(Handled(self.now, event))
        if self._mechanisms is not None:
            self._mechanisms.before(self.core)
        self.promises.before_event(self.core)
        self._resets.before_event(self.core, event)
        effects = self.core.handle(event, self.now)
        self.promises.after_event(self.core, effects)
        self._resets.after_event(self.core, event)
        if self._mechanisms is not None:
            self._mechanisms.after_event(self.core, event, effects)
        self._perform(effects)

    def schedule(self) -> None:
        self.record(Scheduled(self.now))
        if self._mechanisms is not None:
            self._mechanisms.before(self.core)
        self.promises.before_turn(self.core)
        effects = self.core.schedule(self.now)
        self.promises.after_turn(self.core)
        self._resets.look(self.core)
        if self._mechanisms is not None:
            self._mechanisms.after_turn(self.core, effects)
        self._perform(effects)

    def join(
        self,
        incarnation: int = 1,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_cpu_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
        runner: Runner | None = None,
        costs: StepCosts | None = None,
        worker_id: str | None = None,
        faults: str = "",
        draft_hit_rate: float | None = None,
        process: int | None = None,
        predecessor: Predecessor | None = None,
        disk: FakeDisk | None = None,
        mirror: bool = False,
        kv_disk: KVDisk | None = None,
        is_read: bool = False,
        role: WorkerRole = WorkerRole.BOTH,
    ) -> FakeReplica:
        """A replica with a fake model that has `faults` (`octavo.worker.fake.faults`), and a draft model if this has a
        hit rate, or with `runner`; it has `disk`, if any; of worker-`incarnation` unless named, and in a process of its
        own; what it knows of the `predecessor` it tells."""
        if runner is None:
            runner = SpoilableRunner(
                self._directory,
                block_size=block_size,
                num_blocks=num_blocks,
                num_cpu_blocks=num_cpu_blocks,
                windows=windows,
                faults=parse_faults(faults),
                draft_model=None if draft_hit_rate is None else "draft",
                draft_hit_rate=draft_hit_rate or 0.0,
            )
        replica = FakeReplica(runner, incarnation, costs, process, disk, kv_disk or KVDisk(mirror=mirror), is_read)
        if worker_id is not None:
            replica.hello = msgspec.structs.replace(replica.hello, worker_id=worker_id)
        replica.hello = msgspec.structs.replace(replica.hello, predecessor=predecessor, role=role)
        self.replicas[incarnation] = replica
        self.handle(ReplicaJoined(replica.hello))
        return replica

    def leave(self, incarnation: int, cause: LossCause = LossCause.GOODBYE) -> None:
        self.handle(ReplicaLeft(incarnation, cause, "test"))

    def submit(self, *requests: Request) -> None:
        for request in requests:
            for index, known in enumerate(request.generated):
                self.streams.setdefault((request.request_id, index), list(known.token_ids))
            self.streams.setdefault((request.request_id, 0), [])
            self.handle(RequestSubmitted(FRONTEND, request))

    def abort(self, request_id: str) -> None:
        self.handle(RequestsAborted(FRONTEND, [request_id]))

    def step(self, *, fail: bool = False, spoil: str | None = None, spoil_output: str | None = None) -> None:
        """Plans as far ahead as allowed, then every replica answers its oldest plan, in which the sequences of the
        request `spoil` get NaN, and those of `spoil_output` though their KV is sound."""
        for _ in range(self.core.config.max_steps_in_flight):
            self.schedule()
        self.now += 0.01
        for incarnation, replica in list(self.replicas.items()):
            if replica.plans:
                self.answer(incarnation, fail=fail, spoil=spoil, spoil_output=spoil_output)
            if replica.to_read and self.disks_answer and incarnation in self.replicas:
                self.read(incarnation)
            if self.pulls_answer and incarnation in self.replicas and replica.may_pull:
                self.pull(incarnation)

    def answer(
        self, incarnation: int, *, fail: bool = False, spoil: str | None = None, spoil_output: str | None = None
    ) -> None:
        """Lets one replica answer its oldest plan."""
        spoiled, without_output = self._sequence_ids(spoil), self._sequence_ids(spoil_output)
        result = self.replicas[incarnation].execute(fail=fail, spoil=spoiled, spoil_output=without_output)
        self.handle(StepAnswered(incarnation, result))

    def read(self, incarnation: int) -> None:
        """Lets the disk of one replica answer what it was asked for first."""
        self.handle(DiskAnswered(incarnation, self.replicas[incarnation].read()))

    def pull(self, incarnation: int) -> None:
        """Lets one replica copy what it was told to first from another one."""
        replica = self.replicas[incarnation]
        source = self.replicas.get(replica.to_pull[0].source)
        self.handle(PullAnswered(incarnation, replica.pull(source)))

    def _sequence_ids(self, request_id: str | None) -> set[int]:
        return set() if request_id is None else {each.placement.sequence_id for each in self.groups[request_id].live}

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.handle(Tick())

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is held; fails if that takes more than `max_steps`."""
        for _ in range(max_steps):
            if not self.core.groups and not any(replica.plans for replica in self.replicas.values()):
                return
            self.step()
        raise AssertionError(f"{len(self.core.groups)} requests still held after {max_steps} steps\n{self.state()}")

    def state(self) -> str:
        """Tells of each request that is held what keeps it, and where its sequences are; and of each replica what is
        left of it: for a run that does not end."""
        core, lines = self.core, list[str]()
        for group in core.groups:
            lines += [describe(each) for each in explain(core.state, core.policy, group.request.request_id, self.now)]
            for sequence in group.live:
                placement = sequence.placement
                lines.append(
                    f"  sequence {sequence.index}: {sequence.num_known} tokens known, {placement.num_computed} computed"
                    f", {placement.num_in_flight} in flight, draft {placement.draft}, follows {placement.leader},"
                    f" waits for {placement.waits_for}"
                )
        for replica in core.replicas.values():
            outstanding = [(step.step_id, step.num_tokens, step.num_guesses) for step in replica.outstanding]
            lines.append(
                f"{replica.hello.worker_id}: {replica.kv.num_free} blocks free, {replica.size}, running"
                f" {len(replica.running)}, swapped {len(replica.swapped)}, to restart {len(replica.restarts)}, suspect"
                f" {replica.suspect}, steps under way (id, rows, guesses) {outstanding}"
            )
        return "\n".join(lines)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendToReplica(replica_id, message):
                    if isinstance(message, StepPlan):
                        self.record(Planned(message))
                        tokens = sum(work.num_tokens for work in message.work)
                        tokens += sum(len(draft.token_ids) for draft in message.drafts)
                        assert tokens <= self.core.replicas[replica_id].token_budget, "a step beyond its budget"
                    self.replicas[replica_id].take(message)
                case SendToFrontend(_, message):
                    self._take(message)
                case ReplicaLost(replica_id) | ReplicaDismissed(replica_id):
                    del self.replicas[replica_id]
                case ReplicaStalled() | ReplicaMovedOn():
                    self.standstills.append(effect)
                case PrefixGivenUp():
                    self.given_up.append(effect)
        self.core.check()
        self._notice_book.check(self.core, effects)
        if self.router and self.census:
            self.router.look(self.core, self.census)

    def _take(self, message: ToFrontend) -> None:
        self.to_frontend.append(message)
        if isinstance(message, Rejected):
            self.rejected[message.request_id] = message
        if isinstance(message, Notices):
            for notice in message.notices:
                self.notices[notice.request_id].append(notice)
        if not isinstance(message, Deltas):
            return
        for delta in message.deltas:
            stream = (delta.request_id, delta.sequence_index)
            tokens = self.streams.setdefault(stream, [])
            self.deltas[stream].append(delta)
            assert stream not in self.ended, "a delta after the end"
            assert delta.start_index == len(tokens), "a token lost or sent twice"
            assert delta.previous_hash == history.extend(history.EMPTY, tokens)
            tokens += delta.token_ids
            if delta.pooled:
                self.pooled[delta.request_id] = delta.pooled
            if delta.finish_reason:
                self.ended[stream] = delta.finish_reason


def write_fake_model(directory: Path, max_model_len: int = 4096) -> Path:
    """The least a fake replica needs of a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": VOCABULARY.size, "max_position_embeddings": max_model_len}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
