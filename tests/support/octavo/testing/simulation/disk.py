"""The disk of the machine on which simulated workers run: what they keep there outlives them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from octavo.testing.simulation.clock import Process
from octavo.wire.steps import KVDisk
from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.loan import Loan, Parts, Payload
from octavo.worker.kv_store.store import StoreStats, Ticket


@dataclass(frozen=True)
class DiskPlan:
    """Describes a disk: how long it takes to read on average, the share of writes and of reads that come to nothing,
    and from when to when nothing is read."""

    mirror: bool
    read_s: float
    drop_rate: float
    miss_rate: float
    stuck: tuple[float, float]

    @property
    def description(self) -> KVDisk:
        return KVDisk(0.0, self.mirror)


class SimulatedDisk:
    """Holds blocks by the identities of those who keep them, and by their names."""

    def __init__(self, plan: DiskPlan, random: Random) -> None:
        self.plan = plan
        self.random = random
        self.blocks: defaultdict[str, dict[bytes, bytes]] = defaultdict(dict)


class DiskStore:
    """Is the disk as one process sees it: a `BlockStore` in virtual time."""

    def __init__(self, disk: SimulatedDisk, identity: StoreIdentity, process: Process) -> None:
        self._disk, self._process = disk, process
        self._identity = identity.encoded
        self._done: list[Ticket] = []
        self._clears = 0

    @property
    def _blocks(self) -> dict[bytes, bytes]:
        return self._disk.blocks[self._identity]

    def lend(self, blocks: Iterable[tuple[bytes, Parts]], is_sound: Callable[[Parts], bool]) -> list[Loan | None]:
        return [self._lend(name, parts, is_sound) for name, parts in blocks]

    def _lend(self, name: bytes, parts: Parts, is_sound: Callable[[Parts], bool]) -> Loan | None:
        """Reads what is lent only after a while: what is overwritten until then would be found."""
        disk = self._disk
        if disk.random.random() < disk.plan.drop_rate:
            return None
        loan = Loan(name, parts, is_sound, self._clears)
        delay = disk.random.expovariate(1 / disk.plan.read_s)
        self._process.run_at(self._process.clock.now + delay, partial(self._write, loan))
        return loan

    def take_back(self, loan: Loan) -> None:
        if not loan.is_over and loan.parts is not None:
            loan.parts = [memoryview(bytes(part)) for part in loan.parts]

    def _write(self, loan: Loan) -> None:
        loan.is_over = True
        if loan.clears == self._clears and loan.parts is not None and loan.is_sound(loan.parts):
            self._blocks[loan.name] = b"".join(loan.parts)

    def read(self, names: Sequence[bytes], buffers: Sequence[Payload]) -> Ticket:
        ticket = Ticket(list(names), [memoryview(buffer) for buffer in buffers])
        disk, now = self._disk, self._process.clock.now
        begins = disk.plan.stuck[1] if disk.plan.stuck[0] <= now < disk.plan.stuck[1] else now
        self._process.run_at(begins + disk.random.expovariate(1 / disk.plan.read_s), partial(self._complete, ticket))
        return ticket

    def _complete(self, ticket: Ticket) -> None:
        for name, buffer in zip(ticket.names, ticket.buffers, strict=True):
            payload = self._blocks.get(name)
            is_found = payload is not None and self._disk.random.random() >= self._disk.plan.miss_rate
            if payload is not None and is_found:
                buffer[:] = payload
            ticket.found.append(is_found)
        self._done.append(ticket)
        self._process.wake()

    def poll(self) -> list[Ticket]:
        done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        """Returns no descriptor: nobody polls."""
        return -1

    def clear(self) -> None:
        self._clears += 1
        self._blocks.clear()

    def stats(self) -> StoreStats:
        return StoreStats(len(self._blocks), 0, 0, 0, {})
