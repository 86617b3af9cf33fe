"""Watches whether steps come back where there is work: which workers stand still, and whether any is left for new
requests.

A worker that is late with a step is lost by its deadline; this finds the one that is asked for no step at all, though
it holds work or could take the head of the queue. A request that no worker could hold waits rightly, and `octavo
explain` names its obstacle (`capacity`, `no_worker`). Workers also stand rightly that hold nothing, that are about to
have their groups moved away, or that a suspect's steps hold up.
"""

from dataclasses import dataclass

from octavo.scheduler.core.admission import has_capacity
from octavo.scheduler.core.events import ReplicaMovedOn, ReplicaStalled
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import RequestGroup, SequenceGroup
from octavo.scheduler.core.state import SchedulerState

# A step under way is given this many times its deadline, by which its worker should have been lost.
_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Stall:
    """A replica that has answered no step for `silent_s`, longer than `allowance_s`; `group` is the first that should
    have been in one."""

    replica: Replica
    group: SequenceGroup
    silent_s: float
    allowance_s: float

    def __str__(self) -> str:
        return (
            f"worker {self.replica.hello.worker_id} has work, and has answered no step for {self.silent_s:.1f} s of"
            f" {self.allowance_s:.1f} s"
        )


class Watchdog:
    """Reports whenever a replica comes to stand still or moves on; `look` is to be called again and again."""

    def __init__(self, state: SchedulerState) -> None:
        # Replicas that have work, and since when that is known.
        self._busy_since: dict[Replica, float] = {}
        self._state = state

    def stalls(self, now: float) -> list[Stall]:
        """Returns a stall for every replica that stands still."""
        state = self._state
        head = next(state.requests.waiting.candidates(1, state.replica_table.can_hold), None)
        replicas = list(state.replicas)
        first = {replica: group for replica in replicas if (group := self._first(replica, head)) is not None}
        self._busy_since = {replica: self._busy_since.get(replica, now) for replica in first}
        return [stall for replica, group in first.items() if (stall := self._stall(replica, group, now))]

    def look(self, now: float) -> None:
        """Reports the changes since the last call."""
        state = self._state
        found = {stall.replica: stall for stall in self.stalls(now)}
        former = state.replica_table.stalled
        if found.keys() == former:
            return
        state.replica_table.stalled = set(found)
        for replica, stall in found.items():
            if replica not in former:
                state.outbox.add(ReplicaStalled(replica.replica_id, stall.group.request_id, str(stall)))
        for replica in former - found.keys():
            if replica.replica_id in state.replica_table.replicas:
                state.outbox.add(ReplicaMovedOn(replica.replica_id, replica.hello.worker_id))
        state.observer.stalled([replica.hello.worker_id for replica in found])
        state.send_status()

    def _first(self, replica: Replica, head: RequestGroup | None) -> SequenceGroup | None:
        """Returns the first group of a replica's work; the queue's head, if the replica holds nothing and could take
        that; None if there is nothing for it to do."""
        if replica.availability.is_paused:
            return None
        if replica.has_work:
            groups = [*replica.running, *replica.swapped, *replica.prefixes.to_compute]
            return groups[0] if groups else replica.suspect
        takes = (
            head is not None and self._state.replica_table.takes(replica, head) and has_capacity(head.request, replica)
        )
        return head if takes else None

    def _stall(self, replica: Replica, group: SequenceGroup, now: float) -> Stall | None:
        silent = now - max(self._busy_since[replica], replica.steps.answered_at)
        allowance = max(self._state.config.watchdog_s, _FACTOR * replica.steps.allowance)
        return Stall(replica, group, silent, allowance) if silent > allowance else None
