"""Which waiting group goes where: the order of the queue, room on a replica, and the least to wait for."""

from collections import Counter

from octavo.scheduler.admission import has_capacity, obstacle
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.draft import Draft
from octavo.scheduler.fleet import Fleet
from octavo.scheduler.replica import Replica
from octavo.scheduler.sequence import SequenceGroup
from octavo.scheduler.strategy import StepPolicy
from octavo.scheduler.waiting_queue import WaitingQueue

# Waiting groups that are looked at in all, where those in front can go to none of the replicas that have room.
_MAX_LOOKED_AT = 256


def next_admission(
    waiting: WaitingQueue,
    drafts: list[Draft],
    fleet: Fleet,
    policy: StepPolicy,
    config: SchedulerConfig,
    now: float,
) -> tuple[SequenceGroup, Draft] | None:
    """The group that is admitted next, and to which step.

    A group that does not fit may be overtaken by those behind it until it has waited `overtaking_s`, so that a long
    prompt neither idles the blocks nor starves. From then on it holds back every replica that could ever hold it, and
    no other: what only a large one can hold idles no small one. So does at once what has run and lost its blocks. On
    each replica `lookahead` groups are tried. What no replica takes that could ever hold it is passed over.
    """
    open_drafts = [draft for draft in drafts if policy.admits(draft)]
    if not open_drafts:
        return None
    tried: Counter[int] = Counter()
    # With a lookahead of one, the paper's, the head of the queue alone is looked at, wherever it could go.
    for group in waiting.candidates(1 if policy.lookahead == 1 else _MAX_LOOKED_AT, fleet.can_hold):
        possible = [
            draft
            for draft in open_drafts
            if fleet.takes(draft.replica, group) and has_capacity(group.request, draft.replica)
        ]
        fitting = [draft for draft in possible if obstacle(draft, group, whole_prompt=policy.whole_prompts) is None]
        if fitting:
            return group, _quickest(fitting, group)
        tried.update(draft.replica.replica_id for draft in possible)
        is_overdue = now - group.arrival >= config.overtaking_s or waiting.has_run_before(group)
        closed = {
            draft.replica.replica_id
            for draft in possible
            if is_overdue or tried[draft.replica.replica_id] >= policy.lookahead
        }
        open_drafts = [draft for draft in open_drafts if draft.replica.replica_id not in closed]
        if not open_drafts:
            return None
    return None


def _quickest(drafts: list[Draft], group: SequenceGroup) -> Draft:
    # Adding up a load costs a walk over all that runs, so only where there is a choice.
    if len(drafts) == 1:
        return drafts[0]
    usual_rate = _mean_rate(drafts)
    return min(drafts, key=lambda draft: _wait(draft.replica, group, usual_rate))


def _mean_rate(drafts: list[Draft]) -> float:
    """Of the replicas that have been measured; what one that is new counts with."""
    rates = [rate for draft in drafts if (rate := draft.replica.stats.token_rate)]
    return sum(rates) / len(rates) if rates else 1.0


def _wait(replica: Replica, group: SequenceGroup, usual_rate: float) -> float:
    """Seconds, or any unit in which all replicas are measured, until the group's prompt would be computed: so a prefix
    hit counts by the tokens it saves, and a fast replica by its speed."""
    leaders = group.leaders()
    uncached = sum(leader.num_known for leader in leaders) - replica.kv.num_found(leaders)
    return (replica.load + uncached) / (replica.stats.token_rate or usual_rate)
