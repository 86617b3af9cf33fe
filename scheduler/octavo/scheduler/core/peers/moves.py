"""Groups move to another replica with what is computed of them: from one that is drained, or that has no room for what
it has swapped out, or much more to do than others.

A group that is to move is in no new step. Once the steps that were outstanding are answered, nobody writes to its
blocks; the other replica's worker then copies them into CPU blocks of its own. Only when that is answered does the
group change hands, and it comes back there as swapped groups do: nothing is computed again, whatever its sequences
share. Until then it is still where it was: if anything goes wrong in between, it goes on there, or starts over
elsewhere as if nobody had tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from octavo.scheduler.core.admission import has_capacity, start_obstacle
from octavo.scheduler.core.events import SchedulerObserver
from octavo.scheduler.core.peers.pulls import Pulls
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.replica_table import ReplicaTable
from octavo.scheduler.core.request_table import RequestTable
from octavo.scheduler.core.sequence import RequestGroup, SequenceStatus
from octavo.scheduler.kv.memory import Arrival
from octavo.wire.costs import StepCosts
from octavo.wire.requests import NoticeKind, answer_work
from octavo.wire.steps import BlocksPulled, WorkerRole

# Groups that leave one replica at a time: each stands still while those before it are copied.
_MAX_LEAVING = 4
# A copy that takes longer is waited for by no group.
_TIMEOUT_S = 5.0
# A group that could not leave just then is tried again after so long.
_PAUSE_S = 0.5
# Waiting groups whose prompts are counted.
_MOST_COUNTED = 64
# A replica has much more to do than another one from so many sequences more on, if these are twice as many; and a group
# has to have so many tokens before it to be worth moving for that.
_MUCH_MORE, _WORTH_TOKENS = 4, 32


@dataclass(eq=False, slots=True)
class Move:
    """A group on its way. Its blocks are copied as soon as the source's steps up to `after_step_id` are answered, from
    when on there is a `pull_id`."""

    group: RequestGroup
    source: Replica
    target: Replica
    after_step_id: int
    num_blocks: int
    pull_id: int = 0
    began_at: float = 0.0
    asked_at: float = 0.0
    arrival: Arrival | None = None


class Moves:
    """Holds the moves `under_way`, by group, and takes them further as events come in."""

    def __init__(
        self, requests: RequestTable, replica_table: ReplicaTable, pulls: Pulls, observer: SchedulerObserver
    ) -> None:
        self._requests, self._replica_table = requests, replica_table
        self._pulls, self._observer = pulls, observer
        self.under_way: dict[RequestGroup, Move] = {}
        # Those whose pull is not answered yet, by the replica that pulls and its number; nobody may wait for them.
        self.pulling: dict[tuple[int, int], Move] = {}
        # Groups that were caught between two tokens, and so go on for a while before they are tried again; since when.
        self._resting: dict[RequestGroup, float] = {}

    def of(self, group: RequestGroup) -> Move | None:
        """Returns the move that the group is on, if it is on one."""
        return self.under_way.get(group)

    def leaving(self, replica: Replica) -> list[Move]:
        """Returns the moves off this replica."""
        return [move for move in self.under_way.values() if move.source is replica]

    def coming(self, replica: Replica) -> list[Move]:
        """Returns the moves to this replica."""
        return [move for move in self.under_way.values() if move.target is replica]

    # -- begin ----------------------------------------------------------------------------------------------------

    def carry(self, source: Replica, groups: list[RequestGroup], now: float) -> list[RequestGroup]:
        """Moves groups off a replica, a few at a time; returns those that nobody can take with what they hold. The
        others are under way, or will be once those have arrived."""
        left = []
        for group in groups:
            if group in self.under_way or group in self._resting:
                continue
            is_full = len(self.leaving(source)) >= _MAX_LEAVING
            targets = self._targets(source, group, now) if _may_leave(source, group) else []
            target = None if is_full else self._with_room(targets, group, _num_blocks(source, group))
            if target is not None:
                self._begin(group, source, target)
            elif not (targets and self.leaving(source)):
                left.append(group)
        return left

    def hand_over(self, source: Replica, now: float) -> None:
        """Moves groups that have computed their prompts off a replica that is for prompts alone, where to stay would
        hold them up longer than the move does, or leave no room for the next prompt. The others, and those that nobody
        can take, go on there."""
        here = (group for group in source.running if isinstance(group, RequestGroup) and group not in source.moving)
        done = [group for group in here if all(each.is_decoding for each in group.holders)]
        if done and source.hello.costs is not None and not self._keeps_out_the_next(source):
            done = self._held_up(source, done, source.hello.costs, now)
        self.carry(source, done, now)

    def _keeps_out_the_next(self, source: Replica) -> bool:
        """Tells whether what is on a replica leaves no room for the waiting group that comes next, if it could ever be
        there: it would wait for the end of what stays."""
        group = next(iter(self._requests.waiting), None)
        if group is None or not has_capacity(group.request, source):
            return False
        is_full = source.num_running_seqs + group.parallel > source.max_parallel
        return is_full or start_obstacle(source.kv, group) is not None

    def _prompt_tokens(self, source: Replica) -> int:
        """Counts the tokens of prompts that are still to be computed on a replica: of those there, and its share of
        those that wait."""
        here = sum(each.num_uncomputed for group in source.running for each in group.live if not each.is_decoding)
        waiting = sum(group.live[0].num_known for group in islice(self._requests.waiting, _MOST_COUNTED))
        replicas = self._replica_table.replicas.values()
        return here + waiting // sum(each.hello.role is not WorkerRole.DECODE for each in replicas)

    def _held_up(self, source: Replica, groups: list[RequestGroup], costs: StepCosts, now: float) -> list[RequestGroup]:
        """Returns those of the groups that prompts hold up here; where there are no prompts, no group is looked at."""
        prompts = self._prompt_tokens(source)
        return [group for group in groups if prompts and self._is_held_up(source, group, prompts, costs, now)]

    def _is_held_up(self, source: Replica, group: RequestGroup, prompts: int, costs: StepCosts, now: float) -> bool:
        """Tells whether prompts will hold the group's tokens up here for longer than it stands still when it moves.
        Every step may bring as many tokens of prompts as it computes, for as long as the group generates."""
        generated = max((each.num_generated for each in group.live), default=0)
        steps = answer_work(group.sampling.max_tokens, generated)
        held_up_s = min(prompts, steps * source.token_budget) * costs.prefill.token_s
        num_blocks, swap = _num_blocks(source, group), costs.swap
        copies_s = [
            self._pulls.expected_s(source, target, num_blocks, now) for target in self._targets(source, group, now)
        ]
        return held_up_s > min(copies_s, default=0.0) + swap.moves_s + num_blocks * swap.block_in_s

    def balance(self, now: float) -> None:
        """Moves a group from a replica that has swapped it out, or has much more to do than another one; at most one
        from each, and none while another is on its way there."""
        for source in self._replica_table.replicas.values():
            if source.is_ready and not self.leaving(source):
                for group in _superfluous(source):
                    if group in self._resting:
                        continue
                    targets = self._targets(source, group, now) if _may_leave(source, group) else []
                    better = [each for each in targets if not self.coming(each) and _is_better(source, each, group)]
                    target = self._with_room(better, group, _num_blocks(source, group)) if better else None
                    if target is not None:
                        self._begin(group, source, target)
                        break

    def _targets(self, source: Replica, group: RequestGroup, now: float) -> list[Replica]:
        """Returns the replicas that could ever take the group with its blocks."""
        return [
            target
            for target in self._replica_table.replicas.values()
            if target is not source
            and target.is_ready
            and self._pulls.may_try(source, target, now)
            and target.suspect is None
            and target.hello.role is not WorkerRole.PREFILL
            and group not in self._requests.suspects
            and target.replica_id != group.faults.non_finite_on
            and has_capacity(group.request, target)
        ]

    def _with_room(self, targets: list[Replica], group: RequestGroup, num_blocks: int) -> Replica | None:
        """Returns the replica with the least to do of those that have room now, beside what else comes there."""
        fitting = [target for target in targets if self._has_room(target, group, num_blocks)]
        return min(fitting, key=lambda target: (target.num_running_seqs, target.load), default=None)

    def _has_room(self, target: Replica, group: RequestGroup, num_blocks: int) -> bool:
        kv, coming = target.kv, self.coming(target)
        others: list[RequestGroup] = [*(move.group for move in coming), *target.swapped]
        num_expected = sum(move.num_blocks for move in coming if move.arrival is None)
        num_returning = sum(move.num_blocks for move in coming) + sum(kv.num_to_return(each) for each in target.swapped)
        # As one that comes back, it needs a spare block for each sequence, or it would be the next to be preempted.
        spare = kv.watermark_blocks + 2 * sum(each.parallel for each in (*others, group)) * kv.blocks_for(1)
        num_slots = target.num_running_seqs + sum(each.parallel for each in (*others, group))
        return (
            num_expected + num_blocks <= kv.num_cpu_free
            and num_returning + num_blocks + spare <= kv.num_free
            and num_slots <= target.size.seqs
        )

    def _begin(self, group: RequestGroup, source: Replica, target: Replica) -> None:
        source.moving.add(group)
        target.num_coming += 1
        after_step_id = source.next_plan.step_id - 1
        self.under_way[group] = Move(group, source, target, after_step_id, _num_blocks(source, group))

    # -- go on ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Begins to copy the blocks of groups that nobody writes to any more; ends moves that have lost their sense."""
        for move in list(self.under_way.values()):
            if not self._stands(move):
                self._end(move)
            elif move.arrival is None and not _is_outstanding(move):
                self._pull(move, now)

    def look(self, now: float) -> None:
        """Lets no group wait for a copy that takes too long."""
        for move in list(self.under_way.values()):
            if not move.began_at:
                move.began_at = now
            elif now - move.began_at > _TIMEOUT_S:
                self._fail(move, now)
        self._resting = {group: at for group, at in self._resting.items() if now - at < _PAUSE_S and group.live}

    def answered(self, replica: Replica, answer: BlocksPulled, now: float) -> bool:
        """Books what came of a pull: the group goes on there if it still can. Returns False, and does nothing, if that
        was not asked."""
        move = self.pulling.pop((replica.replica_id, answer.pull_id), None)
        if move is None or move.arrival is None:
            return False
        if answer.is_complete:
            self._pulls.took(move.source, replica, len(move.arrival.moves), now - move.asked_at, now)
        is_wanted = self.under_way.get(move.group) is move and self._stands(move)
        if not (answer.is_complete and is_wanted):
            replica.kv.give_up(move.arrival)
            if is_wanted:
                self._fail(move, now)
            return True
        group, source = move.group, move.source
        tables = source.kv.leaving(group)
        self._end(move)
        if group.status is SequenceStatus.RUNNING:
            self._requests.stopped(group, NoticeKind.PREEMPTED)
        source.let_go(group)
        replica.kv.arrive(move.arrival, tables)
        replica.take_in(group)
        self._requests.move(group, replica)
        self._observer.moved(len(move.arrival.moves))
        return True

    def forget(self, replica: Replica) -> None:
        """Ends the moves from and to a replica that is gone."""
        for move in list(self.under_way.values()):
            if replica in (move.source, move.target):
                self._end(move)
        gone = replica.replica_id
        self.pulling = {key: move for key, move in self.pulling.items() if key[0] != gone}
        # Other replicas may be had now, or none, and then nobody looks at this.
        self._resting.clear()

    def _stands(self, move: Move) -> bool:
        """Tells whether the group is still where it was, and may go where it is to go."""
        group, source = move.group, move.source
        if group not in source.moving or not group.live or group in self._requests.suspects:
            return False
        if group.status is SequenceStatus.RUNNING and any(source.kv.holds_distrusted(each) for each in group.holders):
            return False
        return move.target.is_ready

    def _pull(self, move: Move, now: float) -> None:
        source, target = move.source, move.target
        tables = source.kv.leaving(move.group)
        move.num_blocks = _num_blocks(source, move.group)
        is_begun = all(each.placement.num_computed and each.num_uncomputed for each in move.group.holders)
        if not is_begun or move.num_blocks > target.kv.num_cpu_free:
            self._resting[move.group] = now
            self._end(move)
            return
        move.arrival = target.kv.expect(tables)
        from_cpu = move.group.status is SequenceStatus.SWAPPED
        move.pull_id, move.asked_at = self._pulls.ask(source, target, move.arrival.moves, from_cpu=from_cpu), now
        self.pulling[target.replica_id, move.pull_id] = move

    def _fail(self, move: Move, now: float) -> None:
        self._pulls.has_failed(move.source, move.target, now)
        self._end(move)

    def _end(self, move: Move) -> None:
        """Lets the group go on where it is. What is being copied stays the target's until it answers."""
        del self.under_way[move.group]
        move.source.moving.discard(move.group)
        move.target.num_coming -= 1


