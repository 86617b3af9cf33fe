"""Full blocks by what they hold: a chained hash of a block's tokens and all before them.

Equal hash, equal history, so one sequence's block can serve another. SHA-256, because a collision would show one client
another's context. What must be equal besides the tokens goes into the chain where it begins to count: an adapter before
the first block, a client's salt before the first block with a token behind the pinned prefix that the request
continues, if it does. The KV group a block belongs to is part of the key.
"""

import hashlib
import sys
from array import array
from collections import defaultdict
from collections.abc import KeysView
from collections.abc import Set as AbstractSet

from octavo.scheduler.sequence import Sequence
from octavo.wire.base import Value
from octavo.wire.requests import CacheKey

_LITTLE_ENDIAN = sys.byteorder == "little"


def root_hash(key: CacheKey) -> bytes:
    """What the hash of a first block that no salt counts for is chained to."""
    return _mixed(b"", b"adapter", key.adapter)


def _mixed(parent: bytes, kind: bytes, label: str) -> bytes:
    """The parent, unless there is a label. Another function than that of blocks: no label passes for tokens."""
    return hashlib.blake2b(label.encode(), digest_size=32, key=parent, person=kind).digest() if label else parent


def block_hashes(sequence: Sequence, block_size: int) -> list[bytes]:
    """The hashes of all blocks of `block_size` that the sequence's known tokens fill, first to last.

    Kept with the sequence, so each block is hashed once in its life.
    """
    hashes = sequence.block_hashes.setdefault(block_size, [])
    start, stop = len(hashes) * block_size, sequence.num_known // block_size * block_size
    if start < stop:
        key = sequence.cache_key
        first_salted = key.salted_from // block_size
        parent = hashes[-1] if hashes else root_hash(key)
        content, width = _content(sequence, start, stop), 4 * block_size
        for offset in range(0, len(content), width):
            if len(hashes) == first_salted:
                parent = _mixed(parent, b"salt", key.salt)
            parent = hashlib.sha256(parent + content[offset : offset + width]).digest()
            hashes.append(parent)
    return hashes


def _content(sequence: Sequence, start: int, stop: int) -> bytes:
    """Known tokens as little-endian int32."""
    tokens = array("i", sequence.known_tokens(start, stop))
    if not _LITTLE_ENDIAN:
        tokens.byteswap()
    return tokens.tobytes()


class CachedBlock(Value, frozen=True):
    """What a block holds: `depth` blocks come before it in its chain. (A `Value`, for the garbage collector has nothing
    to do with these, and there is one per cached block.)"""

    value: bytes
    kv_group: int
    depth: int

    def __deepcopy__(self, memo: dict[int, object]) -> "CachedBlock":
        return self


class PrefixCache:
    """Which block holds which content. A block stays indexed while it is free, until it is taken for something else.

    An entry made by a step that is still outstanding is provisional: it may be shared by what is planned later, for a
    replica runs its plans in order; it goes if the step fails, or what the step was to compute there is skipped.
    """

    def __init__(self, num_kv_groups: int) -> None:
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(num_kv_groups)]
        self._content_of: dict[int, CachedBlock] = {}
        # Blocks that an outstanding step fills, those steps, and the sequences (by id) that it computes there.
        self._filled_by: dict[int, tuple[int, int]] = {}
        self._provisional: dict[int, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._content_of)

    @property
    def block_ids(self) -> KeysView[int]:
        """All blocks with indexed content."""
        return self._content_of.keys()

    def content(self, block_id: int) -> CachedBlock | None:
        """What the block holds, if that is indexed."""
        return self._content_of.get(block_id)

    def block(self, kv_group: int, value: bytes) -> int | None:
        """The block with this content."""
        return self._block_of[kv_group].get(value)

    def confirmed_block(self, kv_group: int, value: bytes) -> int | None:
        """The block with this content, if the step that filled it has been answered."""
        block_id = self._block_of[kv_group].get(value)
        return None if block_id in self._filled_by else block_id

    def filler(self, block_id: int) -> tuple[int, int] | None:
        """The outstanding step that fills the block, if one does, and the sequence (by id) that it computes there."""
        return self._filled_by.get(block_id)

    def filled_by(self, sequence_id: int) -> list[int]:
        """The indexed blocks that outstanding steps fill with what they compute of this sequence."""
        return [block_id for block_id, (_, owner) in self._filled_by.items() if owner == sequence_id]

    def insert(self, content: CachedBlock, block_id: int, step_id: int, sequence_id: int) -> bool:
        """The block will hold this content once `step_id` has computed this sequence; False, and nothing changed, where
        another holds it already."""
        blocks = self._block_of[content.kv_group]
        if content.value in blocks:
            return False
        blocks[content.value] = block_id
        self._content_of[block_id] = content
        self._provisional[step_id].append(block_id)
        self._filled_by[block_id] = step_id, sequence_id
        return True

    def replace(self, content: CachedBlock, block_id: int) -> None:
        """The block, which holds this content for certain, is the one to be found."""
        former = self._block_of[content.kv_group].get(content.value)
        if former != block_id:
            if former is not None:
                self.remove(former)
            self.remove(block_id)
            self._block_of[content.kv_group][content.value] = block_id
            self._content_of[block_id] = content

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        """Confirms the entries of a step, or takes them out."""
        for block_id in self._provisional.pop(step_id, ()):
            if self._filled_by.get(block_id, (None, 0))[0] == step_id:
                del self._filled_by[block_id]
                if not valid:
                    self.remove(block_id)

    def withdraw(self, sequence_ids: AbstractSet[int], after_step: int) -> None:
        """Takes out what outstanding steps after `after_step` were to fill with these sequences."""
        for block_id, (step_id, owner) in list(self._filled_by.items()):
            if step_id > after_step and owner in sequence_ids:
                self.remove(block_id)

    def remove(self, block_id: int) -> None:
        """The block will hold something else. Unknown blocks are ignored."""
        content = self._content_of.pop(block_id, None)
        if content is not None:
            del self._block_of[content.kv_group][content.value]
            self._filled_by.pop(block_id, None)

    def check(self) -> None:
        """Asserts that blocks and contents name each other."""
        contents = {(content.kv_group, content.value): block_id for block_id, content in self._content_of.items()}
        assert contents == {(g, value): b for g, blocks in enumerate(self._block_of) for value, b in blocks.items()}
