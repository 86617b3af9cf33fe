"""What is news of a scheduler, on which all who wait for one look again: tokens are none."""

from typing import Any

from octavo.frontend.scheduler.client import SchedulerAvailability, SchedulerClient
from octavo.frontend.server import FrontendServer
from octavo.testbed.grpc_calls import collect, ids_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
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
