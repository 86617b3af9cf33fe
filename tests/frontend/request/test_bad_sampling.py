"""Every number at its limits, beyond them, and none at all; and what cannot be had together."""

import math
from typing import Any

import grpc
import pytest

from octavo.frontend.errors import InvalidRequest, ServiceError, Unsupported
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.request.validation import check_form
from octavo.testbed.grpc_calls import collect, reason_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb
from octavo.wire.sampling import BeamSearch, EarlyStopping

Code = grpc.StatusCode

# Field -> its least and greatest value, and one step outside.
WHOLE = {
    "top_k": (0, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "num_sequences": (1, 16),
    "best_of": (1, 16),
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "priority": (-100, 100),
}
REAL = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "top_p": (5e-324, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 2.0),
}


def form(**fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt="x", **fields)


def beam(width: int = 4, length_penalty: float = 1.0) -> BeamSearch:
    return BeamSearch(width, length_penalty, EarlyStopping.OFF)


def refusal(request: GenerationRequest) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        check_form(request)
    return caught.value


@pytest.mark.parametrize("field", [*WHOLE, *REAL])
def test_the_limits_are_allowed(field: str) -> None:
    for value in (WHOLE | REAL)[field]:
        check_form(form(**{field: value}))


@pytest.mark.parametrize("field", WHOLE)
def test_a_whole_number_beyond_its_limits(field: str) -> None:
    low, high = WHOLE[field]
    for value in (low - 1, high + 1, 2**63):
        if not low <= value <= high:
            assert str(refusal(form(**{field: value}))).startswith(f"{field} is {value}, but it must be ")


@pytest.mark.parametrize("field", REAL)
def test_a_number_beyond_its_limits(field: str) -> None:
    low, high = REAL[field]
    below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    for value in (below, above, math.nan, math.inf, -math.inf, -1e9, 2.0**63):
        assert str(refusal(form(**{field: value}))).startswith(f"{field} is {value}, but it must be ")


def test_least_and_most_new_tokens() -> None:
    check_form(form(min_new_tokens=5, max_new_tokens=5))
    assert "min_new_tokens is 6, but max_new_tokens is 5" in str(refusal(form(min_new_tokens=6, max_new_tokens=5)))
    assert "min_new_tokens is -1" in str(refusal(form(min_new_tokens=-1)))


@pytest.mark.parametrize("value", [-100.5, 100.5, math.nan, math.inf, -math.inf])
def test_a_bias_beyond_its_limits(value: float) -> None:
    check_form(form(logit_bias={1: -100.0, 2: 100.0}))
    assert f"logit_bias is {value}" in str(refusal(form(logit_bias={1: 0.0, 2: value})))


@pytest.mark.parametrize(
    ("field", "most"), [("logit_bias", 300), ("allowed_token_ids", 1024), ("banned_token_ids", 1024)]
)
def test_more_entries_than_may_be(field: str, most: int) -> None:
    def entries(count: int) -> Any:
        return dict.fromkeys(range(count), 1.0) if field == "logit_bias" else range(count)

    check_form(form(**{field: entries(most)}))
    assert f"{field} is repeated {most + 1} times" in str(refusal(form(**{field: entries(most + 1)})))


@pytest.mark.parametrize("field", ["tenant", "salt"])
def test_labels(field: str) -> None:
    check_form(form(**{field: "é" * 256}))
    assert f"{field} is 257 characters" in str(refusal(form(**{field: "x" * 257})))
    assert "printable" in str(refusal(form(**{field: "a\nb"})))


@pytest.mark.parametrize("width", [-1, 0, 17, 2**31])
def test_a_beam_width_beyond_its_limits(width: int) -> None:
    check_form(form(beam=beam(16), num_sequences=16))
    assert f"beam_width is {width}, but it must be between 1 and 16" in str(refusal(form(beam=beam(width))))


@pytest.mark.parametrize("penalty", [-100.5, 100.5, math.nan, math.inf])
def test_a_length_penalty_beyond_its_limits(penalty: float) -> None:
    check_form(form(beam=beam(length_penalty=-100.0)))
    assert f"length_penalty is {penalty}" in str(refusal(form(beam=beam(length_penalty=penalty))))


TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "fewer best than wanted": ({"best_of": 2, "num_sequences": 3}, "best_of is 2, but num_sequences is 3"),
    "best of a beam search": ({"best_of": 4, "beam": beam()}, "best_of is 4, but a beam search keeps"),
    "fewer beams than wanted": ({"beam": beam(2), "num_sequences": 3}, "beam_width is 2, but num_sequences is 3"),
    "hot beams": ({"beam": beam(), "temperature": 0.5}, "temperature is 0.5, but a beam search"),
    "beams with top_p": ({"beam": beam(), "top_p": 0.5}, "top_p is 0.5"),
    "beams with top_k": ({"beam": beam(), "top_k": 5}, "top_k is 5"),
    "beams with min_p": ({"beam": beam(), "min_p": 0.5}, "min_p is 0.5"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_contradicts_itself(name: str) -> None:
    fields, words = TOGETHER[name]
    error = refusal(form(**fields))
    assert isinstance(error, InvalidRequest)
    assert words in str(error)


def test_what_is_off_goes_with_a_beam_search() -> None:
    check_form(form(beam=beam(), temperature=0.0, top_p=1.0, top_k=0, min_p=0.0))


@pytest.mark.parametrize("fields", [{"stop_strings": ("x",)}, {"top_logprobs": 0}, {"prompt_logprobs": 0}])
def test_what_a_beam_search_does_not_have(fields: dict[str, Any]) -> None:
    check_form(form(**fields))
    error = refusal(form(beam=beam(), **fields))
    assert isinstance(error, Unsupported)
    assert f"{next(iter(fields))} cannot be had with a beam search" in str(error)


def sampled(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**sampling))


OVER_THE_WIRE: dict[str, tuple[pb.GenerateRequest, Code, str]] = {
    "no sequences": (sampled(num_sequences=0), Code.INVALID_ARGUMENT, "num_sequences is 0"),
    "no best": (sampled(best_of=0), Code.INVALID_ARGUMENT, "best_of is 0"),
    "no width": (sampled(beam_search={}), Code.INVALID_ARGUMENT, "beam_width is 0"),
    "NaN penalty": (sampled(repetition_penalty=math.nan), Code.INVALID_ARGUMENT, "repetition_penalty is nan"),
    "unknown enum": (
        sampled(beam_search={"beam_width": 2, "early_stopping": 9}),
        Code.INVALID_ARGUMENT,
        "early_stopping is 9, but it must be a value",
    ),
    "bias outside": (sampled(logit_bias={258: 1.0}), Code.INVALID_ARGUMENT, "logit_bias is 258, but the vocabulary"),
    "ids without end": (
        sampled(banned_token_ids=[1] * 1_000_000),
        Code.INVALID_ARGUMENT,
        "banned_token_ids is repeated 1000000 times",
    ),
    "low priority": (
        pb.GenerateRequest(text="x", scheduling={"priority": -101}),
        Code.INVALID_ARGUMENT,
        "priority is -101, but it must be between -100 and 100",
    ),
    "searched logprobs": (
        pb.GenerateRequest(text="x", sampling={"beam_search": {"beam_width": 2}}, response={"top_logprobs": 0}),
        Code.UNIMPLEMENTED,
        "top_logprobs cannot be had with a beam search",
    ),
}


@pytest.mark.parametrize("name", OVER_THE_WIRE)
async def test_the_client_is_told(name: str, scheduler: FakeScheduler, stub: Any) -> None:
    request, code, words = OVER_THE_WIRE[name]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(request))
    assert (caught.value.code(), words in (caught.value.details() or "")) == (code, True)
    assert reason_of(caught.value) == ("BAD_PARAMETER" if code is Code.INVALID_ARGUMENT else "UNSUPPORTED_FIELD")
    assert scheduler.submitted == []


async def test_more_than_the_workers_run_side_by_side(scheduler: FakeScheduler, stub: Any) -> None:
    scheduler.max_parallel = 2
    assert await collect(stub.Generate(sampled(num_sequences=2, seed=1)))
    with pytest.raises(grpc.aio.AioRpcError, match="num_sequences is 3, but at most 2"):
        await collect(stub.Generate(sampled(num_sequences=3)))


async def test_an_unknown_field_beside_a_map(scheduler: FakeScheduler, stub: Any) -> None:
    request = sampled(logit_bias={1: 2.0})
    request.sampling.MergeFromString(b"\xa0\x06\x01")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(request))
    assert caught.value.code() is Code.UNIMPLEMENTED
    assert "field 100 of octavo.v1.SamplingParams" in (caught.value.details() or "")
