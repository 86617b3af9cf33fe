"""The Admin service as an operator meets it: a real gRPC server over a core that the test drives."""

import asyncio
import io
from typing import Any

import grpc
import pytest

from octavo.scheduler.core.events import FrontendJoined, RequestSubmitted
from octavo.scheduler.core.sequence import SequenceStatus
from octavo.scheduler.server.event_log import Planned, StepFeed, log_file, read_records, recorder, replay
from octavo.testing.cluster import FRONTEND, make_request
from octavo.v1 import admin_pb2 as pb
from octavo.wire.requests import PrefixesChanged

from ..conftest import Connect, MakeCluster

_PATIENCE_S = 60.0


def refused(error: "pytest.ExceptionInfo[grpc.aio.AioRpcError]") -> tuple[grpc.StatusCode, str]:
    return error.value.code(), error.value.details() or ""


# -- load -----------------------------------------------------------------------------------------------------------


async def test_every_block_is_counted_once_whatever_happens(make_cluster: MakeCluster, connect: Connect) -> None:
    """Pinned prefixes that share blocks, cached and parked blocks, swapping: all were there, and all sums are right."""
    cluster = make_cluster(watermark=0.0)
    stub = await connect(cluster)
    cluster.join(num_blocks=24, num_cpu_blocks=12)
    await stub.PinPrefix(pb.PinPrefixRequest(name="a", token_ids=range(8)))
    cluster.step()
    await stub.PinPrefix(pb.PinPrefixRequest(name="b", token_ids=range(10)))
    for i in range(6):
        cluster.submit(make_request(f"r{i}", 9, max_tokens=16, shared=4, num_sequences=2, temperature=1.0))
    seen = set()
    for turn in range(60):
        cluster.schedule()
        cluster.schedule()
        if turn == 9:
            cluster.abort("r0")
        load = await stub.GetLoad(pb.GetLoadRequest())
        [worker] = load.workers
        parts = (worker.blocks_free, worker.blocks_parked, worker.blocks_pinned, worker.blocks_referenced)
        assert sum(parts) == worker.blocks_total == 24
        assert worker.blocks_cached_free <= min(worker.blocks_cached, worker.blocks_free)
        assert worker.cpu_blocks_free + worker.cpu_blocks_referenced == worker.cpu_blocks_total == 12
        assert load.waiting + load.running + load.swapped == len(cluster.groups)
        assert (load.running, load.swapped) == (worker.running, worker.swapped)
        seen |= {field.name for field, _ in worker.ListFields()}
        cluster.step()
    cluster.run()
    load = await stub.GetLoad(pb.GetLoadRequest())
    [worker] = load.workers
    assert seen >= {"blocks_parked", "blocks_cached_free", "cpu_blocks_referenced", "swapped", "steps_in_flight"}
    # 2 full blocks of both, and the tail of b.
    assert (worker.blocks_free, worker.blocks_pinned, worker.blocks_referenced) == (21, 3, 0)
    assert (load.preemptions, load.swaps) == (cluster.core.preemptions, cluster.core.swaps)
    assert load.swaps > 0
    assert load.pinned_prefixes == 2


