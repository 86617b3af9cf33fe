"""The sans-IO core: events in, effects out. No socket, no clock, no thread; time comes with each event."""

from dataclasses import dataclass, field

import msgspec

from octavo.scheduler import results
from octavo.scheduler.admission import Refusal, has_capacity, refuse_malformed, refuse_misfit
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.draft import Draft
from octavo.scheduler.events import (
    Effect,
    Event,
    FrontendJoined,
    FrontendLost,
    LeaseRenewed,
    PrefixesNamed,
    PrefixGivenUp,
    PrefixPinned,
    PrefixUnpinned,
    ReplicaHeard,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaLost,
    RequestsAborted,
    RequestSubmitted,
    SendToFrontend,
    SendToReplica,
    SequenceEnded,
    StepAnswered,
    Tick,
)
from octavo.scheduler.kv_cache_manager import KVCacheManager
from octavo.scheduler.notices import NoticeBoard
from octavo.scheduler.observer import SchedulerObserver
from octavo.scheduler.placement import POLICIES, next_admission
from octavo.scheduler.prefix_cache import root_hash
from octavo.scheduler.prefix_pins import PrefixPins
from octavo.scheduler.queue_times import QueueTimes, describe_wait
from octavo.scheduler.replica import OutstandingStep, Replica
from octavo.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus, new_sequences
from octavo.scheduler.waiting_queue import WaitingQueue
from octavo.wire.requests import (
    Deltas,
    FinishReason,
    FrontendWelcome,
    Lease,
    NoticeKind,
    Notices,
    PinRefused,
    Prefix,
    PrefixesChanged,
    Rejected,
    RejectReason,
    Renewed,
    Request,
    ServiceStatus,
    StatusChanged,
    ToFrontend,
)
from octavo.wire.steps import (
    ModelInfo,
    StepOutcome,
    StepResult,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)


@dataclass(slots=True)
class Frontend:
    """A registered frontend: when its lease was last renewed, and what is held for it, by request id."""

    renewed_at: float
    groups: dict[str, SequenceGroup] = field(default_factory=dict)


