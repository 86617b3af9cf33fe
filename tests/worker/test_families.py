"""Tiny random models of every family, against the logits and tokens of transformers' own implementation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from octavo.testing.models import fp32_runner, generate, transformers_greedy, write_tiny_model
from octavo.worker.batch import build_batch
from octavo.worker.model_runner import ModelRunner
from octavo.worker.sequences import WorkerSequence, WorkItem

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
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 180))]


def last_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    sampling: Any = None
    width = -(-len(prompt) // runner.block_size)
    sequence = WorkerSequence(0, 0, sampling, len(prompt), prompt, 0, list(range(width)))
    batch = build_batch([WorkItem(sequence, 0, len(prompt), True)], runner.block_size, torch.device("cpu"))
    with torch.inference_mode():
        logits = runner._model.forward(
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            runner._plan_attention(batch),
            runner._kv_cache.layers,
            batch.sample_rows,
        )
    return logits[0]


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


def test_sharded_weights_load_like_whole_ones(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "whole", FAMILIES["qwen3"])
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    whole, sharded = (fp32_runner(tmp_path / name, num_blocks=64, threads=1) for name in ("whole", "sharded"))
    assert torch.equal(last_logits(whole, PROMPTS[1]), last_logits(sharded, PROMPTS[1]))
