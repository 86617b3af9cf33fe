"""Copies blocks of other workers into CPU blocks of this one, as the scheduler has it done, some at a time."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.wire.peers import MAX_READ_BLOCKS, BlocksRead, ReadBlocks
from octavo.wire.steps import BlockMove, BlockServer, PullBlocks
from octavo.worker.kv_store.loan import Payload

# The bytes of a read, and the reads of one pull that are under way: what arrives waits in memory until a step is done.
_READ_BYTES, _MAX_READS = 4 << 20, 4
# A pull of which nothing more comes for so long is given up.
_TIMEOUT_S = 5.0

Answer = tuple[BlocksRead, Sequence[Payload]]
# Gives the bytes of blocks, of the device or of CPU memory; None where there are no such blocks.
Peek = Callable[[Sequence[int], bool], Sequence[Payload] | None]


class Exchange(Protocol):
    """Carries reads to other workers and their answers back, and answers theirs for the `incarnation` of this one."""

    incarnation: int

    @property
    def endpoint(self) -> str: ...

    def ask(self, endpoint: str, read: ReadBlocks) -> None: ...

    def answers(self) -> list[Answer]: ...

    def fileno(self) -> int: ...


def answer_to(read: ReadBlocks, incarnation: int, peek: Peek) -> Answer:
    """Answers another worker's read of the blocks of this `incarnation`."""
    payloads = peek(read.block_ids, read.from_cpu) if read.incarnation == incarnation else None
    return BlocksRead(read.read_id, payloads is not None), payloads or []


@dataclass(eq=False)
class _Pull:
    """What one message wants: the moves that are still to be asked for, and how many have not come yet."""

    wanted: PullBlocks
    since: float
    to_ask: deque[list[BlockMove]] = field(default_factory=deque)
    num_open: int = 0
    has_failed: bool = False


class BlockPulls:
    """Pulls blocks by way of an `exchange`, and calls `fill` with a CPU block and what it is to hold. Blocks of workers
    with the same `identity` are of use here; `has_device` tells whether others can read this one's device blocks."""

    def __init__(
        self,
        exchange: Exchange,
        identity: str,
        block_bytes: int,
        fill: Callable[[int, Payload], None],
        clock: Callable[[], float],
        *,
        has_device: bool = True,
    ) -> None:
        self.description = BlockServer(exchange.endpoint, identity, has_device)
        self._exchange = exchange
        self._block_bytes = block_bytes
        self._fill = fill
        self._clock = clock
        self._pulls: list[_Pull] = []
        # Reads under way, by their ids.
        self._reads: dict[int, tuple[_Pull, list[BlockMove]]] = {}
        # What has come for steps that are still to be done.
        self._early: list[tuple[_Pull, list[BlockMove], Sequence[Payload]]] = []
        self._num_reads = 0

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `pulled` has something to do."""
        return self._exchange.fileno()

    def serve_as(self, incarnation: int) -> None:
        """Lets others read the blocks of this incarnation alone; drops all that is being pulled for the one before."""
        self._exchange.incarnation = incarnation
        self._pulls.clear()
        self._reads.clear()
        self._early.clear()

    def pull(self, wanted: PullBlocks) -> None:
        """Begins to pull; `pulled` tells of it once."""
        pull = _Pull(wanted, self._clock())
        size = max(1, min(_READ_BYTES // self._block_bytes, MAX_READ_BLOCKS))
        pull.to_ask.extend(wanted.moves[first : first + size] for first in range(0, len(wanted.moves), size))
        pull.num_open = len(pull.to_ask)
        self._pulls.append(pull)
        for _ in range(_MAX_READS):
            self._ask(pull)

    def refuse(self, wanted: PullBlocks) -> None:
        """Pulls nothing; `pulled` tells of it once."""
        self._pulls.append(_Pull(wanted, self._clock(), has_failed=True))

    def pulled(self, done_step_id: int) -> list[tuple[int, bool]]:
        """Fills CPU blocks with what has come, those of pulls whose step is done; returns the pulls that are over, and
        whether all of each has come."""
        for header, payloads in self._exchange.answers():
            pull, moves = self._reads.pop(header.read_id, (None, []))
            if pull is None:
                continue
            pull.since = self._clock()
            sizes = [memoryview(payload).nbytes for payload in payloads]
            is_whole = header.found and sizes == [self._block_bytes] * len(moves)
            if not is_whole:
                pull.has_failed = True
            else:
                self._early.append((pull, moves, payloads))
                self._ask(pull)
        early, self._early = self._early, []
        for pull, moves, payloads in early:
            if pull.wanted.after_step_id > done_step_id:
                self._early.append((pull, moves, payloads))
                continue
            for move, payload in zip(moves, payloads, strict=True):
                self._fill(move.target, payload)
            pull.num_open -= 1
        return self._over()

    def _ask(self, pull: _Pull) -> None:
        if not pull.to_ask:
            return
        self._num_reads += 1
        moves, wanted = pull.to_ask.popleft(), pull.wanted
        self._reads[self._num_reads] = pull, moves
        block_ids = [move.source for move in moves]
        self._exchange.ask(wanted.endpoint, ReadBlocks(self._num_reads, wanted.source, wanted.from_cpu, block_ids))

    def _over(self) -> list[tuple[int, bool]]:
        now = self._clock()
        over = []
        for pull in list(self._pulls):
            is_late = now - pull.since > _TIMEOUT_S
            if pull.num_open and not pull.has_failed and not is_late:
                continue
            self._pulls.remove(pull)
            self._reads = {read_id: each for read_id, each in self._reads.items() if each[0] is not pull}
            self._early = [each for each in self._early if each[0] is not pull]
            over.append((pull.wanted.pull_id, not (pull.num_open or pull.has_failed)))
        return over
