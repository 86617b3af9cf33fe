"""What a cell is asked for a request of Dynamo's, and what is refused."""

from typing import Any

import pytest

from octavo.dynamo.requests import RequestRefused, read_request
from octavo.v1 import generation_pb2 as pb

# As Dynamo 1.6 writes a request that asks for nothing but an answer.
PLAIN: dict[str, Any] = {
    "model": "m",
    "token_ids": [19556, 33],
    "stop_conditions": {
        "max_tokens": 5,
        "stop": None,
        "stop_token_ids": None,
        "stop_token_ids_visible": None,
        "stop_token_ids_hidden": [2],
        "min_tokens": None,
        "ignore_eos": None,
        "max_thinking_tokens": None,
    },
    "sampling_options": {
        "n": None,
        "best_of": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "repetition_penalty": None,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "use_beam_search": None,
        "length_penalty": None,
        "seed": None,
        "include_stop_str_in_output": None,
        "guided_decoding": None,
    },
    "output_options": {
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": None,
        "formatted_prompt": None,
        "return_tokens_as_token_ids": None,
    },
    "eos_token_ids": [2],
    "mdc_sum": "6603",
    "annotations": [],
    "routing": {"dp_rank": 0},
    "router_config_override": None,
}


def asking(**sections: Any) -> dict[str, Any]:
    return PLAIN | {
        name: PLAIN[name] | value if isinstance(PLAIN.get(name), dict) else value for name, value in sections.items()
    }


def test_a_plain_request_asks_for_token_ids_and_leaves_the_rest_to_the_model() -> None:
    assert read_request(PLAIN, "r-1") == pb.GenerateRequest(
        request_id="r-1",
        token_ids=pb.TokenIds(ids=[19556, 33]),
        sampling=pb.SamplingParams(),
        stopping=pb.StoppingCriteria(max_new_tokens=5, stop_token_ids=[2]),
        response=pb.ResponseOptions(text=False, incremental=True),
        scheduling=pb.SchedulingHints(priority=0),
        cache=pb.CacheOptions(),
    )


def test_sampling_options_are_passed_on() -> None:
    sampling = {
        "n": 1,
        "best_of": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "allowed_token_ids": [1, 2],
        "logit_bias": {"5": -3.0},
        "bad_words_token_ids": [[7], [8]],
        "use_beam_search": False,
    }
    asked = read_request(asking(sampling_options=sampling), "r").sampling
    assert asked == pb.SamplingParams(
        best_of=2,
        temperature=0.5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        allowed_token_ids=[1, 2],
        logit_bias={5: -3.0},
        banned_token_ids=[7, 8],
    )


def test_options_that_dynamo_passes_on_unread_count_too() -> None:
    request = asking(extra_args={"nvext": {"cache_salt": "s"}, "sampling_options": {"allowed_token_ids": [3]}})
    assert read_request(request, "r").sampling.allowed_token_ids == [3]


@pytest.mark.parametrize(("top_k", "asked"), [(-1, 0), (0, 0), (40, 40)])
def test_any_top_k_below_one_is_off(top_k: int, asked: int) -> None:
    assert read_request(asking(sampling_options={"top_k": top_k}), "r").sampling.top_k == asked


@pytest.mark.parametrize(("seed", "asked"), [(7, 7), (-1, 2**64 - 1), (-99, 2**64 - 99)])
def test_a_negative_seed_is_a_seed_of_its_own(seed: int, asked: int) -> None:
    assert read_request(asking(sampling_options={"seed": seed}), "r").sampling.seed == asked


def test_all_stop_tokens_end_an_answer_and_stop_strings_stay_with_dynamos_frontend() -> None:
    conditions = {"stop_token_ids": [9, 4], "stop_token_ids_visible": [5], "stop": ["STOP"], "ignore_eos": False}
    stopping = read_request(asking(stop_conditions=conditions), "r").stopping
    assert stopping.stop_token_ids == [2, 4, 5, 9]
    assert not stopping.stop_strings
    assert stopping.ignore_eos is False


