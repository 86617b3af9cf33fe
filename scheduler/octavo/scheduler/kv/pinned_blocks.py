"""The blocks that pinned prefixes keep on one replica."""

from dataclasses import dataclass

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.blocks import BlockTable
from octavo.scheduler.kv.device_blocks import DeviceBlocks
from octavo.scheduler.kv.prefix_cache import CachedBlock, Tail, block_hashes, root_hash
from octavo.wire.base import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class _Pin:
    """What a pinned prefix holds."""

    block_ids: list[int]
    tail: Tail | None


class PinnedBlocks:
    """By the names of the prefixes. `tails` are those of all that are pinned, for whoever looks prefixes up."""

    def __init__(self, blocks: DeviceBlocks, block_size: int, tails: list[Tail]) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._tails = tails
        self._pins: dict[str, _Pin] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    @property
    def by_name(self) -> dict[str, list[int]]:
        """The blocks of each prefix."""
        return {name: pin.block_ids for name, pin in self._pins.items()}

    @property
    def block_ids(self) -> set[int]:
        """All blocks that any prefix keeps."""
        return {block_id for pin in self._pins.values() for block_id in pin.block_ids}

    def pin(self, name: str, sequence: Sequence, table: BlockTable) -> None:
        """Takes over the blocks of a sequence's prompt, all computed."""
        size, num_full = self._block_size, sequence.num_prompt // self._block_size
        hashes = block_hashes(sequence, size)
        for group, blocks in enumerate(table.groups):
            for logical, block_id in enumerate(blocks[:num_full]):
                if block_id != NULL_BLOCK:
                    # Where another block holds the same, this one is to be found, for that one may go.
                    self._blocks.cache.replace(CachedBlock(hashes[logical], group, logical), block_id)
        tail = None
        if sequence.num_prompt % size:
            tokens = sequence.known_tokens(num_full * size, sequence.num_prompt)
            parent = hashes[num_full - 1] if num_full else root_hash(sequence.cache_key)
            tail = Tail(parent, tokens, [blocks[num_full] for blocks in table.groups])
            self._tails.append(tail)
        self._pins[name] = _Pin(table.block_ids, tail)

    def unpin(self, name: str) -> None:
        """Gives a prefix's blocks up; as cached content, if that is wanted, they stay until they are taken."""
        pin = self._pins.pop(name)
        if pin.tail is not None:
            self._tails.remove(pin.tail)
        self._blocks.release(pin.block_ids)
