"""The replicas that are registered: which workers may join, what is lost with one that leaves, what all of them can
do."""

from collections.abc import Iterator

import msgspec

from octavo.scheduler.core.admission import has_capacity, refuse_misfit
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import (
    LossCause,
    Outbox,
    PrefixGivenUp,
    ReplicaDismissed,
    ReplicaLost,
    RequestQuarantined,
    SchedulerObserver,
)
from octavo.scheduler.core.pinned_prefixes import PrefixPins, making_way_for
from octavo.scheduler.core.poison import Death, Quarantine, Verdict
from octavo.scheduler.core.replica import Availability, Replica
from octavo.scheduler.core.request_table import RequestTable
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.core.step_limits import StepDeadlines
from octavo.scheduler.core.steps_in_flight import StepsInFlight
from octavo.scheduler.kv.memory import MakeMemory
from octavo.wire.requests import NoticeKind, RejectReason, ServiceStatus, StatusChanged
from octavo.wire.steps import ModelInfo, WorkerDismissed, WorkerHello, WorkerRefused, WorkerWelcome


class ReplicaTable:
    """Holds the registered replicas by incarnation, in order of registration."""

    def __init__(
        self,
        config: SchedulerConfig,
        request_table: RequestTable,
        prefixes: PrefixPins,
        outbox: Outbox,
        observer: SchedulerObserver,
        quarantine: Quarantine,
        make_memory: MakeMemory,
    ) -> None:
        self.replicas: dict[int, Replica] = {}
        # The first worker's model; replicas that serve another are refused for the life of this scheduler.
        self.model: ModelInfo | None = None
        # Replicas that stand still (`octavo.scheduler.core.watchdog`).
        self.stalled: set[Replica] = set()
        # Names of workers that get nothing new, registered or not.
        self.cordoned: set[str] = set()
        # By name of the worker: the incarnation of it that left the books last.
        self._lost: dict[str, int] = {}
        self._config = config
        self._request_table = request_table
        self._prefixes = prefixes
        self._outbox = outbox
        self._observer = observer
        self._quarantine = quarantine
        self._make_memory = make_memory

    def of_worker(self, worker_id: str) -> Replica | None:
        """Returns the replica that the worker named `worker_id` registered last; None if it is not registered."""
        return next((r for r in self.replicas.values() if r.hello.worker_id == worker_id), None)

    def has_ready_home(self, group: RequestGroup, besides: Replica | None = None) -> bool:
        """Tells whether any replica that gets new requests, other than `besides`, could ever hold the group. A group
        may have none once a larger replica, which held it, was lost."""
        return any(
            replica.is_ready and replica is not besides and has_capacity(group.request, replica)
            for replica in self.replicas.values()
        )

    def takes(self, replica: Replica, group: RequestGroup) -> bool:
        """Tells whether the group may be admitted to `replica`; one that isolates a suspect takes no other group."""
        return replica.suspect in (None, group) and self.may_take(replica, group)

    def may_take(self, replica: Replica, group: RequestGroup) -> bool:
        """Tells whether the group may be admitted to `replica`, whichever suspect that isolates.

        A group that has lost its blocks on a replica that gets nothing new may come back to it, if it can go nowhere
        else. A group to which a replica gave nothing finite goes to another one if it can.
        """
        if replica.replica_id == group.faults.non_finite_on and self.has_ready_home(group, besides=replica):
            return False
        return replica.is_ready or (replica.replica_id == group.former_replica_id and not self.has_ready_home(group))

    def can_hold(self, group: RequestGroup) -> bool:
        """Tells whether any replica that takes the group in its turn could ever hold it; suspects wait for no turn."""
        return group not in self._request_table.suspects and self.has_home(group)

    def has_home(self, group: RequestGroup) -> bool:
        """Tells whether any replica that takes the group could ever hold it."""
        if self.has_ready_home(group):
            return True
        former = self.replicas.get(group.former_replica_id or 0)
        return former is not None and not former.is_ready and has_capacity(group.request, former)

    def returning(self, replica: Replica) -> Iterator[RequestGroup]:
        """Yields the waiting groups that have lost their blocks and that `replica` takes and could ever hold, in their
        order."""
        return (group for group in self._request_table.waiting.returning if self._takes_back(replica, group))

    def _takes_back(self, replica: Replica, group: RequestGroup) -> bool:
        # A suspect comes to the replica that isolates it, if any does.
        is_its_place = replica.suspect is group or group not in self._request_table.suspects
        return is_its_place and self.takes(replica, group) and has_capacity(group.request, replica)

    @property
    def stands_still(self) -> bool:
        """Tells whether some replica stands still, and so does every one that gets new requests."""
        return bool(self.stalled) and all(
            replica in self.stalled for replica in self.replicas.values() if replica.is_ready
        )

    def status(self) -> ServiceStatus:
        """Returns what frontends need to know of the replicas: the model, their number, the limits."""
        memories = (replica.kv for replica in self.replicas.values())
        largest = max(memories, key=lambda kv: kv.capacity_tokens, default=None)
        capacity, block_size = (largest.capacity_tokens, largest.block_size) if largest else (0, 1)
        work_tokens = sum(self._request_table.work_tokens.values())
        max_parallel = self._config.max_parallel
        return ServiceStatus(
            len(self.replicas), self.model, capacity, max_parallel, block_size, work_tokens, self.stands_still
        )

    def send_status(self) -> None:
        """Sends the status to every frontend."""
        for frontend_id in self._request_table.held:
            self._outbox.to_frontend(frontend_id, StatusChanged(self._outbox.epoch, self.status()))

    # -- join -------------------------------------------------------------------------------------------------------

    def join(self, hello: WorkerHello, now: float) -> None:
        """Registers a worker that said hello, for the first time or again; or refuses it."""
        # A worker that was lost still holds sequences: once welcomed, it is asked at its first message to register
        # anew.
        if hello.incarnation in self.replicas or self._lost.get(hello.worker_id) == hello.incarnation:
            self._outbox.to_replica(hello.incarnation, WorkerWelcome(self._outbox.epoch))
            return
        if former := self.of_worker(hello.worker_id):
            is_same = former.hello.process == hello.process
            cause = LossCause.RECONNECTED if is_same else LossCause.RETURNED
            reason = "registered anew" if is_same else "another process of its name registered"
            self.lose(former.replica_id, cause, reason, now)
        self._request_table.suspects.came_back(hello.worker_id, hello.process, hello.predecessor)
        self._convict(now)
        if refusal := self._refusal(hello):
            self._outbox.to_replica(hello.incarnation, WorkerRefused(refusal))
            return
        steps = StepsInFlight(self._config, StepDeadlines(self._config), heard_at=now, answered_at=now)
        availability = Availability(is_cordoned=hello.worker_id in self.cordoned)
        replica = Replica(hello, self._config, steps, availability, self._make_memory(hello, self._config))
        self.replicas[hello.incarnation] = replica
        for name, group in self._prefixes.equip(
            replica, self.replicas.values(), list(self._request_table.waiting)
        ).items():
            self._outbox.add(PrefixGivenUp(replica.replica_id, name, making_way_for(group)))
        self._outbox.to_replica(hello.incarnation, WorkerWelcome(self._outbox.epoch))
        if self.model is None:
            self._learn_model(hello.model)
        self.send_status()

    def _refusal(self, hello: WorkerHello) -> str | None:
        # Replicas may call one model by different names; whatever decides the tokens must be equal.
        if self.model and msgspec.structs.replace(hello.model, name=self.model.name) != self.model:
            return (
                f"this scheduler serves {_describe(self.model)}, worker {hello.worker_id} has {_describe(hello.model)};"
                " start it with the same model directory, dtype and context length, or restart the scheduler"
            )
        return None

    def _learn_model(self, model: ModelInfo) -> None:
        """Takes the first worker's model, and checks requests that came before any worker against its limits."""
        self.model = model
        for group in list(self._request_table.waiting):
            accepted = group.request.resubmitted
            if refusal := refuse_misfit(group.request, model, self.replicas.values(), was_accepted=accepted):
                self._request_table.reject(group, *refusal)

    # -- leave ------------------------------------------------------------------------------------------------------

    def lose_overdue(self, now: float) -> None:
        """Loses workers that are silent, or late with a step."""
        for replica in list(self.replicas.values()):
            if reason := replica.steps.overdue(now):
                self.lose(replica.replica_id, LossCause.OVERDUE, reason, now)

    def dismiss(self, replica: Replica) -> None:
        """Lets a drained worker go."""
        self._forget(replica.replica_id)
        self._outbox.to_replica(replica.replica_id, WorkerDismissed(self._outbox.epoch))
        self._outbox.add(ReplicaDismissed(replica.replica_id, replica.hello.worker_id))
        self.send_status()

    def _forget(self, replica_id: int) -> Replica:
        replica = self.replicas.pop(replica_id)
        self.stalled.discard(replica)
        self._lost[replica.hello.worker_id] = replica_id
        return replica

    def expel(self, replica: Replica, reason: str, now: float) -> None:
        """Ends a worker whose results cannot be relied on, with an error, so that its supervisor starts it anew."""
        self._outbox.to_replica(replica.replica_id, WorkerRefused(f"{reason}; it must be started anew"))
        self.lose(replica.replica_id, LossCause.BROKEN, reason, now)

    def lose(self, replica_id: int, cause: LossCause, reason: str, now: float) -> None:
        """Forgets a replica. Its sequences wait to be recomputed on another one; a request that is convicted of its
        death ends."""
        replica = self._forget(replica_id)
        # A worker that was asked to end, and did not in time, was killed for that.
        if cause.is_death and (cause.is_explained or not replica.availability.wants_to_leave):
            verdict = Verdict.CRASHED if cause.is_explained else Verdict.OPEN
            is_late = replica.steps.elapsed(now) > self._config.step_timeout_s
            death = Death(replica.hello.worker_id, replica.hello.process, now, reason, verdict, is_late)
            self._request_table.suspects.died(replica.outstanding, death)
        for group in replica.requests:
            group.restart()
            self._request_table.requeue(group, NoticeKind.WORKER_LOST)
        self._observer.replica_lost(cause)
        self._outbox.add(ReplicaLost(replica_id, cause, reason, replica.hello.worker_id))
        self._convict(now)
        self.send_status()

    def settle_deaths(self, now: float) -> None:
        """Settles deaths that have been unexplained for `death_grace_s`, as time passes."""
        self._request_table.suspects.give_up_waiting(now - self._config.death_grace_s)
        self._convict(now)

    def _convict(self, now: float) -> None:
        for guilty in self._request_table.suspects.guilty():
            if not guilty.is_finished:
                self._quarantine_payload(guilty, now)

    def _quarantine_payload(self, guilty: RequestGroup, now: float) -> None:
        *before, last = self._request_table.suspects.deaths(guilty)
        detail = (
            f"{len(before)} workers were lost while they computed this request, {', '.join(map(str, before))}, and then"
            f" worker {last}, which computed nothing else; the same prompt with the same parameters is refused for"
            f" {self._config.quarantine_s:g} s; the logs of the workers may tell why"
        )
        self._quarantine.add(guilty.request, now, detail)
        self._outbox.add(RequestQuarantined(guilty.request_id, detail))
        for group in self._request_table.groups:
            # Other requests may have the same payload.
            if group is guilty or self._quarantine.refusal(group.request, now):
                self._request_table.reject(group, RejectReason.QUARANTINED, detail)


