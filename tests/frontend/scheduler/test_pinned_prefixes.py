"""Prefixes under a name: read from a file, pinned with the scheduler, put before prompts."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Unavailable
from octavo.frontend.scheduler.client import SchedulerAvailability
from octavo.frontend.scheduler.pinned_prefixes import NamedPrefixes, PinnedPrefixesError, read_pinned_prefixes
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.server import FrontendServer
from octavo.frontend.stream.preparation import Readiness
from octavo.testbed.credentials import bearer, write_keys
from octavo.testbed.grpc_calls import collect, reason_of
from octavo.testbed.tiny_model import START_TOKEN_ID
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire.requests import MAX_PREFIXES, CacheKey

TEXTS = {"system": "<|im_start|>be brief", "story": "once upon a time"}


def characters(text: str) -> list[int]:
    return [ord(character) for character in text]


def written(directory: Path, content: str) -> Path:
    path = directory / "prefixes.json"
    path.write_text(content, encoding="utf-8")
    return path


@pytest.fixture
def pinning_config(config: FrontendConfig, tmp_path: Path) -> FrontendConfig:
    return dataclasses.replace(config, pinned_prefixes=written(tmp_path, json.dumps(TEXTS)))


def ask(name: str, **fields: Any) -> pb.GenerateRequest:
    stopping = pb.StoppingCriteria(max_new_tokens=3)
    return pb.GenerateRequest(stopping=stopping, cache=pb.CacheOptions(pinned_prefix=name), **fields)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, '{"a": "xy", "b": "z"}')
    assert read_pinned_prefixes(path, characters, 100) == {"a": [120, 121], "b": [122]}


BAD = {
    "no JSON": ("{", "cannot read the pinned prefixes"),
    "no UTF-8": ("\udcff", "cannot read the pinned prefixes"),
    "deep": ("[" * 100_000, "cannot read the pinned prefixes"),
    "no object": ('["a"]', "holds no JSON object"),
    "a number": ('{"a": 1}', "has no text for the prefix 'a'"),
    "an object": ('{"a": {}}', "has no text for the prefix 'a'"),
    "no text": ('{"a": ""}', "has no text for the prefix 'a'"),
    "no name": ('{"": "x"}', "name is 0 characters long"),
    "a long name": (json.dumps({"x" * 257: "x"}), "name is 257 characters long"),
    "a name twice": ('{"a": "x", "a": "y"}', "names the prefix 'a' twice"),
    "too many": (json.dumps({str(i): "x" for i in range(MAX_PREFIXES + 1)}), "names 257 prefixes; at most 256"),
    "too long": (json.dumps({"a": "x" * 99}), "has 99 tokens and the context 100"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    path = tmp_path / "prefixes.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(PinnedPrefixesError, match=words):
        read_pinned_prefixes(path, characters, 100)


def test_as_many_and_as_long_as_may_be(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({str(i) + "x" * 253: "x" * 98 for i in range(MAX_PREFIXES)}))
    assert len(read_pinned_prefixes(path, characters, 100)) == MAX_PREFIXES


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PinnedPrefixesError, match="cannot read"):
        read_pinned_prefixes(tmp_path / "nothing", characters, 100)


async def test_a_frontend_has_its_prefixes_pinned_by_every_scheduler(
    scheduler: FakeScheduler, pinning_config: FrontendConfig, eventually: Any
) -> None:
    async with running_frontend(pinning_config) as (server, _):
        encode = server.generation.tokenizer.encode
        expected = {name: encode(text) for name, text in TEXTS.items()}
        assert expected["system"][0] == START_TOKEN_ID
        await eventually(lambda: scheduler.pinned == expected)
        await scheduler.set_pinned(expected | {"learned": [1, 2]})
        await eventually(lambda: "learned" in server.scheduler.prefixes.known)
        scheduler.restart()
        await eventually(lambda: scheduler.pinned == expected | {"learned": [1, 2]})


async def test_a_prefix_comes_before_the_prompt(scheduler: FakeScheduler, pinning_config: FrontendConfig) -> None:
    async with (
        running_frontend(pinning_config) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = services.GenerationServiceStub(channel)
        prefix = server.generation.tokenizer.encode(TEXTS["story"])
        responses = await collect(stub.Generate(ask("story", text="!")))
        await collect(stub.Generate(ask("story", token_ids=pb.TokenIds(ids=[1, 2]))))
        assert scheduler.submitted[0].prompt_token_ids == prefix + server.generation.tokenizer.encode("!")
        assert scheduler.submitted[1].prompt_token_ids == [*prefix, 1, 2]
        assert responses[0].started.prompt_tokens == responses[-1].usage.prompt_tokens == len(prefix) + 1


async def test_a_salt_begins_behind_the_prefix(scheduler: FakeScheduler, stub: Any) -> None:
    await scheduler.set_pinned({"story": [5, 6]})
    request = ask("story", token_ids=pb.TokenIds(ids=[7]))
    request.cache.salt = "mine"
    await collect(stub.Generate(request))
    assert scheduler.submitted[0].cache_key == CacheKey(salt="mine", salted_from=2)


async def test_a_prefix_counts_against_the_context(scheduler: FakeScheduler, stub: Any, frontend: Any) -> None:
    await scheduler.set_pinned({"long": [1] * 500})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(ask("long", text="x" * 12)))
    assert reason_of(caught.value) == "PROMPT_TOO_LONG"


async def test_an_unknown_prefix_is_not_found(scheduler: FakeScheduler, stub: Any) -> None:
    scheduler.pinned = {"story": [1], "system": [2]}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(ask("tale", text="x")))
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "PREFIX_NOT_FOUND")
    assert "pinned are: 'story', 'system'" in (caught.value.details() or "")
    assert scheduler.submitted == []


async def test_a_prefix_may_be_named_before_the_news_of_it_has_come(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    await eventually(lambda: frontend.scheduler.prefixes.reported)
    scheduler.pinned = {"late": [5, 6]}
    await collect(stub.Generate(ask("late", token_ids=pb.TokenIds(ids=[7]))))
    assert scheduler.submitted[0].prompt_token_ids == [5, 6, 7]


async def test_unknown_names_share_questions(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    await eventually(lambda: frontend.scheduler.prefixes.reported)
    hellos = scheduler.num_hellos
    calls = [collect(stub.Generate(ask(f"tale {i}", text="x"))) for i in range(40)]
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(failure, grpc.aio.AioRpcError) for failure in failures)
    assert {reason_of(failure) for failure in failures if isinstance(failure, grpc.aio.AioRpcError)} == {
        "PREFIX_NOT_FOUND"
    }
    assert 1 <= scheduler.num_hellos - hellos < 40


async def test_who_asks_in_vain_holds_up_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pool = 0.0, Mock(spec=SchedulerPool)
    pool.prefixes, pool.availability = NamedPrefixes({}, False), SchedulerAvailability.NO_WORKER
    pool.away_s.return_value, pool.grace_s = 0.0, 60.0

    async def changed() -> None:
        nonlocal now
        now += 1.0
        await asyncio.sleep(0)

    pool.changed = changed
    monkeypatch.setattr("octavo.frontend.stream.preparation.time", Mock(monotonic=lambda: now))
    readiness = Readiness(pool, "byte-model", worker_grace_s=5.0)
    calls = [readiness.prefix(f"tale {i}", tells_names=False) for i in range(40)]
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(failure) for failure in failures} == {Unavailable}
    assert now <= 6.0


@pytest.mark.parametrize(("tenant", "sees"), [("alice", False), ("gateway", True)])
async def test_what_is_pinned_is_not_told_to_tenants(
    scheduler: FakeScheduler, config: FrontendConfig, tmp_path: Path, tenant: str, sees: bool
) -> None:
    scheduler.pinned = {"merger with acme": [1]}
    keyed = dataclasses.replace(config, api_keys=write_keys(tmp_path / "keys.json"))
    async with (
        running_frontend(keyed) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub: Any = services.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(ask("tale", text="x"), metadata=(("authorization", bearer(tenant)),)))
    assert reason_of(caught.value) == "PREFIX_NOT_FOUND"
    assert ("merger" in str(caught.value)) is sees


async def test_a_prefix_that_the_scheduler_refuses_is_not_found(
    scheduler: FakeScheduler, pinning_config: FrontendConfig, eventually: Any
) -> None:
    scheduler.unpinnable = {"story"}
    async with running_frontend(pinning_config) as (server, _):
        await eventually(lambda: list(server.scheduler.prefixes.known) == ["system"] and server.generation.ready)


async def test_a_request_waits_until_the_scheduler_has_said_what_is_pinned(
    fake_scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    fake_scheduler.pinned = {"story": [5, 6]}
    call = stub.Generate(ask("story", token_ids=pb.TokenIds(ids=[7])))
    await eventually(lambda: frontend.generation.num_running == 1)
    async with fake_scheduler.serving():
        assert await collect(call)
    assert fake_scheduler.submitted[0].prompt_token_ids == [5, 6, 7]
