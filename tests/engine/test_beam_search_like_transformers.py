"""Scheduler's core and worker in one process, in fp32: beam search against that of transformers, token by token."""

import itertools
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from octavo.testbed.models import fp32_runner, write_tiny_model
from octavo.testing.cluster import Cluster, make_request, write_fake_model
from octavo.testing.depth import every_row
from octavo.wire.requests import Request
from octavo.wire.sampling import BeamSearch, EarlyStopping

WIDTHS = (2, 4, 6)
LENGTH_PENALTIES = (0.5, 1.0, 2.0)
EARLY_STOPPING = {EarlyStopping.ON: True, EarlyStopping.OFF: False, EarlyStopping.NEVER: "never"}
SETTINGS = list(itertools.product(WIDTHS, LENGTH_PENALTIES, EarlyStopping))
LONG = "OCTAVO_TEST_LONG" in os.environ
TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "1 2 3 4 5 6 7 8 9",
    "def fibonacci(n):\n    ",
    "中文的句子：今天天气",
    "Q: What is the tallest mountain on Earth?\nA:",
    "The lighthouse keeper counted 17 ships before dawn, wrote each name in the log, and put the kettle on.",
    "🎉 héllo wörld 🎉",
]


def beam_request(name: str, prompt: list[int], beam: BeamSearch, max_tokens: int, stop: list[int]) -> Request:
    """All `beam.width` hypotheses are wanted."""
    request = make_request(name, 1, max_tokens, stop_token_ids=tuple(stop), num_sequences=beam.width, beam=beam)
    return msgspec.structs.replace(request, prompt_token_ids=prompt)


def transformers_beams(model: Any, requests: list[Request]) -> list[list[list[int]]]:
    """Each request's best hypotheses, best first, up to and with their ends. All must be alike but for prompts of equal
    length, for they run as one batch."""
    sampling, prompts = requests[0].sampling, torch.tensor([request.prompt_token_ids for request in requests])
    assert sampling.beam is not None
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=sampling.max_tokens,
        do_sample=False,
        num_beams=sampling.beam.width,
        num_return_sequences=sampling.num_sequences,
        length_penalty=sampling.beam.length_penalty,
        early_stopping=EARLY_STOPPING[sampling.beam.early_stopping],
        eos_token_id=sampling.stop_token_ids or None,
        pad_token_id=0,
    )
    hypotheses = [_until_end(row[prompts.shape[1] :].tolist(), sampling.stop_token_ids) for row in output]
    count = sampling.num_sequences
    return [hypotheses[start : start + count] for start in range(0, len(hypotheses), count)]


def _until_end(token_ids: list[int], stop: list[int]) -> list[int]:
    ends = [i for i, token_id in enumerate(token_ids) if token_id in stop]
    return token_ids[: ends[0] + 1] if ends else token_ids


# Two of the tiny model's 60 tokens end a sequence, so that searches end in every way there is.
STOP = [7, 11]


def tiny_prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(60) for _ in range(11)] for _ in range(8)]


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def tiny(tiny_directory: Path) -> Any:
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return write_tiny_model(tiny_directory, config)


@pytest.mark.parametrize(("width", "length_penalty", "early_stopping"), every_row(4, SETTINGS))
def test_a_tiny_model_gives_the_same_hypotheses(
    tiny: Any, tiny_directory: Path, width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    beam = BeamSearch(width, length_penalty, early_stopping)
    requests = [beam_request(f"r{i}", prompt, beam, 14, STOP) for i, prompt in enumerate(tiny_prompts())]
    cluster = Cluster(tiny_directory)
    cluster.join(runner=fp32_runner(tiny_directory, num_blocks=400, block_size=4))
    cluster.submit(*requests)
    cluster.run()
    assert [cluster.outputs(request.request_id) for request in requests] == transformers_beams(tiny, requests)


def test_the_tiny_model_ends_by_stop_tokens_and_by_length(tiny: Any) -> None:
    """Or the comparison above would compare less than it says."""
    beam = BeamSearch(4, 1.0, EarlyStopping.OFF)
    found = transformers_beams(tiny, [beam_request("r", prompt, beam, 14, STOP) for prompt in tiny_prompts()])
    ends = {hypothesis[-1] in STOP for hypotheses in found for hypothesis in hypotheses}
    assert ends == {True, False}


@pytest.fixture(scope="module")
def prompts(bundled_model: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(bundled_model)
    return [tokenizer.encode(text) for text in (TEXTS if LONG else TEXTS[::3])]


@pytest.fixture(scope="module")
def bundled(bundled_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32)


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    SETTINGS if LONG else [(4, 1.0, EarlyStopping.OFF), (2, 2.0, EarlyStopping.ON), (6, 0.5, EarlyStopping.NEVER)],
)
@pytest.mark.deep
def test_the_bundled_model_gives_the_same_hypotheses(
    bundled: Any,
    bundled_model: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    width: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> None:
    # "." and the line break end a sequence beside EOS: the model would hardly ever say EOS within a few tokens.
    stop = [0, 30, 198]
    beam = BeamSearch(width, length_penalty, early_stopping)
    requests = [beam_request(f"r{i}", prompt, beam, 10, stop) for i, prompt in enumerate(prompts)]
    cluster = Cluster(write_fake_model(tmp_path))
    cluster.join(runner=fp32_runner(bundled_model, num_blocks=512, block_size=16))
    cluster.submit(*requests)
    cluster.run()
    for request in requests:
        assert [cluster.outputs(request.request_id)] == transformers_beams(bundled, [request])
