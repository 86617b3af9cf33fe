"""What a request leaves out is put in; what the model or the workers cannot do is refused with its figures."""

import dataclasses
from typing import Any

import pytest

from octavo.frontend.errors import InvalidRequest, NotFound, Reason
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.stream.preparation import MAX_PROMPT_LOGPROBS, Limits, find_prefix, resolve_sampling
from octavo.frontend.text.model_defaults import ModelDefaults
from octavo.wire.sampling import NEUTRAL, BeamSearch, EarlyStopping, SamplingParams

DEFAULTS = ModelDefaults(
    eos_token_ids=frozenset({9}),
    max_model_len=100,
    vocab_size=50,
    sampling=NEUTRAL | {"temperature": 0.75, "top_p": 0.5, "top_k": 20, "min_p": 0.25, "repetition_penalty": 1.5},
)
LIMITS = Limits(vocab_size=50, max_model_len=100, capacity_tokens=1000, max_parallel=8)
PROMPT = [1] * 10
BEAM = BeamSearch(width=4, length_penalty=1.0, early_stopping=EarlyStopping.OFF)


def resolve(limits: Limits = LIMITS, prompt: list[int] = PROMPT, **fields: Any) -> SamplingParams:
    return resolve_sampling(GenerationRequest(prompt=prompt, **fields), prompt, DEFAULTS, limits)


def refusal(limits: Limits = LIMITS, prompt: list[int] = PROMPT, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        resolve(limits, prompt, **fields)
    return caught.value


def with_capacity(capacity_tokens: int) -> Limits:
    return Limits(50, 100, capacity_tokens, 8)


def test_the_model_says_what_the_request_leaves_out() -> None:
    sampling = resolve()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.75, 0.5, 20, 0.25)
    assert sampling.repetition_penalty == 1.5
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.0, 0.0)


def test_what_turns_a_default_off_is_in_force() -> None:
    sampling = resolve(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
    assert sampling.repetition_penalty == 1.0


def test_a_beam_search_does_not_sample_whatever_the_model_says() -> None:
    sampling = resolve(beam=BEAM, num_sequences=2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.num_sequences, sampling.parallel) == (1.5, 2, 4)


@pytest.mark.parametrize(
    ("fields", "num_sequences", "logprobs"),
    [
        ({"num_sequences": 3}, 3, None),
        ({"num_sequences": 2, "best_of": 5}, 5, 0),
        ({"num_sequences": 2, "best_of": 5, "top_logprobs": 4}, 5, 4),
        ({"top_logprobs": 0}, 1, 0),
    ],
)
def test_the_best_are_told_by_logprobs(fields: dict[str, Any], num_sequences: int, logprobs: int | None) -> None:
    sampling = resolve(**fields)
    assert (sampling.num_sequences, sampling.logprobs) == (num_sequences, logprobs)


@pytest.mark.parametrize(
    ("capacity", "fields", "max_tokens"),
    [
        (1000, {}, 90),
        (60, {}, 50),
        (60, {"num_sequences": 4}, 5),
        (63, {"best_of": 4}, 5),
        (60, {"beam": BEAM}, 5),
        (60, {"max_new_tokens": 3, "num_sequences": 4}, 3),
    ],
)
def test_without_a_limit_there_are_as_many_tokens_as_context_and_cache_leave(
    capacity: int, fields: dict[str, Any], max_tokens: int
) -> None:
    assert resolve(with_capacity(capacity), **fields).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_new_tokens": 6, "num_sequences": 4}, "4 sequences of 16 tokens"),
        ({"num_sequences": 6}, "6 sequences of 11 tokens"),
        ({"min_new_tokens": 6, "beam": BEAM}, "4 sequences of 16 tokens"),
        ({"max_new_tokens": 51}, "room for 61 tokens"),
    ],
)
def test_sequences_that_never_fit_side_by_side(fields: dict[str, Any], words: str) -> None:
    error = refusal(with_capacity(60), **fields)
    assert error.reason is Reason.NEVER_FITS_KV
    assert words in str(error)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"num_sequences": 9}, "num_sequences"), ({"best_of": 9}, "best_of"), ({"num_sequences": 1}, "")],
)
def test_no_more_sequences_than_run_side_by_side(fields: dict[str, Any], field: str) -> None:
    if not field:
        assert resolve(Limits(50, 100, 1000, 1), **fields).num_sequences == 1
        return
    assert str(refusal(**fields)) == f"{field} is 9, but at most 8 sequences run side by side here; lower it"


