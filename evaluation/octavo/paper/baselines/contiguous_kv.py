"""Manages KV memory as before paging: every sequence has one contiguous chunk, as long as it may get, from admission
on."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import chain

from octavo.paper.baselines.buddy import BuddyAllocator
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.blocks import Growth
from octavo.scheduler.kv.manager import AllocStatus, KVCacheManager
from octavo.wire.steps import BlockMove, Remap, WorkerHello

# How many slots a sequence asks for, by the tokens of its prompt, those of its output, and the model's longest.
Reserve = Callable[[int, int, int], int]


def exactly(prompt_tokens: int, output_tokens: int, max_model_len: int) -> int:
    """Reserves what Orca (Oracle) does: the output's true length is known."""
    return prompt_tokens + output_tokens


def next_power_of_two(prompt_tokens: int, output_tokens: int, max_model_len: int) -> int:
    """Reserves what Orca (Pow2) does: room for at most twice the true output; a power of two, as far as the model's
    context goes."""
    return min(prompt_tokens + (1 << (output_tokens - 1).bit_length()), max_model_len)


def longest_possible(prompt_tokens: int, output_tokens: int, max_model_len: int) -> int:
    """Reserves what Orca (Max) does: all that the model's context leaves."""
    return max_model_len


@dataclass(eq=False, slots=True)
class Allotment:
    """Holds a group's chunks, by their first slots; `spare` are those that none of its sequences holds. Of each chunk's
    `size` slots its sequence asked for `asked` and will have used `used` when it has ended."""

    size: int
    asked: int
    used: int
    chunks: list[int]
    spare: list[int]
    num_holders: int = 0


@dataclass(slots=True)
class Holding:
    """Holds the memory of one sequence; no chunk yet (None) while it has to be copied from `source`, another's
    chunk."""

    allotment: Allotment
    chunk: int | None = None
    source: int = 0


