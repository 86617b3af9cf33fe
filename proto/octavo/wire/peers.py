"""Defines what workers say to each other when one reads blocks of another: a read, and its answer.

The answer is a message of several frames: `BlocksRead`, then the bytes of each block, in the order asked for, if they
were `found`. A worker answers a connection's reads in their order.
"""

from typing import Annotated

from msgspec import Meta

from octavo.wire.base import Count, Identity, Message

# Blocks of one read.
MAX_READ_BLOCKS = 1 << 10


class ReadBlocks(Message, frozen=True):
    """Asks a worker for blocks that it holds as this `incarnation`: CPU blocks if `from_cpu`, else of its device."""

    read_id: Count
    incarnation: Identity
    from_cpu: bool
    block_ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(min_length=1, max_length=MAX_READ_BLOCKS)]


class BlocksRead(Message, frozen=True):
    """Answers a read. It was not `found` if the worker is no longer that incarnation, or has no such blocks."""

    read_id: Count
    found: bool
