"""The scheduler itself: it takes events in and returns effects, without sockets, clock or threads; time comes with each
event."""

from octavo.scheduler.core import workers
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import (
    CacheReset,
    DiskAnswered,
    Effect,
    Event,
    FrontendJoined,
    LeaseRenewed,
    PrefixesNamed,
    PrefixPinned,
    PrefixUnpinned,
    PullAnswered,
    QuarantineCleared,
    ReplicaHeard,
    ReplicaJoined,
    ReplicaLeft,
    RequestsAborted,
    RequestSubmitted,
    SchedulerObserver,
    SequenceEnded,
    StepAnswered,
    Tick,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.faults import isolation
from octavo.scheduler.core.faults.watchdog import Watchdog
from octavo.scheduler.core.frontends import FrontendLeases
from octavo.scheduler.core.placement import Homeless, describe_wait, next_admission
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.core.state import SchedulerState
from octavo.scheduler.core.step import grammar_time, results
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.scheduler.core.step.policies import POLICIES, StepPolicy, empty_step
from octavo.scheduler.core.waiting_queue import WaitingQueue
from octavo.scheduler.kv.manager import paged_memory
from octavo.scheduler.kv.memory import MakeMemory
from octavo.wire.requests import NoticeKind, PinRefused, Prefix, PrefixCacheReset, RejectReason, ServiceStatus
from octavo.wire.steps import ModelInfo, WorkerRole


class Scheduler:
    """Holds the queues, replicas and leases. Its caller hands every event to `handle`, then calls `schedule` once for
    all that arrived together.

    `make_memory` makes the KV memory of each replica that joins; `policy` fills the steps (None: the configured one);
    the `drafter` guesses next tokens (None: from what it has seen).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        epoch: int,
        observer: SchedulerObserver | None = None,
        make_memory: MakeMemory = paged_memory,
        policy: StepPolicy | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.policy = policy or POLICIES[config.policy]
        self.state = state = SchedulerState.new(
            config, epoch, observer or SchedulerObserver(), make_memory, drafter or Drafter()
        )
        self.request_table, self.replica_table = state.requests, state.replica_table
        self.prefixes, self.quarantine = state.prefixes, state.quarantine
        self._outbox, self._observer = state.outbox, state.observer
        self._frontends = FrontendLeases(state)
        self.watchdog, self._homeless = Watchdog(state), Homeless(state)
        # By incarnation, in order of registration.
        self.replicas = self.replica_table.replicas
        self.preemptions = 0
        self.swaps = 0

    @property
    def model(self) -> ModelInfo | None:
        """Returns the model that the workers serve; None until a first worker has registered."""
        return self.replica_table.model

    @property
    def waiting(self) -> WaitingQueue:
        """The requests that run nowhere."""
        return self.request_table.waiting

    @property
    def num_frontends(self) -> int:
        return len(self._frontends)

    @property
    def groups(self) -> list[RequestGroup]:
        """Returns all groups that are held for frontends: waiting, running or swapped out."""
        return self.request_table.groups

    def replica_of_worker(self, worker_id: str) -> Replica | None:
        """Returns the replica that the worker named `worker_id` registered last; None if it is not registered."""
        return self.replica_table.of_worker(worker_id)

    def status(self) -> ServiceStatus:
        """Returns what frontends need to know of the replicas: the model, their number, the limits, the load."""
        return self.replica_table.status()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes in one event and returns its effects. `now` is the shell's monotonic clock in seconds and never goes
        back."""
        match event:
            # The most frequent first, for cases are tried in turn.
            case StepAnswered(replica_id, result):
                replica = self.replicas[replica_id]
                results.take(self.state, replica, result, now)
                if replica.hello.role is WorkerRole.PREFILL:
                    self.state.moves.hand_over(replica, now)
            case DiskAnswered(replica_id, answer):
                workers.take_from_disk(self.state, self.replicas[replica_id], answer, now)
            case PullAnswered(replica_id, pull):
                workers.take_pulled(self.state, self.replicas[replica_id], pull, now)
            case FrontendJoined(frontend_id):
                self._frontends.join(frontend_id, now)
            case RequestSubmitted(frontend_id, request):
                self._frontends.submit(frontend_id, request, now)
            case LeaseRenewed(frontend_id, live):
                self._frontends.renew(frontend_id, live, now)
            case RequestsAborted(frontend_id, request_ids):
                self._frontends.abort(frontend_id, request_ids)
            case SequenceEnded(frontend_id, request_id, attempt, sequence_index):
                self._frontends.end_sequence(frontend_id, request_id, attempt, sequence_index)
            case PrefixesNamed(frontend_id, prefixes):
                self._pin_named(frontend_id, prefixes)
            case PrefixPinned(prefix):
                self._pin(prefix)
            case PrefixUnpinned(name):
                self.prefixes.unpin(name, self.replicas.values())
                self._frontends.send_all_prefixes()
            case CacheReset(salt, frontend_id, serial):
                self._reset_cache(salt, frontend_id, serial)
            case ReplicaJoined(hello):
                workers.join(self.state, hello, now)
            case ReplicaLeft(replica_id, cause, reason):
                workers.lose(self.state, replica_id, cause, reason, now)
            case ReplicaHeard(replica_id, is_leaving, disk):
                workers.heard(self.state, self.replicas[replica_id], disk, now, is_leaving=is_leaving)
            case WorkerCordoned(worker_id):
                workers.cordon(self.state, worker_id)
            case WorkerDrained(worker_id, grace_s):
                workers.drain(self.state, worker_id, grace_s, now)
            case WorkerReadmitted(worker_id):
                workers.readmit(self.state, worker_id)
            case QuarantineCleared(payload):
                self.quarantine.clear(payload)
            case Tick():
                self._frontends.lose_overdue(now)
                self._frontends.tell_load(now)
                workers.lose_overdue(self.state, now)
                workers.look_at_reads(self.state, now)
                self.state.moves.balance(now)
                workers.settle_deaths(self.state, now)
                self._homeless.look(now)
                self.request_table.notices.follow(self.waiting, now)
                self.watchdog.look(now)
        workers.see_off(self.state, now)
        if self.state.moves.under_way:
            self.state.moves.advance(now)
        return self._take_effects(now)

    def schedule(self, now: float) -> list[Effect]:
        """Plans a step for every replica that can take one, and admits waiting requests to these steps."""
        if overdue := self.request_table.queue_times.overdue(now):
            self._reject(overdue, now)
        isolation.arrange(self.state)
        waiting, any_idle = self.request_table.waiting, False
        builders: list[StepBuilder] = []
        head = next(waiting.candidates(1, self.replica_table.can_hold), None) if waiting else None
        for replica in self.replicas.values():
            if not replica.may_plan:
                continue
            # Where no group waits, an idle replica has nothing to plan.
            if head is None and not replica.has_work:
                any_idle = True
            elif builder := self._builder(replica, head, now):
                builders.append(builder)
        copies, table = self.state.prefix_copies, self.replica_table
        while admission := next_admission(waiting, builders, table, copies, self.policy, self.config, now):
            group, builder = admission
            # What is known to be on another replica comes before what a disk may have.
            is_copied = len(self.replicas) > 1 and copies.fetch(group, builder.replica, now)
            if not (is_copied or builder.replica.fetch(group)):
                self._admit(group, builder, now)
        for builder in builders:
            if self.policy.end(builder):
                self._send(builder, now)
            self._requeue_preempted(builder)
        if builders or any_idle or not self.replicas:
            self.request_table.notices.passed()
        return self._take_effects(now)

    def check(self) -> None:
        """Asserts every invariant."""
        self.request_table.check(sum(len(replica.requests) for replica in self.replicas.values()))
        for replica in self.replicas.values():
            replica.check()
            if not replica.running and not replica.outstanding:
                num_kept = replica.kv.num_pinned + len(replica.kv.lent_block_ids)
                assert replica.kv.num_free + num_kept == replica.kv.num_blocks, "an idle replica holds blocks"
            if not replica.swapped:
                num_held = replica.kv.num_cpu_blocks - replica.kv.num_cpu_free
                num_kept = replica.kv.num_arriving + replica.kv.num_cpu_lent
                assert num_held == num_kept, "CPU blocks are held for nobody"

    # -- prefixes ---------------------------------------------------------------------------------------------------

    def pin_refusal(self, prefix: Prefix) -> str | None:
        """Returns why `prefix` cannot be pinned; None if it can."""
        return self.prefixes.refusal(prefix, self.model, self.replicas.values(), self.groups)

    def _pin_named(self, frontend_id: int, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            if self.prefixes.get(prefix.name) == prefix:
                continue
            if refusal := self.pin_refusal(prefix):
                self._outbox.to_frontend(frontend_id, PinRefused(self.epoch, prefix.name, refusal))
            else:
                self._pin(prefix)

    def _pin(self, prefix: Prefix) -> None:
        self.prefixes.pin(prefix, self.replicas.values())
        self._frontends.send_all_prefixes()

    def _reset_cache(self, salt: str | None, frontend_id: int | None, serial: int) -> None:
        found = self.state.count_cached(salt)
        self.state.reset_cache(salt)
        if frontend_id is not None:
            answer = PrefixCacheReset(self.epoch, serial, found.num_blocks, found.num_in_use, found.num_prefixes)
            self._outbox.to_frontend(frontend_id, answer)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _reject(self, overdue: list[RequestGroup], now: float) -> None:
        """Rejects requests that have waited too long, before anything is admitted, so that no step computes them."""
        positions = self.waiting.positions(overdue)
        for group, position in zip(overdue, positions, strict=True):
            detail = describe_wait(group, position, self.replicas.values(), now)
            self.request_table.reject(group, RejectReason.QUEUE_TIMEOUT, detail)

    def _builder(self, replica: Replica, head: RequestGroup | None, now: float) -> StepBuilder | None:
        """Begins a step of a replica that may plan; returns None if it has to wait for an outstanding answer."""
        if head is not None and not self.replica_table.takes(replica, head):
            head = None
        replica.kv.now = now
        builder = empty_step(self.state, replica)
        if self.state.speculation.serves(replica):
            builder.speculation = self.state.speculation
        if replica.suspect is not None and (suspect := isolation.comer(self.state, replica)):
            if replica.outstanding:
                return None
            self._admit(suspect, builder, now)
            return builder
        return builder if self.policy.begin(builder, head, now) else None

    def _admit(self, group: RequestGroup, builder: StepBuilder, now: float) -> None:
        has_run, is_new_here = group.has_run, group.cached_prompt_tokens is None
        self.request_table.place(group, builder.replica)
        self.waiting.charge(group, builder.admit(group))
        self.request_table.notices.runs(group)
        if not has_run:
            self._observer.admitted(now - group.arrival)
            self._observer.traced(group.request.traceparent, "admitted")
        if is_new_here:
            self.state.note_lookup(group, builder.replica, now)
            self._observer.prefix_lookup(len(group.request.prompt_token_ids), group.cached_prompt_tokens or 0)

    def _send(self, builder: StepBuilder, now: float) -> None:
        plan = builder.send(self.epoch, now)
        if plan is not None:
            self._outbox.to_replica(builder.replica.replica_id, plan)
            served = (*builder.samplers, *builder.beams, *builder.pooled)
            self.request_table.waiting.charge_each(group for group, _ in served if isinstance(group, RequestGroup))
            for group, _ in served:
                if group.grammar is not None and isinstance(group, RequestGroup):
                    self.waiting.charge(group, grammar_time.tokens_worth(group.grammar, builder.replica))
            for drafting, _, draft in builder.drafts:
                assert isinstance(drafting, RequestGroup)
                grammar = drafting.grammar
                per_guess = 1 + (grammar_time.tokens_worth(grammar, builder.replica) if grammar else 0)
                self.waiting.charge(drafting, len(draft.token_ids) * per_guess)

    def _requeue_preempted(self, builder: StepBuilder) -> None:
        self.preemptions += len(builder.evicted) + len(builder.swapped_out)
        self.swaps += len(builder.swapped_out)
        for group in builder.evicted:
            self._observer.preempted(swapped=False)
            self.request_table.come_back(builder.replica, group)
        for group in builder.swapped_out:
            self._observer.preempted(swapped=True)
            self.request_table.stopped(group, NoticeKind.PREEMPTED)
        for group in builder.resumed:
            self.request_table.notices.runs(group)

    def _take_effects(self, now: float) -> list[Effect]:
        if self.request_table.notices.pending:
            self.request_table.send_notices(now)
        return self._outbox.take()
