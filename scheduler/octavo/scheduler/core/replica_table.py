"""The replicas that are registered: which group may go to which of them, and what all of them can do."""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from octavo.scheduler.core.admission import has_capacity
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.request_table import RequestTable
from octavo.scheduler.core.sequence import RequestGroup
from octavo.wire.requests import BlockUse, ServiceLoad, ServiceStatus
from octavo.wire.steps import ModelInfo, WorkerHello, WorkerRole

# Incarnations that have left are remembered as far as that; their hellos are late by seconds, if ever.
_MAX_LEFT = 1024


class ReplicaTable:
    """Holds the registered replicas by incarnation, in order of registration."""

    def __init__(self, config: SchedulerConfig, request_table: RequestTable) -> None:
        self.replicas: dict[int, Replica] = {}
        # The first worker's model; replicas that serve another are refused for the life of this scheduler.
        self.model: ModelInfo | None = None
        # Replicas that stand still (`octavo.scheduler.core.faults.watchdog`).
        self.stalled: set[Replica] = set()
        # Names of workers that get nothing new, registered or not.
        self.cordoned: set[str] = set()
        # Incarnations that have left the books, the last of them last.
        self._left: OrderedDict[int, None] = OrderedDict()
        self._config = config
        self._request_table = request_table

    def add(self, replica: Replica) -> None:
        """Takes a replica into the books."""
        self.replicas[replica.replica_id] = replica

    def remove(self, replica_id: int) -> Replica:
        """Takes a replica out of the books, and returns it."""
        replica = self.replicas.pop(replica_id)
        replica.kv.close()
        self.stalled.discard(replica)
        self._left[replica_id] = None
        if len(self._left) > _MAX_LEFT:
            self._left.popitem(last=False)
        return replica

    def knows(self, hello: WorkerHello) -> bool:
        """Tells whether this registration of a worker is in the books, or has left them: a hello may be late."""
        return hello.incarnation in self.replicas or hello.incarnation in self._left

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
        """Tells whether the group may be admitted to `replica`, whichever suspect that isolates. One that is for what
        follows prompts takes none while another takes those, unless the prompt would wait there for longer than it
        would hold up all that runs here; but suspects wherever there is a place for them.

        A group that has lost its blocks on a replica that gets nothing new may come back to it, if it can go nowhere
        else. A group to which a replica gave nothing finite goes to another one if it can.
        """
        is_for_prompts = replica.hello.role is not WorkerRole.DECODE or group in self._request_table.suspects
        if not is_for_prompts and self._has_prefiller(group, replica):
            return False
        if replica.replica_id == group.faults.non_finite_on and self.has_ready_home(group, besides=replica):
            return False
        return replica.is_ready or (replica.replica_id == group.former_replica_id and not self.has_ready_home(group))

    def _has_prefiller(self, group: RequestGroup, decoder: Replica) -> bool:
        """Tells whether a replica that is not for decoding alone takes the group in its turn, could hold it, and has
        not much more to compute before it than the group would add to the steps of each sequence on the `decoder`."""
        return any(
            replica.hello.role is not WorkerRole.DECODE
            and replica.is_ready
            and replica.suspect is None
            and replica.replica_id != group.faults.non_finite_on
            and has_capacity(group.request, replica)
            and not self._is_behind(replica, decoder, group)
            for replica in self.replicas.values()
        )

    def _is_behind(self, prefiller: Replica, decoder: Replica, group: RequestGroup) -> bool:
        """Tells whether the prompt would wait longer at the one, and make those behind it wait, than it would hold up
        the sequences at the other, all together: in tokens, for their workers compute alike."""
        load = prefiller.load
        if load <= prefiller.token_budget:
            return False
        num_more = decoder.num_running_seqs - len(self._request_table.waiting)
        return load > num_more * decoder.kv.num_uncomputed(group)

    def can_hold(self, group: RequestGroup) -> bool:
        """Tells whether any replica that takes the group in its turn could ever hold it. Suspects wait for no turn, and
        what waits for a disk or a copy has none."""
        return group not in self._request_table.suspects and not group.is_fetching and self.has_home(group)

    def has_home(self, group: RequestGroup) -> bool:
        """Tells whether any replica that takes the group could ever hold it."""
        if self.has_ready_home(group):
            return True
        former = self.replicas.get(group.former_replica_id or 0)
        return former is not None and not former.is_ready and has_capacity(group.request, former)

    def returning(self, replica: Replica) -> Iterator[RequestGroup]:
        """Yields the waiting groups that have lost their blocks and that `replica` takes and could ever hold, in their
        order, but for those that wait for a disk or a copy."""
        return (group for group in self._request_table.waiting.returning if self._takes_back(replica, group))

    def _takes_back(self, replica: Replica, group: RequestGroup) -> bool:
        # A suspect comes to the replica that isolates it, if any does.
        is_its_place = replica.suspect is group or group not in self._request_table.suspects
        has_turn = is_its_place and not group.is_fetching
        return has_turn and self.takes(replica, group) and has_capacity(group.request, replica)

    @property
    def stands_still(self) -> bool:
        """Tells whether some replica stands still, and so does every one that gets new requests."""
        return bool(self.stalled) and all(
            replica in self.stalled for replica in self.replicas.values() if replica.is_ready
        )

    def load(self) -> ServiceLoad:
        """Counts what waits and runs, and the blocks of each size. A group that is swapped out waits."""
        replicas = self.replicas.values()
        num_swapped = sum(len(replica.swapped) for replica in replicas)
        num_blocks, num_free = Counter[int](), Counter[int]()
        for kv in (replica.kv for replica in replicas):
            num_blocks[kv.block_size] += kv.num_blocks
            num_free[kv.block_size] += kv.num_free
        return ServiceLoad(
            len(self._request_table.waiting) + num_swapped,
            self._request_table.num_placed - num_swapped,
            [BlockUse(size, count, count - num_free[size]) for size, count in num_blocks.items()],
        )

    def status(self) -> ServiceStatus:
        """Returns what frontends need to know of the replicas: the model, their number, the limits, the load."""
        memories = (replica.kv for replica in self.replicas.values())
        largest = max(memories, key=lambda kv: kv.capacity_tokens, default=None)
        capacity, block_size = (largest.capacity_tokens, largest.block_size) if largest else (0, 1)
        work_tokens = sum(self._request_table.work_tokens.values())
        max_parallel = self._config.max_parallel
        return ServiceStatus(
            len(self.replicas),
            self.model,
            capacity,
            max_parallel,
            block_size,
            work_tokens,
            self.stands_still,
            self.load(),
        )
