"""Grammar time: how much of a step grammars may take, and whose turn it is where they want more.

Workers report how long each sequence's grammar took. An ambiguous one takes a thousand times as long as a usual one,
and would hold up all that share its steps; so their time in a step is bounded in sum, tenants share it evenly, and the
groups of a tenant its part. A group that keeps to its share is in every step; one that does not sits out as many steps
as pay for its next one. All of it is read off the books, so nothing need be kept beside them.
"""

from collections import Counter
from collections.abc import Iterable

from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import GrammarCost, Member, Sequence, SequenceGroup

# Limits of all grammars' time in one step, in microseconds: usually; and where no other group runs there to be held
# up, though one may come.
STEP_US = 5_000
ALONE_US = 50_000


def in_turn(replica: Replica, decodes: list[Member], *, prefills: bool) -> list[Member]:
    """Returns the decodes whose sequences may choose in the replica's next step; `prefills` tells whether that prefills
    too.

    A group's sequences decode together or not at all, and some group does in any case where nothing would be computed
    otherwise.
    """
    waiting = _waiting(replica, decodes, prefills=prefills)
    return [decode for decode in decodes if decode[0] not in waiting] if waiting else decodes


def left_by(decodes: list[Member]) -> int:
    """Returns the microseconds of grammars that these decodes leave of a step."""
    return max(0, STEP_US - sum(group.grammar.us for group, _ in decodes if group.grammar is not None))


def tokens_worth(grammar: GrammarCost, replica: Replica) -> int:
    """Returns how many tokens the replica computes in the time that a token takes for its grammar."""
    return round(grammar.us * replica.stats.token_rate / 1e6)


def may_start(us: int, already_us: int) -> bool:
    """Tells whether a group's grammar may take `us` microseconds for its first tokens in a step in which grammars of
    others take `already_us`."""
    return not already_us or already_us + us <= STEP_US


def _waiting(replica: Replica, decodes: list[Member], *, prefills: bool) -> set[SequenceGroup]:
    members: dict[SequenceGroup, list[Sequence]] = {}
    costs: dict[SequenceGroup, int] = {}
    for group, sequence in decodes:
        if group.grammar is not None:
            members.setdefault(group, []).append(sequence)
            costs[group] = costs.get(group, 0) + group.grammar.us
    if sum(costs.values()) <= STEP_US:
        return set()
    shares = _shares(members)
    costly = [group for group in members if costs[group] > shares[group]]
    # How much of its next step each group has paid by waiting. The one that paid most goes first, so all have their
    # turns.
    paid = {group: _waited(replica, members[group]) * shares[group] / costs[group] for group in costly}
    costly.sort(key=lambda group: (-paid[group], group.order))
    has_others = len(costly) < len(members) or any(group.grammar is None for group in replica.stepping)
    limit = STEP_US if has_others else ALONE_US
    going: set[SequenceGroup] = set()
    spent = 0
    for group in costly:
        if (not has_others or paid[group] >= 1) and (not going or spent + costs[group] <= limit):
            going.add(group)
            spent += costs[group]
    if not going and not prefills and not replica.outstanding and len(costly) == len({group for group, _ in decodes}):
        going.add(costly[0])
    return set(costly) - going


def _waited(replica: Replica, sequences: list[Sequence]) -> int:
    """Counts the steps since the last with any of the sequences."""
    return replica.next_plan.step_id - max(sequence.placement.last_step_id for sequence in sequences)


def _shares(groups: Iterable[SequenceGroup]) -> dict[SequenceGroup, float]:
    """Returns each group's share of every step, in microseconds."""
    groups = list(groups)
    num_groups = Counter(group.request.tenant for group in groups)
    return {group: STEP_US / len(num_groups) / num_groups[group.request.tenant] for group in groups}
