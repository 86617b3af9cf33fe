"""The KV memory of one replica as the scheduler's core uses it: what it asks before it fills a step, and what a step
takes and gives back."""

from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.sequence import BlockRead, Lookup, Sequence, SequenceGroup
from octavo.scheduler.kv.blocks import BlockTable
from octavo.scheduler.kv.disk_tier import DiskTier
from octavo.scheduler.kv.peer_tier import PeerCopy as PeerCopy
from octavo.scheduler.kv.peer_tier import PeerTier
from octavo.scheduler.kv.prefix_cache import TierUse
from octavo.wire.steps import BlockMove, Remap, WorkerHello


@dataclass(slots=True)
class Growth:
    """Changes of a sequence's tables that its worker must make too: blocks appended (one list per KV group, or none at
    all), entries that changed, and blocks to copy first."""

    new_block_ids: list[list[int]] = field(default_factory=list)
    remaps: list[Remap] = field(default_factory=list)
    copies: list[BlockMove] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A run of a sequence's tokens: `num_tokens` after the first `context`."""

    context: int
    num_tokens: int


class Arrival:
    """The CPU blocks into which a group's blocks come from another replica: those of each of its sequences, one list
    per KV group; and the moves that bring them."""

    def __init__(self, blocks: dict[Sequence, list[list[int]]], moves: list[BlockMove]) -> None:
        self.blocks = blocks
        self.moves = moves

    def __deepcopy__(self, memo: dict[int, object]) -> "Arrival":
        """Returns this one: nothing here changes."""
        return self


