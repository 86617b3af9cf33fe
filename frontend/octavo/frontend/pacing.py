"""Clients that do not read are cut off, so that nothing is computed and kept for them."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from octavo.frontend.errors import Aborted, Reason

T = TypeVar("T")


async def within(stall_timeout_s: float, writing: Awaitable[T]) -> T:
    """What `writing` to a client gives, if the client takes it in so many seconds. Raises `Aborted` otherwise."""
    try:
        async with asyncio.timeout(stall_timeout_s):
            return await writing
    except TimeoutError:
        raise slow_reader(stall_timeout_s) from None


def slow_reader(stall_timeout_s: float) -> Aborted:
    """The error of a request whose client has stopped to read."""
    return Aborted(
        Reason.SLOW_READER,
        f"the client has not read anything for {stall_timeout_s:g} s; read faster, or ask for incremental=false",
        stall_timeout_s=stall_timeout_s,
    )
