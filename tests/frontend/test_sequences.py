"""Several sequences per request over real gRPC: side by side, the best of many, and those of a beam search."""

import asyncio
from typing import Any

import msgspec
import pytest

from octavo.frontend.server import FrontendServer
from octavo.testbed.grpc_calls import all_finished, collect, finished_of, ids_of, of_sequence, text_of
from octavo.testbed.tiny_model import END_TOKEN_ID
from octavo.testing.fakes.fake_answers import letters, made_up, total
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import Delta, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping


def ask(
    num_sequences: int = 1, *, max_new_tokens: int = 12, stop_strings: tuple[str, ...] = (), **sampling: Any
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="hello",
        sampling=pb.SamplingParams(seed=7, num_sequences=num_sequences, **sampling),
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens, stop_strings=stop_strings),
    )


def searching(width: int, num_sequences: int, **beam: Any) -> pb.GenerateRequest:
    return ask(num_sequences, beam_search=pb.BeamSearch(beam_width=width, **beam))


def kinds(responses: list[pb.GenerateResponse]) -> list[str]:
    return [str(response.WhichOneof("event")) for response in responses]


async def read_while_held(scheduler: FakeScheduler, call: Any, num_sequences: int) -> list[pb.GenerateResponse]:
    """All events of a call whose sequences are let go only when each has been seen to begin."""
    scheduler.hold_after = 6
    responses = []
    async for response in call:
        responses.append(response)
        if {r.delta.index for r in responses if r.WhichOneof("event") == "delta"} == set(range(num_sequences)):
            scheduler.hold_after = 1 << 30
    return responses


async def test_sequences_stream_side_by_side(scheduler: FakeScheduler, frontend: FrontendServer, stub: Any) -> None:
    responses = await read_while_held(scheduler, stub.Generate(ask(3)), 3)
    assert scheduler.submitted[0].sampling.num_sequences == 3
    for index in range(3):
        own = of_sequence(index, responses)
        assert ids_of(own) == letters(scheduler.submitted[0], index)
        assert text_of(own) == frontend.generation.tokenizer.decode(ids_of(own), skip_special_tokens=True)
        assert kinds(own)[-1] == "finished"
    assert kinds(responses)[-1] == "usage"
    assert responses[-1].usage.completion_tokens == 36


async def test_each_sequence_has_its_own_end(scheduler: FakeScheduler, stub: Any) -> None:
    scheduler.answer = lambda request, index: [40, END_TOKEN_ID] if index else letters(request, 0)
    responses = await collect(stub.Generate(ask(2)))
    ends = {finished.index: finished for finished in all_finished(responses)}
    assert ends == {
        0: pb.Finished(index=0, reason=pb.FINISH_REASON_LENGTH),
        1: pb.Finished(index=1, reason=pb.FINISH_REASON_STOP, eos_token_id=END_TOKEN_ID),
    }
    assert responses[-1].usage.completion_tokens == 14


