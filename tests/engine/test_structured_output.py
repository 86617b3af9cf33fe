"""Scheduler's core and real models in one process: constrained answers are whole, and stay what they are whatever
happens to their requests and whoever runs beside them."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from msgspec.structs import replace

from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.runtime.models.grammar import load_vocabulary
from octavo.scheduler.core.config import Preemption
from octavo.testbed.models import fp32_runner
from octavo.testbed.tiny_model import END_TOKEN_ID
from octavo.testing.cluster import Cluster, make_request, resubmitted, write_fake_model
from octavo.testing.native import loaded, threads
from octavo.testing.small.constraints import (
    WORDS,
    compiled,
    conforms,
    schema_constraint,
    text_of,
    write_tiny_byte_model,
)
from octavo.wire.requests import FinishReason, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.worker.model_settings import ModelSettings
from octavo.worker.runner import Runner
from octavo.worker.step.model_runner import ModelRunner

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 0, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
OBJECT = schema_constraint(PERSON)
DATE = Constraint(ConstraintKind.REGEX, r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d")
BEAM = BeamSearch(3, 1.0, EarlyStopping.OFF)
# By name: the constraint, and how to choose tokens. Those without one are neighbours.
KINDS: dict[str, tuple[Constraint | None, dict[str, Any]]] = {
    "greedy": (OBJECT, {"logprobs": 2}),
    "sampled": (OBJECT, {"temperature": 1.0, "seed": 1, "num_sequences": 3}),
    "nucleus": (DATE, {"temperature": 0.8, "top_p": 0.9, "seed": 2, "num_sequences": 2}),
    "penalised": (OBJECT, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}),
    "choice": (WORDS, {"temperature": 1.0, "top_k": 20, "seed": 3}),
    "beam": (OBJECT, {"beam": BEAM, "num_sequences": 3}),
    "beam of choices": (WORDS, {"beam": BEAM, "num_sequences": 3}),
    "free": (None, {"temperature": 1.0, "seed": 4, "num_sequences": 2}),
    "free beam": (None, {"beam": BEAM, "num_sequences": 3}),
}
MAX_TOKENS = 64


def make_requests(prompt: list[int], eos: int, vocabulary: LLTokenizer) -> list[Request]:
    made = []
    for place, (name, (constraint, sampling)) in enumerate(KINDS.items()):
        grammar = compiled(constraint, vocabulary) if constraint else ""
        length = MAX_TOKENS if constraint else 20
        request = make_request(name, 1, length, stop_token_ids=(eos,), grammar=grammar, **sampling)
        made.append(replace(request, prompt_token_ids=[*prompt, *prompt[: place % 3]]))
    return made


def run(directory: Path, runner: Runner, requests: list[Request], **config: Any) -> Cluster:
    cluster = Cluster(write_fake_model(directory), **config)
    cluster.join(runner=runner)
    cluster.submit(*requests)
    cluster.run()
    assert cluster.rejected == {}
    return cluster


def check_whole(cluster: Cluster, vocabulary: LLTokenizer) -> None:
    """Every constrained sequence has ended by itself and is what it was to be."""
    for (name, index), tokens in cluster.streams.items():
        constraint = KINDS[name][0]
        if constraint is None:
            continue
        assert cluster.ended[name, index] is FinishReason.STOP, name
        text = text_of(vocabulary, tokens)
        if constraint is OBJECT:
            assert conforms(json.loads(text), PERSON), text
        elif constraint is WORDS:
            assert text in WORDS.choices
        else:
            assert len(text) == 10
            assert text[:2] in ("19", "20")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_byte_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny_vocabulary(tiny_model: Path) -> LLTokenizer:
    return load_vocabulary(tiny_model)


@pytest.fixture(scope="module")
def tiny_requests(tiny_vocabulary: LLTokenizer) -> list[Request]:
    return make_requests(tiny_vocabulary.tokenize_str("A person as JSON: "), END_TOKEN_ID, tiny_vocabulary)


def exact_runner(directory: Path, **options: Any) -> ModelRunner:
    """Tokens that depend on nothing beside a request."""
    loaded()
    usual: dict[str, Any] = {"numerics": "exact", "threads": 1, "num_blocks": 300, "num_cpu_blocks": 40}
    return ModelRunner(directory, ModelSettings(**usual | options))


@pytest.fixture(scope="module")
def tiny_alone(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_requests: list[Request]
) -> dict[str, list[list[int]]]:
    with threads(1):
        runner, directory = exact_runner(tiny_model), tmp_path_factory.mktemp("alone")
        return {
            each.request_id: run(directory, runner, [each], prefix_caching=False).outputs(each.request_id)
            for each in tiny_requests
        }


@pytest.mark.parametrize(
    ("config", "runner_options"),
    [
        ({}, {}),
        ({"max_num_batched_tokens": 9, "max_num_seqs": 9, "max_steps_in_flight": 1}, {}),
        ({"preemption": Preemption.SWAP, "watermark": 0.0}, {"num_blocks": 20, "num_cpu_blocks": 20}),
        ({"preemption": Preemption.RECOMPUTE, "watermark": 0.0}, {"num_blocks": 20, "num_cpu_blocks": 20}),
    ],
    ids=["together", "small steps", "swapped", "recomputed"],
)
def test_all_kinds_in_one_batch_answer_as_alone(
    tmp_path: Path,
    tiny_model: Path,
    tiny_vocabulary: LLTokenizer,
    tiny_requests: list[Request],
    tiny_alone: dict[str, list[list[int]]],
    config: dict[str, Any],
    runner_options: dict[str, Any],
) -> None:
    with threads(1):
        cluster = run(tmp_path, exact_runner(tiny_model, **runner_options), tiny_requests, **config)
    assert (cluster.core.preemptions > 0) == ("preemption" in config)
    assert (cluster.core.swaps > 0) == (config.get("preemption") is Preemption.SWAP)
    check_whole(cluster, tiny_vocabulary)
    for request in tiny_requests:
        assert cluster.outputs(request.request_id) == tiny_alone[request.request_id], request.request_id


def test_a_replay_from_what_was_generated_gives_the_same_answer(
    tmp_path: Path, tiny_model: Path, tiny_requests: list[Request], tiny_alone: dict[str, list[list[int]]]
) -> None:
    with threads(1):
        runner = exact_runner(tiny_model)
        for request in tiny_requests:
            whole = tiny_alone[request.request_id]
            for share in (3, 2):
                if not request.sampling.beam:
                    again = resubmitted(request, *(tokens[: len(tokens) // share] for tokens in whole))
                    assert run(tmp_path, runner, [again]).outputs(request.request_id) == whole, request.request_id


def test_neighbours_without_a_grammar_answer_as_without_the_others(
    tmp_path: Path, tiny_model: Path, tiny_requests: list[Request], tiny_alone: dict[str, list[list[int]]]
) -> None:
    free = [request for request in tiny_requests if not request.sampling.grammar]
    assert len(free) == 2
    with threads(1):
        cluster = run(tmp_path, exact_runner(tiny_model), free)
    for request in free:
        assert cluster.outputs(request.request_id) == tiny_alone[request.request_id]


@pytest.mark.deep
def test_the_bundled_model_answers_whole(tmp_path: Path, bundled_model: Path) -> None:
    vocabulary = load_vocabulary(bundled_model)
    prompt = vocabulary.tokenize_str("A person as JSON, with name, age and tags:\n")
    requests = make_requests(prompt, vocabulary.eos_token, vocabulary)
    cluster = run(tmp_path, fp32_runner(bundled_model, threads=1), requests)
    check_whole(cluster, vocabulary)
    assert len({text_of(vocabulary, tokens) for tokens in cluster.outputs("sampled")}) > 1
