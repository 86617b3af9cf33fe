"""Full blocks by what they hold: a chained hash of a block's tokens and all before them.

Equal hash, equal history, so one sequence's block can serve another. SHA-256, because a collision would show one client
another's context.
"""

import hashlib
from array import array

from octavo.scheduler.sequence import Sequence


def block_hashes(sequence: Sequence, block_size: int) -> list[bytes]:
    """The hashes of all blocks of `block_size` that the sequence's known tokens fill, first to last.

    Kept with the sequence, so each block is hashed once in its life.
    """
    hashes = sequence.block_hashes.setdefault(block_size, [])
    for start in range(len(hashes) * block_size, sequence.num_known - block_size + 1, block_size):
        parent = hashes[-1] if hashes else b""
        tokens = array("i", (sequence.token_id(position) for position in range(start, start + block_size)))
        hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())
    return hashes


class PrefixCache:
    """Which block holds which content. A block stays indexed while it is free, until it is taken for something else."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._hash_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hash_of

    def find(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest prefix that is held, in order."""
        found = []
        for value in hashes:
            block_id = self._block_of.get(value)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def insert(self, value: bytes, block_id: int) -> None:
        """The block holds this content. Where another block holds it already, that one stays the one to be found."""
        if value not in self._block_of:
            self._block_of[value] = block_id
            self._hash_of[block_id] = value

    def remove(self, block_id: int) -> None:
        """The block will hold something else, or what it holds cannot be relied on. Unknown blocks are ignored."""
        value = self._hash_of.pop(block_id, None)
        if value is not None:
            del self._block_of[value]

    def check(self) -> None:
        """Asserts that blocks and contents name each other."""
        assert {value: block_id for block_id, value in self._hash_of.items()} == self._block_of
