"""Checkpoints of compressed-tensors, GPTQ and AWQ compute what transformers computes with their numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from octavo.testbed.models import fp32_runner, last_logits
from octavo.testing.small.architecture_trial import write_random_model
from octavo.testing.small.packed import KINDS, quantize_checkpoint
from octavo.worker.models.transformers.model import TransformersModel

PROMPT = [(5 + 7 * place) % 300 for place in range(20)]
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
PHI3 = Phi3Config(**SIZES, num_key_value_heads=2)
GPT_NEOX = GPTNeoXConfig(**SIZES)


def assert_like_transformers(directory: Path, config: Any, architecture: Any, kind: str) -> bool:
    """Returns whether transformers computes the model for Octavo too."""
    model = write_random_model(directory, config, architecture)
    quantize_checkpoint(directory, model, KINDS[kind])
    runner = fp32_runner(directory, num_blocks=16, threads=1)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(last_logits(runner, PROMPT), expected, rtol=1e-4, atol=1e-4)
    return isinstance(runner.decoder, TransformersModel)


@pytest.mark.parametrize("kind", KINDS)
def test_a_native_model_computes_with_the_checkpoints_numbers(tmp_path: Path, kind: str) -> None:
    assert not assert_like_transformers(tmp_path, LLAMA, LlamaForCausalLM, kind)


@pytest.mark.parametrize("kind", ["w8a8", "w4a16 zeros", "gptq", "awq"])
def test_fused_layers_are_cut_where_they_are_joined(tmp_path: Path, kind: str) -> None:
    assert not assert_like_transformers(tmp_path, PHI3, Phi3ForCausalLM, kind)


@pytest.mark.parametrize("kind", ["w8a8", "w4a16", "gptq", "awq"])
def test_a_model_of_transformers_computes_with_the_checkpoints_numbers(tmp_path: Path, kind: str) -> None:
    assert assert_like_transformers(tmp_path, GPT_NEOX, GPTNeoXForCausalLM, kind)
