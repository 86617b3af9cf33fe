"""An event loop is told of messages, and of nothing else but the time."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from octavo.runtime.transport.arrivals import Arrivals
from octavo.runtime.transport.messages import has_arrived, may_send
from octavo.runtime.transport.sockets import connect_dealer
from octavo.runtime.transport.wakeup import Wakeup

_LONG_S = 60.0
Socket = zmq.Socket[bytes]
both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


class Taker:
    """Takes the messages of a router, and is told what to wait for."""

    def __init__(self, router: Socket, *others: Wakeup, patience_s: float = math.inf) -> None:
        self.calls = 0
        self.taken: list[bytes] = []
        self.patience_s = patience_s
        self.arrivals = Arrivals(self._take, [router], *others)
        self._router = router
        self._called = asyncio.Event()

    def _take(self) -> float:
        self.calls += 1
        if has_arrived(self._router):
            self.taken.append(self._router.recv_multipart()[1])
        self._called.set()
        return self.patience_s

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(_LONG_S):
            while not condition():
                self._called.clear()
                await self._called.wait()

    async def __aenter__(self) -> "Taker":
        self._running = asyncio.create_task(self.arrivals.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running


@both_loops
def test_it_is_called_for_a_message(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends

    async def wait() -> None:
        async with Taker(router) as taker:
            asyncio.get_running_loop().call_later(0.02, dealer.send, b"hello")
            await taker.until(lambda: taker.taken == [b"hello"])

    run(wait())


@both_loops
def test_what_came_before_it_ran_is_taken(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    for number in range(50):
        dealer.send(b"%d" % number)
    while not has_arrived(router):
        time.sleep(0.001)

    async def wait() -> None:
        async with Taker(router) as taker:
            await taker.until(lambda: len(taker.taken) == 50)

    run(wait())


@both_loops
def test_a_message_is_not_overlooked_that_came_while_others_were_sent(
    run: Callable[..., None], ends: tuple[Socket, Socket]
) -> None:
    router, dealer = ends
    dealer.send(b"hello")
    connection, _ = router.recv_multipart()

    async def wait() -> None:
        async with Taker(router) as taker:
            await taker.until(lambda: taker.calls > 0)
            for number in range(20):
                dealer.send(b"%d" % number)
                # No turn of the event loop in between: the descriptor's news are taken in by these calls.
                while not has_arrived(router):
                    time.sleep(0.0001)
                router.send_multipart([connection, b"answer"])
                taker.arrivals.look()
                await taker.until(lambda number=number: taker.taken[-1:] == [b"%d" % number])  # type: ignore[misc]

    run(wait())


@both_loops
def test_one_call_is_made_for_one_message(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    """What wakes a process for a token is what the token costs."""
    router, dealer = ends

    async def wait() -> int:
        async with Taker(router) as taker:
            await taker.until(lambda: taker.calls > 0)
            # The socket's own news, such as a connection made, are over by then.
            await asyncio.sleep(0.05)
            before = taker.calls
            for number in range(20):
                dealer.send(b"%d" % number)
                await taker.until(lambda number=number: len(taker.taken) > number)  # type: ignore[misc]
                await asyncio.sleep(0.002)
            return taker.calls - before

    assert run(wait()) == 20  # type: ignore[func-returns-value]


@both_loops
def test_it_is_called_for_a_wakeup_from_another_thread(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    async def wait() -> None:
        with closing(Wakeup()) as wakeup:
            async with Taker(ends[0], wakeup) as taker:
                await taker.until(lambda: taker.calls > 0)
                await asyncio.gather(asyncio.to_thread(wakeup.ring), taker.until(wakeup.heard))

    run(wait())


@both_loops
def test_it_is_called_when_the_time_is_over(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    async def wait() -> float:
        async with Taker(ends[0], patience_s=0.01) as taker:
            await taker.until(lambda: taker.calls > 0)
            began, before = time.monotonic(), taker.calls
            # The socket's own news may come before.
            await taker.until(lambda: taker.calls >= before + 10)
            return time.monotonic() - began

    assert 0.03 <= run(wait()) < _LONG_S  # type: ignore[func-returns-value, operator]


@both_loops
def test_a_shorter_patience_counts_at_once(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends

    async def wait() -> None:
        async with Taker(router, patience_s=_LONG_S * 10) as taker:
            await taker.until(lambda: taker.calls > 0)
            taker.patience_s = 0.01
            dealer.send(b"hurry")
            await taker.until(lambda: bool(taker.taken))
            calls = taker.calls
            await taker.until(lambda: taker.calls >= calls + 3)

    run(wait())


@both_loops
def test_others_run_while_messages_do_not_end(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    dealer.send(b"never read")
    while not has_arrived(router):
        time.sleep(0.001)
    calls = 0

    def take() -> float:
        nonlocal calls
        calls += 1
        return math.inf

    async def wait() -> None:
        running = asyncio.create_task(Arrivals(take, [router]).run())
        while calls < 5:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(asyncio.wait_for(wait(), _LONG_S))
    assert calls >= 5


@both_loops
def test_what_a_call_raises_ends_it(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    def take() -> float:
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        run(asyncio.wait_for(Arrivals(take, [ends[0]]).run(), _LONG_S))


@both_loops
def test_nothing_is_called_once_it_is_cancelled(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends

    async def wait() -> None:
        async with Taker(router, patience_s=0.001) as taker:
            await taker.until(lambda: taker.calls > 0)
        calls = taker.calls
        dealer.send(b"late")
        taker.arrivals.look()
        await asyncio.sleep(0.05)
        assert taker.calls == calls

    run(wait())


def test_a_socket_without_a_connection_says_so(tmp_path: Path) -> None:
    with zmq.Context() as context, connect_dealer(context, f"ipc://{tmp_path}/none") as dealer:
        assert not may_send(dealer)
        assert not has_arrived(dealer)


def test_a_socket_with_a_connection_says_so(ends: tuple[Socket, Socket]) -> None:
    assert may_send(ends[1])


@both_loops
def test_it_is_called_again_where_that_is_due_at_once(run: Callable[..., None], ends: tuple[Socket, Socket]) -> None:
    """An event loop may take what is due within a millisecond for a call that knows no time."""
    router, dealer = ends
    for number in range(20):
        dealer.send(b"%d" % number)

    failures: list[dict[str, Any]] = []

    async def wait() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with Taker(router, patience_s=0.0004) as taker:
            await taker.until(lambda: len(taker.taken) == 20 and taker.calls >= 40)

    run(wait())
    assert not failures