async def test_one_delta_per_sequence_when_not_incremental(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask(2)
    request.response.incremental = False
    responses = await collect(stub.Generate(request))
    assert kinds(responses) == ["started", "delta", "finished", "delta", "finished", "usage"]
    assert [len(ids_of(of_sequence(index, responses))) for index in range(2)] == [12, 12]


async def test_a_sequence_that_ends_by_a_stop_string_is_ended_there_while_the_other_runs(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    encode = frontend.generation.tokenizer.encode
    answers = [encode("one two STOP and so on" * 2), encode("no such word" * 4)]
    scheduler.answer = lambda request, index: answers[index][: request.sampling.max_tokens]
    scheduler.hold_after = 12
    request = ask(2, max_new_tokens=24, stop_strings=("STOP",))
    call = asyncio.create_task(collect(stub.Generate(request)))
    await eventually(lambda: len(scheduler.ended) == 1)
    assert scheduler.ended == [(scheduler.submitted[0].request_id, 1, 0)]
    scheduler.hold_after = 1 << 30
    responses = await call
    assert [text_of(of_sequence(index, responses)) for index in range(2)] == ["one two ", "no such word" * 2]
    assert all_finished(responses)[0].stop_string == "STOP"
    assert scheduler.aborted == []


async def test_the_last_sequence_that_ends_by_a_stop_string_ends_the_request(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    scheduler.answer = lambda request, index: frontend.generation.tokenizer.encode("a STOP" * 4)
    scheduler.hold_after = 8
    request = ask(2, max_new_tokens=24, stop_strings=("STOP",))
    responses = await collect(stub.Generate(request))
    assert [finished.stop_string for finished in all_finished(responses)] == ["STOP", "STOP"]
    await eventually(lambda: len(scheduler.aborted) == 1 and len(scheduler.ended) == 1)


async def test_a_restarted_scheduler_goes_on_with_the_sequences_that_have_not_ended(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    stopping = frontend.generation.tokenizer.encode("xSTOP and more text")

    def answer(request: Request, index: int) -> list[int]:
        return [[40, END_TOKEN_ID], stopping, letters(request, 2)][index]

    scheduler.answer = answer
    scheduler.hold_after = 8
    request = ask(3, max_new_tokens=16, stop_strings=("STOP",))
    call = asyncio.create_task(collect(stub.Generate(request)))
    await eventually(lambda: len(scheduler.ended) == 1)
    scheduler.restart()
    scheduler.hold_after = 1 << 30
    responses = await call
    again = scheduler.submitted[-1].generated
    assert [sequence.finished for sequence in again] == [True, True, False]
    assert ids_of(of_sequence(0, responses)) == [40, END_TOKEN_ID]
    assert text_of(of_sequence(1, responses)) == "x"
    assert ids_of(of_sequence(2, responses)) == letters(scheduler.submitted[0], 2)
    assert responses[-1].usage.preemptions == 1


async def test_the_wire_may_lose_any_sequences_tokens(scheduler: FakeScheduler, stub: Any) -> None:
    lost: set[tuple[int, int]] = set()

    def lose_each_once(delta: Delta) -> list[Delta]:
        place = (delta.sequence_index, delta.start_index)
        if delta.start_index % 5 == 2 + delta.sequence_index and place not in lost:
            lost.add(place)
            return []
        return [delta]

    scheduler.tamper = lose_each_once
    scheduler.pace_s = 0.002
    responses = await collect(stub.Generate(ask(2)))
    assert len(lost) == 4
    for index in range(2):
        assert ids_of(of_sequence(index, responses)) == letters(scheduler.submitted[0], index)


async def test_the_best_of_many_come_at_the_end_best_first(scheduler: FakeScheduler, stub: Any) -> None:
    responses = await collect(stub.Generate(ask(2, best_of=5)))
    assert kinds(responses) == ["started", "delta", "finished", "delta", "finished", "usage"]
    sampling = scheduler.submitted[0].sampling
    assert (sampling.num_sequences, sampling.logprobs) == (5, 0)
    answers = [letters(scheduler.submitted[0], index) for index in range(5)]
    best = sorted(answers, key=total, reverse=True)[:2]
    assert len(set(map(total, answers))) == 5
    assert [ids_of(of_sequence(index, responses)) for index in range(2)] == best
    assert [finished.cumulative_logprob for finished in all_finished(responses)] == list(map(total, best))
    assert [finished.index for finished in all_finished(responses)] == [0, 1]
    assert not responses[1].delta.logprobs
    assert responses[-1].usage.completion_tokens == 5 * 12


async def test_best_of_as_many_as_are_wanted_streams(scheduler: FakeScheduler, stub: Any) -> None:
    responses = await read_while_held(scheduler, stub.Generate(ask(2, best_of=2)), 2)
    sums = {finished.index: finished.cumulative_logprob for finished in all_finished(responses)}
    assert sums == {index: total(letters(scheduler.submitted[0], index)) for index in range(2)}


async def test_what_a_stop_string_cuts_off_does_not_count_for_the_best(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any
) -> None:
    answers = [frontend.generation.tokenizer.encode(text) for text in ("a.||||||||", "||||")]
    scheduler.answer = lambda request, index: answers[index][: request.sampling.max_tokens]
    scheduler.tokens_per_delta = 10
    assert total(answers[0]) < total(answers[1]) < total(answers[0][:2])
    request = ask(1, best_of=2, max_new_tokens=4, stop_strings=(".",))
    responses = await collect(stub.Generate(request))
    assert text_of(responses) == "a"
    assert finished_of(responses).cumulative_logprob == total(answers[0][:2])
    assert responses[-1].usage.completion_tokens == 6


async def test_logprobs_come_with_their_tokens(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask(2)
    request.response.top_logprobs = 3
    responses = await collect(stub.Generate(request))
    assert scheduler.submitted[0].sampling.logprobs == 3
    for index in range(2):
        own = of_sequence(index, responses)
        tokens = [token for response in own for token in response.delta.logprobs]
        expected = [made_up(token_id, 3) for token_id in ids_of(own)]
        assert [token.id for token in tokens] == ids_of(own)
        assert [(token.logprob, token.rank) for token in tokens] == [(e.logprob, e.rank) for e in expected]
        assert [(c.id, c.logprob) for c in tokens[0].top] == [(0, -0.125), (1, -0.25), (2, -0.375)]
        assert own[-1].finished.cumulative_logprob == total(ids_of(own))


async def test_logprobs_need_no_alternatives_and_no_ids(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask()
    request.response.top_logprobs = 0
    request.response.token_ids = False
    responses = await collect(stub.Generate(request))
    tokens = [token for response in responses for token in response.delta.logprobs]
    assert [token.id for token in tokens] == letters(scheduler.submitted[0], 0)
    assert not any(token.top for token in tokens)


async def test_no_logprobs_unless_asked_for(scheduler: FakeScheduler, stub: Any) -> None:
    responses = await collect(stub.Generate(ask()))
    assert scheduler.submitted[0].sampling.logprobs is None
    assert scheduler.submitted[0].sampling.prompt_logprobs is None
    assert not any(response.delta.logprobs for response in responses)
    assert not finished_of(responses).HasField("cumulative_logprob")


async def test_the_prompts_logprobs_come_with_the_start(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask()
    request.token_ids.ids.extend([5, 6, 7])
    request.response.prompt_logprobs = 1
    started = (await collect(stub.Generate(request)))[0].started
    assert [(t.id, t.logprob, t.rank, len(t.top)) for t in started.prompt_logprobs] == [
        (token_id, made_up(token_id, 1).logprob, made_up(token_id, 1).rank, 1) for token_id in (6, 7)
    ]


async def test_a_scheduler_that_leaves_out_the_logprobs_is_at_fault(scheduler: FakeScheduler, stub: Any) -> None:
    scheduler.tamper = lambda delta: [msgspec.structs.replace(delta, logprobs=[])]
    request = ask()
    request.response.top_logprobs = 0
    with pytest.raises(Exception, match="without the logprobs, or the output, asked for"):
        await collect(stub.Generate(request))
    assert len(scheduler.submitted) == 1


async def test_the_results_of_a_beam_search_come_whole_in_the_schedulers_order(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any
) -> None:
    # The likelier one comes second: a length penalty may rank it there.
    answers = [[*frontend.generation.tokenizer.encode("|" * 8), END_TOKEN_ID], [40, 41, END_TOKEN_ID]]
    scheduler.answer = lambda request, index: answers[index]
    assert total(answers[0]) < total(answers[1])
    responses = await collect(stub.Generate(searching(4, 2)))
    assert kinds(responses) == ["started", "delta", "finished", "delta", "finished", "usage"]
    assert [ids_of(of_sequence(index, responses)) for index in range(2)] == answers
    assert [finished.cumulative_logprob for finished in all_finished(responses)] == list(map(total, answers))
    assert responses[-1].usage.completion_tokens == 12


async def test_a_beam_search_is_passed_on(scheduler: FakeScheduler, stub: Any) -> None:
    request = searching(4, 2, length_penalty=-0.5, early_stopping=pb.EARLY_STOPPING_NEVER)
    await collect(stub.Generate(request))
    sampling = scheduler.submitted[0].sampling
    assert sampling.beam == BeamSearch(4, -0.5, EarlyStopping.NEVER)
    assert (sampling.num_sequences, sampling.temperature, sampling.logprobs) == (2, 0.0, None)


async def test_a_beam_search_left_to_its_defaults(scheduler: FakeScheduler, stub: Any) -> None:
    await collect(stub.Generate(searching(2, 1)))
    assert scheduler.submitted[0].sampling.beam == BeamSearch(2, 1.0, EarlyStopping.OFF)


async def test_a_beam_search_starts_over_with_a_restarted_scheduler(
    scheduler: FakeScheduler, stub: Any, eventually: Any
) -> None:
    scheduler.hold_after = 0
    call = asyncio.create_task(collect(stub.Generate(searching(3, 2))))
    await eventually(lambda: len(scheduler.running) == 1)
    scheduler.restart()
    scheduler.hold_after = 1 << 30
    responses = await call
    assert [request.generated for request in scheduler.submitted] == [[], []]
    assert [len(ids_of(of_sequence(index, responses))) for index in range(2)] == [12, 12]


async def test_scheduling_and_salt_are_passed_on(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask()
    request.scheduling.CopyFrom(pb.SchedulingHints(tenant="them", priority=-100))
    request.cache.salt = "pepper"
    await collect(stub.Generate(request))
    submitted = scheduler.submitted[0]
    assert (submitted.tenant, submitted.priority, submitted.cache_key.salt) == ("them", -100, "pepper")


async def test_all_sampling_parameters_are_passed_on(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask(
        min_p=0.25,
        frequency_penalty=-1.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={9: -2.0, 3: 4.0},
        allowed_token_ids=[5, 4, 5],
        banned_token_ids=[6],
    )
    request.stopping.min_new_tokens = 2
    await collect(stub.Generate(request))
    sampling = scheduler.submitted[0].sampling
    assert (sampling.min_p, sampling.frequency_penalty, sampling.presence_penalty) == (0.25, -1.5, 1.5)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.25, 2)
    assert sampling.logit_bias == [(3, 4.0), (9, -2.0)]
    assert (sampling.allowed_token_ids, sampling.banned_token_ids) == ([4, 5], [6])


async def test_swaps_are_reported(scheduler: FakeScheduler, stub: Any) -> None:
    scheduler.tamper = lambda delta: [msgspec.structs.replace(delta, preemptions=3, swaps=2)]
    usage = (await collect(stub.Generate(ask())))[-1].usage
    assert (usage.preemptions, usage.swaps) == (3, 2)
