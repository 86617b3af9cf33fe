"""The second tier of the prefix cache: what device blocks held before they were taken for something else goes to CPU
blocks, and comes back where a sequence begins with it."""

from octavo.scheduler.kv.blocks import CachedBlocks
from octavo.scheduler.kv.prefix_cache import CachedBlock
from octavo.wire.steps import BlockMove, WorkerHello

# Owns what is moved rather than computed: ids of sequences begin at 1.
_NO_SEQUENCE = 0


class CPUTier:
    """Keeps in `cpu` blocks, as far as swapped groups leave them free, what `device` blocks held that were taken.

    All goes by moves of the plan that takes the blocks, or that starts the sequence. A replica runs its plans in order,
    and in each what leaves the device before what comes to it, so content may be found here as soon as it is planned.
    If the step fails, nobody knows what was moved: its entries are withdrawn on both sides.
    """

    def __init__(self, device: CachedBlocks, cpu: CachedBlocks) -> None:
        self._device, self._cpu = device, cpu
        self._loads: list[BlockMove] = []
        # CPU blocks that the plan being made reads: they must not be filled in it.
        self.held: list[int] = []
        # Totals of blocks.
        self.num_stored = 0
        self.num_loaded = 0

    def hold(self, cpu_blocks: list[int]) -> None:
        """Keeps blocks from being taken until the plan is made."""
        self._cpu.pool.share(cpu_blocks)
        self.held += cpu_blocks

    def load(self, cpu_block: int, step_id: int) -> int:
        """Returns a device block with this block's content, referenced once more; it is there as soon as step `step_id`
        has moved it, if no other block has it."""
        content = self._cpu.cache.content(cpu_block)
        assert content is not None, f"CPU block {cpu_block} is not held"
        block_id = self._device.cache.block(content.kv_group, content.value)
        if block_id is not None:
            self._device.pool.share([block_id])
            return block_id
        (block_id,) = self._device.take(1)
        self._device.cache.insert(content, block_id, (step_id, _NO_SEQUENCE))
        self._loads.append(BlockMove(cpu_block, block_id))
        return block_id

    def store(self, content: CachedBlock | None, cpu_block: int, step_id: int) -> None:
        """Notes that a CPU block that was taken will hold this content once step `step_id` has moved it."""
        if content is not None:
            self._cpu.cache.insert(content, cpu_block, (step_id, _NO_SEQUENCE))

    def moves(self, step_id: int) -> tuple[list[BlockMove], list[BlockMove]]:
        """Returns the moves of step `step_id` beside those of swapped groups: those off the device, and those to it.

        Where CPU memory has no room for all, what was used last stays.
        """
        if not (self._device.evicted or self._loads or self.held):
            return [], []
        stored: list[BlockMove] = []
        evicted, self._device.evicted = self._device.evicted, []
        room = self._cpu.pool.num_free
        for block_id, content in reversed(evicted):
            former = self._cpu.cache.block(content.kv_group, content.value)
            if former is not None:
                self._cpu.pool.used(former)
            elif len(stored) < room:
                (cpu_block,) = self._cpu.take(1)
                self.store(content, cpu_block, step_id)
                stored.append(BlockMove(block_id, cpu_block))
        self._cpu.release(move.target for move in stored)
        self._cpu.release(self.held)
        loads, self._loads, self.held = self._loads, [], []
        self.num_stored += len(stored)
        self.num_loaded += len(loads)
        return stored, loads

    def forget(self, contents: list[CachedBlock]) -> None:
        """Lets nobody find these contents here any more."""
        for content in contents:
            cpu_block = self._cpu.cache.block(content.kv_group, content.value)
            if cpu_block is not None:
                self._cpu.cache.remove(cpu_block)


def moves_pay(hello: WorkerHello) -> bool:
    """Tells whether to move a block's tokens to CPU memory and back takes less time than to compute them; that is so
    where the worker has not measured."""
    costs = hello.costs
    if costs is None:
        return True
    moves_s = len(hello.kv_groups) * (costs.swap.block_out_s + costs.swap.block_in_s)
    return moves_s < hello.block_size * costs.prefill.token_s