def test_no_more_beams_than_run_side_by_side() -> None:
    assert "beam_width is 4, but at most 3" in str(refusal(Limits(50, 100, 1000, 3), beam=BEAM))


@pytest.mark.parametrize(
    ("recommended", "fields", "max_tokens"),
    [
        (20, {}, 20),
        (20, {"max_new_tokens": 50}, 50),
        (20, {"max_new_tokens": 5}, 5),
        (20, {"min_new_tokens": 30}, 30),
        (2000, {}, 90),
        (20, {"num_sequences": 8}, 20),
        (200, {"num_sequences": 8, "min_new_tokens": 1}, 90),
    ],
)
def test_a_length_that_the_model_recommends_gives_way_to_all_else(
    recommended: int, fields: dict[str, Any], max_tokens: int
) -> None:
    defaults = dataclasses.replace(DEFAULTS, max_new_tokens=recommended)
    assert resolve_sampling(GenerationRequest(PROMPT, **fields), PROMPT, defaults, LIMITS).max_tokens == max_tokens


def test_min_new_tokens_must_fit_too() -> None:
    assert resolve(min_new_tokens=90).min_tokens == 90
    assert "min_new_tokens is 91, but there is room for 90" in str(refusal(min_new_tokens=91))


def test_a_prompt_with_an_id_outside_the_vocabulary() -> None:
    assert resolve(prompt=[49])
    assert str(refusal(prompt=[1, 50, 2])) == "prompt token id is 50, but the vocabulary ends at 49"


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "banned_token_ids"])
def test_ids_outside_the_vocabulary(field: str) -> None:
    inside: dict[str, Any] = {field: [0, 49]}
    outside: dict[str, Any] = {field: [0, 50]}
    assert resolve(**inside)
    assert str(refusal(**outside)) == f"{field} is 50, but the vocabulary ends at 49"


def test_biased_ids_outside_the_vocabulary() -> None:
    assert resolve(logit_bias={49: 1.0}).logit_bias == [(49, 1.0)]
    assert "logit_bias is 50, but the vocabulary ends at 49" in str(refusal(logit_bias={50: 1.0}))


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"allowed_token_ids": [1, 2], "banned_token_ids": [1]}, True),
        ({"allowed_token_ids": [1, 2], "banned_token_ids": [1, 2, 3]}, False),
        ({"allowed_token_ids": [9]}, True),
        ({"allowed_token_ids": [9], "min_new_tokens": 1}, False),
        ({"allowed_token_ids": [9], "min_new_tokens": 1, "ignore_eos": True}, True),
        ({"banned_token_ids": range(49)}, True),
        ({"banned_token_ids": range(50)}, False),
    ],
)
def test_a_token_must_be_left_to_choose(fields: dict[str, Any], left: bool) -> None:
    if left:
        assert resolve(**fields)
    else:
        assert "must leave a token to choose" in str(refusal(**fields))


def test_more_prompt_logprobs_than_a_message_holds() -> None:
    limits = Limits(50, 1 << 20, 1 << 24, 8)
    most = [1] * (MAX_PROMPT_LOGPROBS // 16)
    assert resolve(limits, most, prompt_logprobs=15).prompt_logprobs == 15
    assert "prompt_logprobs is 16" in str(refusal(limits, most, prompt_logprobs=16))


def test_every_seed_is_drawn_anew() -> None:
    assert resolve().seed != resolve().seed
    assert resolve(seed=0).seed == 0


def test_a_prefix_that_is_not_pinned() -> None:
    known = {"b": [2], "a": [1]}
    for tells_names in (True, False):
        assert find_prefix("b", known, tells_names=tells_names) == [2]
    with pytest.raises(NotFound, match="no prefix 'c' is pinned; pinned are: 'a', 'b'"):
        find_prefix("c", known, tells_names=True)
    with pytest.raises(NotFound, match="pinned are: none"):
        find_prefix("c", {}, tells_names=True)
    with pytest.raises(NotFound, match="no prefix 'c' is pinned; ask") as caught:
        find_prefix("c", known, tells_names=False)
    assert "'a'" not in str(caught.value)


def test_sequences_side_by_side_share_the_cache_in_whole_blocks() -> None:
    limits = Limits(50, 1000, capacity_tokens=160, max_parallel=8, block_size=16)
    # Ten blocks: two for each of four sequences, of which the prompt takes its part.
    assert resolve(limits, num_sequences=4).max_tokens == 32 - len(PROMPT)
    assert "4 sequences of 33" in str(refusal(limits, num_sequences=4, max_new_tokens=33 - len(PROMPT)))
