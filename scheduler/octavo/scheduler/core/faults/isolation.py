"""Isolation of suspects, one at a time: each has the steps of one replica to itself until it is cleared, or its guilt
is certain.

The `PoisonDetector` says which groups are suspects and which are guilty; it knows deaths and steps, but no replicas.
Here it is decided where and when a suspect runs: `arrange` marks the replica (`Replica.isolate`), to which no other
group is admitted from then on, and calls `PoisonDetector.goes_to`, so that the detector can tell a death on a worker
that had not died over the suspect from one on a worker that may be broken itself. A suspect is let go once the detector
no longer names it; or, if it has lost its blocks, where its replica cannot take it again, or its guilt depends on a
death that nobody has explained yet.

Groups that already run on that replica keep their blocks and stand still meanwhile: none of them is in a step that a
worker could die over. Other replicas go on as ever.
"""

from octavo.scheduler.core.admission import has_capacity
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import RequestGroup, SequenceStatus
from octavo.scheduler.core.state import SchedulerState
from octavo.scheduler.core.step.builder import StepBuilder


def arrange(state: SchedulerState) -> None:
    """Ends isolations that are over; then, if none goes on, gives the next suspect the replica that has the least
    to lose."""
    for replica in state.replicas:
        if replica.suspect is not None and not _goes_on(state, replica, replica.suspect):
            replica.isolate(None)
    if state.requests.suspects.accuses_any and (found := upcoming(state)):
        suspect, home = found
        home.isolate(suspect)
        state.requests.suspects.goes_to(suspect, home.hello.worker_id)


def upcoming(state: SchedulerState) -> tuple[RequestGroup, Replica] | None:
    """Returns the next suspect, and the replica that isolates it from the next planning on; None if one is isolated
    already or none can be."""
    replicas = state.replicas
    if any(state.requests.suspects) and not any(_is_taken(state, replica) for replica in replicas):
        return _next(state)
    return None


def suspect_of(state: SchedulerState, replica: Replica) -> RequestGroup | None:
    """Returns the suspect that `replica` isolates, or will from the next planning on; None if there is none."""
    if _is_taken(state, replica):
        return replica.suspect
    found = upcoming(state)
    return found[0] if found and found[1] is replica else None


def _is_taken(state: SchedulerState, replica: Replica) -> bool:
    return replica.suspect is not None and _goes_on(state, replica, replica.suspect)


def _goes_on(state: SchedulerState, replica: Replica, suspect: RequestGroup) -> bool:
    is_here = state.requests.replica_of(suspect) is replica
    return suspect in state.requests.suspects and (is_here or _is_home(state, replica, suspect))


def _next(state: SchedulerState) -> tuple[RequestGroup, Replica] | None:
    for suspect in sorted(state.requests.suspects, key=_order):
        homes = [replica for replica in state.replicas if _is_home(state, replica, suspect)]
        if homes:
            # A worker that has died over the suspect already proves less.
            known = state.requests.suspects.worker_ids(suspect)
            return suspect, min(homes, key=lambda home: (home.hello.worker_id in known, _at_stake(home)))
    return None


def _is_home(state: SchedulerState, replica: Replica, suspect: RequestGroup) -> bool:
    return (
        not state.requests.suspects.awaits_word(suspect)
        and state.replica_table.may_take(replica, suspect)
        and has_capacity(suspect.request, replica)
    )


def comer(state: SchedulerState, replica: Replica) -> RequestGroup | None:
    """Returns the suspect that comes to `replica` as soon as nothing is outstanding there, if the replica has room
    for it now; else None."""
    suspect = replica.suspect
    if suspect is None or suspect.status is not SequenceStatus.WAITING:
        return None
    return None if StepBuilder(replica, replica.token_budget).obstacle(suspect) else suspect


def _order(group: RequestGroup) -> tuple[float, int]:
    return group.order


def _at_stake(replica: Replica) -> int:
    """Counts the tokens that would have to be computed again if the replica were lost."""
    return sum(sequence.placement.num_computed for group in replica.requests for sequence in group.live)