def _describe(model: ModelInfo) -> str:
    return f"{model.name} ({model.dtype}, context {model.max_model_len}, fingerprint {model.fingerprint[:12]})"


# -- cordons and drains -----------------------------------------------------------------------------------------------


class Draining:
    """Cordons workers, and drains them from the order to their dismissal."""

    def __init__(self, config: SchedulerConfig, request_table: RequestTable, replica_table: ReplicaTable) -> None:
        self._config = config
        self._request_table = request_table
        self._replica_table = replica_table

    def cordon(self, worker_id: str) -> None:
        """Gives the worker of this name no new requests, under this registration or a later one."""
        self._replica_table.cordoned.add(worker_id)
        if replica := self._replica_table.of_worker(worker_id):
            replica.availability.cordon()

    def drain(self, worker_id: str, grace_s: float | None, now: float) -> None:
        """Gives the worker of this name no new requests and lets it go once it holds none; groups that run there for
        longer than `grace_s` are moved."""
        if replica := self._replica_table.of_worker(worker_id):
            replica.availability.drain(now + (self._config.drain_grace_s if grace_s is None else grace_s))

    def wants_to_leave(self, replica: Replica, now: float) -> None:
        """Drains a worker that says, at every heartbeat, that its process is to end."""
        replica.availability.ask_to_leave(now + self._config.drain_grace_s)

    def readmit(self, worker_id: str) -> None:
        """Gives the worker of this name requests again."""
        self._replica_table.cordoned.discard(worker_id)
        if replica := self._replica_table.of_worker(worker_id):
            replica.availability.readmit()

    def see_off(self, now: float) -> None:
        """Takes every drain as far as it goes now."""
        for replica in list(self._replica_table.replicas.values()):
            if (until := replica.availability.drain_until) is not None:
                self._see_off(replica, now >= until)

    def _see_off(self, replica: Replica, is_over: bool) -> None:
        moving = self._movable(replica) if is_over else []
        # Groups that move, and a worker that ends, must be in no step.
        replica.availability.pause(bool(moving) or self._is_done(replica))
        if not replica.availability.is_paused or replica.outstanding:
            return
        for group in moving:
            self._move(replica, group)
        # Groups that stay can go on at once.
        replica.availability.pause(False)
        if self._is_done(replica):
            self._replica_table.dismiss(replica)

    def _movable(self, replica: Replica) -> list[RequestGroup]:
        return [group for group in replica.requests if self._replica_table.has_ready_home(group)]

    def _is_done(self, replica: Replica) -> bool:
        """Tells whether the replica holds no request, and none waits that has lost its blocks there and can go nowhere
        else."""
        return not replica.requests and not any(
            self._replica_table.takes(replica, group) for group in self._request_table.waiting
        )

    def _move(self, replica: Replica, group: RequestGroup) -> None:
        replica.evict(group)
        self._request_table.requeue(group, NoticeKind.PREEMPTED)
