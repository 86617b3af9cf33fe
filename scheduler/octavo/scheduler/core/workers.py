"""Workers come and go: which may join, which are silent, late or wrong, what is lost with one that leaves; and those
that are cordoned or drained."""

import msgspec

from octavo.scheduler.core.admission import refuse_misfit
from octavo.scheduler.core.events import LossCause, PrefixGivenUp, ReplicaDismissed, ReplicaLost, RequestQuarantined
from octavo.scheduler.core.faults.poison import Death, Verdict
from octavo.scheduler.core.pinned_prefixes import making_way_for
from octavo.scheduler.core.replica import Availability, Replica
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.core.state import SchedulerState
from octavo.scheduler.core.steps_in_flight import StepDeadlines, StepsInFlight
from octavo.wire.requests import NoticeKind, RejectReason
from octavo.wire.steps import (
    BlocksFetched,
    BlocksPulled,
    DiskUse,
    ModelInfo,
    WorkerDismissed,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)

# -- join -------------------------------------------------------------------------------------------------------


def join(state: SchedulerState, hello: WorkerHello, now: float) -> None:
    """Registers a worker that said hello, for the first time or again; or refuses it."""
    # A worker that was lost still holds sequences: once welcomed, it is asked at its first message to register
    # anew.
    if state.replica_table.knows(hello):
        state.outbox.to_replica(hello.incarnation, WorkerWelcome(state.epoch))
        return
    if former := state.replica_table.of_worker(hello.worker_id):
        is_same = former.hello.process == hello.process
        cause = LossCause.RECONNECTED if is_same else LossCause.RETURNED
        reason = "registered anew" if is_same else "another process of its name registered"
        lose(state, former.replica_id, cause, reason, now)
    state.requests.suspects.came_back(hello.worker_id, hello.process, hello.predecessor)
    _convict(state, now)
    if refusal := _refusal(state, hello):
        state.outbox.to_replica(hello.incarnation, WorkerRefused(refusal))
        return
    steps = StepsInFlight(state.config, StepDeadlines(state.config), heard_at=now, answered_at=now)
    availability = Availability(is_cordoned=hello.worker_id in state.replica_table.cordoned)
    replica = Replica(hello, state.config, steps, availability, state.make_memory(hello, state.config))
    state.replica_table.add(replica)
    for name, group in state.prefixes.equip(replica, state.replicas, list(state.requests.waiting)).items():
        state.outbox.add(PrefixGivenUp(replica.replica_id, name, making_way_for(group)))
    state.outbox.to_replica(hello.incarnation, WorkerWelcome(state.epoch))
    if state.replica_table.model is None:
        _learn_model(state, hello.model)
    state.send_status()


def _refusal(state: SchedulerState, hello: WorkerHello) -> str | None:
    keeps_kv = bool(hello.kv_groups)
    if keeps_kv != bool(hello.num_blocks) or not (keeps_kv or hello.model.pooling):
        return (
            f"worker {hello.worker_id} has {hello.num_blocks} KV blocks in {len(hello.kv_groups)} groups;"
            " only an encoder, which generates nothing, has neither"
        )
    # Replicas may call one model by different names; whatever decides the tokens must be equal.
    model = state.replica_table.model
    if model and msgspec.structs.replace(hello.model, name=model.name) != model:
        return (
            f"this scheduler serves {_describe(model)}, worker {hello.worker_id} has {_describe(hello.model)};"
            " start it with the same model directory, dtype, quantization and context length, or restart the scheduler"
        )
    return None


def _learn_model(state: SchedulerState, model: ModelInfo) -> None:
    """Takes the first worker's model, and checks requests that came before any worker against its limits."""
    state.replica_table.model = model
    for group in list(state.requests.waiting):
        accepted = group.request.resubmitted
        if refusal := refuse_misfit(group.request, model, state.replicas, was_accepted=accepted):
            state.requests.reject(group, *refusal)


# -- what workers read ------------------------------------------------------------------------------------------


