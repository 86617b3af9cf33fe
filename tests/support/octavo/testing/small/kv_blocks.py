"""Blocks for stores of KV blocks: number n has a name and bytes of its own; and the end of a read waited for."""

import hashlib
import select
from collections.abc import Sequence
from typing import Final

from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.store import KVStore, StoreLimits, Ticket

BLOCK_BYTES: Final = 192
IDENTITY: Final = StoreIdentity("a model", "bfloat16", "blocks first", "fast", 16, BLOCK_BYTES)
# Segments of others are looked for at each miss, and a failure stops no later write.
EAGER: Final = StoreLimits(rest_s=0.0, refresh_s=0.0)
_LONG_S: Final = 60.0


def name_of(number: int) -> bytes:
    """Returns the name of block `number`."""
    return hashlib.sha256(f"name {number}".encode()).digest()


def payload_of(number: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    """Returns the bytes of block `number`."""
    return hashlib.shake_128(f"payload {number}".encode()).digest(num_bytes)


def put(store: KVStore, *numbers: int, num_bytes: int = BLOCK_BYTES) -> None:
    """Writes these blocks, and waits until that has been done or has failed."""
    for number in numbers:
        assert store.write(name_of(number), payload_of(number, num_bytes))
        assert store.flush(_LONG_S)


def finished(store: KVStore) -> Ticket:
    """Waits for the next read that ends."""
    assert select.select([store], [], [], _LONG_S)[0], "no read has ended"
    (ticket,) = store.poll()
    return ticket


def got(store: KVStore, numbers: Sequence[int], num_bytes: int = BLOCK_BYTES) -> list[int]:
    """Reads these blocks and returns the numbers of those found, whose bytes must be theirs."""
    buffers = [bytearray(num_bytes) for _ in numbers]
    ticket = store.read([name_of(number) for number in numbers], buffers)
    assert finished(store) is ticket
    found = [(number, buffer) for number, buffer, there in zip(numbers, buffers, ticket.found, strict=True) if there]
    assert all(buffer == payload_of(number, num_bytes) for number, buffer in found), "found wrong bytes"
    return [number for number, _ in found]