def _superfluous(source: Replica) -> Iterator[RequestGroup]:
    """Yields groups that had better be elsewhere, if that is better: the first that is swapped out, if there is no room
    for it; where none is, of the running ones that which came last and has much before it."""
    if source.swapped:
        if not _may_return(source, source.swapped[0]):
            yield source.swapped[0]
        return
    for group in reversed(source.running):
        if isinstance(group, RequestGroup) and _num_to_come(group) >= _WORTH_TOKENS:
            yield group
            return


def _may_return(source: Replica, group: RequestGroup) -> bool:
    fits = source.num_running_seqs + group.parallel <= source.max_parallel
    return fits and source.kv.num_to_return(group) + source.kv.watermark_blocks <= source.kv.num_free


def _num_to_come(group: RequestGroup) -> int:
    return max((group.longest - sequence.num_known for sequence in group.live), default=0)


def _is_better(source: Replica, target: Replica, group: RequestGroup) -> bool:
    if target.swapped:
        return False
    if group.status is SequenceStatus.SWAPPED:
        return True
    more = source.num_running_seqs - (target.num_running_seqs + group.parallel)
    return more >= _MUCH_MORE and source.num_running_seqs >= 2 * (target.num_running_seqs + group.parallel)


def _may_leave(source: Replica, group: RequestGroup) -> bool:
    """Tells whether anything is computed of each of the group's sequences, and can be read by others: all of it."""
    server = source.hello.block_server
    if server is None or source.hello.gathers or group in source.restarts or group is source.suspect:
        return False
    if group.status is SequenceStatus.SWAPPED:
        return True
    holders = group.holders
    return server.has_device and all(each.placement.is_ready and each.placement.num_computed for each in holders)


def _num_blocks(source: Replica, group: RequestGroup) -> int:
    tables = source.kv.leaving(group).values()
    return len({block_id for table in tables for block_id in table.block_ids})


def _is_outstanding(move: Move) -> bool:
    outstanding = move.source.outstanding
    return bool(outstanding) and outstanding[0].step_id <= move.after_step_id
