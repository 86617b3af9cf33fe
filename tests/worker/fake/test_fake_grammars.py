"""The fake model under constraints: whatever it says conforms, however its steps are cut and its sequences copied."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.scheduler.core.config import Preemption
from octavo.testbed.tiny_model import END_TOKEN_ID, write_byte_model
from octavo.testing.cluster import Cluster, make_request, resubmitted
from octavo.testing.small.constraints import DIGITS, WORDS, compiled, conforms, schema_constraint, schemas, text_of
from octavo.wire.requests import FinishReason, RejectReason, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.worker.fake.runner import FakeRunner
from octavo.worker.sampling.grammars import Grammars

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    # Without spaces, so that answers are short.
    "x-guidance": {"whitespace_pattern": ""},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    return directory


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Grammars:
    return Grammars(directory)


def run(directory: Path, *requests: Request, num_blocks: int = 1000, **config: Any) -> Cluster:
    cluster = Cluster(directory, **config)
    runner = FakeRunner(directory, block_size=4, num_blocks=num_blocks, num_cpu_blocks=num_blocks, eos_probability=0.2)
    cluster.join(runner=runner)
    cluster.submit(*requests)
    cluster.run()
    return cluster


def request(name: str, constraint: Constraint, grammars: Grammars, max_tokens: int = 900, **sampling: Any) -> Request:
    made = make_request(name, 1, max_tokens, stop_token_ids=(END_TOKEN_ID,), **sampling)
    prompt = {"prompt_token_ids": [1, 2, 3, len(name)]}
    grammar = compiled(constraint, grammars.vocabulary)
    return replace(made, **prompt, sampling=replace(made.sampling, grammar=grammar))


def texts(cluster: Cluster, name: str, grammars: Grammars) -> list[str]:
    assert cluster.rejected == {}
    assert all(reason is FinishReason.STOP for (each, _), reason in cluster.ended.items() if each == name)
    return [text_of(grammars.vocabulary, tokens) for tokens in cluster.outputs(name)]


@settings(max_examples=15)
@given(schemas, st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_every_answer_conforms_to_its_schema(
    directory: Path, grammars: Grammars, schema: dict[str, Any], seed: int, temperature: float
) -> None:
    asked = request("r", schema_constraint(schema), grammars, temperature=temperature, seed=seed, num_sequences=2)
    cluster = run(directory, asked)
    for text in texts(cluster, "r", grammars):
        assert conforms(json.loads(text), schema), text


KINDS: dict[str, tuple[Constraint, dict[str, Any]]] = {
    "greedy": (schema_constraint(RECORD), {}),
    "three": (schema_constraint(RECORD), {"temperature": 1.0, "seed": 5, "num_sequences": 3}),
    "regex": (DIGITS, {"temperature": 0.7, "seed": 6, "num_sequences": 2}),
    "choice": (WORDS, {"temperature": 1.0, "seed": 7}),
    "beam": (WORDS, {"beam": BeamSearch(3, 1.0, EarlyStopping.OFF), "num_sequences": 3}),
    "beam of records": (schema_constraint(RECORD), {"beam": BeamSearch(2, 1.0, EarlyStopping.ON), "num_sequences": 2}),
    **{f"one of many {i}": (schema_constraint(RECORD), {"temperature": 1.0, "seed": i}) for i in range(8)},
}


@pytest.fixture(scope="module")
def requests(grammars: Grammars) -> list[Request]:
    return [request(name, constraint, grammars, 48, **sampling) for name, (constraint, sampling) in KINDS.items()]


@pytest.fixture(scope="module")
def alone(directory: Path, requests: list[Request]) -> dict[str, list[list[int]]]:
    return {each.request_id: run(directory, each).outputs(each.request_id) for each in requests}


def test_all_answers_are_whole(directory: Path, requests: list[Request], grammars: Grammars) -> None:
    cluster = run(directory, *requests)
    for name in ("greedy", "three", "beam of records"):
        assert all(conforms(json.loads(text), RECORD) for text in texts(cluster, name, grammars))
    assert all(text.isdecimal() and len(text) <= 6 for text in texts(cluster, "regex", grammars))
    assert set(texts(cluster, "choice", grammars)) <= set(WORDS.choices)
    assert sorted(texts(cluster, "beam", grammars)) == sorted(WORDS.choices)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_steps_in_flight": 1, "max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"preemption": Preemption.SWAP, "watermark": 0.0, "num_blocks": 40},
        {"preemption": Preemption.RECOMPUTE, "watermark": 0.0, "num_blocks": 40},
    ],
    ids=["together", "small steps", "swapped", "recomputed"],
)
def test_nothing_that_happens_to_a_request_changes_its_answer(
    directory: Path, requests: list[Request], alone: dict[str, list[list[int]]], config: dict[str, Any]
) -> None:
    cluster = run(directory, *requests, **config)
    assert cluster.rejected == {}
    assert (cluster.core.preemptions > 0) == ("preemption" in config)
    for each in requests:
        assert cluster.outputs(each.request_id) == alone[each.request_id], each.request_id


def test_a_request_submitted_again_goes_on_within_its_grammar(
    directory: Path, requests: list[Request], alone: dict[str, list[list[int]]]
) -> None:
    greedy, three = requests[:2]
    for count in range(0, len(alone["greedy"][0]), 5):
        again = resubmitted(greedy, alone["greedy"][0][:count])
        assert run(directory, again).outputs("greedy") == alone["greedy"]
    again = resubmitted(three, *(tokens[: 2 * index + 1] for index, tokens in enumerate(alone["three"])))
    assert run(directory, again).outputs("three") == alone["three"]


def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(
    directory: Path, requests: list[Request], alone: dict[str, list[list[int]]]
) -> None:
    bad = replace(requests[0], request_id="bad", sampling=replace(requests[0].sampling, grammar="start: !"))
    stuck = resubmitted(replace(requests[3], request_id="stuck"), [200, 201])
    cluster = run(directory, bad, *requests, stuck)
    assert {name: each.reason for name, each in cluster.rejected.items()} == {
        "bad": RejectReason.BAD_GRAMMAR,
        "stuck": RejectReason.BAD_GRAMMAR,
    }
    for each in requests:
        assert cluster.outputs(each.request_id) == alone[each.request_id], each.request_id


def test_an_end_that_may_not_come_yet_fails_the_request(directory: Path, grammars: Grammars) -> None:
    asked = request("r", Constraint(ConstraintKind.CHOICE, choices=("a",)), grammars, min_tokens=5)
    cluster = run(directory, asked)
    assert cluster.rejected["r"].reason is RejectReason.NO_TOKEN_LEFT
    assert "of those that its grammar lets come next" in cluster.rejected["r"].detail
