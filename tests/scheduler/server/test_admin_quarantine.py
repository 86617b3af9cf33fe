"""The Admin service and `octavo quarantine`: what is refused after deaths, shown and cleared."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from click.testing import CliRunner, Result

from octavo.cli.main import main
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.operated import admin_server
from octavo.v1 import admin_pb2 as pb

from ..conftest import Connect, MakeCluster

WHY = "2 workers were lost while they computed this request"
NAMES = ["one", "two"]


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    """Two payloads are in quarantine."""
    cluster = make_cluster()
    for name in NAMES:
        cluster.core.quarantine.add(make_request(name, 8, 20), cluster.now, WHY)
    cluster.now += 0.5
    return cluster


@pytest.fixture
async def operated(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """The same, where the commands look for their scheduler."""
    async with admin_server(cluster) as address:
        monkeypatch.setenv("OCTAVO_ADMIN_ADDRESS", address)
        yield cluster


async def run(*arguments: str) -> Result:
    """The server answers in this thread meanwhile."""
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


def left(cluster: Cluster) -> list[str]:
    return [entry.request_id for entry in cluster.core.quarantine.entries(cluster.now)]


async def test_what_is_refused_is_listed(cluster: Cluster, connect: Connect) -> None:
    stub = await connect(cluster)
    listed = (await stub.ListQuarantine(pb.ListQuarantineRequest())).payloads
    assert [(each.request_id, each.prompt_tokens, each.reason) for each in listed] == [(name, 8, WHY) for name in NAMES]
    assert all(each.remaining.ToMilliseconds() == 599_500 for each in listed)
    assert len({each.payload for each in listed}) == 2


async def test_one_is_cleared_by_the_first_digits_of_its_hash_and_all_at_once(
    cluster: Cluster, connect: Connect
) -> None:
    stub = await connect(cluster)
    first = (await stub.ListQuarantine(pb.ListQuarantineRequest())).payloads[0].payload
    assert (await stub.ClearQuarantine(pb.ClearQuarantineRequest(payload=first[:6]))).cleared == 1
    assert left(cluster) == ["two"]
    assert (await stub.ClearQuarantine(pb.ClearQuarantineRequest(all=True))).cleared == 1
    assert left(cluster) == []


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.ClearQuarantineRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.ClearQuarantineRequest(all=False), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.ClearQuarantineRequest(payload=""), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.ClearQuarantineRequest(payload="none"), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_what_names_none_clears_none(
    cluster: Cluster, connect: Connect, request_: pb.ClearQuarantineRequest, code: grpc.StatusCode
) -> None:
    stub = await connect(cluster)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ClearQuarantine(request_)
    assert caught.value.code() is code
    assert left(cluster) == NAMES


async def test_an_operator_lists_and_clears(operated: Cluster) -> None:
    listed = (await run("quarantine", "list")).output
    head, one, two, *reasons = listed.splitlines()
    assert head.split() == ["PAYLOAD", "REQUEST", "PROMPT-TOKENS", "REMAINING"]
    payload = two.split()[0]
    assert (one.split()[1:], two.split()[1:]) == (["one", "8", "599", "s"], ["two", "8", "599", "s"])
    assert reasons[1] == f"{payload}: {WHY}"
    assert (await run("quarantine", "clear", payload)).output == "cleared 1\n"
    assert left(operated) == ["one"]
    assert (await run("quarantine", "clear", "--all")).output == "cleared 1\n"
    assert left(operated) == []
    for arguments in ([], [payload, "--all"]):
        assert "give a payload, or --all" in (await run("quarantine", "clear", *arguments)).output
