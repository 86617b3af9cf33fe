"""The fake model's cache, and beside it for every slot of what history its content was computed."""

from typing import Any

from octavo.wire.steps import BlockMoves
from octavo.worker.fake.cache import FakeCache


class TracedCache(FakeCache):
    """`origins` moves along with what it is about: a number for each slot."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.origins = FakeCache(**sizes)

    def move(self, moves: BlockMoves) -> None:
        super().move(moves)
        self.origins.move(moves)

    @property
    def block_bytes(self) -> int:
        return 2 * super().block_bytes

    def block(self, block_id: int, *, in_cpu: bool = False) -> list[memoryview]:
        return super().block(block_id, in_cpu=in_cpu) + self.origins.block(block_id, in_cpu=in_cpu)

    def fill_cpu(self, block_id: int, content: bytes) -> None:
        half = len(content) // 2
        super().fill_cpu(block_id, content[:half])
        self.origins.fill_cpu(block_id, content[half:])
