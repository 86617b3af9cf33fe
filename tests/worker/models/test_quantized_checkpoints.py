"""Quantised checkpoints, and models quantised as they are loaded, compute what transformers computes with their
numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from octavo.kernels.native.library import VARIANT_VARIABLE, find
from octavo.kernels.quantize import QUANTIZERS, quantize
from octavo.kernels.quantized import FORMATS
from octavo.testbed.models import fp32_runner, last_logits
from octavo.testing.native import kernels, loaded
from octavo.testing.small.architecture_trial import write_random_model
from octavo.testing.small.packed import KINDS, quantize_checkpoint
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.models.transformers.model import TransformersModel

__all__ = ["kernels"]

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
TIED = GPTNeoXConfig(**SIZES, tie_word_embeddings=True)


def assert_like_transformers(directory: Path, model: Any, kernels: str, **options: Any) -> bool:
    """Returns whether transformers computes the model for Octavo too."""
    runner = fp32_runner(directory, num_blocks=16, threads=1, **options)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    error = last_logits(runner, PROMPT) - expected
    # Octavo's kernels quantise the inputs of a layer as well.
    assert error.norm() < (0.05 if kernels == "compiled" else 1e-5) * expected.norm()
    return isinstance(runner.decoder, TransformersModel)


def checkpoint_of(directory: Path, config: Any, architecture: Any, kind: str) -> Any:
    model = write_random_model(directory, config, architecture)
    quantize_checkpoint(directory, model, KINDS[kind])
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_native_model_computes_with_the_checkpoints_numbers(tmp_path: Path, kind: str, kernels: str) -> None:
    model = checkpoint_of(tmp_path, LLAMA, LlamaForCausalLM, kind)
    assert not assert_like_transformers(tmp_path, model, kernels)


@pytest.mark.parametrize("kind", ["w8a8", "w4a16 zeros", "gptq", "awq"])
def test_fused_layers_are_cut_where_they_are_joined(tmp_path: Path, kind: str, kernels: str) -> None:
    model = checkpoint_of(tmp_path, PHI3, Phi3ForCausalLM, kind)
    assert not assert_like_transformers(tmp_path, model, kernels)


@pytest.mark.parametrize("kind", ["w8a8", "w4a16", "gptq", "awq"])
def test_a_model_of_transformers_computes_with_the_checkpoints_numbers(tmp_path: Path, kind: str, kernels: str) -> None:
    model = checkpoint_of(tmp_path, GPT_NEOX, GPTNeoXForCausalLM, kind)
    assert assert_like_transformers(tmp_path, model, kernels)


def with_quantized(model: Any, quantization: str, ends: tuple[str, ...]) -> Any:
    """Makes the weights of the model's linear layers, and those called `ends`, what they are quantised."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name in ends or isinstance(module, nn.Linear):
                to = "q8_0" if name in ends else quantization
                module.weight.copy_(quantize(module.weight, FORMATS[to]).dequantize())
    return model


@pytest.fixture
def compiled() -> None:
    """Skips the test without Octavo's own kernels."""
    loaded()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("quantization", QUANTIZERS)
def test_a_native_model_is_quantised_as_it_is_loaded(tmp_path: Path, quantization: str) -> None:
    model = write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    with_quantized(model, quantization, ("model.embed_tokens", "lm_head"))
    assert not assert_like_transformers(tmp_path, model, "compiled", quantization=quantization)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("quantization", ["q8_0", "q4_0", "q5_1"])
def test_a_model_of_transformers_is_quantised_as_it_is_loaded(tmp_path: Path, quantization: str) -> None:
    model = write_random_model(tmp_path, GPT_NEOX, GPTNeoXForCausalLM)
    with_quantized(model, quantization, ("lm_head",))
    assert assert_like_transformers(tmp_path, model, "compiled", quantization=quantization)


@pytest.mark.usefixtures("compiled")
def test_the_head_of_a_model_of_transformers_that_is_tied_stays_as_it_is(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, TIED, GPTNeoXForCausalLM)
    for layer in model.gpt_neox.layers:
        with_quantized(layer, "q4_0", ())
    assert assert_like_transformers(tmp_path, model, "compiled", quantization="q4_0")


def test_quantising_without_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANT_VARIABLE, "none")
    find.cache_clear()
    write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    with pytest.raises(ModelConfigError, match=r"--quantization q4_0 would only lose where .*or leave it out"):
        fp32_runner(tmp_path, quantization="q4_0")
    find.cache_clear()


@pytest.mark.usefixtures("compiled")
def test_replicas_tell_how_they_are_quantised(tmp_path: Path) -> None:
    write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    found = [fp32_runner(tmp_path, num_blocks=16, threads=1, quantization=each).model for each in ("none", "q8_0")]
    assert [each.quantization for each in found] == ["none", "q8_0"]
    assert found[0].fingerprint == found[1].fingerprint
