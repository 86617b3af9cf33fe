"""A reader sees what comes, and the first reason why nothing more will."""

import asyncio

import pytest

from octavo.frontend.errors import Aborted, Broken, Reason
from octavo.frontend.reader import Reader


async def test_every_wait_is_for_something_new() -> None:
    reader = Reader()
    reader.notify()
    reader.notify()
    await reader.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await reader.wait()


async def test_the_first_failure_stays_wherever_the_request_stands() -> None:
    reader = Reader()
    reader.check()
    reader.fail(Aborted(Reason.ABORTED, "first"))
    reader.fail(Broken(Reason.STEP_FAILED, "second"))
    reader.notify()
    with pytest.raises(Aborted, match="first"):
        reader.check()
    for _ in range(2):
        with pytest.raises(Aborted, match="first"):
            await reader.wait()