class ContiguousKV(KVCacheManager):
    """Manages a buddy pool over all slots of the replica's blocks, with single tokens as units.

    A group has a chunk for each of its sequences from admission to the end of the last; nothing is shared, found again
    or preempted. A fork copies what is computed into its own chunk when it is computed next: in moves of `block_size`
    tokens, so that a latency model charges them as it charges blocks. What the inherited blocks would count is counted
    in slots, and reported in blocks where the scheduler compares.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, reserve: Reserve) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=False)
        self.buddy = BuddyAllocator(num_blocks * block_size)
        self._max_model_len = max_model_len
        self._reserve = reserve
        self._held: dict[Sequence, Holding] = {}
        # By the step whose answer frees them.
        self._parked: defaultdict[int, list[Allotment]] = defaultdict(list)
        # How many chunks groups need of which it was asked whether they fit, by the first of their sequences.
        self._wanted: dict[Sequence, int] = {}

    @property
    def num_free(self) -> int:
        return self.buddy.num_free // self.block_size

    @property
    def holdings(self) -> dict[Sequence, Holding]:
        """Returns what each sequence holds; callers only read it."""
        return self._held

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self._held

    def block_table(self, sequence: Sequence) -> list[list[int]]:
        """Returns the first slot of the sequence's chunk."""
        chunk = self._held[sequence].chunk
        return [[] if chunk is None else [chunk]]

    # -- start ------------------------------------------------------------------------------------------------------

    def can_allocate(self, sequences: Ordered[Sequence], worst_case_blocks: int) -> AllocStatus:
        """Raises `ValueError` for a group that an empty pool has no chunks for, which would wait for ever."""
        leader = sequences[0]
        asked, count = self._asked(leader), worst_case_blocks // self.blocks_for(leader.longest)
        if not count:
            raise ValueError("contiguous memory keeps no prefix for others: pin none")
        if not self.buddy.can_ever_allocate(asked, count):
            raise ValueError(
                f"{count} sequences of {asked} tokens each never fit into a buddy pool of {self.buddy.size} slots"
            )
        self._wanted[leader] = count
        return AllocStatus.OK if self.buddy.can_allocate(asked, count) else AllocStatus.LATER

    def num_needed(self, sequences: Ordered[Sequence]) -> int:
        return self._wanted[sequences[0]] * self.blocks_for(self._asked(sequences[0]))

    def num_found(self, sequences: Ordered[Sequence]) -> int:
        return 0

    def allocate(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """Allocates the chunks of a group of which `can_allocate` was asked."""
        leader = sequences[0]
        asked, count = self._asked(leader), self._wanted.pop(leader)
        chunks = [self.buddy.allocate(asked) for _ in range(count)]
        allotment = Allotment(self.buddy.size_of(chunks[0]), asked, leader.longest, chunks, list(chunks))
        for sequence in sequences:
            self._hold(sequence, Holding(allotment, allotment.spare.pop()))
            sequence.num_computed = 0
            sequence.shares_last_block = False
        return []

    def _asked(self, sequence: Sequence) -> int:
        return self._reserve(sequence.num_prompt, sequence.longest - sequence.num_prompt, self._max_model_len)

    def _hold(self, sequence: Sequence, holding: Holding) -> None:
        self._held[sequence] = holding
        holding.allotment.num_holders += 1

    # -- grow -------------------------------------------------------------------------------------------------------

    def num_missing(self, sequences: Iterable[Sequence]) -> int:
        return 0

    def extend(self, sequence: Sequence) -> Growth | None:
        holding = self._held[sequence]
        if holding.chunk is not None:
            return None
        chunk = holding.chunk = holding.allotment.spare.pop()
        if chunk == holding.source:
            # Its parent has ended since, and left it where it was.
            return None
        offsets = range(0, sequence.num_computed, self.block_size)
        return Growth(copies=[BlockMove(holding.source + offset, chunk + offset) for offset in offsets])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Notes that `child` will be copied; not before beams that have ended have given up their chunks."""
        holding = self._held[parent]
        source = holding.source if holding.chunk is None else holding.chunk
        self._hold(child, Holding(holding.allotment, source=source))

    def index(self, sequence: Sequence, step_id: int) -> list[Remap]:
        return []

    # -- give up ----------------------------------------------------------------------------------------------------

    def distrust(self, sequence_id: int, sequence: Sequence | None) -> None:
        """Does nothing: nothing of one sequence is another's."""

    def holds_distrusted(self, sequence: Sequence) -> bool:
        return False

    def free(self, sequence: Sequence, outstanding_step_id: int | None = None) -> None:
        """Returns the sequence's chunk to its group; with the last of them all chunks go."""
        holding = self._held.pop(sequence)
        allotment = holding.allotment
        allotment.num_holders -= 1
        if holding.chunk is not None:
            allotment.spare.append(holding.chunk)
        if allotment.num_holders:
            return
        if outstanding_step_id is None:
            self._give_up(allotment)
        else:
            self._parked[outstanding_step_id].append(allotment)

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        for allotment in self._parked.pop(step_id, []):
            self._give_up(allotment)

    def _give_up(self, allotment: Allotment) -> None:
        for chunk in allotment.chunks:
            self.buddy.free(chunk)

    # -- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts that every chunk is some group's, and held by no more than one of its sequences."""
        self.buddy.check()
        running = {holding.allotment: None for holding in self._held.values()}
        allotments = [*running, *chain.from_iterable(self._parked.values())]
        in_groups = sum(each.size * len(each.chunks) for each in allotments)
        assert in_groups == self.buddy.size - self.buddy.num_free, "chunks are held for no group"
        for allotment in allotments:
            own = [holding for holding in self._held.values() if holding.allotment is allotment]
            in_use = [holding.chunk for holding in own if holding.chunk is not None]
            assert len(own) == allotment.num_holders <= len(allotment.chunks)
            assert sorted(allotment.spare + in_use) == sorted(allotment.chunks), "a chunk is nobody's, or held twice"
        for sequence, holding in self._held.items():
            allotment = holding.allotment
            assert sequence.num_computed <= allotment.used <= allotment.asked <= allotment.size, "a chunk is too short"


def contiguous_kv(reserve: Reserve) -> Callable[[WorkerHello, SchedulerConfig], KVCacheManager]:
    """Makes the memory of replicas that reserve so."""

    def make(hello: WorkerHello, config: SchedulerConfig) -> KVCacheManager:
        return ContiguousKV(hello.num_blocks, hello.block_size, hello.model.max_model_len, reserve)

    return make
