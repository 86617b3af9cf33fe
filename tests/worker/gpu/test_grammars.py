"""Constrained requests on a GPU, or in Triton's interpreter: two steps in flight, and the answers of a CPU."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.runtime.models.grammar import load_vocabulary
from octavo.testbed.models import fp32_runner
from octavo.testbed.tiny_model import END_TOKEN_ID
from octavo.testing.cluster import Cluster, make_request, write_fake_model
from octavo.testing.gpu_runner import gpu_runner
from octavo.testing.small.constraints import compiled, text_of, write_tiny_byte_model
from octavo.wire.requests import Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.worker.runner import Runner

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


def test_constrained_requests_answer_as_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_byte_model(tmp_path / "model")
    vocabulary = load_vocabulary(model)
    digits = Constraint(ConstraintKind.REGEX, "[0-9]{2}")
    kinds: dict[str, dict[str, Any]] = {
        "digits": {"grammar": compiled(digits, vocabulary), "logprobs": 1},
        "beam": {"grammar": compiled(WORDS, vocabulary), "beam": BEAM, "num_sequences": 2},
        "free": {"temperature": 1.0, "seed": 3},
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