def take_from_disk(state: SchedulerState, replica: Replica, answer: BlocksFetched, now: float) -> None:
    """Books what a replica's disk has read; a replica that answers what it was not asked is lost."""
    replica.steps.heard(now)
    disk = replica.kv.disk
    if disk is None or not disk.answered(answer.step_id, answer.found):
        reason = f"answered a read of step {answer.step_id}, which it was not asked"
        lose(state, replica.replica_id, LossCause.CONFUSED, reason, now)


def take_pulled(state: SchedulerState, replica: Replica, answer: BlocksPulled, now: float) -> None:
    """Books what a replica has pulled; one that answers what it was not asked is lost."""
    replica.steps.heard(now)
    if not (state.moves.answered(replica, answer, now) or state.prefix_copies.answered(replica, answer, now)):
        reason = f"answered a pull {answer.pull_id}, which it was not asked"
        lose(state, replica.replica_id, LossCause.CONFUSED, reason, now)


def look_at_reads(state: SchedulerState, now: float) -> None:
    """Lets no group wait for a disk, or another replica, that takes too long."""
    for replica in state.replicas:
        if replica.kv.disk is not None:
            replica.kv.disk.look(now)
    if len(state.replicas) > 1:
        state.moves.look(now)
        state.prefix_copies.look(now)
        state.pulls.look(now)


# -- leave ------------------------------------------------------------------------------------------------------


def lose_overdue(state: SchedulerState, now: float) -> None:
    """Loses workers that are silent, or late with a step."""
    for replica in list(state.replicas):
        if reason := replica.steps.overdue(now):
            lose(state, replica.replica_id, LossCause.OVERDUE, reason, now)


def dismiss(state: SchedulerState, replica: Replica) -> None:
    """Lets a drained worker go."""
    _remove(state, replica.replica_id)
    state.outbox.to_replica(replica.replica_id, WorkerDismissed(state.epoch))
    state.outbox.add(ReplicaDismissed(replica.replica_id, replica.hello.worker_id))
    state.send_status()


def expel(state: SchedulerState, replica: Replica, reason: str, now: float) -> None:
    """Ends a worker whose results cannot be relied on, with an error, so that its supervisor starts it anew."""
    state.outbox.to_replica(replica.replica_id, WorkerRefused(f"{reason}; it must be started anew"))
    lose(state, replica.replica_id, LossCause.BROKEN, reason, now)


def lose(state: SchedulerState, replica_id: int, cause: LossCause, reason: str, now: float) -> None:
    """Forgets a replica. Its sequences wait to be recomputed on another one; a request that is convicted of its
    death ends."""
    replica = _remove(state, replica_id)
    # A worker that was asked to end, and did not in time, was killed for that.
    if cause.is_death and (cause.is_explained or not replica.availability.wants_to_leave):
        verdict = Verdict.CRASHED if cause.is_explained else Verdict.OPEN
        is_late = replica.steps.elapsed(now) > state.config.step_timeout_s
        death = Death(replica.hello.worker_id, replica.hello.process, now, reason, verdict, is_late)
        state.requests.suspects.died(replica.outstanding, death)
    for group in replica.requests:
        group.restart()
        state.requests.requeue(group, NoticeKind.WORKER_LOST)
    state.observer.replica_lost(cause)
    state.outbox.add(ReplicaLost(replica_id, cause, reason, replica.hello.worker_id))
    _convict(state, now)
    state.send_status()


def _remove(state: SchedulerState, replica_id: int) -> Replica:
    """Takes a replica out of the books, and ends what others copy from it, or it from others."""
    replica = state.replica_table.remove(replica_id)
    for books in (state.moves, state.prefix_copies, state.pulls):
        books.forget(replica)
    return replica


def settle_deaths(state: SchedulerState, now: float) -> None:
    """Settles deaths that have been unexplained for `death_grace_s`, as time passes."""
    state.requests.suspects.give_up_waiting(now - state.config.death_grace_s)
    _convict(state, now)


def _convict(state: SchedulerState, now: float) -> None:
    for guilty in state.requests.suspects.guilty():
        if not guilty.is_finished:
            _quarantine_payload(state, guilty, now)


