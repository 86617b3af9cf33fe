"""How much work one turn of the event loop holds, and that calls come in between."""

import asyncio
import dataclasses
from typing import Any, Final

import grpc
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.frontend.stream.pacing import Turns
from octavo.runtime.telemetry.metrics import render
from octavo.testbed.grpc_calls import reason_of, retry_delay_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb

ALONE, BESIDE = 5, 2
GENERATE: Final = "/octavo.v1.GenerationService/Generate"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Work:
    """Pieces of work, and how many were done in each turn that had some."""

    def __init__(self, turns: Turns) -> None:
        self.order: list[int] = []
        self.per_turn: list[int] = []
        self._turns = turns

    async def piece(self, number: int) -> None:
        await self._turns.take()
        self.order.append(number)

    async def do(self, count: int) -> None:
        tasks = [asyncio.create_task(self.piece(number)) for number in range(count)]
        while len(self.order) < count:
            before = len(self.order)
            await asyncio.sleep(0)
            if done := len(self.order) - before:
                self.per_turn.append(done)
        await asyncio.gather(*tasks)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turns(clock: Clock) -> Turns:
    return Turns(ALONE, BESIDE, clock)


async def test_a_turn_holds_so_much_work_and_what_waits_goes_on_in_order(turns: Turns) -> None:
    work = Work(turns)
    await work.do(17)
    assert max(work.per_turn) <= ALONE
    assert work.order == list(range(17))


async def test_a_turn_in_which_a_call_comes_goes_on_no_longer_than_one_beside_calls(turns: Turns) -> None:
    assert [turns.take_now() for _ in range(BESIDE + 1)] == [True] * (BESIDE + 1)
    turns.call_came()
    assert not turns.take_now()


async def test_while_calls_come_it_holds_less(turns: Turns, clock: Clock) -> None:
    turns.call_came()
    work = Work(turns)
    await work.do(9)
    assert max(work.per_turn) <= BESIDE
    clock.now += 10
    later = Work(turns)
    await later.do(10)
    assert ALONE in later.per_turn


async def test_little_work_waits_for_nothing(turns: Turns) -> None:
    for _ in range(3):
        for _ in range(ALONE):
            with pytest.raises(StopIteration):
                turns.take().send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_what_has_gone_takes_no_room(turns: Turns) -> None:
    work = Work(turns)
    tasks = [asyncio.create_task(work.piece(number)) for number in range(30)]
    await asyncio.sleep(0)
    for task in tasks[ALONE:28]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert work.order == [*range(ALONE), 28, 29]


async def test_what_shares_a_turn_is_all_done_before_any_of_it_but_the_first_is_written(turns: Turns) -> None:
    done: list[str] = []

    async def stream(number: int) -> None:
        await turns.take()
        done.append(f"work {number}")
        await turns.others_first()
        done.append(f"write {number}")

    for _ in range(2):
        done.clear()
        await asyncio.gather(*map(stream, range(4)))
        assert done == ["work 0", "write 0", "work 1", "work 2", "work 3", "write 1", "write 2", "write 3"]


async def test_what_is_alone_in_its_turn_writes_at_once(turns: Turns) -> None:
    for _ in range(3):
        with pytest.raises(StopIteration):
            turns.others_first().send(None)
        assert turns.take_now()
        with pytest.raises(StopIteration):
            turns.others_first().send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    return dataclasses.replace(config, max_requests=1)


async def test_where_there_is_no_room_calls_are_refused_unread(
    frontend: FrontendServer, scheduler: FakeScheduler, channel: Any, eventually: Any
) -> None:
    scheduler.hold_after = 0
    held = channel.unary_stream(GENERATE)(pb.GenerateRequest(text="x").SerializeToString())
    await eventually(lambda: frontend.generation.num_running == 1)
    # Of this call nothing comes but its beginning.
    silent = channel.stream_stream(GENERATE)()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(silent.read(), 60)
    assert reason_of(caught.value) == "TOO_MANY_REQUESTS"
    assert (retry_delay_of(caught.value) or 0) > 0
    assert b'octavo_requests_refused_total{reason="TOO_MANY_REQUESTS"} 1.0' in render()[0]
    held.cancel()
