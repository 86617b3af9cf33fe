"""What happens to streams when the scheduler, the workers or the client go away."""

import asyncio
import contextlib
import dataclasses
import sys
from typing import Any

import grpc
import msgspec
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.scheduler.client import SchedulerAvailability, SchedulerRefused
from octavo.frontend.server import FrontendServer
from octavo.testbed.grpc_calls import collect, ids_of, reason_of, retry_delay_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import lose_patience, running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire import history
from octavo.wire.codec import encode
from octavo.wire.requests import Delta, Deltas

Code = grpc.StatusCode
# A client that says so whenever it gets something.
_READER = """
import sys, grpc
from octavo.v1 import generation_pb2 as pb, generation_pb2_grpc as services
for event in services.GenerationServiceStub(grpc.insecure_channel(sys.argv[1])).Generate(pb.GenerateRequest(text="x")):
    print(event, flush=True)
"""


def ask(max_new_tokens: int = 20, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="hello",
        sampling=pb.SamplingParams(seed=7),
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens),
        **fields,
    )


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


async def test_a_restarted_scheduler_goes_on_with_the_same_tokens(
    scheduler: FakeScheduler, stub: Any, eventually: Any
) -> None:
    expected = ids_of(await collect(stub.Generate(ask())))
    scheduler.hold_after = 8
    call = asyncio.create_task(collect(stub.Generate(ask(request_id="mine"))))
    await eventually(lambda: scheduler.running == {"mine"})
    scheduler.restart()
    scheduler.hold_after = 1 << 30
    responses = await call
    assert ids_of(responses) == expected
    assert responses[-1].usage.preemptions == 1
    mine = [request for request in scheduler.submitted if request.request_id == "mine"]
    assert [(request.attempt, request.resubmitted) for request in mine] == [(2, False), (3, True)]


async def test_a_scheduler_process_that_dies_and_comes_back(
    fake_scheduler: FakeScheduler, stub: Any, eventually: Any
) -> None:
    fake_scheduler.hold_after = 8
    async with fake_scheduler.serving():
        call = asyncio.create_task(collect(stub.Generate(ask(request_id="mine"))))
        await eventually(lambda: fake_scheduler.running == {"mine"})
    fake_scheduler.restart()
    fake_scheduler.hold_after = 1 << 30
    async with fake_scheduler.serving():
        assert len(ids_of(await call)) == 20


async def test_a_scheduler_that_forgot_one_request_is_told_again(
    scheduler: FakeScheduler, stub: Any, eventually: Any
) -> None:
    scheduler.hold_after = 8
    call = asyncio.create_task(collect(stub.Generate(ask())))
    await eventually(lambda: len(scheduler.running) == 1)
    scheduler.forget_everything()
    scheduler.hold_after = 1 << 30
    assert len(ids_of(await call)) == 20
    assert [request.attempt for request in scheduler.submitted] == [1, 2]


