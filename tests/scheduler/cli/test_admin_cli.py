"""The operator's commands against a real server over a core that the test drives."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from click.testing import CliRunner, Result

from octavo.cli.main import main
from octavo.scheduler.cli.operate import cache_lines, explanation_lines
from octavo.scheduler.cli.tables import text_table
from octavo.scheduler.cli.top import frame
from octavo.scheduler.core.events import ReplicaHeard
from octavo.testing.cluster import VOCABULARY, Cluster, FakeDisk, make_request
from octavo.testing.fakes.drafters import Foresight, ScriptedDrafter
from octavo.testing.operated import admin_server
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import generation_pb2, generation_pb2_grpc
from octavo.wire.steps import DiskUse, KVDisk

from ..conftest import MakeCluster


@pytest.fixture
async def cluster(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """A cluster that the commands find where its scheduler's address should be."""
    cluster = make_cluster(max_num_seqs=2, max_steps_in_flight=1)
    async with admin_server(cluster) as address:
        monkeypatch.setenv("OCTAVO_ADMIN_ADDRESS", address)
        yield cluster


async def run(*arguments: str) -> Result:
    """The server answers in this thread meanwhile."""
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


async def output(*arguments: str) -> str:
    result = await run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


async def test_explain_says_what_a_request_waits_for(cluster: Cluster) -> None:
    cluster.join()
    cluster.submit(*(make_request(f"r{i}", 4, max_tokens=9, priority=int(i == 2)) for i in range(4)))
    cluster.step()
    cluster.now += 1.49
    assert (await output("explain", "r3")).splitlines() == [
        "r3: waiting, 1.5 s after it came",
        "  4 prompt tokens, 0 generated in 1 sequences, 0 computed; preempted 0 times, 0 of them swapped out",
        "  tenant -, priority 0, frontend 0000000000000007",
        "  place 2 in the queue, behind r1",
        "  worker-1: needs 1 sequence slots, 0 are free",
    ]


async def test_explain_says_in_which_step_a_request_is(cluster: Cluster) -> None:
    cluster.join()
    cluster.submit(make_request("r", 4, max_tokens=9, tenant="a"))
    assert "there is room for it: it joins the next step" in await output("explain", "r")
    cluster.schedule()
    lines = (await output("explain", "r")).splitlines()
    assert lines[0] == "r: running on worker-1, 0.0 s after it came"
    assert lines[2:] == [
        "  tenant a, priority 0, frontend 0000000000000007",
        "  found computed: 0 of 4 tokens: 0 on the device, 0 in CPU memory, 0 on the disk; worker-1",
        "  the rest fills no block before the last token, which is always computed",
        "  steps under way with it: 1; tokens chosen in them: 1",
    ]


