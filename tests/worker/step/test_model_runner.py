"""The real bundled model through the runner, token by token against `generate` of transformers in fp32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.runtime.models.directory import fingerprint
from octavo.testbed.models import (
    finish,
    fp32_runner,
    generate,
    new_sequences,
    transformers_greedy,
)
from octavo.testing.depth import deep
from octavo.testing.native import loaded
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import KVGroup
from octavo.worker.make_runner import describe
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.config import ModelConfigError
from octavo.worker.step.model_runner import ModelRunner, ModelRunnerError, _cache_dtype

NEW_TOKENS = 8
TEXTS = [
    "The",
    "The capital of France is",
    "12 345 + 6 789 =",
    "def fibonacci(n):\n    ",
    "你好,世界。今天",
    "🎉 héllo wörld 🎉",
    "Once upon a time there was a printer who folded every sheet three times. " * 8,
]


@pytest.fixture(scope="module")
def prompts(bundled_model: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(bundled_model)
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(bundled_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32)
    return [transformers_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def runner(bundled_model: Path) -> ModelRunner:
    return fp32_runner(bundled_model)


def test_all_prompts_together_continue_as_in_transformers(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert generate(runner, prompts, NEW_TOKENS) == expected


def test_what_the_model_says_makes_sense(bundled_model: Path, expected: list[list[int]]) -> None:
    """Both sides above read the same converted weights: this is what a wrong conversion would break."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_model)
    assert tokenizer.decode(expected[1][:1]) == " Paris"


@pytest.mark.deep
def test_each_prompt_alone_continues_as_in_transformers(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert [generate(runner, [prompt], NEW_TOKENS)[0] for prompt in prompts] == expected


def test_prompts_cut_into_chunks_beside_decodes_continue_as_in_transformers(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert generate(runner, prompts, NEW_TOKENS, budget=23) == expected


@pytest.mark.parametrize("block_size", [256, *deep(1)])
def test_the_block_size_does_not_show(
    bundled_model: Path, prompts: list[list[int]], expected: list[list[int]], block_size: int
) -> None:
    assert generate(fp32_runner(bundled_model, block_size=block_size), prompts, NEW_TOKENS) == expected


def test_recomputing_a_sequence_from_its_tokens_continues_it_alike(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    sequences = new_sequences(runner, prompts, NEW_TOKENS)
    for sequence, tokens in zip(sequences, expected, strict=True):
        sequence.token_ids += tokens[:7]
    assert finish(runner, sequences, NEW_TOKENS) == expected


@pytest.mark.deep
def test_bfloat16_gives_a_sequence_the_same_tokens_alone_as_in_a_batch(
    bundled_model: Path, prompts: list[list[int]]
) -> None:
    runner = ModelRunner(bundled_model, ModelSettings(num_blocks=256))
    assert runner.model.dtype == "bfloat16"
    together = generate(runner, prompts[2:], NEW_TOKENS)
    assert together == [generate(runner, [prompt], NEW_TOKENS)[0] for prompt in prompts[2:]]


def test_sampling_with_a_seed_does_not_depend_on_the_batch(runner: ModelRunner, prompts: list[list[int]]) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=64)
    together = generate(runner, prompts[:4], 8, sampling=sampling)
    assert together == [generate(runner, [prompt], 8, sampling=sampling)[0] for prompt in prompts[:4]]
    assert together != generate(runner, prompts[:4], 8)


def test_a_sequence_left_broken_in_its_blocks_does_not_reach_the_next_owner(
    bundled_model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    runner = fp32_runner(bundled_model, num_blocks=256)
    with torch.inference_mode():
        for layer in runner._kv_cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
    assert generate(runner, prompts[:3], NEW_TOKENS) == expected[:3]


def test_says_what_it_serves_and_how_long_each_stage_took(bundled_model: Path) -> None:
    runner = fp32_runner(bundled_model, max_model_len=512)
    assert runner.model.fingerprint == fingerprint(bundled_model)
    assert (runner.model.dtype, runner.model.vocab_size, runner.model.max_model_len) == ("float32", 49152, 512)
    assert (runner.num_blocks, runner.block_size, runner.device) == (256, 16, "cpu")
    assert runner.kv_bytes_per_token == 2 * 30 * 192 * 4
    assert runner.kv_groups == [KVGroup(window=0)]


def test_a_memory_budget_sets_the_number_of_blocks(bundled_model: Path) -> None:
    runner = ModelRunner(bundled_model, ModelSettings(kv_cache_memory=10_000_000, block_size=16))
    assert runner.num_blocks == 10_000_000 // (16 * 2 * 30 * 192 * 2)


def test_8_bits_hold_nearly_twice_as_much_in_the_same_memory(bundled_model: Path) -> None:
    loaded()
    memory = ModelSettings(kv_cache_memory=20_000_000)
    plain, narrow = (ModelRunner(bundled_model, replace(memory, kv_cache_dtype=name)) for name in ("auto", "int8"))
    assert narrow.kv_bytes_per_token == 2 * 30 * 3 * (64 + 4)
    assert narrow.num_blocks == 20_000_000 // (16 * narrow.kv_bytes_per_token)
    assert narrow.num_blocks > 1.87 * plain.num_blocks
    assert "23040 KV bytes per token (bfloat16); kernels:" in describe(plain)
    assert "12240 KV bytes per token (int8); kernels:" in describe(narrow)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, "in bfloat16 they keep .* bfloat16 and int8, not float32"),
        ({"kv_cache_dtype": "int8", "block_size": 8}, "--kv-cache-dtype int8 needs Octavo's own kernels: they want bl"),
        ({"dtype": "int8"}, "'int8' is no dtype"),
        ({"dtype": "float16"}, "float16 is slow"),
    ],
)
def test_options_that_cannot_be_are_refused(bundled_model: Path, options: dict[str, Any], message: str) -> None:
    loaded()
    with pytest.raises(ModelRunnerError, match=message):
        ModelRunner(bundled_model, ModelSettings(**options))


