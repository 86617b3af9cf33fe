"""Messages of vLLM's engine protocol become requests."""

from array import array
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb  # type: ignore[import-untyped]

from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.frontend.vllm_engine.requests import read_generate


def message(**sampling: Any) -> Any:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[1, 2]), sampling_params=pb.SamplingParams(**sampling)
    )


@pytest.mark.parametrize(
    ("sampling", "constraint"),
    [
        ({}, None),
        ({"json_object": True}, Constraint(ConstraintKind.JSON_OBJECT)),
        ({"json_object": False}, None),
        ({"json_schema": "{}"}, Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        ({"regex": "a+"}, Constraint(ConstraintKind.REGEX, "a+")),
        ({"grammar": "root ::= x"}, Constraint(ConstraintKind.GRAMMAR, "root ::= x")),
        (
            {"choice": pb.ChoiceConstraint(choices=["a", "b"])},
            Constraint(ConstraintKind.CHOICE, choices=("a", "b")),
        ),
        ({"regex": "a+", "grammar_from_first_token": True}, Constraint(ConstraintKind.REGEX, "a+")),
    ],
)
def test_constraints_keep_their_kind(sampling: dict[str, Any], constraint: Constraint | None) -> None:
    assert read_generate(message(**sampling), 512).constraint == constraint


def test_zeros_that_mean_nothing_are_left_out_and_those_that_mean_something_kept() -> None:
    request = read_generate(message(temperature=0.0, seed=0, logprobs=0), 512)
    assert (request.temperature, request.seed, request.top_logprobs) == (0.0, 0, 0)
    assert (request.top_p, request.top_k, request.repetition_penalty, request.max_new_tokens) == (None,) * 4
    assert (request.num_sequences, request.min_new_tokens) == (1, 0)


def test_a_rank_of_zero_is_the_only_one_there_is() -> None:
    request = message()
    request.data_parallel_rank = 0
    assert read_generate(request, 512).prompt == array("I", [1, 2])
