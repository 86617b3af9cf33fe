"""Manages KV memory as before paging: every sequence has one contiguous chunk, as long as it may get, from admission
on, out of a buddy allocator's pool."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain

from octavo.scheduler.core.sequence import BlockRead, Lookup, Sequence, SequenceGroup
from octavo.scheduler.kv.blocks import BlockTable
from octavo.scheduler.kv.disk_tier import DiskTier
from octavo.scheduler.kv.memory import Arrival, Growth, MakeMemory, TokenRun
from octavo.scheduler.kv.peer_tier import PeerTier
from octavo.scheduler.kv.prefix_cache import TierUse
from octavo.wire.steps import BlockMove, Remap

# -- the pool ---------------------------------------------------------------------------------------------------------


class BuddyAllocator:
    """Allocates from `size` slots, which need not be a power of two: the pool is a row of trees, one for each power of
    two in `size`, largest first. A chunk is known by its first slot."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool has at least 1 slot, not {size}")
        self.size = size
        self.num_free = size
        # By order (the logarithm of a chunk's size): first slots, in the order in which they came free.
        self._free: list[dict[int, None]] = [{} for _ in range(size.bit_length())]
        self._trees = tuple(_powers(size))
        self._orders: dict[int, int] = {}
        for first, order in self._trees:
            self._free[order][first] = None

    def can_allocate(self, num_slots: int, count: int = 1) -> bool:
        """Returns whether there is room for `count` chunks of `num_slots` slots."""
        order = _order(num_slots)
        larger = enumerate(self._free[order:])
        return sum(len(chunks) << above for above, chunks in larger) >= count

    def can_ever_allocate(self, num_slots: int, count: int = 1) -> bool:
        """Returns whether there would be room for `count` chunks of `num_slots` slots if nothing else held any."""
        order = _order(num_slots)
        return sum(1 << (larger - order) for _, larger in self._trees if larger >= order) >= count

    def allocate(self, num_slots: int) -> int:
        """Returns a chunk of the least power of two that holds `num_slots`. Raises `ValueError` if there is none."""
        order = _order(num_slots)
        source = next((larger for larger in range(order, len(self._free)) if self._free[larger]), None)
        if source is None:
            raise ValueError(f"no chunk of {1 << order} slots is free, though {self.num_free} slots are")
        first, _ = self._free[source].popitem()
        for smaller in range(source - 1, order - 1, -1):
            self._free[smaller][first + (1 << smaller)] = None
        self._orders[first] = order
        self.num_free -= 1 << order
        return first

    def free(self, first: int) -> None:
        """Gives a chunk back. Raises `ValueError` if none begins there."""
        order = self._orders.pop(first, None)
        if order is None:
            raise ValueError(f"no chunk begins at slot {first}")
        self.num_free += 1 << order
        base, top = self._tree(first)
        while order < top and (twin := base + ((first - base) ^ (1 << order))) in self._free[order]:
            del self._free[order][twin]
            first, order = min(first, twin), order + 1
        self._free[order][first] = None

    def size_of(self, first: int) -> int:
        """Returns the number of slots of the chunk that begins there."""
        return 1 << self._orders[first]

    @property
    def largest_free(self) -> int:
        """Returns the number of slots of the largest chunk that could be had; 0 if there is none."""
        return max((1 << order for order, chunks in enumerate(self._free) if chunks), default=0)

    @property
    def fragmentation(self) -> float:
        """Share of the free slots that the largest chunk could not have; 0 where nothing is free."""
        return 1.0 - self.largest_free / self.num_free if self.num_free else 0.0

    def check(self) -> None:
        """Asserts that chunks, held and free, cover all slots once, and that no two free twins are apart."""
        held = list(self._orders.items())
        free = [(first, order) for order, chunks in enumerate(self._free) for first in chunks]
        end = 0
        for first, order in sorted(held + free):
            assert first == end, f"slots from {min(first, end)} are in two chunks, or in none"
            end = first + (1 << order)
        assert end == self.size
        assert self.num_free == sum(1 << order for _, order in free)
        for first, order in free:
            base, top = self._tree(first)
            twin = base + ((first - base) ^ (1 << order))
            assert order == top or twin not in self._free[order], f"free twins {first} and {twin} are not merged"

    def _tree(self, first: int) -> tuple[int, int]:
        """Returns the first slot and the order of the tree that a slot is in."""
        return next((base, order) for base, order in reversed(self._trees) if base <= first)