class Scheduler:
    """Queues, replicas and leases. `handle` every event, then `schedule` once for all that arrived together."""

    def __init__(self, config: SchedulerConfig, epoch: int, observer: SchedulerObserver | None = None) -> None:
        self.config = config
        self.epoch = epoch
        self._observer = observer or SchedulerObserver()
        self.waiting = WaitingQueue(config.tenant_weights)
        self.prefixes = PrefixPins()
        # By incarnation, in order of registration.
        self.replicas: dict[int, Replica] = {}
        # By name of the worker: its incarnation that was lost last.
        self._lost: dict[str, int] = {}
        # The first worker's; replicas that serve another model are refused for the life of this scheduler.
        self.model: ModelInfo | None = None
        self._frontends: dict[int, Frontend] = {}
        self._replica_of: dict[SequenceGroup, Replica] = {}
        self._notices = NoticeBoard()
        self._queue_times = QueueTimes()
        self._next_serial = 1
        self._effects: list[Effect] = []
        self.preemptions = 0
        self.swaps = 0

    @property
    def num_frontends(self) -> int:
        return len(self._frontends)

    @property
    def groups(self) -> list[SequenceGroup]:
        """All that is held for frontends: waiting, running or swapped out."""
        return [group for frontend in self._frontends.values() for group in frontend.groups.values()]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes one event in; `now` is the shell's monotonic clock in seconds and never goes back."""
        match event:
            case FrontendJoined(frontend_id):
                self._join_frontend(frontend_id, now)
            case RequestSubmitted(frontend_id, request):
                self._submit(frontend_id, request, now)
            case LeaseRenewed(frontend_id, live):
                self._renew(frontend_id, live, now)
            case RequestsAborted(frontend_id, request_ids):
                self._abort(frontend_id, request_ids)
            case SequenceEnded(frontend_id, request_id, attempt, sequence_index):
                self._end_sequence(frontend_id, request_id, attempt, sequence_index)
            case PrefixesNamed(frontend_id, prefixes):
                self._pin_named(frontend_id, prefixes)
            case PrefixPinned(prefix):
                self._pin(prefix)
            case PrefixUnpinned(name):
                self.prefixes.unpin(name, self.replicas.values())
                self._tell_prefixes()
            case ReplicaJoined(hello):
                self._join_replica(hello, now)
            case ReplicaLeft(replica_id, reason):
                self._lose_replica(replica_id, reason)
            case ReplicaHeard(replica_id):
                self.replicas[replica_id].heard(now)
            case StepAnswered(replica_id, result):
                self._answer(self.replicas[replica_id], result, now)
            case Tick():
                self._tick(now)
        return self._take_effects(now)

    def schedule(self, now: float) -> list[Effect]:
        """Plans a step for every replica that can take one, and admits from the waiting queue to these steps."""
        self._reject_overdue(now)
        policy = POLICIES[self.config.policy]
        head = next(self.waiting.candidates(1, self._is_runnable), None)
        drafts = [draft for replica in self.replicas.values() if (draft := self._draft(replica, head, now))]
        while admission := next_admission(self.waiting, drafts, self._is_runnable, self.config, now):
            self._admit(*admission, now)
        for draft in drafts:
            if policy.end(draft):
                plan = draft.send(self.epoch, now)
                if plan is not None:
                    self._effects.append(SendToReplica(draft.replica.replica_id, plan))
                    served = (group for group, _ in (*draft.samplers, *draft.beams))
                    self.waiting.charge_each(group for group in served if group.prefix_name is None)
            self._requeue_preempted(draft)
        if drafts or not self.replicas:
            self._notices.passed()
        return self._take_effects(now)

    def replica_of_worker(self, worker_id: str) -> Replica | None:
        """The replica that the worker of this name registered last."""
        return next((r for r in self.replicas.values() if r.hello.worker_id == worker_id), None)

    def check(self) -> None:
        """Asserts every invariant."""
        placed = [group for replica in self.replicas.values() for group in (*replica.running, *replica.swapped)]
        assert len([group for group in placed if group.prefix_name is None]) + len(self.waiting) == len(self.groups)
        assert sum(tenant.num_groups for tenant in self.waiting.tenants) == len(self.groups)
        assert all(tenant.num_groups for tenant in self.waiting.tenants), "an account is kept for nobody"
        for replica in self.replicas.values():
            replica.check()
            if not replica.running and not replica.outstanding:
                assert replica.kv.num_free + replica.kv.num_pinned == replica.kv.num_blocks, (
                    "an idle replica holds blocks"
                )
            if not replica.swapped:
                assert replica.kv.num_cpu_free == replica.kv.num_cpu_blocks, "CPU blocks are held for nobody"

    # -- frontends --------------------------------------------------------------------------------------------------

    def _join_frontend(self, frontend_id: int, now: float) -> None:
        self._frontends.setdefault(frontend_id, Frontend(now)).renewed_at = now
        self._to_frontend(frontend_id, FrontendWelcome(self.epoch, self.status()))
        self._to_frontend(frontend_id, PrefixesChanged(self.epoch, self.prefixes.all))

    def _submit(self, frontend_id: int, request: Request, now: float) -> None:
        groups = self._frontends[frontend_id].groups
        held = groups.get(request.request_id)
        if held and held.request.attempt >= request.attempt:
            # A frontend counts its submissions: the same came twice, or an older one late.
            self._observer.ended(request.traceparent)
            return
        if held:
            self._drop(held)
        if refusal := self._refusal(request):
            self._refuse(frontend_id, request, *refusal)
            return
        group = self._new_group(request, frontend_id, now)
        groups[request.request_id] = group
        self.waiting.enter(group)
        self._queue_times.add(group)
        self._notices.enters(group)

    def _new_group(self, request: Request, frontend_id: int, now: float) -> SequenceGroup:
        arrival = now - request.age_ms / 1000.0
        order = (arrival - request.priority * self.config.priority_ageing_s, self._next_serial)
        self._next_serial += 1
        sampling, sequences = request.sampling, new_sequences(request, root_hash(request.cache_key))
        group = SequenceGroup(request, frontend_id, arrival, order, sequences)
        if sampling.beam is not None:
            group.search = BeamSearch(sampling.beam, sampling.max_tokens, group.stop_token_ids)
        return group

    def _refusal(self, request: Request) -> Refusal | None:
        if refusal := refuse_malformed(request, self.config.max_parallel):
            return refusal
        if len(self.waiting) >= self.config.max_waiting and not request.resubmitted:
            return RejectReason.QUEUE_FULL, f"{len(self.waiting)} requests are waiting"
        return refuse_misfit(request, self.model, self.replicas.values()) if self.model else None

    def _renew(self, frontend_id: int, live: list[Lease], now: float) -> None:
        frontend = self._frontends[frontend_id]
        frontend.renewed_at = now
        named = {lease.request_id: lease.attempt for lease in live}
        for group in list(frontend.groups.values()):
            if named.get(group.request.request_id) != group.request.attempt:
                self._abandon(group)
        unknown = [lease for lease in live if lease.request_id not in frontend.groups]
        self._to_frontend(frontend_id, Renewed(self.epoch, unknown, self.status()))

    def _abort(self, frontend_id: int, request_ids: list[str]) -> None:
        groups = self._frontends[frontend_id].groups
        for request_id in request_ids:
            if group := groups.get(request_id):
                self._abandon(group)

    def _end_sequence(self, frontend_id: int, request_id: str, attempt: int, sequence_index: int) -> None:
        group = self._frontends[frontend_id].groups.get(request_id)
        if group is None or group.request.attempt != attempt or group.search is not None:
            return
        wanted = [sequence for sequence in group.live if not sequence.is_unwanted]
        ended = [sequence for sequence in wanted if sequence.index == sequence_index]
        if ended:
            self._observer.finished(FinishReason.STOP)
        if wanted == ended:
            self._drop(group)
        elif ended:
            self._end_one(group, ended[0])

    def _end_one(self, group: SequenceGroup, sequence: Sequence) -> None:
        replica = self._replica_of.get(group)
        if replica is None:
            sequence.leave(SequenceStatus.FINISHED)
        elif group.needs(sequence):
            sequence.is_unwanted = True
        else:
            replica.finish(group, sequence)

    def _lose_frontend(self, frontend_id: int) -> None:
        for group in list(self._frontends[frontend_id].groups.values()):
            self._abandon(group)
        del self._frontends[frontend_id]
        self._effects.append(FrontendLost(frontend_id))

    def _abandon(self, group: SequenceGroup) -> None:
        """Nobody waits for the group any more."""
        self._observer.aborted()
        self._drop(group)

    def _drop(self, group: SequenceGroup) -> None:
        """Ends a group wherever it is; its blocks come back once outstanding steps are answered."""
        replica = self._replica_of.pop(group, None)
        if replica is None:
            self.waiting.remove(group)
        else:
            replica.drop(group)
        self._forget(group)

    def _forget(self, group: SequenceGroup) -> None:
        self.waiting.leave(group)
        self._queue_times.discard(group)
        self._notices.forget(group)
        self._observer.ended(group.request.traceparent)
        if group.frontend_id is not None:
            del self._frontends[group.frontend_id].groups[group.request_id]

    # -- prefixes ---------------------------------------------------------------------------------------------------

    def pin_refusal(self, prefix: Prefix) -> str | None:
        """Why a prefix cannot be pinned, if it cannot."""
        return self.prefixes.refusal(prefix, self.model, self.replicas.values(), self.groups)

    def _pin_named(self, frontend_id: int, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            if self.prefixes.get(prefix.name) == prefix:
                continue
            if refusal := self.pin_refusal(prefix):
                self._to_frontend(frontend_id, PinRefused(self.epoch, prefix.name, refusal))
            else:
                self._pin(prefix)

    def _pin(self, prefix: Prefix) -> None:
        self.prefixes.pin(prefix, self.replicas.values())
        self._tell_prefixes()

    def _tell_prefixes(self) -> None:
        for frontend_id in self._frontends:
            self._to_frontend(frontend_id, PrefixesChanged(self.epoch, self.prefixes.all))
        self._tell_status()

    # -- replicas ---------------------------------------------------------------------------------------------------

    def _join_replica(self, hello: WorkerHello, now: float) -> None:
        # One that was lost holds what it was sent: once welcomed, it is told at its first word to register anew.
        if hello.incarnation in self.replicas or self._lost.get(hello.worker_id) == hello.incarnation:
            self._effects.append(SendToReplica(hello.incarnation, WorkerWelcome(self.epoch)))
            return
        if former := self.replica_of_worker(hello.worker_id):
            self._lose_replica(former.replica_id, "registered anew")
        if refusal := self._worker_refusal(hello):
            self._effects.append(SendToReplica(hello.incarnation, WorkerRefused(refusal)))
            return
        replica = self.replicas[hello.incarnation] = Replica(hello, self.config, now)
        self.prefixes.equip(replica)
        self._effects.append(SendToReplica(hello.incarnation, WorkerWelcome(self.epoch)))
        if self.model is None:
            self._learn_model(hello.model)
        self._tell_status()

    def _learn_model(self, model: ModelInfo) -> None:
        """Requests that came before any worker are checked now that the limits are known."""
        self.model = model
        for group in list(self.waiting):
            if refusal := refuse_misfit(group.request, model, self.replicas.values()):
                self._reject(group, *refusal)

    def _worker_refusal(self, hello: WorkerHello) -> str | None:
        if hello.world_size != 1:
            return f"world_size {hello.world_size}: replicas of several ranks are not supported yet"
        # Replicas may call one model by different names; what decides its tokens must be equal.
        if self.model and msgspec.structs.replace(hello.model, name=self.model.name) != self.model:
            return (
                f"this scheduler serves {_describe(self.model)}, worker {hello.worker_id} has {_describe(hello.model)};"
                " start it with the same model directory, dtype and context length, or restart the scheduler"
            )
        return None

    def _lose_replica(self, replica_id: int, reason: str) -> None:
        """Forgets a replica; its sequences wait to be recomputed elsewhere."""
        replica = self.replicas.pop(replica_id)
        self._lost[replica.hello.worker_id] = replica_id
        for group in (*replica.running, *replica.swapped):
            if group.prefix_name is None:
                group.preemptions += 1
                for sequence in group.live:
                    sequence.restart()
                self._requeue(group, NoticeKind.WORKER_LOST)
        self._observer.replica_lost()
        self._effects.append(ReplicaLost(replica_id, reason))
        self._tell_status()

    def _requeue(self, group: SequenceGroup, why: NoticeKind) -> None:
        del self._replica_of[group]
        self.waiting.resume(group)
        self._notices.stops(group, why)
        self._observer.traced(group.request.traceparent, why.name.lower())

    def status(self) -> ServiceStatus:
        """What frontends need to know of the replicas."""
        largest = max((replica.kv for replica in self.replicas.values()), key=_capacity, default=None)
        capacity, block_size = (largest.capacity_tokens, largest.block_size) if largest else (0, 1)
        return ServiceStatus(len(self.replicas), self.model, capacity, self.config.max_parallel, block_size)

    def _tell_status(self) -> None:
        for frontend_id in self._frontends:
            self._to_frontend(frontend_id, StatusChanged(self.epoch, self.status()))

    # -- steps ------------------------------------------------------------------------------------------------------

    def _draft(self, replica: Replica, head: SequenceGroup | None, now: float) -> Draft | None:
        if not replica.may_plan:
            return None
        draft = Draft(replica, replica.token_budget)
        return draft if POLICIES[self.config.policy].begin(draft, head, now) else None

    def _is_runnable(self, group: SequenceGroup) -> bool:
        """Whether any replica could ever hold the group; not if its own, a larger one, was lost."""
        return any(has_capacity(group.request, replica) for replica in self.replicas.values())

    def _admit(self, group: SequenceGroup, draft: Draft, now: float) -> None:
        has_run, is_new_here = group.has_run, group.cached_prompt_tokens is None
        self.waiting.remove(group)
        self._queue_times.discard(group)
        self._replica_of[group] = draft.replica
        self.waiting.charge(group, draft.admit(group))
        self._notices.runs(group)
        if not has_run:
            self._observer.admitted(now - group.arrival)
            self._observer.traced(group.request.traceparent, "admitted")
        if is_new_here:
            self._observer.prefix_lookup(len(group.request.prompt_token_ids), group.cached_prompt_tokens or 0)

    def _requeue_preempted(self, draft: Draft) -> None:
        self.preemptions += len(draft.evicted) + len(draft.swapped_out)
        self.swaps += len(draft.swapped_out)
        for group in draft.evicted:
            self._observer.preempted(swapped=False)
            self._come_back(draft.replica, group)
        for group in draft.swapped_out:
            self._observer.preempted(swapped=True)
            self._notices.stops(group, NoticeKind.PREEMPTED)
            self._observer.traced(group.request.traceparent, "preempted")
        for group in draft.resumed:
            self._notices.runs(group)

    def _answer(self, replica: Replica, result: StepResult, now: float) -> None:
        step = replica.outstanding[0] if replica.outstanding else None
        if step is None or step.step_id != result.step_id or not results.answers(step, result):
            self._lose_replica(replica.replica_id, f"answered step {result.step_id}, which it was not asked")
            return
        done = result.outcome is StepOutcome.DONE
        failures = results.separate(replica, step, result.failed)
        seconds = replica.answered(step, now, done=done)
        if done:
            replica.stats.add(step, result)
            num_sampled = len(result.sampled) + len(result.candidates)
            self._observer.step(step.num_tokens, num_sampled, len(step.groups), seconds)
            self._end_failed(replica, failures)
            self._book(replica, results.accept(replica, step, result))
        else:
            _fail_step(replica, step, result)
        if replica.restarts and not replica.outstanding:
            self._restart(replica)

    def _book(self, replica: Replica, outcome: results.Outcome) -> None:
        for frontend_id, deltas in outcome.deltas.items():
            self._to_frontend(frontend_id, Deltas(self.epoch, deltas))
        for reason in outcome.reasons:
            self._observer.finished(reason)
        for group in outcome.finished:
            replica.remove(group)
            del self._replica_of[group]
            self._forget(group)
        for group in outcome.prefixes:
            replica.pin(group)

    def _end_failed(self, replica: Replica, failures: results.Failures) -> None:
        """Ends the groups whose sequences failed of themselves; their victims start over, without what they shared."""
        for group, failure in failures.ended.items():
            self._give_up(replica, group, RejectReason(failure.reason), failure.detail)
        for group, failure in failures.victims.items():
            group.failed_steps += group not in replica.restarts
            replica.restarts.setdefault(group, (RejectReason(failure.reason), failure.detail))

    def _restart(self, replica: Replica) -> None:
        """What is to start over does so from its known tokens, unless its steps have failed too often."""
        restarts, replica.restarts = replica.restarts, {}
        for group, (reason, detail) in restarts.items():
            if group.is_finished:
                # Since then, or aborted.
                continue
            if group.failed_steps < self.config.max_failed_steps:
                group.preemptions += 1
                replica.evict(group)
                self._come_back(replica, group)
            else:
                self._give_up(replica, group, reason, detail)

    def _give_up(self, replica: Replica, group: SequenceGroup, reason: RejectReason, detail: str) -> None:
        if group.prefix_name is None:
            self._reject(group, reason, detail)
        else:
            self.prefixes.give_up(group.prefix_name, replica)
            self._effects.append(PrefixGivenUp(replica.replica_id, group.prefix_name, detail))
            self._tell_status()

    def _come_back(self, replica: Replica, group: SequenceGroup) -> None:
        if group.prefix_name is None:
            self._requeue(group, NoticeKind.PREEMPTED)
        else:
            replica.prefixes.append(group)

    # -- time and effects -------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for frontend_id, frontend in list(self._frontends.items()):
            if now - frontend.renewed_at > self.config.lease_s:
                self._lose_frontend(frontend_id)
        for replica in list(self.replicas.values()):
            if reason := replica.overdue(now):
                self._lose_replica(replica.replica_id, reason)
        self._notices.follow(self.waiting, now)

    def _reject_overdue(self, now: float) -> None:
        """Before anything is admitted, so that nothing is computed of those whose time is over."""
        if overdue := self._queue_times.overdue(now):
            positions = self.waiting.positions(overdue)
            for group, position in zip(overdue, positions, strict=True):
                detail = describe_wait(group, position, self.replicas.values(), now)
                self._reject(group, RejectReason.QUEUE_TIMEOUT, detail)

    def _reject(self, group: SequenceGroup, reason: RejectReason, detail: str) -> None:
        """Ends a group that was accepted."""
        assert group.frontend_id is not None
        self._refuse(group.frontend_id, group.request, reason, detail)
        self._drop(group)

    def _refuse(self, frontend_id: int, request: Request, reason: RejectReason, detail: str) -> None:
        self._observer.rejected(reason)
        self._observer.ended(request.traceparent, reason)
        self._to_frontend(frontend_id, Rejected(self.epoch, request.request_id, request.attempt, reason, detail))

    def _to_frontend(self, frontend_id: int, message: ToFrontend) -> None:
        self._effects.append(SendToFrontend(frontend_id, message))

    def _take_effects(self, now: float) -> list[Effect]:
        if len(self._notices):
            for frontend_id, notices in self._notices.take(self._positions, now).items():
                self._to_frontend(frontend_id, Notices(self.epoch, notices))
        effects, self._effects = self._effects, []
        return effects

    def _positions(self, groups: list[SequenceGroup]) -> list[int]:
        """Where groups that wait, or are swapped out, come in their queues, from 1 on."""
        waiting = [group for group in groups if group not in self._replica_of]
        found = dict(zip(waiting, self.waiting.positions(waiting), strict=True))
        return [found.get(group) or self._replica_of[group].swapped.index(group) + 1 for group in groups]


def _fail_step(replica: Replica, step: OutstandingStep, result: StepResult) -> None:
    """Every group in a failed or skipped step is to start over; one that was skipped is not to blame."""
    remapped = set(step.remapped)
    blamed = set(step.groups) if result.outcome is StepOutcome.FAILED else set()
    groups = [*step.groups, *step.swapped_out]
    groups += [group for group in replica.running if not remapped.isdisjoint(group.sequences)]
    for group in dict.fromkeys(groups):
        group.failed_steps += group in blamed
        replica.restarts.setdefault(group, (RejectReason.STEP_FAILED, result.detail))


def _capacity(kv: KVCacheManager) -> int:
    return kv.capacity_tokens


def _describe(model: ModelInfo) -> str:
    return f"{model.name} ({model.dtype}, context {model.max_model_len}, fingerprint {model.fingerprint[:12]})"
