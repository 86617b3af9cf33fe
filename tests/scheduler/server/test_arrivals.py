"""The scheduler's loop wakes for messages, and for nothing else but the time."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from octavo.runtime.transport.sockets import bind_router, connect_dealer
from octavo.scheduler.server.poller import SocketPoller, Wakeup, watching

_LONG_S = 60.0
Socket = zmq.Socket[bytes]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Socket, Socket]]:
    """A router and a dealer, of contexts of their own."""
    endpoint = f"ipc://{tmp_path}/s"
    with (
        zmq.Context() as context,
        zmq.Context() as other,
        bind_router(context, endpoint) as router,
        connect_dealer(other, endpoint) as dealer,
    ):
        assert dealer.poll(60_000, zmq.POLLOUT)
        yield router, dealer


async def _until(arrivals: SocketPoller, condition: Callable[[], bool]) -> None:
    """Waits, and again where it was woken for something else."""
    began = time.monotonic()
    await arrivals.wait(_LONG_S)
    while not condition():
        await arrivals.wait(_LONG_S)
    assert time.monotonic() - began < _LONG_S, "nothing woke it"


def test_it_wakes_for_a_message(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends

    async def wait() -> None:
        with watching([router]) as arrivals:
            asyncio.get_running_loop().call_later(0.02, dealer.send, b"hello")
            await _until(arrivals, lambda: bool(router.poll(0)))

    asyncio.run(wait())
    assert router.recv_multipart()[1] == b"hello"


def test_a_message_is_not_overlooked_that_came_while_others_were_sent(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    dealer.send(b"hello")
    connection, _ = router.recv_multipart()

    async def wait() -> None:
        with watching([router]) as arrivals:
            for number in range(20):
                dealer.send(b"%d" % number)
                while not int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    await asyncio.sleep(0)
                # The descriptor's news are taken in by the call above and by this one.
                router.send_multipart([connection, b"answer"])
                await _until(arrivals, lambda: bool(router.poll(0)))
                assert router.recv_multipart()[1] == b"%d" % number

    asyncio.run(wait())


def test_it_wakes_for_a_bell_on_another_thread(ends: tuple[Socket, Socket]) -> None:
    wakeup = Wakeup()

    async def wait() -> None:
        with watching([ends[0]], wakeup) as arrivals:
            await asyncio.gather(asyncio.to_thread(wakeup.ring), _until(arrivals, wakeup.heard))

    asyncio.run(wait())
    wakeup.close()


def test_it_wakes_when_the_time_is_over(ends: tuple[Socket, Socket]) -> None:
    async def wait() -> float:
        with watching([ends[0]]) as arrivals:
            began = time.monotonic()
            # The socket's own news, such as a connection made, may wake it before.
            while time.monotonic() - began < 0.01:
                await arrivals.wait(0.01)
        return time.monotonic() - began

    assert 0.01 <= asyncio.run(wait()) < _LONG_S


def test_others_run_while_messages_do_not_end(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    dealer.send(b"never read")
    assert router.poll(60_000)

    async def wait() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while turns < 5:
                turns += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(other())
        with watching([router]) as arrivals:
            while not running.done():
                await arrivals.wait(_LONG_S)
        return turns

    assert asyncio.run(wait()) == 5