async def test_explain_and_top_say_what_became_of_drafts(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(speculation=4, drafter=ScriptedDrafter(Foresight(VOCABULARY)))
    cluster.join()
    cluster.submit(make_request("r", 4, max_tokens=30))
    async with admin_server(cluster) as address:
        monkeypatch.setenv("OCTAVO_ADMIN_ADDRESS", address)
        assert "drafts" not in await output("explain", "r")
        while len(cluster.tokens["r"]) < 10:
            cluster.step()
        lines = (await output("explain", "r")).splitlines()
        shown = (await output("top", "--once")).splitlines()
    told = cluster.deltas["r", 0][-1]
    drafts = told.drafted // 4
    assert drafts > 0
    assert (
        lines[2]
        == f"  {drafts} drafts: {told.drafted} guesses checked, {told.drafted} right; 5.00 tokens from a step with one"
    )
    worker = dict(zip(shown[2].split(), shown[3].split(), strict=True))
    assert (worker["DRAFTED"], worker["ACCEPTED"]) == (str(told.drafted), str(told.accepted))
    assert worker["TOKENS/DRAFT"] == "5.00"


def test_explain_has_words_for_every_obstacle() -> None:
    for kind, _ in pb.Obstacle.Kind.items():
        obstacle = pb.Obstacle(worker_id="w", kind=kind, needed=17, available=4)
        explanation = pb.Explanation(queue_position=1, obstacles=[obstacle])
        explanation.status.state = pb.REQUEST_STATE_WAITING
        last = list(explanation_lines(explanation))[-1]
        assert ("does not know" in last) == (kind == "KIND_UNSPECIFIED")
        assert "{" not in last


async def test_explain_says_what_an_ended_request_had_found(cluster: Cluster) -> None:
    cluster.join()
    for name in ("r", "again"):
        cluster.submit(make_request(name, 9, 3, shared=6, tenant="a"))
        cluster.run()
    cluster.now += 2.0
    first, tenant, found, why = (await output("explain", "again")).splitlines()
    assert first.startswith("again: ended, 2.")
    assert tenant == "  tenant a, priority 0, frontend 0000000000000007"
    assert found == "  found computed: 4 of 9 tokens: 4 on the device, 0 in CPU memory, 0 on the disk; worker-1"
    own, other = (make_request(name, 9, 3, shared=6).prompt_token_ids[6] for name in ("again", "r"))
    assert why == f"  token 6 is {own}; the longest beginning known has {other} there"


def test_explain_has_words_for_every_miss() -> None:
    for reason, _ in pb.CacheLookup.Reason.items():
        [_, why] = cache_lines(pb.CacheLookup(reason=reason))
        assert ("does not know" in why) == (reason == "REASON_UNSPECIFIED")
        assert "{" not in why


async def test_an_unknown_request_is_one_line_of_error(cluster: Cluster) -> None:
    result = await run("explain", "nobody")
    assert result.exit_code == 1
    [line] = result.output.splitlines()
    assert line == "Error: no request 'nobody' is held: it has ended, or never came here [NOT_FOUND]"


@pytest.mark.parametrize("command", [["explain", "r"], ["requests"], ["top", "--once"], ["prefix", "list"]])
def test_without_a_scheduler_every_command_says_so_in_one_line(command: list[str], tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/admin.sock"
    result = CliRunner().invoke(main, [*command, "--admin-address", address])
    assert result.exit_code == 1
    [line] = result.output.splitlines()
    assert line.startswith(f"Error: {address}: ")
    assert line.endswith("[UNAVAILABLE]")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["prefix", "pin", "p", "--text", "a", "--server"], "--server"),
        (["top", "--once", "--admin-address"], "--admin-address"),
    ],
)
def test_an_empty_address_is_refused_before_grpc_sees_it(
    command: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a channel was made")

    monkeypatch.setattr(grpc, "insecure_channel", never)
    result = CliRunner().invoke(main, [*command, ""])
    assert (result.exit_code, result.output) == (1, f"Error: {name} is empty; write host:port or unix:path\n")


async def test_a_server_that_is_no_scheduler_is_said_to_be_none(cluster: Cluster) -> None:
    async with tokenizing_frontend() as server:
        result = await run("top", "--once", "--admin-address", server)
    assert result.stderr == (
        f"Error: {server}: a gRPC server answers, but it has no octavo.v1.AdminService: is this the address of another"
        " process? [UNIMPLEMENTED]\n"
    )


def test_the_address_of_the_scheduler_on_this_machine_is_known(tmp_path: Path) -> None:
    environment = {"OCTAVO_RUNTIME_DIR": str(tmp_path / "run")}
    result = CliRunner(env=environment).invoke(main, ["requests"])
    assert result.output.startswith(f"Error: unix:{tmp_path}/run/admin.sock: ")


async def test_requests_lists_all_pages(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.server.admin_service._MAX_PAGE", 2)
    cluster.join()
    cluster.submit(*(make_request(f"r{i}", 4 + i, max_tokens=9, tenant="a" if i == 4 else "") for i in range(5)))
    cluster.step()
    head, *rows = [line.split() for line in (await output("requests")).splitlines()]
    assert [row[:6] for row in rows] == [
        ["r0", "-", "0", "running", "worker-1", "4"],
        ["r1", "-", "0", "waiting", "-", "5"],
        ["r2", "-", "0", "waiting", "-", "6"],
        ["r3", "-", "0", "waiting", "-", "7"],
        ["r4", "a", "0", "running", "worker-1", "8"],
    ]
    assert len(head) == 12
    waiting = (await output("requests", "--state", "waiting", "--tenant", "")).splitlines()[1:]
    assert [line.split()[0] for line in waiting] == ["r1", "r2", "r3"]


# -- top ------------------------------------------------------------------------------------------------------------


async def test_top_prints_one_frame_without_a_terminal(cluster: Cluster) -> None:
    cluster.join(num_blocks=64, num_cpu_blocks=8)
    cluster.submit(*(make_request(f"r{i}", 4, max_tokens=9, tenant="a") for i in range(3)))
    cluster.step()
    lines = (await output("top", "--once")).splitlines()
    assert lines[0].startswith("waiting 1, running 2, swapped 0; preemptions 0, swaps 0; frontends 1")
    worker = dict(zip(lines[2].split(), lines[3].split(), strict=True))
    assert (worker["WORKER"], worker["RUNNING"], worker["BLOCKS"], worker["CPU"]) == ("worker-1", "2", "64", "8")
    assert sum(int(worker[name]) for name in ("FREE", "CACHED", "PARKED", "PINNED", "USED")) == 64
    assert (worker["STATE"], worker["OUT/S"]) == ("ready", "-")
    tenant = dict(zip(lines[5].split(), lines[6].split(), strict=True))
    assert (tenant["TENANT"], tenant["HELD"], tenant["WAITING"]) == ("a", "3", "1")


async def test_top_clears_the_screen_only_to_draw_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[None] = []
    monkeypatch.setattr("octavo.scheduler.cli.top.click.clear", lambda: cleared.append(None))
    cluster.join()
    await output("top", "--once")
    assert cleared == []
    monkeypatch.setattr("octavo.scheduler.cli.top.time.sleep", Mock(side_effect=KeyboardInterrupt))
    await output("top")
    assert cleared == [None]


async def test_top_draws_again_until_it_is_interrupted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("octavo.scheduler.cli.top.time.sleep", sleep)
    cluster.join()
    printed = await output("top", "--interval", "0.5")
    assert pauses == [0.5] * 3
    assert printed.count("WORKER") == 3


def test_output_is_counted_from_one_frame_to_the_next() -> None:
    def load(tokens: int) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(workers=[pb.Worker(id="w", tokens_sampled=tokens, token_rate=1234.56)])

    lines = frame(load(150), load(100), 2.0).splitlines()
    assert lines[3].split()[-2:] == ["1234.6", "25.0"]
    # The worker has started anew.
    assert frame(load(10), load(100), 2.0).splitlines()[3].split()[-1] == "0.0"


def test_a_table_is_aligned() -> None:
    assert text_table("NAME TOKENS", [["a", 7], ["longer", 1234]]).splitlines() == [
        "NAME    TOKENS",
        "a            7",
        "longer    1234",
    ]
    assert text_table("NAME TOKENS", []) == "NAME  TOKENS"


# -- the terminal's width -------------------------------------------------------------------------------------------


def test_a_table_that_is_too_wide_does_without_what_matters_least() -> None:
    rows = [["r-1", "tenant", 7, "running"]]
    tables = {
        width: text_table("ID TENANT PRIORITY STATE", rows, width=width, dispensable="PRIORITY TENANT").splitlines()
        for width in (30, 29, 20, 19, 11, 6, 1)
    }
    assert tables[30] == text_table("ID TENANT PRIORITY STATE", rows).splitlines()
    assert tables[29] == tables[20] == ["ID   TENANT  STATE", "r-1  tenant  running"]
    assert tables[19] == ["ID   STATE", "r-1  running"]
    assert tables[11] == ["ID   STATE", "r-1  runni…"]
    assert tables[6] == ["ID  S…", "r…  r…"]
    assert tables[1] == ["…  …", "…  …"]


WIDE_LOAD = pb.GetLoadResponse(
    workers=[
        pb.Worker(id="gpu-host-17.example-0", state=pb.WORKER_STATE_READY, blocks_total=123456, token_rate=9999.5)
    ],
    tenants=[pb.TenantLoad(tenant="a tenant with a long name " * 4, weight=1.0, virtual_time=1e9)],
)


@pytest.mark.parametrize("width", [40, 80, 100, 132])
def test_a_frame_is_no_wider_than_the_terminal(width: int) -> None:
    whole, shown = frame(WIDE_LOAD, WIDE_LOAD, 1.0), frame(WIDE_LOAD, WIDE_LOAD, 1.0, width)
    assert max(map(len, shown.splitlines())) <= width < max(map(len, whole.splitlines()))
    for word in ("WORKER", "RUNNING", "OUT/S", "HELD"):
        assert word in shown


@pytest.mark.parametrize("command", [["requests"], ["workers"], ["top", "--once"]])
async def test_commands_fit_the_terminal_and_give_a_pipe_all(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    cluster.join()
    cluster.submit(make_request("a-request-of-which-the-id-is-long", 4, max_tokens=9))
    piped = await output(*command)
    assert max(map(len, piped.splitlines())) > 60
    monkeypatch.setenv("COLUMNS", "60")
    assert await output(*command) == piped
    # What runs the command here replaces sys.stdout, so it is told below it.
    monkeypatch.setattr("octavo.scheduler.cli.tables.sys", SimpleNamespace(stdout=Mock(isatty=lambda: True)))
    shown = await output(*command)
    assert max(map(len, shown.splitlines())) <= 60
    assert ("a-request-of-which-the-id-is-long" in shown) == (command == ["requests"])


# -- the prefix cache -------------------------------------------------------------------------------------------------


async def test_the_cache_is_reset_whole_or_behind_one_salt(cluster: Cluster) -> None:
    cluster.join(block_size=4)
    await output("prefix", "pin", "rules", "--token-ids", "1,2,3,4")
    cluster.submit(make_request("a", 9, 1, salt="s"), make_request("b", 9, 1))
    cluster.run()
    assert await output("cache", "reset", "--salt", "s") == "dropped 2 cached blocks, 0 of them still in use\n"
    assert await output("cache", "reset") == (
        "dropped 3 cached blocks, 1 of them still in use\npinned prefixes that are computed anew: 1\n"
    )
    dropped = {"dropped_blocks": 0, "blocks_in_use": 0, "pinned_prefixes": 1}
    assert json.loads(await output("cache", "reset", "--json")) == dropped
    result = await run("cache", "reset", "--salt", "")
    assert result.exit_code == 1
    assert "leave it out to reset all" in result.output


async def test_the_tiers_of_every_worker_are_listed_and_added_up(cluster: Cluster) -> None:
    shared = KVDisk(place="host:/kv")
    for incarnation in (1, 2):
        cluster.join(
            incarnation, num_blocks=20, block_size=4, num_cpu_blocks=6, disk=FakeDisk(), mirror=True, kv_disk=shared
        )
        cluster.handle(ReplicaHeard(incarnation, disk=DiskUse(30 * incarnation, 400, 1)))
    # The second request finds two blocks of the first.
    for name in "ab":
        cluster.submit(make_request(name, 9, 1, shared=9))
        cluster.run()
    told = json.loads(await output("cache", "list", "--json"))
    assert [worker["id"] for worker in told["workers"]] == ["worker-1", "worker-2"]
    device, cpu, disk = told["totals"]
    assert (device["tier"], cpu["tier"], disk["tier"]) == ("device", "cpu", "disk")
    assert (device["blocks"], device["capacity"], device["hits"], device["hit_tokens"]) == (2, 40, 1, 8)
    assert (cpu["blocks"], cpu["capacity"]) == (0, 12)
    # One place, of which the second worker knows more.
    assert (disk["blocks"], disk["capacity"], disk["evicted_blocks"]) == (60, 400, 2)
    lines = (await output("cache", "list")).splitlines()
    assert lines[0].split()[:6] == ["WORKER", "TIER", "BLOCKS", "ROOM", "USED", "HITS"]
    assert [line.split()[:5] for line in lines[1:4]] == [
        ["worker-1", "device", "2", "20", "10%"],
        ["worker-1", "cpu", "0", "6", "0%"],
        ["worker-1", "disk", "30", "400", "8%"],
    ]
    assert lines[3].endswith("host:/kv")
    assert lines[-1].split()[:5] == ["(all)", "disk", "60", "400", "15%"]


# -- prefixes -------------------------------------------------------------------------------------------------------


class Tokenizer(generation_pb2_grpc.GenerationServiceServicer):
    """A frontend that knows bytes."""

    async def Tokenize(self, request: Any, context: Any) -> generation_pb2.TokenizeResponse:
        return generation_pb2.TokenizeResponse(ids=request.text.encode())


@asynccontextmanager
async def tokenizing_frontend() -> AsyncIterator[str]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Tokenizer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_prefix_of_token_ids_is_pinned_listed_and_unpinned(cluster: Cluster) -> None:
    cluster.join()
    assert await output("prefix", "pin", "rules", "--token-ids", "1, 15,7") == "pinned rules: 3 tokens\n"
    assert cluster.core.prefixes.all[0].token_ids == [1, 15, 7]
    assert (await output("prefix", "list")).splitlines()[1].split() == ["rules", "3", "-", "worker-1"]
    cluster.step()
    assert (await output("prefix", "list")).splitlines()[1].split() == ["rules", "3", "worker-1", "-"]
    assert await output("prefix", "unpin", "rules") == "unpinned rules\n"
    assert len((await output("prefix", "list")).splitlines()) == 1


async def test_a_prefix_of_text_is_tokenized_by_a_frontend(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "rules.txt"
    file.write_text("Be kind.\n", encoding="utf-8")
    async with tokenizing_frontend() as server:
        assert await output("prefix", "pin", "a", "--text", "Hi", "--server", server) == "pinned a: 2 tokens\n"
        await output("prefix", "pin", "b", "--file", str(file), "--server", server)
    pinned = {prefix.name: bytes(prefix.token_ids) for prefix in cluster.core.prefixes.all}
    assert pinned == {"a": b"Hi", "b": b"Be kind.\n"}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["pin", "a"], 2, "give the prefix by one of"),
        (["pin", "a", "--text", "x", "--token-ids", "1"], 2, "give the prefix by one of"),
        (["pin", "a", "--token-ids", "1,x"], 2, "'1,x' is not a list"),
        (["pin", "a", "--token-ids", ""], 2, "'' is not a list"),
        (["pin", "a", "--token-ids", "-1"], 2, "'-1' is not a list"),
        (["pin", "a", "--token-ids", str(2**31)], 2, "is not a list"),
        (["pin", "a", "--token-ids", "1000"], 1, "outside the vocabulary of 1000 [INVALID_ARGUMENT]"),
        (["pin", "a", "--text", "x", "--server", "127.0.0.1:1"], 1, "[UNAVAILABLE]"),
        (["pin", "a", "--file", "/nonexistent"], 2, "does not exist"),
        (["unpin", "a"], 1, "no prefix named 'a' is pinned [NOT_FOUND]"),
    ],
)
async def test_what_cannot_be_done_with_a_prefix_is_said_at_the_end_of_one_line(
    cluster: Cluster, arguments: list[str], status: int, message: str
) -> None:
    cluster.join()
    result = await run("prefix", *arguments)
    assert result.exit_code == status
    assert message in result.output.splitlines()[-1]
    assert not cluster.core.prefixes.all


async def test_a_file_that_is_no_text_is_one_line_of_error(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "picture"
    file.write_bytes(b"\xff\xfe\xfd")
    result = await run("prefix", "pin", "a", "--file", str(file))
    assert result.exit_code == 1
    [line] = result.output.splitlines()
    assert f"cannot read {file} as UTF-8 text" in line
