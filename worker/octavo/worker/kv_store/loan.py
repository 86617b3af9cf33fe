"""A block that waits to be written lies where its owner has it, and is lent from there: nothing is copied unless the
owner needs the place first.

The owner never waits for who writes. It puts a copy in the loan, or nothing, and changes its bytes; the writer, who may
be in the middle of them, looks once it has read them all, and begins again if they are not what is lent any more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Payload = bytes | bytearray | memoryview
# The bytes of a block, in one piece or several.
Parts = Sequence[memoryview]


@dataclass(eq=False, slots=True)
class Loan:
    """Lends the bytes of a block, which are the `parts`, until it `is_over`. They are a copy in the store's `buffer` if
    there is one, and None once the owner has them back without a copy. `is_sound` says whether they are worth keeping;
    `clears` counts what had been forgotten when they were lent."""

    name: bytes
    parts: Parts | None
    is_sound: Callable[[Parts], bool]
    clears: int
    buffer: bytearray | None = None
    is_over: bool = False


def copied(parts: Parts, buffer: bytearray) -> Parts:
    """Copies the parts into `buffer`; returns them as they are there."""
    begin, copies, whole = 0, [], memoryview(buffer)
    for part in parts:
        copies.append(whole[begin : begin + part.nbytes])
        copies[-1][:] = part
        begin += part.nbytes
    return copies
