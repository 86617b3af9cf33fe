"""`--numerics exact`, scheduler's core and model in one process: whatever happens to a request, its tokens and logprobs
stay the same to the last bit."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig

from octavo.scheduler.core.config import Policy, Preemption
from octavo.testbed.models import write_tiny_model
from octavo.testing.cluster import Cluster, make_request, write_fake_model
from octavo.testing.depth import deep, deep_unless
from octavo.testing.native import loaded, threads
from octavo.wire.requests import Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.worker.model_settings import ModelSettings
from octavo.worker.step.model_runner import ModelRunner

NUM_TOKENS = 12
# Of 16 slots. Prompts of up to 40 tokens take three of them, and a fourth while they grow.
NUM_BLOCKS = 64
FEW_BLOCKS = 14
# By name: tokens of the prompt, and how to choose. Several begin alike.
REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (40, {"logprobs": 5}),
    "sampled": (38, {"temperature": 1.0, "seed": 1, "logprobs": 5}),
    "nucleus": (1, {"temperature": 0.8, "top_p": 0.9, "seed": 2, "logprobs": 0}),
    "top-k": (13, {"temperature": 1.3, "top_k": 30, "seed": 3, "logprobs": 0}),
    "penalised": (37, {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 0, "prompt_logprobs": 2}),
    "two": (39, {"temperature": 1.0, "seed": 4, "num_sequences": 2, "logprobs": 2}),
    "beam": (30, {"beam": BeamSearch(2, 1.0, EarlyStopping.OFF), "num_sequences": 2}),
}
TINY = LlamaConfig(
    vocab_size=40_000,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
)


@dataclass(frozen=True)
class Situation:
    """How requests that arrive together are served; `runner` and `config` are what differs from the defaults.
    `warm`: everything has been asked for before."""

    config: dict[str, Any] = field(default_factory=dict)
    runner: dict[str, Any] = field(default_factory=dict)
    warm: bool = False
    reverse: bool = False


SITUATIONS = {
    "together": Situation(),
    "in another order, on two threads": Situation(runner={"threads": 2}, reverse=True),
    "chunks of up to 7": Situation({"max_num_batched_tokens": 7, "max_num_seqs": 7}),
    "chunks of up to 33, one step in flight": Situation({"max_num_batched_tokens": 33, "max_steps_in_flight": 1}),
    "prompts and decodes in turns": Situation({"policy": Policy.PAPER, "prefix_caching": False}),
    "a warm prefix cache": Situation(warm=True),
    "recomputed": Situation({"preemption": Preemption.RECOMPUTE, "watermark": 0.0}, {"num_blocks": FEW_BLOCKS}),
    "swapped": Situation({"preemption": Preemption.SWAP, "watermark": 0.0}, {"num_blocks": FEW_BLOCKS}),
}
# Enough for a model that takes a while.
HARD_SITUATIONS = deep("chunks of up to 7", "in another order, on two threads", "swapped")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def make_requests(vocab_size: int) -> list[Request]:
    shared = random.Random("shared").choices(range(vocab_size), k=20)
    made = []
    for name, (length, sampling) in REQUESTS.items():
        own = random.Random(name).choices(range(vocab_size), k=20)
        request = make_request(name, 1, NUM_TOKENS, **sampling)
        made.append(msgspec.structs.replace(request, prompt_token_ids=(shared + own)[:length]))
    return made


def make_runner(directory: Path, **options: Any) -> ModelRunner:
    loaded()
    usual: dict[str, Any] = {"numerics": "exact", "threads": 1, "num_blocks": NUM_BLOCKS, "num_cpu_blocks": 14}
    return ModelRunner(directory, ModelSettings(**usual | options))


def run(directory: Path, runner: ModelRunner, requests: list[Request], situation: Situation) -> Cluster:
    cluster = Cluster(write_fake_model(directory), **situation.config)
    cluster.join(runner=runner)
    if situation.warm:
        cluster.submit(*(msgspec.structs.replace(each, request_id=f"{each.request_id}, before") for each in requests))
        cluster.run()
    cluster.submit(*(reversed(requests) if situation.reverse else requests))
    cluster.run()
    return cluster


def told(cluster: Cluster, request: Request) -> list[Any]:
    """All that a frontend is told of what the request's sequences say."""
    streams = sorted(stream for stream in cluster.deltas if stream[0] == request.request_id)
    return [
        (
            cluster.streams[stream],
            [logprobs for delta in cluster.deltas[stream] for logprobs in delta.logprobs],
            cluster.deltas[stream][0].prompt_logprobs,
            cluster.deltas[stream][-1].cumulative_logprob,
        )
        for stream in streams
    ]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory, TINY)
    return directory


