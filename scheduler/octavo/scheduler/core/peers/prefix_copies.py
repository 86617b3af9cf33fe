"""Prefixes that one replica has computed are copied by another, where that is quicker than to compute them there.

A group whose turn it is on a replica waits there for what another one holds of its beginning, as it waits for a disk:
the blocks are copied into CPU blocks, and it starts with what has come. What does not come, or comes late, is computed.
"""

from dataclasses import dataclass

from octavo.scheduler.core.events import SchedulerObserver
from octavo.scheduler.core.peers.pulls import Pulls
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.replica_table import ReplicaTable
from octavo.scheduler.core.sequence import RequestGroup, Sequence
from octavo.scheduler.kv.memory import PeerCopy
from octavo.wire.costs import StepCosts, attended_pairs
from octavo.wire.steps import BlocksPulled

# Nobody waits longer for a copy than for what it saves, within these bounds.
_LEAST_WAIT_S, _MOST_WAIT_S = 1.0, 5.0


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy under way from one replica to another; where the source is gone, nothing of it counts."""

    source: Replica
    target: Replica
    blocks: PeerCopy
    asked_at: float
    is_lost: bool = False


class PrefixCopies:
    """Has replicas copy what groups begin with, and books what has come."""

    def __init__(self, replica_table: ReplicaTable, pulls: Pulls, observer: SchedulerObserver) -> None:
        self._replica_table, self._pulls, self._observer = replica_table, pulls, observer
        # By the replica that copies, and the number of the pull.
        self.under_way: dict[tuple[int, int], _Copy] = {}

    def fetch(self, group: RequestGroup, target: Replica, now: float) -> bool:
        """Has a replica copy what the group begins with and another one holds, if that pays, once in a wait; returns
        whether the group has to wait for that."""
        tier = target.kv.peers
        if tier is None or group.reads_of(target.replica_id, from_disk=False):
            return False
        sources = {each.kv.peers: each for each in self._sources(group, target, now)}
        found = tier.missing(group, [each for each in sources if each is not None]) if sources else None
        if found is None:
            return False
        source_tier, missing = found
        source, reads = sources[source_tier], missing.reads
        costs = target.hello.costs
        computing_s = _computing_s(target, missing.runs, costs) if costs is not None else None
        if missing.contents and self._pays(source, target, len(missing.contents), computing_s, now):
            timeout_s = min(max(_LEAST_WAIT_S, computing_s or _MOST_WAIT_S), _MOST_WAIT_S)
            for blocks in tier.copy(missing, source_tier, source.hello.worker_id, timeout_s):
                pull_id = self._pulls.ask(source, target, blocks.moves, from_cpu=blocks.from_cpu)
                self.under_way[target.replica_id, pull_id] = _Copy(source, target, blocks, now)
                reads.append(blocks.read)
        if reads:
            target.awaits(group, reads)
        return bool(reads)

    def savings(self, group: RequestGroup, targets: list[Replica], now: float) -> dict[Replica, float]:
        """Returns of replicas how many tokens less the group would leave to compute there if they copied what it begins
        with and another has, where that pays: the time of the copy counts as tokens that are computed in it. Known are
        only costs that were measured: of prompts by the worker, of copies by such as have ended lately.

        One sequence is looked at for all of the group, and of the replicas that it begins on the one that has most.
        """
        if not self._pulls.has_counted:
            return {}
        leader = group.leaders()[0]
        given = [(each.kv.peers.num_given(leader), each) for each in self._givers(group) if each.kv.peers is not None]
        given.sort(key=lambda each: -each[0])
        found = ((target, self._saved_tokens(leader, target, given, now)) for target in targets)
        return {target: saved for target, saved in found if saved}

    def _saved_tokens(self, leader: Sequence, target: Replica, given: list[tuple[int, Replica]], now: float) -> float:
        tier, costs, size = target.kv.peers, target.hello.costs, target.kv.block_size
        if tier is None or costs is None or not given or not given[0][0]:
            return 0.0
        num_found = tier.num_found(leader)
        for num_given, source in given:
            num_more = num_given - num_found
            if num_more <= 0:
                break
            num_blocks = num_more * len(target.hello.kv_groups)
            pull_s = self._pulls.known_s(source, target, num_blocks, now)
            if pull_s is not None and self._pulls.may_try(source, target, now):
                computing_s = _computing_s(target, [(num_found * size, num_more * size)], costs)
                copying_s = pull_s + _landing_s(num_blocks, costs)
                pays = copying_s < computing_s
                return num_more * size * (1.0 - copying_s / computing_s) if pays else 0.0
        return 0.0

    def _givers(self, group: RequestGroup) -> list[Replica]:
        """Returns the replicas that others may copy from: none that gave the group nothing finite, nor one on which a
        suspect is computed alone."""
        return [
            source
            for source in self._replica_table.replicas.values()
            if source.kv.peers is not None
            and source.suspect is None
            and source.replica_id != group.faults.non_finite_on
        ]

    def _sources(self, group: RequestGroup, target: Replica, now: float) -> list[Replica]:
        """Returns the replicas that this one may copy from."""
        givers = self._givers(group)
        return [source for source in givers if source is not target and self._pulls.may_try(source, target, now)]

    def _pays(self, source: Replica, target: Replica, num_blocks: int, computing_s: float | None, now: float) -> bool:
        """Tells whether to copy blocks takes less time than to compute their tokens; that is so where the worker has
        not measured."""
        costs = target.hello.costs
        if computing_s is None or costs is None:
            return True
        return self._pulls.expected_s(source, target, num_blocks, now) + _landing_s(num_blocks, costs) < computing_s

    def answered(self, replica: Replica, answer: BlocksPulled, now: float) -> bool:
        """Books what came of a copy. Returns False, and does nothing, if that was not asked."""
        copy = self.under_way.pop((replica.replica_id, answer.pull_id), None)
        if copy is None:
            return False
        assert replica.kv.peers is not None, "a replica copies that takes no part in it"
        is_late, num_blocks = copy.blocks.read.is_late, len(copy.blocks.moves)
        is_sound = self._take_back(copy)
        if answer.is_complete and not copy.is_lost:
            self._pulls.took(copy.source, replica, num_blocks, now - copy.asked_at, now)
        elif not copy.is_lost:
            self._pulls.has_failed(copy.source, replica, now)
        found = [answer.is_complete and each for each in is_sound]
        num_copied = replica.kv.peers.copied(copy.blocks, found)
        self._observer.prefix_copied(num_blocks, num_copied, is_late=is_late)
        return True

    def _take_back(self, copy: _Copy) -> list[bool]:
        tier = copy.source.kv.peers
        if copy.is_lost or tier is None:
            return [False] * len(copy.blocks.moves)
        return tier.take_back(copy.blocks)

    def look(self, now: float) -> None:
        """Lets no group wait for a copy that takes too long; the two replicas are not tried together for a while."""
        for copy in self.under_way.values():
            was_late = copy.blocks.read.is_late
            copy.blocks.read.look(now)
            if copy.blocks.read.is_late and not was_late:
                self._pulls.has_failed(copy.source, copy.target, now)

    def forget(self, replica: Replica) -> None:
        """Ends the copies to a replica that is gone, and lets nobody wait for those from it."""
        for key, copy in list(self.under_way.items()):
            if copy.target is replica:
                del self.under_way[key]
                self._take_back(copy)
            elif copy.source is replica:
                copy.is_lost = True
                copy.blocks.read.give_up()


def _computing_s(target: Replica, runs: list[tuple[int, int]], costs: StepCosts) -> float:
    """Returns the seconds to compute runs of so many tokens, each after a context, in steps that compute others as
    well."""
    windows = [group.window for group in target.hello.kv_groups]
    num_pairs = sum(attended_pairs(context, num_tokens, windows) for context, num_tokens in runs)
    num_tokens = sum(num_tokens for _, num_tokens in runs)
    return num_tokens * costs.prefill.token_s + num_pairs * costs.prefill.pair_s


def _landing_s(num_blocks: int, costs: StepCosts) -> float:
    """Returns the seconds in which blocks that were copied are moved onto the device."""
    return costs.swap.moves_s + num_blocks * costs.swap.block_in_s