async def test_a_scheduler_that_stays_away_ends_running_requests(
    fake_scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    fake_scheduler.hold_after = 8
    async with fake_scheduler.serving():
        call = stub.Generate(ask())
        await anext(aiter(call))
    lose_patience(frontend, 0.5)
    error = await failure(call)
    assert (error.code(), reason_of(error)) == (Code.UNAVAILABLE, "SCHEDULER_UNREACHABLE")
    assert frontend.generation.num_running == 0
    error = await failure(stub.Generate(ask()))
    assert (error.code(), reason_of(error)) == (Code.UNAVAILABLE, "SCHEDULER_UNREACHABLE")
    assert retry_delay_of(error) == 1.0


async def test_a_request_waits_for_a_scheduler_that_is_not_up_yet(fake_scheduler: FakeScheduler, stub: Any) -> None:
    call = asyncio.create_task(collect(stub.Generate(ask())))
    await asyncio.sleep(0)
    async with fake_scheduler.serving():
        assert len(ids_of(await call)) == 20


@pytest.mark.parametrize("num_replicas", [0])
async def test_a_request_waits_for_a_first_worker(
    scheduler: FakeScheduler, frontend: Any, stub: Any, eventually: Any
) -> None:
    call = asyncio.create_task(collect(stub.Generate(ask())))
    await eventually(lambda: frontend.scheduler.status is not None and frontend.generation.num_running == 1)
    assert scheduler.submitted == []
    await scheduler.set_replicas(1)
    assert len(ids_of(await call)) == 20


async def test_workers_of_another_model(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    scheduler.model = msgspec.structs.replace(scheduler.model, fingerprint="f" * 64)
    await scheduler.set_replicas(1)
    await eventually(lambda: frontend.scheduler.availability is SchedulerAvailability.MODEL_MISMATCH)
    error = await failure(stub.Generate(ask()))
    assert (error.code(), reason_of(error)) == (Code.UNAVAILABLE, "MODEL_MISMATCH")
    assert "f" * 12 in (error.details() or "")
    assert frontend.scheduler.model_fingerprint[:12] in (error.details() or "")
    assert not frontend.generation.ready


async def test_a_stream_does_not_go_on_with_another_model(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any
) -> None:
    scheduler.hold_after = 3
    call = stub.Generate(ask())
    await anext(aiter(call))
    scheduler.restart()
    scheduler.model = msgspec.structs.replace(scheduler.model, fingerprint="f" * 64)
    error = await failure(call)
    assert (error.code(), reason_of(error)) == (Code.UNAVAILABLE, "MODEL_MISMATCH")
    assert "start them and this frontend with the same model directory" in (error.details() or "")
    assert scheduler.running == set()
    assert frontend.generation.num_running == 0


@pytest.mark.parametrize("num_replicas", [0])
async def test_a_deadline_ends_the_wait_for_a_worker(
    scheduler: FakeScheduler, config: FrontendConfig, eventually: Any
) -> None:
    async with (
        running_frontend(config) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        error = await failure(services.GenerationServiceStub(channel).Generate(ask(), timeout=0.3))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await eventually(lambda: server.generation.num_running == 0)


async def test_a_deadline_in_mid_stream_frees_the_work(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    scheduler.hold_after = 3
    # A machine may be so busy that nothing has begun by then.
    for timeout in (0.3, 3.0, 60.0):
        name = f"mine within {timeout} s"
        call = stub.Generate(ask(request_id=name), timeout=timeout)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await anext(aiter(call))
            break
    assert (await failure(call)).code() is Code.DEADLINE_EXCEEDED
    await eventually(lambda: name in scheduler.aborted and frontend.generation.num_running == 0)


async def test_a_client_that_cancels_frees_the_work(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    scheduler.hold_after = 3
    call = stub.Generate(ask(request_id="mine"))
    await anext(aiter(call))
    call.cancel()
    await eventually(lambda: scheduler.aborted == ["mine"] and frontend.generation.num_running == 0)
    assert scheduler.running == set()


async def test_an_id_used_again_right_after_a_cancel_gets_only_its_own_tokens(
    scheduler: FakeScheduler, stub: Any, eventually: Any
) -> None:
    expected = ids_of(await collect(stub.Generate(ask())))
    scheduler.hold_after = 0
    first = stub.Generate(ask(request_id="mine"))
    await eventually(lambda: len(scheduler.submitted) == 2)
    first.cancel()
    await eventually(lambda: scheduler.aborted == ["mine"])
    second = asyncio.create_task(collect(stub.Generate(ask(request_id="mine"))))
    await eventually(lambda: len(scheduler.submitted) == 3)
    # What the first was about to be told when it was cancelled.
    late = Delta("mine", scheduler.submitted[1].attempt, 0, 0, history.EMPTY, [33, 34], None, 0, 0, 0)
    await scheduler.send_raw(encode(Deltas(epoch=scheduler.epoch, deltas=[late])))
    scheduler.hold_after = 1 << 30
    assert ids_of(await asyncio.wait_for(second, 60)) == expected


async def test_a_client_that_vanishes_while_tokens_flow_frees_the_work(
    scheduler: FakeScheduler, frontend: FrontendServer, eventually: Any
) -> None:
    scheduler.pace_s = 0.001
    async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel:
        call = services.GenerationServiceStub(channel).Generate(ask(500, request_id="mine"))
        await anext(aiter(call))
    await eventually(lambda: scheduler.aborted == ["mine"] and frontend.generation.num_running == 0)


async def test_a_client_killed_while_tokens_flow_frees_the_work(
    scheduler: FakeScheduler, frontend: FrontendServer, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.pace_s = 0.001
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _READER, f"127.0.0.1:{frontend.port}"), stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    await client.stdout.read(1)
    client.kill()
    await client.wait()
    await eventually(lambda: len(scheduler.aborted) == 1 and frontend.generation.num_running == 0)
    assert "a request failed" not in caplog.text


async def test_more_requests_than_a_renewal_can_name(
    scheduler: FakeScheduler, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.frontend.scheduler.client.MAX_LIVE_REQUESTS", 1)
    scheduler.hold_after = 3
    first = stub.Generate(ask())
    await anext(aiter(first))
    error = await failure(stub.Generate(ask()))
    assert (error.code(), reason_of(error)) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
    assert retry_delay_of(error) == 1.0
    first.cancel()


async def test_a_scheduler_of_another_version_ends_the_process(
    scheduler: FakeScheduler, config: FrontendConfig
) -> None:
    scheduler.refusal = "schema 2, not 1"
    with pytest.raises(SchedulerRefused, match="schema 2, not 1"):
        await FrontendServer(config).serve(asyncio.Event())


async def test_streams_wait_until_a_scheduler_of_their_version_is_back(
    scheduler: FakeScheduler, stub: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ids_of(await collect(stub.Generate(ask())))
    scheduler.hold_after = 8
    call = asyncio.create_task(collect(stub.Generate(ask(request_id="mine"))))
    await eventually(lambda: scheduler.running == {"mine"})
    scheduler.refusal = "schema 2, not 1"
    scheduler.restart()
    await eventually(lambda: "gets no requests: schema 2, not 1" in caplog.text)
    scheduler.refusal = None
    scheduler.hold_after = 1 << 30
    assert ids_of(await call) == expected


async def test_streams_and_process_end_if_only_another_version_is_there(
    scheduler: FakeScheduler, config: FrontendConfig, eventually: Any
) -> None:
    server = FrontendServer(config)
    served = asyncio.create_task(server.serve(asyncio.Event()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        scheduler.hold_after = 8
        stub = services.GenerationServiceStub(channel)
        call = asyncio.create_task(failure(stub.Generate(ask(request_id="mine"), wait_for_ready=True)))
        await eventually(lambda: scheduler.running == {"mine"})
        scheduler.refusal = "schema 2, not 1"
        scheduler.restart()
        lose_patience(server, 0.5)
        error = await call
    assert (error.code(), reason_of(error)) == (Code.UNAVAILABLE, "SCHEDULER_UNREACHABLE")
    with pytest.raises(SchedulerRefused, match="schema 2, not 1"):
        await served


async def test_a_drain_finishes_what_runs_and_refuses_the_rest(
    scheduler: FakeScheduler, config: FrontendConfig, eventually: Any
) -> None:
    scheduler.hold_after = 3
    async with (
        running_frontend(config) as (server, stopping),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = services.GenerationServiceStub(channel)
        call = stub.Generate(ask())
        await anext(aiter(call))
        stopping.set()
        await eventually(lambda: server.generation.draining)
        error = await failure(stub.Generate(ask()))
        assert (error.code(), reason_of(error)) == (Code.UNAVAILABLE, "DRAINING")
        scheduler.hold_after = 1 << 30
        assert len(ids_of(await collect(call))) == 20


async def test_a_drain_does_not_wait_for_ever(
    scheduler: FakeScheduler, config: FrontendConfig, eventually: Any
) -> None:
    scheduler.hold_after = 3
    async with running_frontend(dataclasses.replace(config, drain_timeout_s=0.1)) as (server, _):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        call = services.GenerationServiceStub(channel).Generate(ask(request_id="mine"))
        await anext(aiter(call))
    error = await failure(call)
    assert (error.code(), reason_of(error)) == (Code.UNAVAILABLE, "DRAINING")
    await channel.close(None)