@pytest.mark.parametrize(("device", "message"), [("gpu", "'gpu' is no device"), ("meta", "'meta' is not implemented")])
def test_devices_that_cannot_be_are_refused(bundled_model: Path, device: str, message: str) -> None:
    with pytest.raises(ModelRunnerError, match=message):
        ModelRunner(bundled_model, device=device)


def test_a_context_longer_than_the_models_is_refused(bundled_model: Path) -> None:
    with pytest.raises(ModelConfigError, match="1 to 8192"):
        ModelRunner(bundled_model, ModelSettings(max_model_len=8193))


def test_a_gpu_beyond_those_that_are_there_is_named(bundled_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ModelRunnerError, match="this process sees 1 GPUs"):
        ModelRunner(bundled_model, device="cuda:1")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_a_cache_of_fp8_is_refused_where_a_gpu_has_none(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    with pytest.raises(
        ModelRunnerError, match=rf"--kv-cache-dtype fp8 .* 8\.9 or higher .* cuda has 8\.{capability[1]}"
    ):
        _cache_dtype("fp8", torch.bfloat16, cuda)
    assert _cache_dtype("auto", torch.bfloat16, cuda) == torch.bfloat16
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    assert _cache_dtype("fp8", torch.bfloat16, cuda) == torch.float8_e4m3fn


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", [torch.device("cuda:1")]), ("cuda", []), ("cpu", [])])
def test_a_ranks_gpu_is_current_before_anything_is_put_there(
    device: str, chosen: list[torch.device], bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current device."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    current: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.set_device", current.append)

    def load(*_: Any, **__: Any) -> None:
        assert current == chosen
        raise InterruptedError("far enough")

    monkeypatch.setattr("octavo.worker.step.model_runner.load_model", load)
    with pytest.raises(InterruptedError):
        ModelRunner(bundled_model, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without CUDA")
def test_a_missing_gpu_is_named(bundled_model: Path) -> None:
    with pytest.raises(ModelRunnerError, match="finds no CUDA device"):
        ModelRunner(bundled_model, device="cuda")
