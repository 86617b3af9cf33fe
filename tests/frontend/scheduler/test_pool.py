"""One frontend in front of two schedulers: who gets what, and who goes on with it."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import msgspec
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.scheduler import pool
from octavo.frontend.scheduler.client import SchedulerAvailability, SchedulerRefused
from octavo.frontend.scheduler.session import LiveRequest
from octavo.frontend.server import FrontendServer
from octavo.runtime.telemetry.metrics import render
from octavo.testbed.grpc_calls import collect, ids_of, reason_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import lose_patience, running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire import history
from octavo.wire.codec import encode
from octavo.wire.requests import Delta, Deltas, RejectReason

# A token per byte, so it is three blocks of the router's.
_SYSTEM = "You are a helpful assistant of few words, and kind."


@pytest.fixture
def two(fake_scheduler: FakeScheduler, tmp_path: Path) -> tuple[FakeScheduler, FakeScheduler]:
    return fake_scheduler, FakeScheduler(f"ipc://{tmp_path}/other.sock", fake_scheduler.model)


@pytest.fixture
def config(config: FrontendConfig, tmp_path: Path) -> FrontendConfig:
    endpoints = (*config.scheduler_endpoints, f"ipc://{tmp_path}/other.sock")
    return dataclasses.replace(config, scheduler_endpoints=endpoints)


class Serving:
    """Two fake schedulers that serve, each until it is stopped."""

    def __init__(self, two: tuple[FakeScheduler, FakeScheduler]) -> None:
        self.both = two
        self._stacks = {scheduler.endpoint: AsyncExitStack() for scheduler in two}

    async def start(self, scheduler: FakeScheduler) -> None:
        await self._stacks[scheduler.endpoint].enter_async_context(scheduler.serving())

    async def stop(self, scheduler: FakeScheduler) -> None:
        await self._stacks[scheduler.endpoint].aclose()

    def __iter__(self) -> Any:
        return iter(self.both)

    def holder(self, request_id: str) -> FakeScheduler | None:
        return next((scheduler for scheduler in self.both if request_id in scheduler.running), None)

    def other(self, scheduler: FakeScheduler) -> FakeScheduler:
        return next(other for other in self.both if other is not scheduler)


@pytest.fixture
async def serving(two: tuple[FakeScheduler, FakeScheduler]) -> AsyncIterator[Serving]:
    serving = Serving(two)
    for scheduler in two:
        await serving.start(scheduler)
    yield serving
    for scheduler in two:
        await serving.stop(scheduler)


@pytest.fixture
async def frontend(serving: Serving, config: FrontendConfig, eventually: Any) -> AsyncIterator[FrontendServer]:
    async with running_frontend(config) as (server, _):
        await eventually(lambda: server.scheduler.status and server.scheduler.status.replicas == 2)
        await eventually(lambda: server.scheduler.prefixes.reported)
        yield server


def ask(text: str = "hello", max_new_tokens: int = 20, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(seed=7),
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens),
        **fields,
    )


async def started(serving: Serving, stub: Any, eventually: Any, held: int) -> tuple[Any, FakeScheduler]:
    """A request that has got `held` tokens and no more, and who holds it."""
    for scheduler in serving:
        scheduler.hold_after, scheduler.tokens_per_delta = held, max(held, 1)
    call = asyncio.create_task(collect(stub.Generate(ask(request_id="mine"))))
    await eventually(lambda: serving.holder("mine"))
    holder = serving.holder("mine")
    assert holder
    return call, holder


def let_go(serving: Serving) -> None:
    for scheduler in serving:
        scheduler.hold_after = 1 << 30


class TestRouting:
    async def test_requests_spread_by_load(self, serving: Serving, stub: Any, eventually: Any) -> None:
        for scheduler in serving:
            scheduler.hold_after = 0
        calls = [asyncio.create_task(collect(stub.Generate(ask(f"{i} wants something")))) for i in range(8)]
        await eventually(lambda: sum(len(scheduler.running) for scheduler in serving) == 8)
        assert [len(scheduler.running) for scheduler in serving] == [4, 4]
        let_go(serving)
        await asyncio.gather(*calls)

    async def test_equal_prefixes_stick(self, serving: Serving, stub: Any) -> None:
        for i in range(6):
            await collect(stub.Generate(ask(f"{_SYSTEM} {i} wants something else")))
        assert sorted(len(scheduler.submitted) for scheduler in serving) == [0, 6]

    async def test_a_cell_that_is_busy_with_others_requests_gets_less(
        self, serving: Serving, frontend: FrontendServer, stub: Any, eventually: Any
    ) -> None:
        busy, idle = serving
        busy.work_tokens = 10_000
        await eventually(lambda: frontend.scheduler.links[0].work_tokens == 10_000)
        for i in range(4):
            await collect(stub.Generate(ask(f"{i} wants something")))
        assert [len(scheduler.submitted) for scheduler in (busy, idle)] == [0, 4]

    async def test_what_one_cell_has_no_place_for_goes_to_the_other(self, serving: Serving, stub: Any) -> None:
        full, free = serving
        full.rejection = RejectReason.QUEUE_FULL
        for i in range(4):
            await collect(stub.Generate(ask(f"{i} wants something")))
        assert len(free.submitted) == 4
        assert full.submitted
        # It is no request that was lost: who has no place for it may say so too.
        assert not any(request.resubmitted for request in free.submitted)

    async def test_what_no_cell_has_a_place_for_is_refused_once_all_were_asked(
        self, serving: Serving, frontend: FrontendServer, stub: Any
    ) -> None:
        for scheduler in serving:
            scheduler.rejection = RejectReason.QUEUE_FULL
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(ask()))
        assert reason_of(caught.value) == "QUEUE_FULL"
        assert [len(scheduler.submitted) for scheduler in serving] == [1, 1]
        assert frontend.scheduler.journals == []

    @pytest.mark.parametrize("reason", [RejectReason.NEVER_FITS_KV, RejectReason.QUARANTINED, RejectReason.STEP_FAILED])
    async def test_other_refusals_are_final(self, serving: Serving, stub: Any, reason: RejectReason) -> None:
        for scheduler in serving:
            scheduler.rejection = reason
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(stub.Generate(ask()))
        assert sum(len(scheduler.submitted) for scheduler in serving) == 1

    async def test_a_pinned_prefix_leads_to_the_cell_that_has_it(
        self, serving: Serving, frontend: FrontendServer, stub: Any, eventually: Any
    ) -> None:
        _, second = serving
        await second.set_pinned({"system": [72, 73, 74]})
        await eventually(lambda: "system" in frontend.scheduler.prefixes.known)
        for i in range(4):
            request = ask(f"{i} wants something", cache=pb.CacheOptions(pinned_prefix="system"))
            await collect(stub.Generate(request))
        assert len(second.submitted) == 4

    async def test_a_request_goes_where_it_fits(
        self, serving: Serving, frontend: FrontendServer, stub: Any, eventually: Any
    ) -> None:
        small, large = serving
        small.capacity_tokens = 64
        await small.set_replicas(1)
        link = frontend.scheduler.links[0]
        await eventually(lambda: link.status and link.status.capacity_tokens == 64)
        assert frontend.scheduler.status
        assert frontend.scheduler.status.capacity_tokens == 100_000
        for i in range(4):
            await collect(stub.Generate(ask(f"{i}", max_new_tokens=100)))
        assert [len(scheduler.submitted) for scheduler in (small, large)] == [0, 4]

    async def test_workers_of_another_model_get_nothing_and_are_complained_about(
        self, serving: Serving, frontend: FrontendServer, stub: Any, eventually: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = serving
        with caplog.at_level(logging.WARNING):
            second.model = msgspec.structs.replace(second.model, fingerprint="f" * 64)
            await second.set_replicas(1)
            await eventually(lambda: "its workers serve another model" in caplog.text)
        assert second.endpoint in caplog.text
        for i in range(4):
            await collect(stub.Generate(ask(f"{i} wants something")))
        assert [len(scheduler.submitted) for scheduler in (first, second)] == [4, 0]
        assert frontend.scheduler.status
        assert frontend.scheduler.status.replicas == 1


class TestHandover:
    async def test_a_stream_goes_on_with_the_same_tokens(
        self, serving: Serving, frontend: FrontendServer, stub: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool, "_HANDOVER_S", 0.3)
        expected = ids_of(await collect(stub.Generate(ask())))
        call, holder = await started(serving, stub, eventually, held=8)
        (journal,) = frontend.scheduler.journals
        await eventually(lambda: len(journal.sequences[0].token_ids) == 8)
        heir = serving.other(holder)
        await serving.stop(holder)
        let_go(serving)
        responses = await asyncio.wait_for(call, 60)
        assert ids_of(responses) == expected
        assert responses[-1].usage.preemptions == 1
        mine = [request for request in heir.submitted if request.request_id == "mine"]
        assert [(request.resubmitted, len(request.generated[0].token_ids)) for request in mine] == [(True, 8)]
        assert mine[0].attempt > holder.submitted[-1].attempt
        assert frontend.scheduler.handovers == 1

    async def test_a_stream_that_has_begun_waits_for_its_own_cell(
        self, serving: Serving, frontend: FrontendServer, stub: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool, "_HANDOVER_S", 60.0)
        call, holder = await started(serving, stub, eventually, held=8)
        (journal,) = frontend.scheduler.journals
        await eventually(lambda: len(journal.sequences[0].token_ids) == 8)
        await serving.stop(holder)
        holder.restart()
        await eventually(
            lambda: SchedulerAvailability.NO_SCHEDULER in {link.availability for link in frontend.scheduler.links}
        )
        await serving.start(holder)
        let_go(serving)
        assert len(ids_of(await asyncio.wait_for(call, 60))) == 20
        assert serving.other(holder).submitted == []
        assert frontend.scheduler.handovers == 0

    async def test_a_request_without_a_token_goes_at_once(
        self, serving: Serving, stub: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool, "_HANDOVER_S", 60.0)
        call, holder = await started(serving, stub, eventually, held=0)
        heir = serving.other(holder)
        await serving.stop(holder)
        await eventually(lambda: serving.holder("mine") is heir)
        let_go(serving)
        assert len(ids_of(await asyncio.wait_for(call, 60))) == 20

    async def test_a_cell_whose_workers_stand_still_hands_over_and_the_other_keeps_the_frontend_ready(
        self, serving: Serving, frontend: FrontendServer, stub: Any, eventually: Any
    ) -> None:
        call, holder = await started(serving, stub, eventually, held=0)
        heir = serving.other(holder)
        holder.is_stalled = True
        await holder.set_replicas(1)
        await eventually(lambda: heir.running == {"mine"})
        assert {link.availability for link in frontend.scheduler.links} == {
            SchedulerAvailability.READY,
            SchedulerAvailability.STALLED,
        }
        assert frontend.generation.ready
        heir.is_stalled = True
        await heir.set_replicas(1)
        await eventually(lambda: not frontend.generation.ready)
        heir.is_stalled = False
        await heir.set_replicas(1)
        await eventually(lambda: frontend.generation.ready)
        let_go(serving)
        assert len(ids_of(await asyncio.wait_for(call, 60))) == 20

    async def test_a_cell_that_loses_its_workers_hands_over_too(
        self, serving: Serving, stub: Any, eventually: Any
    ) -> None:
        call, holder = await started(serving, stub, eventually, held=0)
        heir = serving.other(holder)
        await holder.set_replicas(0)
        await eventually(lambda: holder.aborted == ["mine"] and heir.running == {"mine"})
        let_go(serving)
        assert len(ids_of(await asyncio.wait_for(call, 60))) == 20

    async def test_what_a_frozen_cell_says_later_is_not_heard(
        self, serving: Serving, frontend: FrontendServer, stub: Any, eventually: Any
    ) -> None:
        expected = ids_of(await collect(stub.Generate(ask())))
        call, holder = await started(serving, stub, eventually, held=8)
        (journal,) = frontend.scheduler.journals
        await eventually(lambda: len(journal.sequences[0].token_ids) == 8)
        old = holder.submitted[-1].attempt
        heir = serving.other(holder)
        holder.is_frozen = True
        await eventually(lambda: serving.other(holder).running == {"mine"})
        # Of the attempt before, and of the present one from where it is not.
        before = history.extend(history.EMPTY, expected[:8])
        late = [Delta("mine", attempt, 0, 8, before, [33, 34], None, 0, 0, 0) for attempt in (old, journal.attempt)]
        await holder.send_raw(encode(Deltas(epoch=holder.epoch, deltas=late)))
        num_renewals = len(holder.renewals)
        holder.is_frozen = False
        await eventually(lambda: len(holder.renewals) > num_renewals + 1)
        assert holder.renewals[-1] == []
        assert heir.running == {"mine"}
        let_go(serving)
        assert ids_of(await asyncio.wait_for(call, 60)) == expected

    async def test_with_nobody_to_go_on_it_waits_and_then_fails(
        self, serving: Serving, config: FrontendConfig, eventually: Any
    ) -> None:
        async with (
            running_frontend(config) as (server, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            call, holder = await started(serving, services.GenerationServiceStub(channel), eventually, held=8)
            for scheduler in (serving.other(holder), holder):
                await serving.stop(scheduler)
            lose_patience(server, 0.5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call, 60)
            assert reason_of(caught.value) == "SCHEDULER_UNREACHABLE"
            assert server.generation.num_running == 0


class TestSchedulersOfAnotherVersion:
    async def test_one_is_left_out(
        self, serving: Serving, config: FrontendConfig, eventually: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = serving
        first.refusal = "schema 2, not 1"
        async with (
            running_frontend(config) as (server, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            stub = services.GenerationServiceStub(channel)
            assert len(ids_of(await collect(stub.Generate(ask())))) == 20
            await eventually(lambda: f"the cell at {first.endpoint} gets no requests: schema 2" in caplog.text)
        assert [len(scheduler.submitted) for scheduler in (first, second)] == [0, 1]

    async def test_where_all_are_the_process_ends(self, serving: Serving, config: FrontendConfig) -> None:
        for scheduler in serving:
            scheduler.refusal = "schema 2, not 1"
        with pytest.raises(SchedulerRefused, match="schema 2, not 1"):
            await FrontendServer(config).serve(asyncio.Event())


async def test_the_metrics_tell_the_cells_apart(
    serving: Serving, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    call, holder = await started(serving, stub, eventually, held=0)
    text = render()[0].decode()
    other = serving.other(holder)
    assert f'octavo_cell_requests{{cell="{holder.endpoint}"}} 1.0' in text
    assert f'octavo_cell_requests{{cell="{other.endpoint}"}} 0.0' in text
    assert f'octavo_cell_ready{{cell="{other.endpoint}"}} 1.0' in text
    assert f'octavo_cell_work_tokens{{cell="{holder.endpoint}"}} 25.0' in text
    assert "octavo_cell_handovers_total 0.0" in text
    let_go(serving)
    await call


def test_a_sequence_of_a_request_that_was_released_may_still_be_ended() -> None:
    links = pool.SchedulerPool(["ipc:///cell"], "fingerprint", grace_s=30.0)
    request = Mock(spec=LiveRequest)
    links.release(request)
    links.end_sequence(request, 0)
    assert links.listing(request) is None
