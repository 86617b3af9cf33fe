"""Constrained requests on a GPU, or in Triton's interpreter: two steps in flight, and the answers of a CPU."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.runtime.models.grammar import load_vocabulary
from octavo.testbed.models import NO_MOVES, fp32_runner, new_sequences, next_item
from octavo.testbed.tiny_model import END_TOKEN_ID
from octavo.testing.cluster import Cluster, make_request, write_fake_model
from octavo.testing.gpu_runner import gpu_runner
from octavo.testing.small.constraints import compiled, text_of, write_tiny_byte_model
from octavo.wire.requests import Request
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.worker.runner import Runner
from octavo.worker.sequences import PENDING_TOKEN
from octavo.worker.step.failures import not_finite

WORDS = Constraint(ConstraintKind.CHOICE, choices=("yes", "no", "ok"))
BEAM = BeamSearch(2, 1.0, EarlyStopping.OFF)

pytest.importorskip("triton.runtime.interpreter")


def answers(directory: Path, runner: Runner, requests: list[Request]) -> dict[str, list[list[int]]]:
    cluster = Cluster(write_fake_model(directory))
    cluster.join(runner=runner)
    cluster.submit(*requests)
    cluster.run()
    assert cluster.rejected == {}
    return {request.request_id: cluster.outputs(request.request_id) for request in requests}


def test_a_grammar_reads_the_token_of_the_step_before_once_the_model_has_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_byte_model(tmp_path / "model")
    vocabulary = load_vocabulary(model)
    sampling = SamplingParams(
        max_tokens=9, grammar=compiled(Constraint(ConstraintKind.REGEX, "(12|34){2}"), vocabulary)
    )
    runner, prompt = gpu_runner(model, monkeypatch), vocabulary.tokenize_str("digits: ")
    [sequence] = new_sequences(runner, [prompt], 2, sampling)
    first = runner.launch(NO_MOVES, [next_item(sequence, len(prompt))])
    sequence.num_computed = len(prompt)
    sequence.token_ids.append(PENDING_TOKEN)
    order: list[str] = []
    replay = runner.executor._graphs.replay  # type: ignore[union-attr]

    def noted(size: int) -> Any:
        order.append("model")
        return replay(size)

    def settle() -> None:
        order.append("settle")
        [token] = first.output().sampled
        sequence.token_ids[-1] = token.token_id

    monkeypatch.setattr(runner.executor._graphs, "replay", noted)  # type: ignore[union-attr]
    [second] = runner.launch(NO_MOVES, [next_item(sequence, 1)], settle).output().sampled
    assert order == ["model", "settle"]
    assert text_of(vocabulary, [sequence.token_ids[-1], second.token_id]) in ("12", "34")


def test_a_sequence_that_turns_out_to_have_failed_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after the one in which it failed has its work, and a grammar that cannot be followed."""
    model = write_tiny_byte_model(tmp_path / "model")
    vocabulary = load_vocabulary(model)
    sampling = SamplingParams(max_tokens=9, grammar=compiled(WORDS, vocabulary))
    runner = gpu_runner(model, monkeypatch)
    broken, sound = new_sequences(runner, [vocabulary.tokenize_str(text) for text in ("one", "other")], 2, sampling)
    items = [next_item(each, len(each.token_ids)) for each in (broken, sound)]
    first = runner.launch(NO_MOVES, items)
    for each in (broken, sound):
        each.num_computed = len(each.token_ids)
        each.token_ids.append(PENDING_TOKEN)

    def settle() -> None:
        sound.token_ids[-1] = first.output().sampled[1].token_id
        broken.failure = not_finite(broken.sequence_id)
        runner.forget([broken.sequence_id])

    output = runner.launch(NO_MOVES, [next_item(each, 1) for each in (broken, sound)], settle).output()
    token = next(each.token_id for each in output.sampled if each.sequence_id == sound.sequence_id)
    assert any(word.startswith(text_of(vocabulary, [sound.token_ids[-1], token])) for word in WORDS.choices)
    assert broken.sequence_id not in runner.executor._rows._rows  # type: ignore[union-attr]


def test_constrained_requests_answer_as_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_byte_model(tmp_path / "model")
    vocabulary = load_vocabulary(model)
    digits = Constraint(ConstraintKind.REGEX, "[0-9]{2}")
    kinds: dict[str, dict[str, Any]] = {
        "digits": {"grammar": compiled(digits, vocabulary), "logprobs": 1},
        "beam": {"grammar": compiled(WORDS, vocabulary), "beam": BEAM, "num_sequences": 2},
        "free": {"temperature": 1.0, "seed": 3},
        "penalised": {"repetition_penalty": 3.0, "logprobs": 2, "prompt_logprobs": 1},
    }
    requests = [
        replace(
            make_request(name, 1, 4, stop_token_ids=(END_TOKEN_ID,), **sampling),
            prompt_token_ids=vocabulary.tokenize_str(f"{name}: "),
        )
        for name, sampling in kinds.items()
    ]
    found = answers(tmp_path / "gpu", gpu_runner(model, monkeypatch), requests)
    assert found == answers(tmp_path / "cpu", fp32_runner(model, threads=1), requests)
    assert all(text_of(vocabulary, tokens).isdecimal() for tokens in found["digits"])
    assert {text_of(vocabulary, tokens) for tokens in found["beam"]} < set(WORDS.choices)