@pytest.mark.parametrize(("least", "most", "asked"), [(3, 5, 3), (50, 40, 40)])
def test_a_request_that_was_moved_may_end_with_its_last_token(least: int, most: int, asked: int) -> None:
    request = asking(stop_conditions={"min_tokens": least, "max_tokens": most})
    assert read_request(request, "r").stopping.min_new_tokens == asked


@pytest.mark.parametrize(
    ("guided", "asked"),
    [
        ({"json": {"type": "object"}}, pb.OutputConstraint(json_schema='{"type": "object"}')),
        ({"json": '{"type": "object"}'}, pb.OutputConstraint(json_schema='{"type": "object"}')),
        ({"regex": "a+"}, pb.OutputConstraint(regex="a+")),
        ({"choice": ["a", "b"]}, pb.OutputConstraint(choice=pb.ChoiceList(choices=["a", "b"]))),
        ({"grammar": "start: X"}, pb.OutputConstraint(grammar="start: X")),
    ],
)
def test_guided_decoding_is_a_constraint(guided: dict[str, Any], asked: pb.OutputConstraint) -> None:
    request = asking(sampling_options={"guided_decoding": {"backend": None, "choice": [], **guided}})
    assert read_request(request, "r").constraint == asked


def test_logprobs_of_the_answer_and_of_the_prompt() -> None:
    response = read_request(asking(output_options={"logprobs": 0, "prompt_logprobs": 2}), "r").response
    assert (response.HasField("top_logprobs"), response.top_logprobs, response.prompt_logprobs) == (True, 0, 2)


@pytest.mark.parametrize(("priority", "asked"), [(3, 3), (-2, -2), (5000, 100), (-5000, -100)])
def test_routing_hints(priority: int, asked: int) -> None:
    message = read_request(asking(routing={"priority": priority, "cache_salt": "s", "priority_jump": 3.0}), "r")
    assert (message.scheduling.priority, message.cache.salt) == (asked, "s")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"sampling_options": {"n": 2}}, "n is above 1"),
        ({"sampling_options": {"use_beam_search": True}}, "sampling_options.use_beam_search"),
        ({"sampling_options": {"length_penalty": 2.0}}, "sampling_options.length_penalty"),
        ({"sampling_options": {"not_known_yet": 1}}, "sampling_options.not_known_yet"),
        ({"sampling_options": {"bad_words_token_ids": [[1, 2]]}}, "bad words of several tokens"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {}}}}, "guided_decoding.structural_tag"),
        ({"sampling_options": {"guided_decoding": {"whitespace_pattern": " "}}}, "guided_decoding.whitespace_pattern"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "json": {}}}}, "cannot be had together"),
        ({"sampling_options": {"seed": "x"}}, "unusable value"),
        ({"sampling_options": {"logit_bias": [5]}}, "unusable value"),
        ({"sampling_options": {"temperature": "hot"}}, "unusable value"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "stop_conditions.max_thinking_tokens"),
        ({"routing": {"lora_name": "polite"}}, "the adapter polite"),
        ({"routing": {"dp_rank": 1}}, "data-parallel rank 1"),
        ({"multi_modal_data": {"image_url": [{"Url": "x"}]}}, "multi_modal_data"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prefill_result": {"disaggregated_params": {}}}, "prefill_result"),
        ({"bootstrap_info": {"bootstrap_host": "h"}}, "bootstrap_info"),
        ({"require_reasoning": True, "sampling_options": {"guided_decoding": {"regex": "a"}}}, "reasoning"),
    ],
)
def test_what_octavo_cannot_do_is_refused_by_name(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestRefused, match=named):
        read_request(asking(**sections), "r")


def test_reasoning_without_a_constraint_is_an_answer_like_any_other() -> None:
    assert read_request(asking(require_reasoning=True), "r") == read_request(PLAIN, "r")
