"""Tiny random models of every family, against the logits and tokens of transformers' own implementation."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from octavo.testing.models import (
    fp32_runner,
    generate,
    last_logits,
    transformers_greedy,
    write_tiny_model,
)

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases, tied": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama 3 rotary": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama linear rotary": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "mistral": MistralConfig(**SIZES, head_dim=24, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}
FULL = ["full_attention"]


def sliding(family: Any, **changes: Any) -> Any:
    options = {**SIZES, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 20, **changes}
    return family(**options)


PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 180))]


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
def test_logits_and_tokens_are_those_of_transformers(config: Any, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, config)
    runner = fp32_runner(tmp_path, num_blocks=64, threads=1)
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(last_logits(runner, prompt), expected, atol=2e-3, rtol=1e-3)
    tokens = [transformers_greedy(model, prompt, 8) for prompt in PROMPTS]
    assert generate(runner, PROMPTS, 8, budget=13) == tokens


# Of 4 layers, some attend to the last 20 tokens only. The longest prompt has 80.
WINDOWS: dict[str, tuple[Any, list[int]]] = {
    "mistral, all layers": (MistralConfig(**{**SIZES, "num_hidden_layers": 4}, sliding_window=20), [20]),
    "qwen2, full layers first": (sliding(Qwen2Config, max_window_layers=2), [0, 20]),
    "qwen2, sliding layers first": (
        sliding(Qwen2Config, layer_types=["sliding_attention"] * 3 + FULL),
        [20, 20, 20, 0],
    ),
    "qwen3, alternating": (sliding(Qwen3Config, layer_types=["sliding_attention", *FULL] * 2), [20, 0]),
    "qwen3, two groups of one window, one not full": (
        sliding(Qwen3Config, num_hidden_layers=5, max_window_layers=3),
        [0, 0, 20],
    ),
}


@pytest.mark.parametrize("block_size", [1, 8, 32])
@pytest.mark.parametrize(("config", "groups"), WINDOWS.values(), ids=WINDOWS.keys())
def test_sliding_windows_give_the_logits_and_tokens_of_transformers(
    config: Any, groups: list[int], block_size: int, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path, config)
    runner = fp32_runner(tmp_path, block_size=block_size, threads=1)
    assert [group.window for group in runner.kv_groups] == groups
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(last_logits(runner, prompt), expected, atol=2e-3, rtol=1e-3)
    tokens = [transformers_greedy(model, prompt, 30) for prompt in PROMPTS]
    assert generate(runner, PROMPTS, 30, budget=13) == tokens
    assert generate(runner, PROMPTS, 30) == tokens


def test_a_window_makes_a_difference(tmp_path: Path) -> None:
    config, _ = WINDOWS["qwen3, alternating"]
    write_tiny_model(tmp_path / "with", config)
    config = copy.deepcopy(config)
    config.sliding_window, config.use_sliding_window, config.layer_types = None, False, FULL * 4
    write_tiny_model(tmp_path / "without", config)
    runners = [fp32_runner(tmp_path / name, threads=1) for name in ("with", "without")]
    short, long = ([last_logits(runner, prompt) for runner in runners] for prompt in PROMPTS[1:])
    torch.testing.assert_close(*short)
    assert (long[0] - long[1]).abs().max() > 0.1


def test_sharded_weights_load_like_whole_ones(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "whole", FAMILIES["qwen3"])
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    whole, sharded = (fp32_runner(tmp_path / name, num_blocks=64, threads=1) for name in ("whole", "sharded"))
    assert torch.equal(last_logits(whole, PROMPTS[1]), last_logits(sharded, PROMPTS[1]))
