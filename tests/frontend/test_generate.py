"""Generate over real gRPC: the events of a request, whatever its tokens are and however it ends."""

from typing import Any

from octavo.testing.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb


async def collect(call: Any) -> list[pb.GenerateResponse]:
    return [response async for response in call]


def text_of(responses: list[pb.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


def ids_of(responses: list[pb.GenerateResponse]) -> list[int]:
    return [i for response in responses for i in response.delta.token_ids]


async def test_events_come_in_order(scheduler: FakeScheduler, stub: Any) -> None:
    request = pb.GenerateRequest(text="hello", stopping=pb.StoppingCriteria(max_new_tokens=20))
    responses = await collect(stub.Generate(request))
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "started"
    assert set(kinds[1:-2]) == {"delta"}
    assert kinds[-2:] == ["finished", "usage"]
    assert responses[0].started.prompt_tokens == 5
    assert responses[-2].finished.reason == pb.FINISH_REASON_LENGTH
    assert responses[-1].usage.completion_tokens == 20
    assert len(ids_of(responses)) == 20
    assert responses[-1].usage.time_to_first_token.ToNanoseconds() > 0