def told_alone(directory: Path, model: Path, **options: Any) -> dict[str, list[Any]]:
    runner = make_runner(model, **options)
    alone = Situation({"prefix_caching": False})
    requests = make_requests(runner.model.vocab_size)
    return {each.request_id: told(run(directory, runner, [each], alone), each) for each in requests}


@pytest.fixture(scope="module")
def tiny_alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return told_alone(tmp_path_factory.mktemp("alone"), tiny_model)


@pytest.fixture(scope="module")
def int8_alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return told_alone(tmp_path_factory.mktemp("alone"), tiny_model, kv_cache_dtype="int8")


@pytest.fixture(scope="module")
def bundled_alone(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return told_alone(tmp_path_factory.mktemp("alone"), bundled_model)


def check(directory: Path, model: Path, alone: dict[str, list[Any]], situation: Situation) -> None:
    runner = make_runner(model, **situation.runner)
    requests = make_requests(runner.model.vocab_size)
    cluster = run(directory, runner, requests, situation)
    preemption = situation.config.get("preemption")
    assert (cluster.core.preemptions > 0) == (preemption is not None)
    assert (cluster.core.swaps > 0) == (preemption is Preemption.SWAP)
    if situation.warm:
        assert cluster.deltas["greedy", 0][0].cached_prompt_tokens == 32
    for request in requests:
        assert told(cluster, request) == alone[request.request_id], request.request_id


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_a_tiny_model_answers_as_alone(
    tmp_path: Path, tiny_model: Path, tiny_alone: dict[str, list[Any]], situation: Situation
) -> None:
    check(tmp_path, tiny_model, tiny_alone, situation)


@pytest.mark.parametrize(
    "name", deep_unless(lambda name: name in ("chunks of up to 7", "a warm prefix cache", "swapped"), SITUATIONS)
)
def test_a_tiny_model_answers_as_alone_over_8_bits(
    tmp_path: Path, tiny_model: Path, int8_alone: dict[str, list[Any]], name: str
) -> None:
    situation = SITUATIONS[name]
    check(tmp_path, tiny_model, int8_alone, replace(situation, runner={**situation.runner, "kv_cache_dtype": "int8"}))


@pytest.mark.parametrize("name", HARD_SITUATIONS)
def test_the_bundled_model_answers_as_alone(
    tmp_path: Path, bundled_model: Path, bundled_alone: dict[str, list[Any]], name: str
) -> None:
    check(tmp_path, bundled_model, bundled_alone, SITUATIONS[name])


def test_the_comparison_would_notice(tiny_alone: dict[str, list[Any]], int8_alone: dict[str, list[Any]]) -> None:
    """Tokens vary, and logprobs are there where they are asked for; those over 8 bits are others."""
    assert tiny_alone != int8_alone
    for name, (length, sampling) in REQUESTS.items():
        for tokens, logprobs, prompt_logprobs, _ in tiny_alone[name]:
            assert len(tokens) == NUM_TOKENS
            assert len(set(tokens)) > 3
            assert len(logprobs) == (NUM_TOKENS if "logprobs" in sampling else 0)
            assert len(prompt_logprobs) == (length - 1 if "prompt_logprobs" in sampling else 0)
    assert tiny_alone["two"][0] != tiny_alone["two"][1]
