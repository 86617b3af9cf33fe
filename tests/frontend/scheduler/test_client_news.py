"""What is news of a scheduler, on which all who wait for one look again: tokens are none."""

from typing import Any

from octavo.frontend.config import FrontendConfig
from octavo.frontend.scheduler import client
from octavo.frontend.scheduler.client import SchedulerAvailability, SchedulerClient
from octavo.frontend.server import FrontendServer
from octavo.testbed.grpc_calls import collect, ids_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb

TOKENS = 200


async def test_tokens_wake_nobody_but_their_reader_unless_the_scheduler_was_away(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any, monkeypatch: Any
) -> None:
    await eventually(lambda: frontend.generation.ready and frontend.scheduler.prefixes.reported)
    [link] = frontend.scheduler.links
    seen: list[SchedulerAvailability] = []

    def look(link: SchedulerClient) -> None:
        seen.append(link.availability)

    monkeypatch.setattr(link, "_on_change", look)
    monkeypatch.setattr(link, "_announced", SchedulerAvailability.NO_SCHEDULER)
    request = pb.GenerateRequest(text="hello", stopping=pb.StoppingCriteria(max_new_tokens=TOKENS))
    assert len(ids_of(await collect(stub.Generate(request)))) == TOKENS
    assert SchedulerAvailability.READY in seen
    # The messages of every second remain.
    assert len(seen) < TOKENS // 2


async def test_a_hello_that_found_no_connection_goes_out_with_the_first(
    config: FrontendConfig, fake_scheduler: FakeScheduler, eventually: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(client, "_HELLO_INTERVAL_S", 3600.0)
    async with running_frontend(config) as (frontend, _):
        [link] = frontend.scheduler.links

        def has_found_no_connection() -> bool:
            link._hurry.set()
            return link._is_cut_off

        for _ in range(2):
            async with fake_scheduler.serving():
                await eventually(lambda: frontend.generation.ready)
            await eventually(lambda: link.epoch is None)
            # A hello may have left into the connection that was ending: only the one after that finds none.
            link._is_cut_off = False
            await eventually(has_found_no_connection)
