"""The KV cache manager of one replica: which blocks each sequence holds, and which are shared."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Ordered
from collections.abc import Set as AbstractSet

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.sequence import (
    BlockRead,
    CacheUse,
    Lookup,
    Sequence,
    SequenceGroup,
    Tier,
    TierTokens,
    new_sequences,
)
from octavo.scheduler.kv.block_reads import BlockReads
from octavo.scheduler.kv.blocks import BlockTable, CachedBlocks, present
from octavo.scheduler.kv.census import BlockCensus
from octavo.scheduler.kv.cpu_tier import CPUTier, moves_pay
from octavo.scheduler.kv.disk_tier import DiskTier, disk_pays
from octavo.scheduler.kv.memory import Arrival, Growth, TokenRun
from octavo.scheduler.kv.peer_tier import PeerTier
from octavo.scheduler.kv.prefix_cache import (
    Begin,
    CachedBlock,
    PrefixLookup,
    Tail,
    TierUse,
    block_hashes,
    first_visible,
    root_hash,
    salt_of,
)
from octavo.scheduler.kv.swap import SwapSpace
from octavo.wire.base import MAX_TOKENS, NULL_BLOCK
from octavo.wire.steps import BlockMove, BlockServer, KVDisk, Remap, WorkerHello


class KVCacheManager:
    """Is the paged `KVMemory`: sequences get blocks of one size as they grow, and share those with equal content. It
    holds the block tables of the sequences with KV on one replica, and the prefix cache over all its blocks.

    `windows`: one per KV group, in tokens, 0 for none; where no KV is kept there is no group, and tables are empty.
    `watermark`: the share of all blocks that must be left free when a group starts beside others. The `census` counts
    what the prefix cache holds on the device. With `cpu_tier` what device blocks held that are taken goes on in CPU
    blocks that no swapped group needs; with a `disk` behind these it is kept there too, and comes back. With a
    `server`, other replicas copy from what is held, and this one from them.

    A block enters the prefix cache as soon as a plan fills it, before the step is answered: a replica runs its plans in
    order, and writes a step's KV before it reads any, so a sequence that shares the block finds it filled. If the step
    fails, or skips what was to fill the block, the entry is withdrawn.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        watermark: float = 0.0,
        prefix_caching: bool = True,
        windows: Ordered[int] = (0,),
        num_cpu_blocks: int = 0,
        cpu_tier: bool = False,
        disk: KVDisk | None = None,
        server: BlockServer | None = None,
        census: BlockCensus | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_usable = num_blocks
        self.slides = any(windows)
        self._watermark = math.ceil(num_blocks * watermark)
        self._windows = tuple(windows)
        self._windowed = [group for group, window in enumerate(windows) if window]
        self.shares_prefixes = prefix_caching
        self.blocks = CachedBlocks(
            num_blocks,
            len(self._windows),
            prefix_caching=prefix_caching,
            keeps_evicted=cpu_tier and prefix_caching and num_cpu_blocks > 0,
        )
        self._evictions = self.blocks.evictions
        self.cpu_blocks = CachedBlocks(
            num_cpu_blocks, len(self._windows), prefix_caching=True, evictions=self._evictions
        )
        self.cpu_tier = CPUTier(self.blocks, self.cpu_blocks) if self.blocks.keeps_evicted else None
        self.reads = BlockReads(self.cpu_blocks)
        has_disk = disk is not None and self.cpu_tier is not None
        self.disk = DiskTier(self.blocks, self.reads, disk) if disk is not None and has_disk else None
        self._pool, self._cache = self.blocks.pool, self.blocks.cache
        if census is not None:
            self._cache.watch = census.join(self._cache, block_size, self._windows)
        self._take, self._release = self.blocks.take, self.blocks.release
        self._tables: dict[Sequence, BlockTable] = {}
        self._lookup = PrefixLookup(self._cache, self.cpu_blocks.cache, block_size, self._windows)
        self.peers = (
            PeerTier(self.blocks, self.cpu_blocks, self._lookup, self.reads, has_device=server.has_device)
            if server is not None and self.cpu_tier is not None
            else None
        )
        self.pinned: dict[str, list[int]] = {}
        # Blocks set aside for each prefix, those still to be computed too.
        self._reserved: dict[str, int] = {}
        self.swap_space = SwapSpace(block_size, self.blocks, self._tables, self.cpu_blocks, self.cpu_tier)

    # -- counts -----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def watermark_blocks(self) -> int:
        return self._watermark if self._tables else 0

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    @property
    def cached_free_block_ids(self) -> AbstractSet[int]:
        return self.blocks.cached_free_block_ids

    @property
    def num_parked(self) -> int:
        return self.blocks.num_parked

    @property
    def parked_block_ids(self) -> Collection[int]:
        return self.blocks.parked_block_ids

    @property
    def num_cpu_blocks(self) -> int:
        return self.swap_space.pool.num_blocks

    @property
    def num_cpu_free(self) -> int:
        return self.swap_space.pool.num_free

    @property
    def capacity_tokens(self) -> int:
        # What keeps no KV holds sequences of any length.
        return self.num_usable // len(self._windows) * self.block_size if self._windows else MAX_TOKENS

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * len(self._windows)

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self._tables

    def block_table(self, sequence: Sequence) -> list[list[int]]:
        table = self._tables.get(sequence)
        return (self.swap_space.tables[sequence] if table is None else table).groups

    def ref_count(self, block_id: int) -> int:
        """Returns how many tables, parking lots and pins hold a block."""
        return self._pool.ref_count(block_id)

    @property
    def now(self) -> float:
        return self._evictions.now

    @now.setter
    def now(self, now: float) -> None:
        self._evictions.now = now

    @property
    def tiers(self) -> list[TierUse]:
        if not self.shares_prefixes:
            return []
        moved = {}
        if self.cpu_tier is not None:
            moved[Tier.CPU] = self.cpu_tier.num_stored
        if self.disk is not None:
            moved[Tier.DISK] = self.disk.num_stored
        tiers = [TierUse(Tier.DEVICE, len(self._cache), self.num_blocks, self.blocks.num_evicted, moved)]
        if self.cpu_tier is not None:
            held, moved = len(self.cpu_blocks.cache), {Tier.DEVICE: self.cpu_tier.num_loaded}
            tiers.append(TierUse(Tier.CPU, held, self.num_cpu_blocks, self.cpu_blocks.num_evicted, moved))
        if self.disk is not None:
            tiers.append(self.disk.tier)
        return tiers

    @property
    def cpu_cached_block_ids(self) -> Collection[int]:
        return self.cpu_blocks.cache.block_ids

    @property
    def arriving_block_ids(self) -> list[int]:
        copied = [move.target for arrival in self.swap_space.arrivals for move in arrival.moves]
        return [*copied, *self.reads.held]

    def evicted_at(self, lookup: Lookup) -> float | None:
        hashes = block_hashes(new_sequences(lookup.request)[lookup.index], self.block_size)
        index = lookup.found.total // self.block_size
        return self._evictions.last(hashes[index], lookup.at) if index < len(hashes) else None

    # -- start ------------------------------------------------------------------------------------------------------

    def num_needed(self, group: SequenceGroup) -> int:
        leaders = group.leaders()
        begins = self._lookup.begins(leaders)
        taken = sum(
            self.blocks_for(sequence.num_known) - begin.num_blocks * len(self._windows)
            for sequence, begin in zip(leaders, begins, strict=True)
        )
        found = {block_id for begin in begins for block_id in present(begin.found)}
        loaded = {cpu_block for begin in begins for cpu_block in begin.loads.values()}
        return taken + sum(self._pool.ref_count(block_id) == 0 for block_id in found) + len(loaded)

    def num_uncomputed(self, group: SequenceGroup) -> int:
        leaders = group.leaders()
        num_found = sum(begin.num_blocks for begin in self._lookup.begins(leaders)) * self.block_size
        return sum(leader.num_known for leader in leaders) - num_found

    def fetch(self, group: SequenceGroup, *, goes_on: bool) -> list[BlockRead]:
        if self.disk is None:
            return []
        leaders = group.leaders()
        begins = self._lookup.begins(leaders)
        # What sequences begin with together is asked for once.
        own = [(each, begin) for each, begin in zip(leaders, begins, strict=True) if begin.leader is None]
        contents = [content for each, begin in own for content in self._lookup.beyond(each, begin.num_blocks)]
        loads = [cpu_block for begin in begins for cpu_block in begin.loads.values()]
        return self.disk.fetch([*dict.fromkeys(contents)], loads, goes_on=goes_on)

    def use(self, group: SequenceGroup) -> None:
        for begin in self._lookup.begins(group.leaders()):
            self.blocks.use(present(begin.found))
            self.cpu_blocks.use(begin.loads.values())

    def allocate(self, group: SequenceGroup, step_id: int) -> list[BlockMove]:
        """Gives each leader the blocks of all its known tokens (see `KVMemory`): equal beginnings inside a group share
        blocks, cached or not. Taking all blocks at the start rather than chunk by chunk keeps half-prefilled prompts
        from starving each other."""
        sequences = group.holders
        begins = self._lookup.begins(sequences)
        if not group.comes_back:
            group.found = self._found(begins[0])
        # Found blocks are shared before any is taken: those that are free and cached could be taken otherwise.
        for begin in begins:
            self._pool.share(present(begin.found))
            if self.cpu_tier is not None:
                self.cpu_tier.hold([*begin.loads.values()])
        return [
            move
            for sequence, begin in zip(sequences, begins, strict=True)
            for move in self._begin_table(sequence, begin, step_id)
        ]

    def _found(self, begin: Begin) -> TierTokens:
        """Counts the tokens of a beginning by tier: those of a block that is elsewhere, even if in one KV group alone,
        are not the device's."""
        # Of each block that is not on the device where that of each KV group came from: a worker, "" for the disk.
        sources: dict[int, list[str | None]] = {}
        for (_, index), cpu_block in begin.loads.items():
            sources.setdefault(index, []).append(self.reads.source(cpu_block))
        num_replica = sum(any(each) for each in sources.values())
        num_disk = sum("" in each and not any(each) for each in sources.values())
        num_cpu, num_device = len(sources) - num_replica - num_disk, begin.num_blocks - len(sources)
        num_tail, size = len(begin.tail.token_ids) if begin.tail is not None else 0, self.block_size
        worker = next((source for each in sources.values() for source in each if source), "")
        return TierTokens(num_device * size + num_tail, num_cpu * size, num_disk * size, num_replica * size, worker)

    def _begin_table(self, sequence: Sequence, begin: Begin, step_id: int) -> list[BlockMove]:
        groups, placement = begin.found, sequence.placement
        fillers = [self._cache.filler(block_id) for block_id in present(begin.found)]
        if self.disk is not None:
            # Used for the second time.
            self.disk.keep(present(begin.found))
        if begin.loads and self.cpu_tier is not None:
            fillers += [self.cpu_blocks.cache.filler(cpu_block) for cpu_block in begin.loads.values()]
            for (kv_group, index), cpu_block in begin.loads.items():
                groups[kv_group][index] = self.cpu_tier.load(cpu_block, step_id)
                self.reads.took(cpu_block)
            if self._cache.watch is not None:
                self._cache.watch.filled(sequence, min(index for _, index in begin.loads))
        if begin.leader is not None:
            groups = self._shared_with(begin.leader, begin.num_blocks)
            placement.waits_for = (begin.leader, begin.num_blocks * self.block_size)
        missing = -(-sequence.num_known // self.block_size) - begin.num_blocks
        table = BlockTable([[*blocks, *self._take(missing)] for blocks in groups], num_indexed=begin.num_blocks)
        self._tables[sequence] = table
        placement.num_computed = begin.num_blocks * self.block_size
        placement.builds_on = frozenset(filler for filler in fillers if filler is not None)
        if begin.tail is None:
            return []
        placement.num_computed += len(begin.tail.token_ids)
        targets = (blocks[begin.num_blocks] for blocks in table.groups)
        return [BlockMove(source, target) for source, target in zip(begin.tail.block_ids, targets, strict=True)]

    def _shared_with(self, leader: Sequence, num_blocks: int) -> list[list[int]]:
        """Returns the first blocks of a leader's tables, as far as windows reach, with a reference added to each."""
        groups = []
        for window, blocks in zip(self._windows, self._tables[leader].groups, strict=True):
            first = first_visible(window, num_blocks * self.block_size, self.block_size)
            groups.append([NULL_BLOCK] * first + blocks[first:num_blocks])
        self._pool.share(present(groups))
        return groups

    # -- grow -------------------------------------------------------------------------------------------------------

    def num_missing(self, sequences: Iterable[Sequence], num_tokens: int = 1) -> int:
        """Counts the new blocks, and the copies of shared ones, that `num_tokens` more tokens for each of `sequences`
        take."""
        missing = 0
        writers: dict[int, int] = defaultdict(int)
        size, ref_count = self.block_size, self._pool.ref_count
        for sequence in sequences:
            groups = self._tables[sequence].groups
            index, offset = divmod(sequence.placement.num_computed, size)
            if offset:
                for blocks in groups:
                    if ref_count(blocks[index]) > 1:
                        writers[blocks[index]] += 1
            missing += max(0, (index * size + offset + num_tokens - 1) // size + 1 - len(groups[0])) * len(groups)
        # The last of a block's holders writes to it in place (paper Fig. 8).
        return missing + sum(min(count, ref_count(block_id) - 1) for block_id, count in writers.items())

    def extend(self, sequence: Sequence, num_tokens: int = 1) -> Growth | None:
        table, num_computed = self._tables[sequence], sequence.placement.num_computed
        offset = num_computed % self.block_size
        if (offset and not table.shares_last and num_tokens == 1) or not table.groups:
            return None
        groups, index = table.groups, num_computed // self.block_size
        growth = None
        # Only the first token can come into a block that others hold too.
        if offset and any(self._pool.ref_count(blocks[index]) > 1 for blocks in groups):
            growth = Growth()
            for group, blocks in enumerate(groups):
                if self._pool.ref_count(blocks[index]) > 1:
                    self._copy_on_write(sequence, group, index, growth)
        if (num_new := (num_computed + num_tokens - 1) // self.block_size + 1 - len(table)) > 0:
            growth = growth or Growth()
            growth.new_block_ids = self._append(table, num_new)
        return growth

    def _append(self, table: BlockTable, num_new: int) -> list[list[int]]:
        table.shares_last = False
        new = [self._take(num_new) for _ in table.groups]
        for blocks, block_ids in zip(table.groups, new, strict=True):
            blocks += block_ids
        return new

    def _copy_on_write(self, sequence: Sequence, group: int, index: int, growth: Growth) -> None:
        blocks = self._tables[sequence].groups[group]
        shared = blocks[index]
        (blocks[index],) = self._take(1)
        self._pool.release(shared)
        growth.copies.append(BlockMove(shared, blocks[index]))
        growth.remaps.append(Remap(sequence.placement.sequence_id, group, index, blocks[index]))

    def confirm(self, sequence: Sequence) -> list[Remap]:
        table, size = self._tables[sequence], self.block_size
        num_used = -(-sequence.placement.num_computed // size)
        unused = [block_id for blocks in table.groups for block_id in blocks[num_used:]]
        for blocks in table.groups:
            del blocks[num_used:]
        remaps, replaced = self._offer(sequence, None)
        # The next plan tells the worker, which knows the blocks by then that take the place of these.
        self._release([*unused, *replaced, *self._pass(sequence)])
        return [remap for remap in remaps if table.groups[remap.kv_group][remap.logical_index] != NULL_BLOCK]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        shared = self._tables[parent]
        shared.shares_last = True
        self._tables[child] = shared.copy()
        self._pool.share(shared.block_ids)

    def index(self, sequence: Sequence, step_id: int) -> list[Remap]:
        remaps, replaced = self._offer(sequence, step_id)
        self.blocks.park(step_id, replaced)
        return remaps

    def _offer(self, sequence: Sequence, step_id: int | None) -> tuple[list[Remap], list[int]]:
        """Offers full blocks to the prefix cache (see `KVMemory`), which `step_id` fills, or (None) which are filled.
        Where an older block holds the same, the sequence's table is pointed at that and its own is given up: returns
        these changes, and the blocks given up."""
        table = self._tables[sequence]
        num_full = min(sequence.placement.num_computed, sequence.num_known) // self.block_size
        first, table.num_indexed = table.num_indexed, max(num_full, table.num_indexed)
        if first >= num_full or not (self.shares_prefixes or sequence.cache_use is CacheUse.PINNED):
            return [], []
        if table.is_private:
            return [], []
        if self._cache.watch is not None:
            self._cache.watch.filled(sequence, first)
        remaps, replaced = [], []
        for logical in range(first, num_full):
            for group, blocks in enumerate(table.groups):
                own = blocks[logical]
                if self._index_block(sequence, self._content(sequence, group, logical), step_id):
                    remaps.append(Remap(sequence.placement.sequence_id, group, logical, blocks[logical]))
                    replaced.append(own)
        return remaps, replaced

    def _content(self, sequence: Sequence, group: int, logical: int) -> CachedBlock:
        value = block_hashes(sequence, self.block_size)[logical]
        return CachedBlock(value, group, logical, salt_of(sequence.cache_key, logical, self.block_size))

    def _index_block(self, sequence: Sequence, content: CachedBlock, step_id: int | None) -> bool:
        """Offers one block; returns whether another block took its place in the sequence's table."""
        blocks = self._tables[sequence].groups[content.kv_group]
        own = blocks[content.depth]
        filler = None if step_id is None else (step_id, sequence.placement.sequence_id)
        if own == NULL_BLOCK:
            return False
        if self._cache.insert(content, own, filler):
            if filler is None and self.disk is not None and self.disk.mirrors:
                self.disk.keep([own])
            return False
        older = self._cache.confirmed_block(content.kv_group, content.value)
        # A block that nobody holds is left alone: to take it would need a free block that this step may count on.
        if older is None or older == own or not self._pool.ref_count(older):
            return False
        self._pool.share([older])
        blocks[content.depth] = older
        return True

    def slide(self, sequence: Sequence, step_id: int) -> None:
        """Gives up blocks that no token after those computed in `step_id` can see.

        A prefix keeps what is seen from the end of its last full block, which is where a hit begins.
        """
        self.blocks.park(step_id, self._pass(sequence))

    def _pass(self, sequence: Sequence) -> list[int]:
        """Takes out of the sequence's table the blocks that its windows have passed, and returns them."""
        table, position = self._tables[sequence], sequence.placement.num_computed
        if sequence.cache_use is CacheUse.PINNED:
            position -= position % self.block_size
        passed = []
        for group in self._windowed:
            blocks, begin = table.groups[group], table.num_passed[group]
            first = min(len(blocks), first_visible(self._windows[group], position, self.block_size))
            if first > begin:
                passed += present([blocks[begin:first]])
                blocks[begin:first] = [NULL_BLOCK] * (first - begin)
                table.num_passed[group] = first
        return passed

    # -- distrust ---------------------------------------------------------------------------------------------------

    def distrust(self, sequence_id: int, sequence: Sequence | None) -> None:
        """Takes out of the prefix cache what outstanding steps fill with the sequence and, if it is still held, its
        whole table; pinned blocks excepted."""
        held = self._tables[sequence].block_ids if sequence is not None else []
        contents = self.blocks.distrust({*self._cache.filled_by(sequence_id), *held} - self._pinned_block_ids)
        if self.cpu_tier is not None:
            self.cpu_tier.forget(contents)
        self.reads.forget(contents)
        if self.disk is not None:
            self.disk.forget(contents)

    def withdraw(self, sequence_ids: AbstractSet[int], after_step: int) -> None:
        self._cache.withdraw(sequence_ids, after_step)

    def holds_distrusted(self, sequence: Sequence) -> bool:
        return self.blocks.any_distrusted(self._tables[sequence].block_ids)

    # -- reset ------------------------------------------------------------------------------------------------------

    def cached_behind(self, salt: str | None) -> list[int]:
        return self._cache.behind(salt)

    def cpu_cached_behind(self, salt: str | None) -> list[int]:
        return self.cpu_blocks.cache.behind(salt)

    def forget_cached(self, salt: str | None) -> None:
        """Empties the prefix cache (see `KVMemory`). What is computed of running sequences from now on builds on what
        is forgotten, so it is offered to nobody."""
        for cache in (self._cache, self.cpu_blocks.cache):
            for block_id in cache.behind(salt):
                cache.remove(block_id)
        if salt is None:
            self._evictions.clear()
        self.reads.reset(salt)
        if self.disk is not None:
            self.disk.reset()
        for tables in (self._tables, self.swap_space.tables):
            for sequence, table in tables.items():
                table.is_private |= salt is None or sequence.cache_key.salt == salt

    # -- give up ----------------------------------------------------------------------------------------------------

    def free(self, sequence: Sequence, outstanding_step_id: int | None = None) -> None:
        table = self._tables.pop(sequence, None)
        if table is None:
            self.swap_space.drop(sequence)
        elif outstanding_step_id is None:
            self._release(table.block_ids)
        else:
            self.blocks.park(outstanding_step_id, table.block_ids)

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        filled = self.blocks.step_answered(step_id, valid=valid)
        self.cpu_blocks.step_answered(step_id, valid=valid)
        if self.disk is not None:
            self.disk.step_answered(step_id, valid=valid)
            if valid and self.disk.mirrors:
                self.disk.keep(filled)

    def close(self) -> None:
        self._cache.close()
        self.reads.close()

    # -- swap -------------------------------------------------------------------------------------------------------

    def can_swap_out(self, group: SequenceGroup) -> bool:
        return self.num_to_swap(group) <= self.num_cpu_free

    def num_to_swap(self, group: SequenceGroup) -> int:
        return self.swap_space.num_to_swap(group.holders)

    def num_own(self, group: SequenceGroup) -> int:
        return self.swap_space.num_own(group.holders)

    def lost_by(self, group: SequenceGroup, num_taken: int) -> list[TokenRun]:
        return self.swap_space.lost_by(group.holders, num_taken)

    def num_kept(self, group: SequenceGroup, num_taken: int) -> int:
        return self.swap_space.num_kept(group.holders, num_taken)

    def swap_out(self, group: SequenceGroup, step_id: int) -> list[BlockMove]:
        return self.swap_space.swap_out(group.holders, step_id)

    def num_to_return(self, group: SequenceGroup) -> int:
        return self.swap_space.num_to_return(group.holders)

    def swap_in(self, group: SequenceGroup) -> list[BlockMove]:
        return self.swap_space.swap_in(group.holders)

    # -- from replica to replica ------------------------------------------------------------------------------------

    @property
    def num_arriving(self) -> int:
        return len(self.reads.held) + sum(len(arrival.moves) for arrival in self.swap_space.arrivals)

    @property
    def lent_block_ids(self) -> list[int]:
        lent = self.peers.lent if self.peers is not None else {}
        return [block_id for block_id, count in lent.items() if self._pool.ref_count(block_id) == count]

    @property
    def num_cpu_lent(self) -> int:
        return len(self.peers.cpu_lent) if self.peers is not None else 0

    def leaving(self, group: SequenceGroup) -> dict[Sequence, BlockTable]:
        return self.swap_space.leaving(group.holders)

    def expect(self, tables: dict[Sequence, BlockTable]) -> Arrival:
        return self.swap_space.expect(tables)

    def arrive(self, arrival: Arrival, tables: dict[Sequence, BlockTable]) -> None:
        self.swap_space.arrive(arrival, tables)

    def give_up(self, arrival: Arrival) -> None:
        self.swap_space.give_up(arrival)

    def tier_moves(self, step_id: int) -> tuple[list[BlockMove], list[BlockMove]]:
        return self.cpu_tier.moves(step_id) if self.cpu_tier is not None else ([], [])

    # -- pin --------------------------------------------------------------------------------------------------------

    @property
    def num_pinned(self) -> int:
        return len(self._pinned_block_ids)

    @property
    def _pinned_block_ids(self) -> set[int]:
        return {block_id for block_ids in self.pinned.values() for block_id in block_ids}

    def reserve(self, name: str, num_tokens: int) -> None:
        self._reserved[name] = self.blocks_for(num_tokens)
        self.num_usable -= self._reserved[name]

    def pin(self, name: str, sequence: Sequence) -> None:
        """Keeps the blocks (see `KVMemory`), the last of them as a tail if it is partly filled."""
        table, size = self._tables.pop(sequence), self.block_size
        hashes, num_full = block_hashes(sequence, size), sequence.num_prompt // size
        for group, blocks in enumerate(table.groups):
            for logical, block_id in enumerate(blocks[:num_full]):
                if block_id != NULL_BLOCK:
                    # Where another block holds the same, this one is to be found, for that one may go.
                    self._cache.replace(self._content(sequence, group, logical), block_id)
        if self._cache.watch is not None:
            self._cache.watch.filled(sequence, 0)
        if sequence.num_prompt % size:
            tokens = sequence.known_tokens(num_full * size, sequence.num_prompt)
            parent = hashes[num_full - 1] if num_full else root_hash(sequence.cache_key)
            self._lookup.tails[name] = Tail(parent, tokens, [blocks[num_full] for blocks in table.groups])
        self.pinned[name] = table.block_ids

    def unpin(self, name: str) -> None:
        """Gives a prefix up (see `KVMemory`); with prefix caching its blocks stay as cached content until they are
        taken."""
        self.num_usable += self._reserved.pop(name)
        self._lookup.tails.pop(name, None)
        self._release(self.pinned.pop(name, []))

    # -- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts that every block is free, in a table, parked or pinned, and counted right."""
        tables = [table.block_ids for table in self._tables.values()]
        lent, cpu_lent = (self.peers.lent, self.peers.cpu_lent) if self.peers is not None else (Counter(), Counter())
        self._pool.check([*tables, *self.blocks.parked.values(), *self.pinned.values(), lent.elements()])
        self.swap_space.check([*self.reads.held, *cpu_lent.elements()])
        self._cache.check()
        self.cpu_blocks.cache.check()
        for sequence, table in self._tables.items():
            first = sequence.cache_key.salted_from // self.block_size if sequence.cache_key.salt else 0
            own = present(blocks[first:] for blocks in table.groups) if table.is_private else []
            assert self._cache.block_ids.isdisjoint(own), "what is private can be found"
        # Sequences that wait for a block want what is written to it; others must know that they share one.
        awaited = {waits_for[0] for each in self._tables if (waits_for := each.placement.waits_for) is not None}
        for sequence, table in self._tables.items():
            index, offset = divmod(sequence.placement.num_computed, self.block_size)
            if offset and not table.shares_last and sequence not in awaited:
                shared = [blocks[index] for blocks in table.groups if self.ref_count(blocks[index]) > 1]
                assert not shared, f"blocks {shared} would be written to by one of several holders"


def paged_memory(hello: WorkerHello, config: SchedulerConfig, census: BlockCensus | None = None) -> KVCacheManager:
    """Makes the memory of a replica that joins: blocks as its worker has them, kept as `config` says, and counted in
    the `census`, if there is one."""
    return KVCacheManager(
        hello.num_blocks,
        hello.block_size,
        watermark=config.watermark,
        prefix_caching=config.prefix_caching and bool(hello.kv_groups) and not hello.gathers,
        windows=[group.window for group in hello.kv_groups],
        num_cpu_blocks=hello.num_cpu_blocks,
        # Workers before that refuse plans that move blocks both ways.
        cpu_tier=hello.schema_version >= 9 and moves_pay(hello),
        disk=hello.kv_disk if disk_pays(hello) and not hello.gathers else None,
        server=hello.block_server,
        census=census,
    )
