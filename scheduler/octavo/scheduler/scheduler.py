"""The sans-IO core: events in, effects out. No socket, no clock, no thread; time comes with each event."""

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from octavo.scheduler import chunked_policy
from octavo.scheduler.admission import Refusal, refuse_malformed, refuse_misfit
from octavo.scheduler.chunked_policy import Draft
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import (
    Effect,
    Event,
    FrontendJoined,
    FrontendLost,
    LeaseRenewed,
    ReplicaHeard,
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
from octavo.scheduler.kv_cache_manager import AllocStatus
from octavo.scheduler.replica import OutstandingStep, Replica
from octavo.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.waiting_queue import WaitingQueue
from octavo.wire.requests import (
    Delta,
    Deltas,
    FrontendWelcome,
    Lease,
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
    StepPlan,
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

    def __init__(self, config: SchedulerConfig, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self.waiting = WaitingQueue()
        # By incarnation, in order of registration.
        self.replicas: dict[int, Replica] = {}
        # The first worker's; replicas that serve another model are refused for the life of this scheduler.
        self.model: ModelInfo | None = None
        self._frontends: dict[int, Frontend] = {}
        self._replica_of: dict[SequenceGroup, Replica] = {}
        self._next_serial = 1
        self._next_sequence_id = 1
        self._effects: list[Effect] = []
        self.preemptions = 0

    @property
    def num_frontends(self) -> int:
        return len(self._frontends)

    @property
    def groups(self) -> list[SequenceGroup]:
        """All that is held, waiting or running."""
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
        return self._take_effects()

    def schedule(self, now: float) -> list[Effect]:
        """Plans a step for every replica that can take one; running sequences first, then the waiting queue."""
        drafts = [draft for replica in self.replicas.values() if (draft := self._draft(replica))]
        while (group := self._next_waiting()) and (draft := self._place(group, drafts)):
            self._admit(group, draft)
        for draft in drafts:
            self._send(draft, now)
        return self._take_effects()

    def replica_of_worker(self, worker_id: str) -> Replica | None:
        """The replica that the worker of this name registered last."""
        return next((r for r in self.replicas.values() if r.hello.worker_id == worker_id), None)

    def check(self) -> None:
        """Asserts every invariant."""
        placed = [group for replica in self.replicas.values() for group in replica.running]
        assert len(placed) + len(self.waiting) == len(self.groups)
        for replica in self.replicas.values():
            replica.check()
            if not replica.running and not replica.outstanding:
                assert replica.kv.num_free == replica.kv.num_blocks, "an idle replica holds blocks"

    # -- frontends --------------------------------------------------------------------------------------------------

    def _join_frontend(self, frontend_id: int, now: float) -> None:
        self._frontends.setdefault(frontend_id, Frontend(now)).renewed_at = now
        self._to_frontend(frontend_id, FrontendWelcome(self.epoch, self.status()))

    def _submit(self, frontend_id: int, request: Request, now: float) -> None:
        groups = self._frontends[frontend_id].groups
        held = groups.get(request.request_id)
        if held and held.request.attempt < request.attempt:
            self._drop(held)
        elif held:
            self._reject(frontend_id, request, RejectReason.DUPLICATE_ID, "a request with this id is running")
            return
        if refusal := self._refusal(request):
            self._reject(frontend_id, request, *refusal)
            return
        group = SequenceGroup.of(request, frontend_id, now, self._next_serial)
        self._next_serial += 1
        groups[request.request_id] = group
        self.waiting.add(group)

    def _refusal(self, request: Request) -> Refusal | None:
        if refusal := refuse_malformed(request):
            return refusal
        if len(self.waiting) >= self.config.max_waiting and not request.resubmitted:
            return RejectReason.QUEUE_FULL, f"{len(self.waiting)} requests are waiting"
        return refuse_misfit(request, self.model, self.status().capacity_tokens) if self.model else None

    def _renew(self, frontend_id: int, live: list[Lease], now: float) -> None:
        frontend = self._frontends[frontend_id]
        frontend.renewed_at = now
        named = {lease.request_id: lease.attempt for lease in live}
        for group in list(frontend.groups.values()):
            if named.get(group.request.request_id) != group.request.attempt:
                self._drop(group)
        unknown = [lease for lease in live if lease.request_id not in frontend.groups]
        self._to_frontend(frontend_id, Renewed(self.epoch, unknown, self.status()))

    def _abort(self, frontend_id: int, request_ids: list[str]) -> None:
        groups = self._frontends[frontend_id].groups
        for request_id in request_ids:
            if group := groups.get(request_id):
                self._drop(group)

    def _lose_frontend(self, frontend_id: int) -> None:
        for group in list(self._frontends[frontend_id].groups.values()):
            self._drop(group)
        del self._frontends[frontend_id]
        self._effects.append(FrontendLost(frontend_id))

    def _drop(self, group: SequenceGroup) -> None:
        """Ends a group wherever it is; its blocks come back once outstanding steps are answered."""
        self._forget(group)
        replica = self._replica_of.pop(group, None)
        if replica is None:
            self.waiting.remove(group)
            return
        replica.remove(group)
        for sequence in group.live:
            replica.release(sequence)
            sequence.status = SequenceStatus.FINISHED

    def _forget(self, group: SequenceGroup) -> None:
        del self._frontends[group.frontend_id].groups[group.request.request_id]

    # -- replicas ---------------------------------------------------------------------------------------------------

    def _join_replica(self, hello: WorkerHello, now: float) -> None:
        if hello.incarnation in self.replicas:
            self._effects.append(SendToReplica(hello.incarnation, WorkerWelcome(self.epoch)))
            return
        if former := self.replica_of_worker(hello.worker_id):
            self._lose_replica(former.replica_id, "registered anew")
        if refusal := self._worker_refusal(hello):
            self._effects.append(SendToReplica(hello.incarnation, WorkerRefused(refusal)))
            return
        self.replicas[hello.incarnation] = Replica(hello, self.config, now)
        self._effects.append(SendToReplica(hello.incarnation, WorkerWelcome(self.epoch)))
        if self.model is None:
            self._learn_model(hello.model)
        self._tell_status()

    def _learn_model(self, model: ModelInfo) -> None:
        """Requests that came before any worker are checked now that the limits are known."""
        self.model = model
        for group in list(self.waiting):
            if refusal := refuse_misfit(group.request, model, self.status().capacity_tokens):
                self._reject(group.frontend_id, group.request, *refusal)
                self._drop(group)

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
        for group in replica.running:
            group.preemptions += 1
            for sequence in group.live:
                sequence.restart()
            self._requeue(group)
        self._effects.append(ReplicaLost(replica_id, reason))
        self._tell_status()

    def _requeue(self, group: SequenceGroup) -> None:
        del self._replica_of[group]
        self.waiting.add(group)

    def status(self) -> ServiceStatus:
        """What frontends need to know of the replicas."""
        capacity = max((replica.kv.capacity_tokens for replica in self.replicas.values()), default=0)
        return ServiceStatus(len(self.replicas), self.model, capacity)

    def _tell_status(self) -> None:
        for frontend_id in self._frontends:
            self._to_frontend(frontend_id, StatusChanged(self.epoch, self.status()))

    # -- steps ------------------------------------------------------------------------------------------------------

    def _draft(self, replica: Replica) -> Draft | None:
        if not replica.may_plan:
            return None
        draft = Draft(replica, self.config.max_num_batched_tokens)
        stands = chunked_policy.fill_with_running(draft)
        for group in draft.preempted:
            self.preemptions += 1
            self._requeue(group)
        return draft if stands else None

    def _next_waiting(self) -> SequenceGroup | None:
        """First come, first served; only what no live replica could ever hold (its own was lost) is passed over."""
        return next((group for group in self.waiting if self._can_ever_run(group)), None)

    def _can_ever_run(self, group: SequenceGroup) -> bool:
        return any(replica.kv.can_allocate(group) is not AllocStatus.NEVER for replica in self.replicas.values())

    def _place(self, group: SequenceGroup, drafts: list[Draft]) -> Draft | None:
        """The draft with room whose replica has the least to compute."""
        with_room = [draft for draft in drafts if chunked_policy.has_room(draft, group)]
        # Adding up a load costs a walk over all that runs, so only where there is a choice.
        if len(with_room) > 1:
            return min(with_room, key=lambda draft: draft.replica.load)
        return with_room[0] if with_room else None

    def _admit(self, group: SequenceGroup, draft: Draft) -> None:
        self.waiting.remove(group)
        self._replica_of[group] = draft.replica
        chunked_policy.admit(draft, group, self._next_sequence_id)
        self._next_sequence_id += len(group.sequences)

    def _send(self, draft: Draft, now: float) -> None:
        if not draft.work:
            return
        replica = draft.replica
        step = OutstandingStep(replica.next_step_id(), draft.scheduled, draft.sampling, draft.num_tokens, now)
        for _, sequence in draft.scheduled:
            sequence.last_step_id = step.step_id
        replica.outstanding.append(step)
        plan = StepPlan(
            epoch=self.epoch,
            incarnation=replica.replica_id,
            step_id=step.step_id,
            answered_step_id=replica.answered_step_id,
            forget=replica.forget,
            starts=draft.starts,
            work=draft.work,
        )
        replica.forget = []
        self._effects.append(SendToReplica(replica.replica_id, plan))

    def _answer(self, replica: Replica, result: StepResult, now: float) -> None:
        step = replica.outstanding[0] if replica.outstanding else None
        if step is None or step.step_id != result.step_id or not _answers(step, result):
            self._lose_replica(replica.replica_id, f"answered step {result.step_id}, which it was not asked")
            return
        done = result.outcome is StepOutcome.DONE
        replica.answered(step, now, done=done)
        if done:
            replica.stats.add(step, result.times)
            self._accept(replica, step, result)
        else:
            replica.failed.append(step)
        if replica.failed and not replica.outstanding:
            self._restart_failed(replica, result.detail)

    def _accept(self, replica: Replica, step: OutstandingStep, result: StepResult) -> None:
        deltas: dict[int, list[Delta]] = defaultdict(list)
        for (group, sequence), sampled in zip(step.sampling, result.sampled, strict=True):
            # Neither aborted nor finished since the plan was made.
            if sequence.status is SequenceStatus.RUNNING:
                deltas[group.frontend_id].append(self._append(replica, group, sequence, sampled.token_id))
        for frontend_id, batch in deltas.items():
            self._to_frontend(frontend_id, Deltas(self.epoch, batch))

    def _append(self, replica: Replica, group: SequenceGroup, sequence: Sequence, token_id: int) -> Delta:
        start_index, previous_hash = len(sequence.generated_token_ids), sequence.history_hash
        sequence.append(token_id)
        if sequence.num_known % replica.kv.block_size == 0:
            replica.kv.index(sequence)
        sequence.finish_reason = group.finish_reason(sequence)
        if sequence.finish_reason:
            self._finish(replica, group, sequence)
        return Delta(
            request_id=group.request.request_id,
            attempt=group.request.attempt,
            sequence_index=sequence.index,
            start_index=start_index,
            previous_hash=previous_hash,
            token_ids=[token_id],
            finish_reason=sequence.finish_reason,
            preemptions=group.preemptions,
            cached_prompt_tokens=group.cached_prompt_tokens or 0,
        )

    def _finish(self, replica: Replica, group: SequenceGroup, sequence: Sequence) -> None:
        replica.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        if group.is_finished:
            replica.remove(group)
            del self._replica_of[group]
            self._forget(group)

    def _restart_failed(self, replica: Replica, detail: str) -> None:
        """Every sequence in a failed or skipped step starts over from its known tokens."""
        groups = dict.fromkeys(group for step in replica.failed for group, _ in step.scheduled)
        first = {group for group, _ in replica.failed[0].scheduled}
        replica.failed = []
        # Not those that have finished or been aborted since.
        for group in [group for group in groups if self._replica_of.get(group) is replica]:
            for sequence in group.live:
                replica.kv.withdraw(sequence)
            group.failed_steps += group in first
            if group.failed_steps >= self.config.max_failed_steps:
                self._reject(group.frontend_id, group.request, RejectReason.STEP_FAILED, detail)
                self._drop(group)
            else:
                replica.evict(group)
                self._requeue(group)

    # -- time and effects -------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for frontend_id, frontend in list(self._frontends.items()):
            if now - frontend.renewed_at > self.config.lease_s:
                self._lose_frontend(frontend_id)
        for replica in list(self.replicas.values()):
            if reason := replica.overdue(now):
                self._lose_replica(replica.replica_id, reason)

    def _reject(self, frontend_id: int, request: Request, reason: RejectReason, detail: str) -> None:
        self._to_frontend(frontend_id, Rejected(self.epoch, request.request_id, request.attempt, reason, detail))

    def _to_frontend(self, frontend_id: int, message: ToFrontend) -> None:
        self._effects.append(SendToFrontend(frontend_id, message))

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


def _answers(step: OutstandingStep, result: StepResult) -> bool:
    """Whether a result says exactly what the step asked for."""
    if result.outcome is not StepOutcome.DONE:
        return True
    return [sampled.sequence_id for sampled in result.sampled] == [
        sequence.sequence_id for _, sequence in step.sampling
    ]


def _describe(model: ModelInfo) -> str:
    return f"{model.name} ({model.dtype}, context {model.max_model_len}, fingerprint {model.fingerprint[:12]})"
