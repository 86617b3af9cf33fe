"""Chooses which of several schedulers, each with workers of its own (a cell), gets a request: by prefix and by load.

The module is pure: it uses no clock, no socket and no random numbers. A cell is taken to hold the blocks of the prompts
that it was chosen for. That is an estimate: a block that was evicted there costs a longer prefill, never a wrong
answer.
"""

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from octavo.wire.requests import CacheKey

_LITTLE_ENDIAN: Final = sys.byteorder == "little"


@dataclass(frozen=True, slots=True)
class CellLoad:
    """Counts a cell's replicas, and the tokens of prompts and answers that the cell is still to compute."""

    replicas: int
    work_tokens: int


class PrefixRouter:
    """Chooses among `num_cells` cells, named by their indices.

    The cell that holds the longest prefix is preferred for as long as its work per replica exceeds that of the least
    loaded cell by no more than the tokens the prefix saves, and `imbalance` of the least load on top. So a prefix that
    many requests share spreads over the more cells the more it is asked for.

    Prompts are compared in blocks of `block_size` tokens; the `max_blocks` last used of them are remembered, in about
    250 bytes each. `first` is where a choice among cells that are alike begins: frontends that are given different ones
    do not all begin with the same cell.
    """

    def __init__(
        self,
        num_cells: int,
        *,
        block_size: int = 16,
        max_blocks: int = 1 << 17,
        imbalance: float = 0.25,
        first: int = 0,
    ) -> None:
        self._num_cells = num_cells
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._imbalance = imbalance
        self._next = first % num_cells
        # Bit c says that cell c holds the block. The least recently used comes first, a prompt's tail before its head:
        # so a prefix is always known whole.
        self._holders: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """Returns how many blocks are remembered."""
        return len(self._holders)

    def choose(
        self, prompt_token_ids: Sequence[int], cache_key: CacheKey, loads: Sequence[CellLoad | None]
    ) -> int | None:
        """Returns the index of the cell for a request; that cell is taken to hold the prompt from now on.

        `loads` has one entry per cell, None for a cell that cannot take the request. Returns None if no cell can. A
        cell without replicas is chosen only where no other could be.
        """
        pressures = _pressures(loads)
        if not pressures:
            return None
        hashes = list(_block_hashes(prompt_token_ids, cache_key, self._block_size))
        least = min(pressures.values())
        # A hit never covers the last token, whose logits are needed.
        cell = self._holder(hashes[: (len(prompt_token_ids) - 1) // self._block_size], pressures, least)
        if cell is None:
            cell = self._least_loaded(pressures, least)
        self._remember(hashes, cell)
        return cell

    def lost(self, cell: int) -> None:
        """Forgets all blocks of `cell`, whose workers are gone or began anew."""
        others = ~(1 << cell)
        held = ((value, cells & others) for value, cells in self._holders.items())
        self._holders = OrderedDict((value, cells) for value, cells in held if cells)

    def _holder(self, hashes: list[bytes], pressures: dict[int, float], least: float) -> int | None:
        """Returns the cell with the longest prefix whose saving is worth the cell's load, or None.

        `pressures` are tokens of work per replica, by cell, and `least` is the smallest of them.
        """
        tolerable, tried = least * (1 + self._imbalance), 0
        held = self._held(hashes)
        while held:
            saved, cells = len(held) * self._block_size, held.pop()
            candidates = [cell for cell in _bits(cells & ~tried) if cell in pressures]
            tried = cells
            if candidates:
                cell = min(candidates, key=pressures.__getitem__)
                if pressures[cell] <= tolerable + saved:
                    return cell
        return None

    def _held(self, hashes: list[bytes]) -> list[int]:
        """Returns the cells, as bits, that hold the first block, the first two, and so on while any cell does."""
        held, cells = [], -1
        for value in hashes:
            cells &= self._holders.get(value, 0)
            if not cells:
                break
            held.append(cells)
        return held

    def _least_loaded(self, pressures: dict[int, float], least: float) -> int:
        """Returns one of the least loaded cells, each in its turn."""
        alike = [cell for cell, pressure in pressures.items() if pressure == least]
        cell = next((cell for cell in alike if cell >= self._next), alike[0])
        self._next = (cell + 1) % self._num_cells
        return cell

    def _remember(self, hashes: list[bytes], cell: int) -> None:
        holders, bit = self._holders, 1 << cell
        for value in reversed(hashes):
            holders[value] = holders.get(value, 0) | bit
            holders.move_to_end(value)
        while len(holders) > self._max_blocks:
            holders.popitem(last=False)


def _pressures(loads: Sequence[CellLoad | None]) -> dict[int, float]:
    """Returns tokens of work per replica, by cell; cells without replicas count only if there are no others."""
    manned = {cell: load.work_tokens / load.replicas for cell, load in enumerate(loads) if load and load.replicas}
    return manned or {cell: float(load.work_tokens) for cell, load in enumerate(loads) if load}


def _block_hashes(prompt_token_ids: Sequence[int], key: CacheKey, block_size: int) -> Iterator[bytes]:
    """Yields chained hashes of the prompt's full blocks.

    The adapter and the salt go into the chain where a scheduler's cache has them. Otherwise the time that a first token
    takes would tell one tenant what another has asked.
    """
    content, width = _content(prompt_token_ids), 4 * block_size
    parent = _label(b"adapter", key.adapter)
    first_salted = key.salted_from // block_size
    for index in range(len(prompt_token_ids) // block_size):
        if index == first_salted:
            parent += _label(b"salt", key.salt)
        parent = hashlib.sha256(parent + content[index * width : (index + 1) * width]).digest()
        yield parent


def _label(kind: bytes, label: str) -> bytes:
    """Hashes a label by another function than blocks, so that no label passes for tokens."""
    return hashlib.blake2b(label.encode(), digest_size=32, person=kind).digest() if label else b""


def _content(token_ids: Sequence[int]) -> bytes:
    """Returns the ids as bytes of little-endian int32."""
    tokens = array("i", token_ids)
    if not _LITTLE_ENDIAN:
        tokens.byteswap()
    return tokens.tobytes()


def _bits(cells: int) -> Iterator[int]:
    while cells:
        low = cells & -cells
        yield low.bit_length() - 1
        cells ^= low