async def test_load_tells_steps_tokens_and_tenants(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster(tenant_weights={"a": 2.0}, max_num_seqs=2, max_steps_in_flight=1)
    stub = await connect(cluster)
    cluster.join()
    assert (await stub.GetLoad(pb.GetLoadRequest())).workers[0].token_rate == 0.0
    cluster.submit(*(make_request(f"a{i}", 4, max_tokens=9, tenant="a") for i in range(3)))
    cluster.submit(make_request("b", 4, max_tokens=9, tenant="b"))
    cluster.step()
    cluster.step()
    load = await stub.GetLoad(pb.GetLoadRequest())
    # The tenant of a0 has then had 4 prompt tokens at weight 2, so b comes before a1.
    assert [(each.tenant, each.weight, each.waiting, each.held) for each in load.tenants] == [
        ("a", 2.0, 2, 3),
        ("b", 1.0, 0, 1),
    ]
    # Four tokens of a prompt and two generated ones, over the weight.
    assert [each.virtual_time for each in load.tenants] == [3.0, 6.0]
    worker = load.workers[0]
    assert (worker.steps, worker.tokens_computed, worker.tokens_sampled) == (2, 10, 4)
    assert (load.waiting, load.running, load.frontends) == (2, 2, 1)


# -- requests -------------------------------------------------------------------------------------------------------


async def test_requests_are_listed_with_where_they_are(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster(max_num_seqs=3, max_steps_in_flight=1)
    stub = await connect(cluster)
    cluster.join()
    cluster.submit(make_request("r0", 5, max_tokens=9, num_sequences=2, temperature=1.0, priority=3, tenant="a"))
    cluster.submit(make_request("r1", 6, max_tokens=9, num_sequences=2, temperature=1.0))
    cluster.step()
    cluster.step()
    running, waiting = (await stub.ListRequests(pb.ListRequestsRequest())).requests
    assert running == pb.RequestStatus(
        request_id="r0",
        frontend_id=f"{FRONTEND:016x}",
        tenant="a",
        priority=3,
        state=pb.REQUEST_STATE_RUNNING,
        worker_id="worker-1",
        prompt_tokens=5,
        computed_tokens=6,
        output_tokens=4,
        sequences=2,
        age=running.age,
    )
    assert running.age.ToMilliseconds() == 20
    assert (waiting.request_id, waiting.state, waiting.worker_id) == ("r1", pb.REQUEST_STATE_WAITING, "")
    assert (waiting.prompt_tokens, waiting.computed_tokens) == (6, 0)


async def test_requests_are_chosen_by_state_and_tenant(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster(max_num_seqs=2, max_steps_in_flight=1)
    stub = await connect(cluster)
    cluster.join()
    for i, tenant in enumerate(["", "", "a"]):
        cluster.submit(make_request(f"r{i}", 5, max_tokens=9, tenant=tenant))
    cluster.step()

    async def ids(**query: Any) -> list[str]:
        return [each.request_id for each in (await stub.ListRequests(pb.ListRequestsRequest(**query))).requests]

    running = await ids(state=pb.REQUEST_STATE_RUNNING)
    assert sorted(running + await ids(state=pb.REQUEST_STATE_WAITING)) == ["r0", "r1", "r2"]
    assert running == [name for name, group in cluster.groups.items() if group.status is SequenceStatus.RUNNING]
    assert await ids(state=pb.REQUEST_STATE_SWAPPED) == []
    assert await ids(tenant="a") == ["r2"]
    assert await ids(tenant="") == ["r0", "r1"]
    assert await ids(tenant="a", state=pb.REQUEST_STATE_SWAPPED) == []


async def test_pages_hold_every_request_once_though_some_end_between_them(
    make_cluster: MakeCluster, connect: Connect
) -> None:
    cluster = make_cluster()
    stub = await connect(cluster)
    cluster.submit(*(make_request(f"r{i}", 5, max_tokens=9, priority=i % 3) for i in range(7)))
    first = await stub.ListRequests(pb.ListRequestsRequest(page_size=3))
    cluster.abort("r0")
    cluster.abort("r2")
    cluster.abort("r3")
    cluster.submit(make_request("r7", 5, max_tokens=9))
    second = await stub.ListRequests(pb.ListRequestsRequest(page_size=3, page_token=first.next_page_token))
    third = await stub.ListRequests(pb.ListRequestsRequest(page_size=3, page_token=second.next_page_token))
    pages = [[each.request_id for each in page.requests] for page in (first, second, third)]
    assert pages == [["r0", "r1", "r2"], ["r4", "r5", "r6"], ["r7"]]
    assert third.next_page_token == ""


@pytest.mark.parametrize(
    ("query", "message"),
    [({"page_token": "x"}, "page_token 'x'"), ({"page_token": "-1"}, "page_token"), ({"state": 9}, "state 9")],
)
async def test_what_no_list_can_be_made_of_is_refused(
    make_cluster: MakeCluster, connect: Connect, query: dict[str, Any], message: str
) -> None:
    stub = await connect(make_cluster())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ListRequests(pb.ListRequestsRequest(**query))
    code, details = refused(error)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


# -- explanations ---------------------------------------------------------------------------------------------------


async def test_an_explanation_has_the_numbers(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster(max_num_seqs=2, max_steps_in_flight=1)
    stub = await connect(cluster)
    cluster.join()
    cluster.submit(*(make_request(f"r{i}", 4, max_tokens=9) for i in range(4)))
    cluster.step()
    cluster.schedule()
    [waiting] = (await stub.ExplainRequest(pb.ExplainRequestRequest(request_id="r3"))).explanations
    assert waiting.status.state == pb.REQUEST_STATE_WAITING
    assert (waiting.queue_position, list(waiting.ahead_request_ids)) == (2, ["r2"])
    assert list(waiting.obstacles) == [
        pb.Obstacle(worker_id="worker-1", kind=pb.Obstacle.KIND_SEQUENCE_SLOTS, needed=1, available=0)
    ]
    [running] = (await stub.ExplainRequest(pb.ExplainRequestRequest(request_id="r0"))).explanations
    assert (running.queue_position, list(running.step_ids), running.tokens_in_flight) == (0, [2], 1)


async def test_those_ahead_are_named_up_to_a_hundred(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster()
    stub = await connect(cluster)
    cluster.submit(*(make_request(f"r{i}", 2, max_tokens=2) for i in range(130)))
    [explanation] = (await stub.ExplainRequest(pb.ExplainRequestRequest(request_id="r120"))).explanations
    assert explanation.queue_position == 121
    assert list(explanation.ahead_request_ids) == [f"r{i}" for i in range(100)]


async def test_all_requests_of_an_id_are_explained(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster()
    stub = await connect(cluster)
    cluster.submit(make_request("r", 2, max_tokens=2))
    cluster.handle(FrontendJoined(FRONTEND + 1))
    cluster.handle(RequestSubmitted(FRONTEND + 1, make_request("r", 2, max_tokens=2)))
    answer = await stub.ExplainRequest(pb.ExplainRequestRequest(request_id="r"))
    frontends = [int(each.status.frontend_id, 16) for each in answer.explanations]
    assert frontends == [FRONTEND, FRONTEND + 1]


async def test_a_tenant_is_told_of_its_own_tokens_alone(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster()
    stub = await connect(cluster)
    cluster.join()
    for name in ("r", "again"):
        cluster.submit(make_request(name, 9, 3, shared=6, tenant="a"))
        cluster.run()

    async def told(**asker: str) -> pb.CacheLookup:
        asked = pb.ExplainRequestRequest(request_id="again", **asker)
        [explanation] = (await stub.ExplainRequest(asked)).explanations
        assert explanation.status.state == pb.REQUEST_STATE_ENDED
        found: pb.CacheLookup = explanation.cache
        return found

    own, other = (make_request(name, 9, 3, shared=6).prompt_token_ids[6] for name in ("again", "r"))
    whole = pb.CacheLookup(
        tokens=9,
        device_tokens=4,
        worker_id="worker-1",
        reason=pb.CacheLookup.REASON_DIFFERS,
        position=6,
        token=own,
        other_token=other,
    )
    assert await told() == await told(asker="a") == whole
    blurred = pb.CacheLookup(
        tokens=9, device_tokens=4, worker_id="worker-1", reason=pb.CacheLookup.REASON_UNKNOWN, position=4
    )
    assert await told(asker="b") == await told(asker="") == blurred


async def test_an_unknown_request_is_not_found(make_cluster: MakeCluster, connect: Connect) -> None:
    stub = await connect(make_cluster())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ExplainRequest(pb.ExplainRequestRequest(request_id="r"))
    assert refused(error) == (
        grpc.StatusCode.NOT_FOUND,
        "no request 'r' is held: it has ended, or never came here",
    )


# -- steps ----------------------------------------------------------------------------------------------------------


async def read(call: Any, count: int) -> list[pb.WatchStepsResponse]:
    async with asyncio.timeout(_PATIENCE_S):
        return [await call.read() for _ in range(count)]


async def test_what_is_watched_replays_to_the_same_plans(make_cluster: MakeCluster, connect: Connect) -> None:
    feed, records = StepFeed(), 0

    def count(content: bytes) -> None:
        nonlocal records
        records += 1

    cluster = make_cluster(record=recorder(feed.append, count))
    stub = await connect(cluster, feed)
    call = stub.WatchSteps(pb.WatchStepsRequest(from_step=1))
    cluster.join()
    cluster.submit(*(make_request(f"r{i}", 4, max_tokens=9) for i in range(4)))
    await stub.PinPrefix(pb.PinPrefixRequest(name="a", token_ids=range(6)))
    cluster.run()
    await stub.UnpinPrefix(pb.UnpinPrefixRequest(name="a"))
    file = io.BytesIO()
    append = log_file(file)
    for number, response in enumerate(await read(call, records), 1):
        assert (response.step, response.missed) == (number, 0)
        append(response.record)
    call.cancel()
    file.seek(0)
    entries = list(read_records(file))
    result = replay(iter(entries))
    assert result.difference is None
    assert result.plans == sum(isinstance(entry, Planned) for entry in entries) > 0
    assert {"PrefixPinned", "PrefixUnpinned"} <= {
        type(entry.event).__name__ for entry in entries if hasattr(entry, "event")
    }


async def test_a_reader_is_told_how_much_it_has_missed(make_cluster: MakeCluster, connect: Connect) -> None:
    feed = StepFeed(1000)
    cluster = make_cluster(record=recorder(feed.append))
    stub = await connect(cluster, feed)
    cluster.join()
    cluster.submit(make_request("r", 4, max_tokens=40))
    cluster.run()
    call = stub.WatchSteps(pb.WatchStepsRequest(from_step=5))
    [response] = await read(call, 1)
    call.cancel()
    assert response.missed > 0
    assert response.step == 5 + response.missed


async def test_a_reader_that_does_not_read_keeps_nobody_waiting(make_cluster: MakeCluster, connect: Connect) -> None:
    """Far more is appended than the feed and the connection hold; the reader gets the last of it, and a count."""
    feed = StepFeed(64 << 10)
    stub = await connect(make_cluster(), feed)
    call = stub.WatchSteps(pb.WatchStepsRequest(from_step=1))
    feed.append(b"first")
    assert (await read(call, 1))[0].record == b"first"
    content, appended = bytes(16 << 10), 4000
    for number in range(appended):
        feed.append(content)
        if number % 100 == 0:
            await asyncio.sleep(0)
    feed.append(b"last")
    read_count, missed, response = 1, 0, None
    while response is None or response.record != b"last":
        [response] = await read(call, 1)
        read_count, missed = read_count + 1, missed + response.missed
    call.cancel()
    assert read_count + missed == appended + 2
    assert missed > appended / 2


# -- prefixes -------------------------------------------------------------------------------------------------------


async def test_a_prefix_is_pinned_listed_and_unpinned(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    stub = await connect(cluster)
    cluster.join(1)
    cluster.join(2, num_blocks=4)
    await stub.PinPrefix(pb.PinPrefixRequest(name="a", token_ids=range(7)))
    [pending] = (await stub.ListPrefixes(pb.ListPrefixesRequest())).prefixes
    assert pending == pb.PinnedPrefix(name="a", tokens=7, pending_worker_ids=["worker-1", "worker-2"])
    cluster.step()
    # A pinned prefix is no request.
    assert (await stub.GetLoad(pb.GetLoadRequest())).running == 0
    cluster.join(3, num_blocks=2)
    [ready] = (await stub.ListPrefixes(pb.ListPrefixesRequest())).prefixes
    assert ready == pb.PinnedPrefix(name="a", tokens=7, ready_worker_ids=["worker-1", "worker-2"])
    await stub.UnpinPrefix(pb.UnpinPrefixRequest(name="a"))
    assert not (await stub.ListPrefixes(pb.ListPrefixesRequest())).prefixes
    told = [message.prefixes for message in cluster.to_frontend if isinstance(message, PrefixesChanged)]
    assert [[prefix.name for prefix in prefixes] for prefixes in told] == [[], ["a"], []]


@pytest.mark.parametrize(
    ("name", "token_ids", "message"),
    [
        ("", [1], "the name is 0 characters long"),
        ("n" * 257, [1], "the name is 257 characters long"),
        ("n", [], "0 tokens"),
        ("n", [2**31], f"token id {2**31}"),
        ("n", [1000], "outside the vocabulary of 1000"),
        ("n", [1] * 4095, "leave no room in the context of 4096"),
        ("n", [1] * 200, "--max-pinned-share"),
        ("taken", [1], "is pinned already"),
    ],
)
async def test_a_prefix_that_cannot_be_pinned_is_refused_with_the_reason(
    make_cluster: MakeCluster, connect: Connect, name: str, token_ids: list[int], message: str
) -> None:
    cluster = make_cluster()
    stub = await connect(cluster)
    cluster.join()
    await stub.PinPrefix(pb.PinPrefixRequest(name="taken", token_ids=[5]))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.PinPrefix(pb.PinPrefixRequest(name=name, token_ids=token_ids))
    code, details = refused(error)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details
    assert [prefix.name for prefix in cluster.core.prefixes.all] == ["taken"]


async def test_a_name_of_256_characters_can_be_pinned(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster()
    stub = await connect(cluster)
    await stub.PinPrefix(pb.PinPrefixRequest(name="n" * 256, token_ids=[5]))
    assert [prefix.name for prefix in cluster.core.prefixes.all] == ["n" * 256]


@pytest.mark.parametrize("token_ids", [[1000], [1] * 4095], ids=["vocabulary", "context"])
async def test_a_worker_does_not_compute_a_prefix_that_its_model_cannot_take(
    make_cluster: MakeCluster, connect: Connect, token_ids: list[int]
) -> None:
    """Before the first worker nobody knows the model."""
    cluster = make_cluster()
    stub = await connect(cluster)
    await stub.PinPrefix(pb.PinPrefixRequest(name="a", token_ids=token_ids))
    cluster.join(num_blocks=4096)
    cluster.submit(make_request("r", 4, max_tokens=4))
    cluster.run()
    assert cluster.tokens["r"]
    assert (await stub.ListPrefixes(pb.ListPrefixesRequest())).prefixes == [
        pb.PinnedPrefix(name="a", tokens=len(token_ids))
    ]


async def test_an_unknown_prefix_is_not_found(make_cluster: MakeCluster, connect: Connect) -> None:
    stub = await connect(make_cluster())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.UnpinPrefix(pb.UnpinPrefixRequest(name="a"))
    assert refused(error) == (grpc.StatusCode.NOT_FOUND, "no prefix named 'a' is pinned")


# -- resets of the prefix cache ---------------------------------------------------------------------------------------


async def test_a_reset_lets_nothing_be_found_and_says_what_went(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster()
    stub = await connect(cluster)
    cluster.join(block_size=4)
    await stub.PinPrefix(pb.PinPrefixRequest(name="system", token_ids=range(8)))
    cluster.submit(make_request("a", 17, 1, salt="s"))
    cluster.run()
    answer = await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(salt="s"))
    assert (answer.dropped_blocks, answer.blocks_in_use, answer.pinned_prefixes) == (4, 0, 0)
    answer = await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
    assert (answer.dropped_blocks, answer.blocks_in_use, answer.pinned_prefixes) == (2, 2, 1)
    load = await stub.GetLoad(pb.GetLoadRequest())
    assert load.workers[0].blocks_cached == 0


@pytest.mark.parametrize("salt", ["", "s" * 257])
async def test_a_salt_that_nobody_can_have_is_refused(make_cluster: MakeCluster, connect: Connect, salt: str) -> None:
    stub = await connect(make_cluster())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(salt=salt))
    code, details = refused(error)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"the salt is {len(salt)} characters long" in details