def _quarantine_payload(state: SchedulerState, guilty: RequestGroup, now: float) -> None:
    *before, last = state.requests.suspects.deaths(guilty)
    detail = (
        f"{len(before)} workers were lost while they computed this request, {', '.join(map(str, before))}, and then"
        f" worker {last}, which computed nothing else; the same prompt with the same parameters is refused for"
        f" {state.config.quarantine_s:g} s; the logs of the workers may tell why"
    )
    state.quarantine.add(guilty.request, now, detail)
    state.outbox.add(RequestQuarantined(guilty.request_id, detail))
    for group in state.requests.groups:
        # Other requests may have the same payload.
        if group is guilty or state.quarantine.refusal(group.request, now):
            state.requests.reject(group, RejectReason.QUARANTINED, detail)


def _describe(model: ModelInfo) -> str:
    dtype = model.dtype if model.quantization == "none" else f"{model.dtype}, {model.quantization}"
    return f"{model.name} ({dtype}, context {model.max_model_len}, fingerprint {model.fingerprint[:12]})"


# -- cordons and drains, from the order to the dismissal --------------------------------------------------------------


def cordon(state: SchedulerState, worker_id: str) -> None:
    """Gives the worker of this name no new requests, under this registration or a later one."""
    state.replica_table.cordoned.add(worker_id)
    if replica := state.replica_table.of_worker(worker_id):
        replica.availability.cordon()


def drain(state: SchedulerState, worker_id: str, grace_s: float | None, now: float) -> None:
    """Gives the worker of this name no new requests and lets it go once it holds none; groups that run there for
    longer than `grace_s` are moved."""
    if replica := state.replica_table.of_worker(worker_id):
        replica.availability.drain(now + (state.config.drain_grace_s if grace_s is None else grace_s))


def heard(state: SchedulerState, replica: Replica, disk: DiskUse | None, now: float, *, is_leaving: bool) -> None:
    """Notes a heartbeat and what it tells of the worker's disk; drains a worker that says, at every one, that its
    process is to end."""
    replica.steps.heard(now)
    if replica.kv.disk is not None and disk is not None:
        replica.kv.disk.use = disk
    if is_leaving:
        replica.availability.ask_to_leave(now + state.config.drain_grace_s)


def readmit(state: SchedulerState, worker_id: str) -> None:
    """Gives the worker of this name requests again."""
    state.replica_table.cordoned.discard(worker_id)
    if replica := state.replica_table.of_worker(worker_id):
        replica.availability.readmit()


def see_off(state: SchedulerState, now: float) -> None:
    """Takes every drain as far as it goes now."""
    for replica in list(state.replicas):
        if (until := replica.availability.drain_until) is not None:
            _see_off(state, replica, now, is_over=now >= until)


def _see_off(state: SchedulerState, replica: Replica, now: float, *, is_over: bool) -> None:
    # What can take its blocks along does; the others are computed again elsewhere.
    moving = state.moves.carry(replica, _movable(state, replica), now) if is_over else []
    # Groups that move, and a worker that ends, must be in no step.
    replica.availability.pause(bool(moving) or _is_done(state, replica))
    if not replica.availability.is_paused or replica.outstanding:
        return
    for group in moving:
        _move(state, replica, group)
    # Groups that stay can go on at once.
    replica.availability.pause(False)
    if _is_done(state, replica):
        dismiss(state, replica)


def _movable(state: SchedulerState, replica: Replica) -> list[RequestGroup]:
    return [group for group in replica.requests if state.replica_table.has_ready_home(group)]


def _is_done(state: SchedulerState, replica: Replica) -> bool:
    """Tells whether the replica holds no request, and none waits that has lost its blocks there and can go nowhere
    else."""
    return not replica.requests and not any(
        state.replica_table.takes(replica, group) for group in state.requests.waiting
    )


def _move(state: SchedulerState, replica: Replica, group: RequestGroup) -> None:
    replica.evict(group)
    state.requests.requeue(group, NoticeKind.PREEMPTED)
