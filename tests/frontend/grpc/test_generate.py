"""Generate over real gRPC: the events of a request, whatever its tokens are and however it ends."""

import asyncio
from typing import Any

import pytest

from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.server import FrontendServer
from octavo.frontend.stream.pacing import Turns
from octavo.testbed.grpc_calls import collect, finished_of, ids_of, text_of
from octavo.testbed.tiny_model import END_TOKEN_ID
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import Delta


def ask(text: str = "hello", max_new_tokens: int | None = 20, **stopping: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(seed=7),
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens, **stopping),
    )


def answer_with(scheduler: FakeScheduler, frontend: FrontendServer, text: str) -> list[int]:
    ids = frontend.generation.tokenizer.encode(text)
    scheduler.answer = lambda request, index: ids[: request.sampling.max_tokens]
    return ids


async def test_events_come_in_order(scheduler: FakeScheduler, stub: Any) -> None:
    responses = await collect(stub.Generate(ask()))
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "started"
    assert set(kinds[1:-2]) == {"delta"}
    assert kinds[-2:] == ["finished", "usage"]
    assert responses[0].started.prompt_tokens == 5
    assert len(responses[0].started.request_id) == 32
    assert finished_of(responses).reason == pb.FINISH_REASON_LENGTH
    assert responses[-1].usage.completion_tokens == len(ids_of(responses)) == 20
    assert responses[-1].usage.time_to_first_token.ToNanoseconds() > 0


async def test_text_is_the_decoding_of_the_ids(scheduler: FakeScheduler, frontend: FrontendServer, stub: Any) -> None:
    answer_with(scheduler, frontend, "日本 🙂 and 1234<|im_start|>")
    responses = await collect(stub.Generate(ask(max_new_tokens=21)))
    assert text_of(responses) == frontend.generation.tokenizer.decode(ids_of(responses), skip_special_tokens=True)


async def test_a_chat_goes_through_the_template(scheduler: FakeScheduler, stub: Any) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="<|im_end|>")])
    await collect(stub.Generate(pb.GenerateRequest(chat=chat, stopping=pb.StoppingCriteria(max_new_tokens=1))))
    assert scheduler.submitted[0].prompt_token_ids.count(END_TOKEN_ID) == 1


async def test_token_ids_are_taken_as_they_are(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask()
    request.token_ids.ids.extend([1, 2, 257])
    await collect(stub.Generate(request))
    assert scheduler.submitted[0].prompt_token_ids == [1, 2, 257]


async def test_what_is_left_out_is_filled_in(scheduler: FakeScheduler, stub: Any) -> None:
    scheduler.capacity_tokens = 100
    request = ask(max_new_tokens=None)
    request.ClearField("sampling")
    responses = await collect(stub.Generate(request))
    sampling = scheduler.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)
    assert sampling.max_tokens == 95
    assert sampling.stop_token_ids == [END_TOKEN_ID]
    assert sampling.seed == responses[0].started.seed


async def test_what_is_given_is_in_force(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask(ignore_eos=True, stop_token_ids=[9])
    request.request_id = "mine"
    request.sampling.CopyFrom(pb.SamplingParams(temperature=0.5, top_p=0.25, top_k=3, seed=2**64 - 1))
    responses = await collect(stub.Generate(request))
    sampling = scheduler.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 2**64 - 1)
    assert sampling.stop_token_ids == [9]
    assert responses[0].started.request_id == scheduler.submitted[0].request_id == "mine"
    assert responses[0].started.seed == 2**64 - 1


async def test_eos_ends_it(scheduler: FakeScheduler, stub: Any) -> None:
    scheduler.answer = lambda request, index: [40, 41, END_TOKEN_ID]
    responses = await collect(stub.Generate(ask()))
    assert finished_of(responses) == pb.Finished(reason=pb.FINISH_REASON_STOP, eos_token_id=END_TOKEN_ID)
    assert ids_of(responses) == [40, 41, END_TOKEN_ID]
    assert responses[-1].usage.completion_tokens == 3
    assert scheduler.aborted == []