def _order(num_slots: int) -> int:
    if num_slots < 1:
        raise ValueError(f"a chunk has at least 1 slot, not {num_slots}")
    return (num_slots - 1).bit_length()


def _powers(size: int) -> Iterator[tuple[int, int]]:
    """Yields first slots and orders of the powers of two in `size`, largest first."""
    first = 0
    for order in range(size.bit_length() - 1, -1, -1):
        if size >> order & 1:
            yield first, order
            first += 1 << order


# -- the memory -------------------------------------------------------------------------------------------------------


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


class ContiguousKV:
    """Is a `KVMemory` whose groups have a chunk for each of their sequences from admission to the end of the last, out
    of a buddy pool over all slots of the replica's blocks, with single tokens as units.

    Nothing is shared, found again, preempted or pinned. A fork copies what is computed into its own chunk when it is
    computed next: in moves of `block_size` tokens, so that a latency model charges them as it charges blocks. What the
    scheduler counts in blocks is rounded from slots.
    """

    slides = False
    watermark_blocks = num_cpu_blocks = num_cpu_free = num_cached = num_parked = num_pinned = num_cpu_lent = 0
    cached_free_block_ids = parked_block_ids = cpu_cached_block_ids = lent_block_ids = frozenset[int]()

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, reserve: Reserve) -> None:
        self.disk: DiskTier | None = None
        self.peers: PeerTier | None = None
        self.shares_prefixes = False
        self.now = 0.0
        self.block_size = block_size
        self.num_blocks = self.num_usable = num_blocks
        self.pinned: dict[str, list[int]] = {}
        self.buddy = BuddyAllocator(num_blocks * block_size)
        self._max_model_len = max_model_len
        self._reserve = reserve
        self._held: dict[Sequence, Holding] = {}
        # By the step whose answer frees them.
        self._parked: defaultdict[int, list[Allotment]] = defaultdict(list)

    @property
    def num_free(self) -> int:
        return self.buddy.num_free // self.block_size

    @property
    def capacity_tokens(self) -> int:
        return self.buddy.size

    @property
    def holdings(self) -> dict[Sequence, Holding]:
        """Returns what each sequence holds; callers only read it."""
        return self._held

    @property
    def tiers(self) -> list[TierUse]:
        return []

    @property
    def arriving_block_ids(self) -> list[int]:
        return []

    def evicted_at(self, lookup: Lookup) -> float | None:
        return None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self._held

    def block_table(self, sequence: Sequence) -> list[list[int]]:
        """Returns the first slot of the sequence's chunk."""
        chunk = self._held[sequence].chunk
        return [[] if chunk is None else [chunk]]

    # -- start ------------------------------------------------------------------------------------------------------

    def num_needed(self, group: SequenceGroup) -> int:
        """Raises `ValueError` for a group that an empty pool has no chunks for, which would wait for ever."""
        asked, count = self._asked(group), group.parallel
        if not self.buddy.can_ever_allocate(asked, count):
            raise ValueError(
                f"{count} sequences of {asked} tokens each never fit into a buddy pool of {self.buddy.size} slots"
            )
        needed = count * self.blocks_for(asked)
        return needed if self.buddy.can_allocate(asked, count) else max(needed, self.num_free + 1)

    def num_uncomputed(self, group: SequenceGroup) -> int:
        return sum(sequence.num_known for sequence in group.leaders())

    def allocate(self, group: SequenceGroup, step_id: int) -> list[BlockMove]:
        asked = self._asked(group)
        chunks = [self.buddy.allocate(asked) for _ in range(group.parallel)]
        allotment = Allotment(self.buddy.size_of(chunks[0]), asked, group.longest, chunks, list(chunks))
        for sequence in group.leaders():
            self._hold(sequence, Holding(allotment, allotment.spare.pop()))
            sequence.placement.num_computed = 0
        return []

    def _asked(self, group: SequenceGroup) -> int:
        return self._reserve(len(group.request.prompt_token_ids), group.sampling.max_tokens, self._max_model_len)

    def _hold(self, sequence: Sequence, holding: Holding) -> None:
        self._held[sequence] = holding
        holding.allotment.num_holders += 1

    # -- grow -------------------------------------------------------------------------------------------------------

    def num_missing(self, sequences: Iterable[Sequence], num_tokens: int = 1) -> int:
        return 0

    def extend(self, sequence: Sequence, num_tokens: int = 1) -> Growth | None:
        holding = self._held[sequence]
        if holding.chunk is not None:
            return None
        chunk = holding.chunk = holding.allotment.spare.pop()
        if chunk == holding.source:
            # Its parent has ended since, and left it where it was.
            return None
        offsets = range(0, sequence.placement.num_computed, self.block_size)
        return Growth(copies=[BlockMove(holding.source + offset, chunk + offset) for offset in offsets])

    def confirm(self, sequence: Sequence) -> list[Remap]:
        return []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Notes that `child` will be copied; not before beams that have ended have given up their chunks."""
        holding = self._held[parent]
        source = holding.source if holding.chunk is None else holding.chunk
        self._hold(child, Holding(holding.allotment, source=source))

    def index(self, sequence: Sequence, step_id: int) -> list[Remap]:
        return []

    def slide(self, sequence: Sequence, step_id: int) -> None:
        """Does nothing: a chunk keeps all tokens."""

    # -- give up ----------------------------------------------------------------------------------------------------

    def distrust(self, sequence_id: int, sequence: Sequence | None) -> None:
        """Does nothing: nothing of one sequence is another's."""

    def withdraw(self, sequence_ids: AbstractSet[int], after_step: int) -> None:
        """Does nothing: nothing of one sequence is found by another."""

    def holds_distrusted(self, sequence: Sequence) -> bool:
        return False

    def cached_behind(self, salt: str | None) -> list[int]:
        return []

    def cpu_cached_behind(self, salt: str | None) -> list[int]:
        return []

    def forget_cached(self, salt: str | None) -> None:
        """Does nothing: nothing is cached."""

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

    def close(self) -> None:
        """Does nothing: nobody is told what is held here."""

    def _give_up(self, allotment: Allotment) -> None:
        for chunk in allotment.chunks:
            self.buddy.free(chunk)

    # -- what it does not do ----------------------------------------------------------------------------------------

    def can_swap_out(self, group: SequenceGroup) -> bool:
        return False

    def num_to_swap(self, group: SequenceGroup) -> int:
        raise _never("swaps")

    def num_own(self, group: SequenceGroup) -> int:
        raise _never("swaps")

    def lost_by(self, group: SequenceGroup, num_taken: int) -> list[TokenRun]:
        raise _never("swaps")

    def num_kept(self, group: SequenceGroup, num_taken: int) -> int:
        raise _never("swaps")

    def swap_out(self, group: SequenceGroup, step_id: int) -> list[BlockMove]:
        raise _never("swaps")

    def num_to_return(self, group: SequenceGroup) -> int:
        raise _never("swaps")

    def swap_in(self, group: SequenceGroup) -> list[BlockMove]:
        raise _never("swaps")

    @property
    def num_arriving(self) -> int:
        return 0

    def leaving(self, group: SequenceGroup) -> dict[Sequence, BlockTable]:
        raise _never("moves")

    def expect(self, tables: dict[Sequence, BlockTable]) -> Arrival:
        raise _never("moves")

    def arrive(self, arrival: Arrival, tables: dict[Sequence, BlockTable]) -> None:
        raise _never("moves")

    def give_up(self, arrival: Arrival) -> None:
        raise _never("moves")

    def fetch(self, group: SequenceGroup, *, goes_on: bool) -> list[BlockRead]:
        return []

    def use(self, group: SequenceGroup) -> None:
        pass

    def tier_moves(self, step_id: int) -> tuple[list[BlockMove], list[BlockMove]]:
        return [], []

    def reserve(self, name: str, num_tokens: int) -> None:
        """Raises `ValueError`."""
        raise _never("keeps a prefix for others")

    def pin(self, name: str, sequence: Sequence) -> None:
        raise _never("keeps a prefix for others")

    def unpin(self, name: str) -> None:
        raise _never("keeps a prefix for others")

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
            assert sequence.placement.num_computed <= allotment.used <= allotment.asked <= allotment.size, (
                "a chunk is too short"
            )


def _never(does: str) -> ValueError:
    return ValueError(f"contiguous memory never {does}")


def contiguous_kv(reserve: Reserve) -> MakeMemory:
    """Returns what makes the memory of replicas that reserve so."""
    return lambda hello, config: ContiguousKV(hello.num_blocks, hello.block_size, hello.model.max_model_len, reserve)
