"""Requests of several sequences through real processes: side by side, best of, beams; short of blocks; with losses."""

import grpc
import pytest

from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.stack import Stack, collect_choices, token_request
from octavo.testing.depth import deep
from octavo.v1 import generation_pb2
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

from ..conftest import StartStack, all_at_once

pytestmark = pytest.mark.system

NUM_TOKENS = 40
PROMPTS = [[(11 * i + j) % 250 for j in range(5 + 4 * i)] for i in range(6)]
SMALL = {"OCTAVO_NUM_BLOCKS": "40", "OCTAVO_BLOCK_SIZE": "4", "OCTAVO_NUM_CPU_BLOCKS": "40"}


def sampled(prompt: list[int], n: int, seed: int, **sampling: object) -> generation_pb2.GenerateRequest:
    request = token_request(prompt, NUM_TOKENS)
    request.sampling.CopyFrom(
        generation_pb2.SamplingParams(temperature=1.0, seed=seed, num_sequences=n, **sampling)  # type: ignore[arg-type]
    )
    return request


def beams(prompt: list[int], width: int, n: int) -> generation_pb2.GenerateRequest:
    request = token_request(prompt, 12)
    search = generation_pb2.BeamSearch(beam_width=width, length_penalty=1.0)
    request.sampling.CopyFrom(generation_pb2.SamplingParams(num_sequences=n, beam_search=search))
    return request


def expected(stack: Stack, prompt: list[int], n: int, seed: int) -> list[list[int]]:
    vocabulary = FakeVocabulary.read(stack.model)
    sampling = SamplingParams(temperature=1.0, seed=seed, num_sequences=n, max_tokens=NUM_TOKENS)
    return [expected_tokens(prompt, sampling, index, NUM_TOKENS, vocabulary) for index in range(n)]


@pytest.mark.parametrize("preemption", ["auto", *deep("recompute")])
def test_sequences_side_by_side_lose_their_blocks_and_nothing_else(new_stack: StartStack, preemption: str) -> None:
    stack = new_stack(**SMALL, OCTAVO_PREEMPTION=preemption).start_all()
    streams = all_at_once(stack, [sampled(prompt, 2, seed) for seed, prompt in enumerate(PROMPTS)])
    answers = [collect_choices(stream) for stream in streams]
    for seed, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert answer.token_ids == expected(stack, prompt, 2, seed)
        assert answer.usage.completion_tokens == 2 * NUM_TOKENS
    assert sum(answer.usage.preemptions for answer in answers) > 0
    assert (sum(answer.usage.swaps for answer in answers) > 0) == (preemption == "auto")
    stack.wait_idle()
    stack.assert_alive()


def test_the_best_of_several_are_sent_once_and_best_first(new_stack: StartStack) -> None:
    stack = new_stack().start_all()
    prompt = PROMPTS[3]
    everything = stack.choices(sampled(prompt, 5, 1, best_of=5))
    best = stack.choices(sampled(prompt, 2, 1, best_of=5))
    ranked = sorted(everything.finished, key=lambda end: -end.cumulative_logprob)
    assert best.token_ids == [everything.token_ids[end.index] for end in ranked[:2]]
    assert [end.cumulative_logprob for end in best.finished] == [end.cumulative_logprob for end in ranked[:2]]
    assert best.usage.completion_tokens == 5 * NUM_TOKENS
    stack.wait_idle()


def test_a_beam_search_is_the_same_alone_in_a_crowd_and_without_blocks_to_spare(new_stack: StartStack) -> None:
    stack = new_stack(**SMALL).start_all()
    requests = [beams(prompt, 4, 3) for prompt in PROMPTS]
    alone = [stack.choices(request) for request in requests]
    streams = all_at_once(stack, [*requests, *(sampled(prompt, 2, 9) for prompt in PROMPTS)])
    crowd = [collect_choices(stream) for stream in streams]
    assert [answer.token_ids for answer in crowd[: len(requests)]] == [answer.token_ids for answer in alone]
    assert sum(answer.usage.preemptions for answer in crowd) > 0
    for answer in alone:
        scores = [end.cumulative_logprob / len(t) for end, t in zip(answer.finished, answer.token_ids, strict=True)]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
    stack.wait_idle()


def test_several_sequences_survive_the_death_of_worker_and_scheduler(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="10").start_all(workers=2)
    requests = [sampled(prompt, 3, seed) for seed, prompt in enumerate(PROMPTS)] + [beams(PROMPTS[2], 3, 2)]
    undisturbed = stack.choices(requests[-1])
    streams = [stack.stream(request) for request in requests]
    # The beam search says nothing before its end.
    read = [[next(stream) for _ in range(4)] for stream in streams[:-1]] + [[]]
    stack.kill("worker-0")
    stack.kill("scheduler")
    stack.start("scheduler", "scheduler-again")
    answers = [collect_choices([*events, *stream]) for events, stream in zip(read, streams, strict=True)]
    for seed, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=False)):
        assert answer.token_ids == expected(stack, prompt, 3, seed)
    assert answers[-1].token_ids == undisturbed.token_ids
    stack.wait_idle()


def test_a_stop_string_ends_one_sequence_and_leaves_the_others(new_stack: StartStack) -> None:
    stack = new_stack().start_all()
    request = sampled(PROMPTS[1], 3, 5)
    whole = stack.choices(request)
    # A byte of sequence 1 that the others do not say before.
    position, stop = next(
        (position, token)
        for position, token in enumerate(whole.token_ids[1])
        if 0 < token < 94 and not any(token in other for other in (whole.token_ids[0], whole.token_ids[2]))
    )
    request.stopping.stop_strings.append(stack.generation.Detokenize(generation_pb2.DetokenizeRequest(ids=[stop])).text)
    answer = stack.choices(request)
    assert [len(tokens) for tokens in answer.token_ids] == [NUM_TOKENS, position + 1, NUM_TOKENS]
    assert answer.finished[1].WhichOneof("matched") == "stop_string"
    stack.wait_idle()


IMPOSSIBLE: list[tuple[dict[str, object], str]] = [
    ({"num_sequences": 0}, "num_sequences"),
    ({"num_sequences": 17}, "num_sequences"),
    ({"num_sequences": 3, "best_of": 2}, "best_of"),
    ({"num_sequences": 5}, "at most 4"),
    ({"beam_search": {"beam_width": 40}}, "beam_width"),
    ({"beam_search": {"beam_width": 2}, "num_sequences": 3}, "beam_width"),
    ({"beam_search": {"beam_width": 2}, "temperature": 0.5}, "temperature"),
]


def test_groups_that_cannot_be_are_refused_and_hold_nothing(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_MAX_NUM_SEQS="4").start_all()
    for sampling, says in IMPOSSIBLE:
        request = token_request(PROMPTS[0], 4)
        request.sampling.CopyFrom(generation_pb2.SamplingParams(**sampling))  # type: ignore[arg-type]
        with pytest.raises(grpc.RpcError) as refused:
            stack.choices(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert says in (refused.value.details() or "")
        assert reason_of(refused.value) == "BAD_PARAMETER"
    stack.wait_idle()
    stack.assert_alive()
