"""Isolation of suspects, one at a time: each has the steps of one replica to itself until it is cleared, or its guilt
is certain.

Groups that already run on that replica keep their blocks and stand still meanwhile: none of them is in a step that a
worker could die over. Other replicas go on as ever.
"""

from octavo.scheduler.core.admission import has_capacity, obstacle
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.replica_table import ReplicaTable
from octavo.scheduler.core.request_table import RequestTable
from octavo.scheduler.core.sequence import RequestGroup, SequenceStatus
from octavo.scheduler.core.step.builder import StepBuilder


class Isolation:
    """Gives each suspect of the `PoisonDetector` a replica to be computed on alone, for the detector to judge it.

    The detector says which groups are suspects and which are guilty; it knows deaths and steps, but no replicas. This
    class decides where and when a suspect runs: `arrange` marks the replica (`Replica.suspect`), to which no other
    group is admitted from then on, and calls `PoisonDetector.goes_to`, so that the detector can tell a death on a
    worker that had not died over the suspect from one on a worker that may be broken itself. A suspect is let go once
    the detector no longer names it; or, if it has lost its blocks, where its replica cannot take it again, or its guilt
    depends on a death that nobody has explained yet.
    """

    def __init__(self, request_table: RequestTable, replica_table: ReplicaTable) -> None:
        self._request_table = request_table
        self._replica_table = replica_table

    def arrange(self) -> None:
        """Ends isolations that are over; then, if none goes on, gives the next suspect the replica that has the least
        to lose."""
        for replica in self._replica_table.replicas.values():
            if replica.suspect is not None and not self._goes_on(replica, replica.suspect):
                replica.isolate(None)
        if found := self.upcoming():
            suspect, home = found
            home.isolate(suspect)
            self._request_table.suspects.goes_to(suspect, home.hello.worker_id)

    def upcoming(self) -> tuple[RequestGroup, Replica] | None:
        """Returns the next suspect, and the replica that isolates it from the next planning on; None if one is isolated
        already or none can be."""
        replicas = self._replica_table.replicas.values()
        if any(self._request_table.suspects) and not any(self._is_taken(replica) for replica in replicas):
            return self._next()
        return None

    def suspect_of(self, replica: Replica) -> RequestGroup | None:
        """Returns the suspect that `replica` isolates, or will from the next planning on; None if there is none."""
        if self._is_taken(replica):
            return replica.suspect
        found = self.upcoming()
        return found[0] if found and found[1] is replica else None

    def _is_taken(self, replica: Replica) -> bool:
        return replica.suspect is not None and self._goes_on(replica, replica.suspect)

    def _goes_on(self, replica: Replica, suspect: RequestGroup) -> bool:
        is_here = self._request_table.replica_of(suspect) is replica
        return suspect in self._request_table.suspects and (is_here or self._is_home(replica, suspect))

    def _next(self) -> tuple[RequestGroup, Replica] | None:
        for suspect in sorted(self._request_table.suspects, key=_order):
            homes = [replica for replica in self._replica_table.replicas.values() if self._is_home(replica, suspect)]
            if homes:
                # A worker that has died over the suspect already proves less.
                known = self._request_table.suspects.worker_ids(suspect)
                return suspect, min(homes, key=lambda home: (home.hello.worker_id in known, _at_stake(home)))
        return None

    def _is_home(self, replica: Replica, suspect: RequestGroup) -> bool:
        return (
            not self._request_table.suspects.awaits_word(suspect)
            and self._replica_table.may_take(replica, suspect)
            and has_capacity(suspect.request, replica)
        )

    def comer(self, replica: Replica) -> RequestGroup | None:
        """Returns the suspect that comes to `replica` as soon as nothing is outstanding there, if the replica has room
        for it now; else None."""
        suspect = replica.suspect
        if suspect is None or suspect.status is not SequenceStatus.WAITING:
            return None
        return None if obstacle(StepBuilder(replica, replica.token_budget), suspect) else suspect


def _order(group: RequestGroup) -> tuple[float, int]:
    return group.order


def _at_stake(replica: Replica) -> int:
    """Counts the tokens that would have to be computed again if the replica were lost."""
    return sum(sequence.placement.num_computed for group in replica.requests for sequence in group.live)