async def test_a_stop_string_ends_it_here_and_there(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    scheduler.hold_after = len("one STOP")
    answer_with(scheduler, frontend, "one STOP two" * 9)
    responses = await collect(stub.Generate(ask(max_new_tokens=50, stop_strings=["nope", "STOP"])))
    assert text_of(responses) == "one "
    assert finished_of(responses) == pb.Finished(reason=pb.FINISH_REASON_STOP, stop_string="STOP")
    assert responses[-1].usage.completion_tokens == len("one STOP")
    await eventually(lambda: scheduler.aborted == [responses[0].started.request_id])
    assert scheduler.running == set()


async def test_a_stop_string_may_be_kept(scheduler: FakeScheduler, frontend: FrontendServer, stub: Any) -> None:
    answer_with(scheduler, frontend, "one STOP two")
    responses = await collect(stub.Generate(ask(max_new_tokens=12, stop_strings=["STOP"], include_stop=True)))
    assert text_of(responses) == "one STOP"


async def test_one_delta_when_not_incremental(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask()
    request.response.incremental = False
    responses = await collect(stub.Generate(request))
    assert [response.WhichOneof("event") for response in responses] == ["started", "delta", "finished", "usage"]
    assert len(ids_of(responses)) == 20


@pytest.mark.parametrize(("text", "token_ids"), [(True, False), (False, True)])
async def test_deltas_carry_what_is_asked_for(scheduler: FakeScheduler, stub: Any, text: bool, token_ids: bool) -> None:
    request = ask()
    request.response.CopyFrom(pb.ResponseOptions(text=text, token_ids=token_ids))
    responses = await collect(stub.Generate(request))
    assert bool(text_of(responses)) is text
    assert bool(ids_of(responses)) is token_ids


async def test_the_wire_may_repeat_and_lose(scheduler: FakeScheduler, stub: Any) -> None:
    expected = ids_of(await collect(stub.Generate(ask())))
    scheduler.tamper = lambda delta: [delta, delta] if delta.start_index % 3 else [delta]
    assert ids_of(await collect(stub.Generate(ask()))) == expected
    lost: set[int] = set()

    def lose_each_once(delta: Delta) -> list[Delta]:
        if delta.start_index % 7 == 3 and delta.start_index not in lost:
            lost.add(delta.start_index)
            return []
        return [delta]

    scheduler.tamper = lose_each_once
    scheduler.pace_s = 0.002
    assert ids_of(await collect(stub.Generate(ask()))) == expected
    assert lost


async def test_a_slow_reader_gets_merged_deltas(
    scheduler: FakeScheduler, frontend: FrontendServer, eventually: Any
) -> None:
    events = frontend.generation.generate(GenerationRequest(prompt="hello", max_new_tokens=50))
    await anext(events)
    (journal,) = frontend.scheduler.journals
    await eventually(lambda: journal.complete)
    kinds = [type(event).__name__ async for _, event in events]
    assert kinds == ["TextDelta", "SequenceFinished", "RequestUsage"]


async def test_many_at_once_do_not_mix(scheduler: FakeScheduler, stub: Any) -> None:
    prompts = [f"prompt number {i}" for i in range(40)]
    together = await asyncio.gather(*(collect(stub.Generate(ask(prompt))) for prompt in prompts))
    scheduler.tokens_per_delta = 7
    alone = [await collect(stub.Generate(ask(prompt))) for prompt in prompts[:5]]
    assert [ids_of(r) for r in together[:5]] == [ids_of(r) for r in alone]


async def test_a_call_that_is_cancelled_while_others_go_first_is_over(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = stub.Generate(ask())
    waiting, others_first = asyncio.Event(), Turns.others_first

    async def wait_for_others(turns: Turns) -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Turns, "others_first", wait_for_others)
    await asyncio.wait_for(waiting.wait(), 60)
    call.cancel()
    await eventually(lambda: not frontend.generation.num_running and not scheduler.running)
    monkeypatch.setattr(Turns, "others_first", others_first)
    assert len(ids_of(await collect(stub.Generate(ask())))) == 20


async def test_streams_that_share_turns_each_have_their_events_in_order(
    scheduler: FakeScheduler, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However the scheduler's messages fall: all streams but the first of a turn find it shared.
    others_first = Turns.others_first

    async def share(turns: Turns) -> None:
        turns.take_now()
        await others_first(turns)

    monkeypatch.setattr(Turns, "others_first", share)
    for responses in await asyncio.gather(*(collect(stub.Generate(ask())) for _ in range(8))):
        assert [response.event_offset for response in responses] == list(range(1, len(responses) + 1))
        assert len(ids_of(responses)) == 20
