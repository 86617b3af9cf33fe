"""The fake model's paged memory: one int32 per slot, on a device and in CPU memory that are both plain arrays."""

from array import array

from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove, BlockMoves

_EMPTY_SLOT = -1


class FakeCacheError(Exception):
    """Raised for a block table that names no block where one is needed, or tables that contradict each other."""


class FakeCache:
    """Holds blocks of `block_size` tokens, as many as the fake device and its CPU memory have."""

    def __init__(self, *, num_blocks: int, num_cpu_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._device = array("i", [_EMPTY_SLOT]) * (num_blocks * block_size)
        self._cpu = array("i", [_EMPTY_SLOT]) * (num_cpu_blocks * block_size)

    @property
    def slot_bytes(self) -> int:
        return self._device.itemsize

    def move(self, moves: BlockMoves) -> None:
        """Moves whole blocks, in the order of the wire."""
        self._move(self._device, self._cpu, moves.swap_out)
        self._move(self._cpu, self._device, moves.swap_in)
        self._move(self._device, self._device, moves.copy)

    def write(self, table: list[int], start: int, token_ids: list[int]) -> None:
        """Puts tokens at the positions from `start` on. Raises `FakeCacheError` where the table has no block."""
        blocks = self._blocks(table, start, start + len(token_ids))
        first = start // self.block_size
        for position, token_id in enumerate(token_ids, start):
            index, offset = divmod(position, self.block_size)
            self._device[blocks[index - first] * self.block_size + offset] = token_id

    def read(self, table: list[int], start: int, end: int) -> bytes:
        """Returns the tokens at the positions `start` to `end - 1`, as int32. Raises `FakeCacheError` like `write`."""
        size = self.block_size
        blocks = self._blocks(table, start, end)
        content = b"".join(self._device[block * size : (block + 1) * size].tobytes() for block in blocks)
        skipped = start % size
        return content[skipped * self.slot_bytes : (skipped + end - start) * self.slot_bytes]

    @property
    def block_bytes(self) -> int:
        return self._own_bytes

    @property
    def _own_bytes(self) -> int:
        return self.block_size * self.slot_bytes

    def block(self, block_id: int, *, in_cpu: bool = False) -> list[memoryview]:
        """Returns the bytes of a device block, or of one `in_cpu` memory, which change with it."""
        blocks = memoryview(self._cpu if in_cpu else self._device).cast("B")
        return [blocks[block_id * self._own_bytes : (block_id + 1) * self._own_bytes]]

    def fill_cpu(self, block_id: int, content: bytes) -> None:
        """Puts what was in a block into a CPU block."""
        self._cpu[block_id * self.block_size : (block_id + 1) * self.block_size] = array("i", content)

    def _blocks(self, table: list[int], start: int, end: int) -> list[int]:
        first, last = start // self.block_size, -(-end // self.block_size)
        blocks = table[first:last]
        if len(blocks) < last - first or NULL_BLOCK in blocks:
            raise FakeCacheError(f"positions {start} to {end - 1} need blocks {first} to {last - 1} of {table}")
        return blocks

    def _move(self, source: "array[int]", target: "array[int]", moves: list[BlockMove]) -> None:
        size = self.block_size
        # All blocks are read before any is written, as one gather and one scatter do it.
        contents = [source[move.source * size : (move.source + 1) * size] for move in moves]
        for move, content in zip(moves, contents, strict=True):
            target[move.target * size : (move.target + 1) * size] = content
