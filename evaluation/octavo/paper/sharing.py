"""How many blocks sharing saves (paper Fig. 15)."""

from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import SequenceGroup


class SharingProbe:
    """Counts blocks at every sample from `skip_s` on: those taken, and those that would be if nothing were shared."""

    def __init__(self, skip_s: float = 0.0) -> None:
        self._skip_s = skip_s
        self._taken = self._unshared = 0

    def __call__(self, time: float, core: Scheduler) -> None:
        if time >= self._skip_s:
            for replica in core.replicas.values():
                self._taken += replica.kv.num_blocks - replica.kv.num_free
                self._unshared += sum(_unshared_blocks(replica, group) for group in replica.running)

    @property
    def saved(self) -> float | None:
        """As a share of what would be taken; None if nothing ever was."""
        return 1.0 - self._taken / self._unshared if self._unshared else None


def _unshared_blocks(replica: Replica, group: SequenceGroup) -> int:
    """A beam search is one sequence at first; its copies would be as many as its beams then too."""
    blocks = [len(replica.kv.block_table(sequence.leader or sequence)[0]) for sequence in group.live]
    return sum(blocks) * group.parallel // len(blocks)