class KVMemory(Protocol):
    """The KV memory of one replica. Counts are of device blocks, of all KV groups together, unless they name the CPU's.

    A group starts, is swapped out and comes back as a whole; it is given by itself, and its `holders` get the blocks.
    What a sequence gives up while a step with it is outstanding is parked until that step is answered, because until
    then the worker may still use it.
    """

    # Tokens of one block.
    block_size: int
    # Blocks that requests can come to hold: all but those set aside for pinned prefixes.
    num_usable: int
    # Some KV group has a window.
    slides: bool
    # Blocks of each pinned prefix by its name; prefixes may share blocks.
    pinned: dict[str, list[int]]
    # What plans have the replica's disk do; None if it has none that pays.
    disk: DiskTier | None
    # What replicas copy of each other's prefixes; None if this one takes no part.
    peers: PeerTier | None
    # Requests find what others have computed.
    shares_prefixes: bool
    # The time, on the scheduler's clock, of the step that is being planned.
    now: float

    # -- counts -----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int:
        """Counts the blocks that may be taken, those with cached content too."""

    @property
    def watermark_blocks(self) -> int:
        """Counts the free blocks that must be left when a group starts: 0 while no sequence holds any."""

    @property
    def num_cpu_blocks(self) -> int: ...

    @property
    def num_cpu_free(self) -> int: ...

    @property
    def capacity_tokens(self) -> int:
        """Returns the most tokens that one sequence can hold here."""

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold `num_tokens` tokens of one sequence."""

    def holds(self, sequence: Sequence) -> bool:
        """Tells whether the sequence has blocks on the device."""

    def block_table(self, sequence: Sequence) -> list[list[int]]:
        """Returns the sequence's blocks, one list per KV group: CPU blocks while it is swapped out. Not to be changed.

        Raises `KeyError` for a sequence that holds none.
        """

    # -- what operators are shown -----------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """Counts the blocks that a prefix hit would find."""

    @property
    def cached_free_block_ids(self) -> AbstractSet[int]:
        """Returns the free blocks among them."""

    @property
    def num_parked(self) -> int:
        """Counts the blocks that will be free as soon as outstanding steps are answered."""

    @property
    def parked_block_ids(self) -> Collection[int]:
        """Returns the blocks that wait for outstanding steps; sequences may hold them too."""

    @property
    def tiers(self) -> list[TierUse]:
        """Returns the tiers of the prefix cache, in the order in which they are searched; none without one."""

    @property
    def cpu_cached_block_ids(self) -> Collection[int]:
        """Returns the CPU blocks that a prefix hit would find, held by swapped groups or not."""

    @property
    def arriving_block_ids(self) -> list[int]:
        """Returns the CPU blocks into which something is read or copied."""

    def evicted_at(self, lookup: Lookup) -> float | None:
        """Returns when the first block that a lookup here has missed had made way for other content; None if that is
        not known."""

    # -- start ------------------------------------------------------------------------------------------------------

    def num_needed(self, group: SequenceGroup) -> int:
        """Counts the free blocks that a start of the group would use up; more than are free where those will not do."""

    def num_uncomputed(self, group: SequenceGroup) -> int:
        """Counts the known tokens of the group that a start would leave to compute."""

    def fetch(self, group: SequenceGroup, *, goes_on: bool) -> list[BlockRead]:
        """Has the disk read what the group begins with and no block holds, as far as there is room; returns the reads
        that it waits for, with those that others began. With `goes_on` it is likely to be there."""

    def use(self, group: SequenceGroup) -> None:
        """Lets what is here of the group's beginning be taken last: it waits for more of that."""

    def allocate(self, group: SequenceGroup, step_id: int) -> list[BlockMove]:
        """Gives each holder of the group, which has nothing, the blocks of all its known tokens; returns the copies
        that the worker must make in step `step_id`.

        Sets how many tokens each sequence need not compute, and for which of the others it must wait. Raises
        `ValueError` if more is needed than is free.
        """

    # -- grow -------------------------------------------------------------------------------------------------------

    def num_missing(self, sequences: Iterable[Sequence], num_tokens: int = 1) -> int:
        """Counts the blocks that `num_tokens` more tokens for each of `sequences` take."""

    def extend(self, sequence: Sequence, num_tokens: int = 1) -> Growth | None:
        """Makes room for the sequence's next `num_tokens` tokens, in blocks of its own; returns what that changes, None
        if nothing.

        Raises `ValueError` if too few blocks are free.
        """

    def confirm(self, sequence: Sequence) -> list[Remap]:
        """Gives up, at once, the room that drafts have left unused, and what no token after the computed ones can see;
        offers blocks that computed tokens have filled to others with the same tokens. No step with the sequence is
        outstanding.

        Returns changes of the sequence's table, which must reach the worker in the next plan.
        """

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child`, which holds nothing, go on from all that `parent` holds."""

    def index(self, sequence: Sequence, step_id: int) -> list[Remap]:
        """Offers the blocks that known and computed tokens have filled since the last call to others with the same
        tokens. `step_id` fills them at the latest.

        Returns changes of the sequence's table, which must reach the worker in a plan after `step_id`.
        """

    def slide(self, sequence: Sequence, step_id: int) -> None:
        """Gives up blocks that no token after those computed in `step_id` can see."""

    # -- distrust ---------------------------------------------------------------------------------------------------

    def distrust(self, sequence_id: int, sequence: Sequence | None) -> None:
        """Keeps everything that was computed of a sequence, None if it is gone, from being found by others.

        To be called before the step that brought this to light is booked as answered.
        """

    def withdraw(self, sequence_ids: AbstractSet[int], after_step: int) -> None:
        """Lets nobody find any more what outstanding steps after `after_step` were to compute of these sequences."""

    def holds_distrusted(self, sequence: Sequence) -> bool:
        """Tells whether the sequence has held a block since before it was distrusted."""

    # -- reset ------------------------------------------------------------------------------------------------------

    def cached_behind(self, salt: str | None) -> Collection[int]:
        """Returns the device blocks that a prefix hit would find and in which this salt counts; for None all."""

    def cpu_cached_behind(self, salt: str | None) -> Collection[int]:
        """Returns the CPU blocks of which the same holds."""

    def forget_cached(self, salt: str | None) -> None:
        """Lets no prefix hit find these blocks any more, nor what is computed from now on of sequences that hold
        blocks and have this salt; for None of all."""

    # -- give up ----------------------------------------------------------------------------------------------------

    def free(self, sequence: Sequence, outstanding_step_id: int | None = None) -> None:
        """Takes the sequence's blocks back, at once or when `outstanding_step_id` is answered. Raises `KeyError` if it
        holds none."""

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        """Frees what was parked for this step; the content it wrote is relied on only if it is `valid`."""

    def close(self) -> None:
        """Gives all up: the replica is gone."""

    # -- swap -------------------------------------------------------------------------------------------------------

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Tells whether CPU memory has room for the blocks of the group."""

    def num_to_swap(self, group: SequenceGroup) -> int:
        """Counts the blocks that a swap-out of the group moves."""

    def num_own(self, group: SequenceGroup) -> int:
        """Counts those of these blocks that no other group holds."""

    def lost_by(self, group: SequenceGroup, num_taken: int) -> list[TokenRun]:
        """Returns the tokens that would have to be computed again if the group gave up its blocks and `num_taken` of
        these were taken before it came back: a run for each holder."""

    def num_kept(self, group: SequenceGroup, num_taken: int) -> int:
        """Counts the blocks that would move to CPU memory then, and come back, instead of being lost."""

    def swap_out(self, group: SequenceGroup, step_id: int) -> list[BlockMove]:
        """Moves a group, of which no step may be outstanding, to CPU blocks; returns the moves, which step `step_id`
        makes. Its device blocks are free at once."""

    def num_to_return(self, group: SequenceGroup) -> int:
        """Counts the blocks that a swapped group needs to come back and compute one more token for each sequence."""

    def swap_in(self, group: SequenceGroup) -> list[BlockMove]:
        """Moves a swapped group back, with room for all its known tokens; returns the moves."""

    # -- from replica to replica ------------------------------------------------------------------------------------

    @property
    def num_arriving(self) -> int:
        """Counts the CPU blocks into which blocks come from elsewhere."""

    @property
    def lent_block_ids(self) -> Collection[int]:
        """Returns the blocks that are held only because other replicas copy them."""

    @property
    def num_cpu_lent(self) -> int:
        """Counts the CPU blocks that other replicas copy, with those that swapped groups hold."""

    def leaving(self, group: SequenceGroup) -> dict[Sequence, BlockTable]:
        """Returns what the group, running or swapped out, holds that is computed: a table for each holder."""

    def expect(self, tables: dict[Sequence, BlockTable]) -> Arrival:
        """Takes CPU blocks for what another memory has `leaving`, shared alike, and returns the moves that bring it.

        Raises `ValueError` if too few are free.
        """

    def arrive(self, arrival: Arrival, tables: dict[Sequence, BlockTable]) -> None:
        """Takes in the sequences that are still `leaving` by these tables, as swapped ones: their blocks have come."""

    def give_up(self, arrival: Arrival) -> None:
        """Frees the blocks of an arrival that does not come, or is of no use any more."""

    # -- tiers ------------------------------------------------------------------------------------------------------

    def tier_moves(self, step_id: int) -> tuple[list[BlockMove], list[BlockMove]]:
        """Returns what step `step_id` moves beside swapped groups, now that all its blocks are taken: cached content to
        CPU blocks, off the device; and from there to it."""

    # -- pin --------------------------------------------------------------------------------------------------------

    @property
    def num_pinned(self) -> int:
        """Counts the blocks that pinned prefixes keep for good."""

    def reserve(self, name: str, num_tokens: int) -> None:
        """Sets blocks aside for a prefix of `num_tokens` tokens that is to be pinned under this name."""

    def pin(self, name: str, sequence: Sequence) -> None:
        """Keeps the blocks of a sequence's prompt, all computed, as this prefix's; the sequence holds nothing any
        more."""

    def unpin(self, name: str) -> None:
        """Gives up what is set aside for a prefix, and its blocks if it has any. Raises `KeyError` if nothing is."""

    # -- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts that every block is free or held, and counted right."""


# Makes the memory of a replica that joins.
MakeMemory = Callable[[WorkerHello, SchedulerConfig], KVMemory]
