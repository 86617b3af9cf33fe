"""Pulls: workers copy each other's blocks, as the scheduler asks them to; which pairs of replicas can, and how long it
takes them."""

from dataclasses import dataclass

from octavo.scheduler.core.events import Outbox
from octavo.scheduler.core.replica import Replica
from octavo.wire.steps import BlockMove, PullBlocks

# For so long two replicas between which a copy has failed are not tried together again; and for so long what copies
# took is believed.
_REST_S, _BELIEVED_S = 30.0, 120.0
# By this factor a copy counts less with each that follows.
_DECAY = 0.9

_Pair = tuple[int, int]


def are_alike(source: Replica, target: Replica) -> bool:
    """Tells whether the blocks of one are of use to the other, whose worker can read them."""
    ours, theirs = source.hello.block_server, target.hello.block_server
    return ours is not None and theirs is not None and ours.identity == theirs.identity


@dataclass(slots=True)
class CopyTimes:
    """Fits what copies between two replicas take: a time for each, and one for each of its blocks; the last ones count
    most. `at` is when the last one ended."""

    at: float = 0.0
    _weight: float = 0.0
    _blocks: float = 0.0
    _seconds: float = 0.0
    _blocks_squared: float = 0.0
    _products: float = 0.0

    def add(self, num_blocks: int, seconds: float, now: float) -> None:
        """Counts a copy that has ended."""
        self.at = now
        self._weight = self._weight * _DECAY + 1.0
        self._blocks = self._blocks * _DECAY + num_blocks
        self._seconds = self._seconds * _DECAY + seconds
        self._blocks_squared = self._blocks_squared * _DECAY + num_blocks * num_blocks
        self._products = self._products * _DECAY + num_blocks * seconds

    def expected(self, num_blocks: int) -> float:
        """Returns the seconds that a copy of so many blocks will take; 0 if none was counted."""
        if not self._weight:
            return 0.0
        spread = self._weight * self._blocks_squared - self._blocks * self._blocks
        block_s = (self._weight * self._products - self._blocks * self._seconds) / spread if spread > 1e-9 else 0.0
        block_s = min(max(block_s, 0.0), self._seconds / self._blocks)
        return (self._seconds - block_s * self._blocks) / self._weight + block_s * num_blocks


class Pulls:
    """Asks workers for pulls, each by a number of its own, and knows of each pair, the replica that is read and the one
    that copies, what copies have taken and whether one has failed."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._num_pulls = 0
        self._times: dict[_Pair, CopyTimes] = {}
        self._failed: dict[_Pair, float] = {}

    def ask(self, source: Replica, target: Replica, moves: list[BlockMove], *, from_cpu: bool) -> int:
        """Has the worker of `target` copy blocks of `source`, which serves others, into CPU blocks of its own; returns
        the number that its answer will have."""
        assert source.hello.block_server is not None, f"nobody reads from {source.hello.worker_id}"
        self._num_pulls += 1
        after_step_id = target.next_plan.step_id - 1
        endpoint = source.hello.block_server.endpoint
        pull = PullBlocks(
            *(self._outbox.epoch, target.replica_id, self._num_pulls, after_step_id, endpoint, source.replica_id),
            from_cpu,
            moves,
        )
        self._outbox.to_replica(target.replica_id, pull)
        return self._num_pulls

    def took(self, source: Replica, target: Replica, num_blocks: int, seconds: float, now: float) -> None:
        """Notes what a copy has taken from when it was asked for until it was answered."""
        self._times.setdefault(_pair(source, target), CopyTimes()).add(num_blocks, seconds, now)

    @property
    def has_counted(self) -> bool:
        """Tells whether any copy was counted between replicas that are there."""
        return bool(self._times)

    def expected_s(self, source: Replica, target: Replica, num_blocks: int, now: float) -> float:
        """Returns the seconds that a copy will take, by those that were counted lately; 0 if none was."""
        return self.known_s(source, target, num_blocks, now) or 0.0

    def known_s(self, source: Replica, target: Replica, num_blocks: int, now: float) -> float | None:
        """Returns the same; None if no copy was counted lately."""
        times = self._times.get(_pair(source, target))
        return times.expected(num_blocks) if times is not None and now - times.at < _BELIEVED_S else None

    def has_failed(self, source: Replica, target: Replica, now: float) -> None:
        """Notes that a copy came to nothing, or came late."""
        self._failed[_pair(source, target)] = now

    def may_try(self, source: Replica, target: Replica, now: float) -> bool:
        """Tells whether blocks may be copied from one to the other, as far as is known."""
        return are_alike(source, target) and now - self._failed.get(_pair(source, target), -_REST_S) >= _REST_S

    def look(self, now: float) -> None:
        """Forgets failures that do not count any more."""
        self._failed = {pair: at for pair, at in self._failed.items() if now - at < _REST_S}

    def forget(self, replica: Replica) -> None:
        """Forgets a replica that is gone."""
        gone = replica.replica_id
        self._failed = {pair: at for pair, at in self._failed.items() if gone not in pair}
        self._times = {pair: times for pair, times in self._times.items() if gone not in pair}


def _pair(source: Replica, target: Replica) -> _Pair:
    return source.replica_id, target.replica_id
