"""Long answers are written for their clients off the event loop, slice by slice, so that nobody else waits for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

# One for all: slices come in the order in which they are asked for, so answers have turns; and the event loop waits for
# one other at most to let go of Python's lock.
_WRITER: Final = ThreadPoolExecutor(1, thread_name_prefix="writer")


async def apart(write: Callable[[], T]) -> T:
    """What `write`, some milliseconds' work, gives."""
    return await asyncio.get_running_loop().run_in_executor(_WRITER, write)
