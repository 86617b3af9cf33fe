"""Quantised checkpoints on a GPU: what stays quantised there computes with the numbers that it stands for, and the rest
becomes numbers with a line that says so. Without a GPU, Triton's interpreter computes."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from octavo.kernels.quantize import quantize
from octavo.kernels.quantized import FORMATS
from octavo.testbed.models import generate, new_sequences, next_item, transformers_greedy
from octavo.testing.depth import deep
from octavo.testing.gpu_runner import DEVICE, gpu_runner
from octavo.testing.interpreter import order_dots
from octavo.testing.small.architecture_trial import write_random_model
from octavo.testing.small.packed import KINDS, quantize_checkpoint, quantize_to_float8
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models import gpu_linear, linear
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.linear import GatedLinear, Linear, LinearKind
from octavo.worker.models.transformers.linear import QuantizedLinearModule
from octavo.worker.models.transformers.model import TransformersModel
from octavo.worker.step.executor import Executor
from octavo.worker.step.model_runner import ModelRunner
from octavo.worker.tensor_parallel.leader import NO_FOLLOWERS

PROMPT = [(5 + 7 * place) % 100 for place in range(12)]
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
PHI3 = Phi3Config(**SIZES, num_key_value_heads=2)
# 8-bit floats have three bits of mantissa, and so have the inputs of layers.
TOLERANCE, FLOAT8_TOLERANCE = 1e-4, 0.1


def error(runner: ModelRunner, model: Any) -> float:
    """How far logits are from those of transformers' model, of their size."""
    [sequence] = new_sequences(runner, [PROMPT], 0)
    executor = Executor(runner.paged_model, runner._paging, runner.grammars, NO_FOLLOWERS)
    step = executor.paged_step(executor.batch([next_item(sequence, len(PROMPT))]))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
        found = runner.decoder.logits(runner.decoder.forward(step))[0].float().cpu()
    return float((found - expected).norm() / expected.norm())


def products(runner: ModelRunner) -> list[Linear | GatedLinear]:
    assert isinstance(runner.decoder, FusedLlama)
    return [
        part
        for layer in runner.decoder._model.layers
        for part in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    ]


@pytest.mark.parametrize(
    "kind", ["awq", *deep("w4a16", "w4a16 bf16", "w4a16 zeros", "w4a16 channel", "gptq", "gptq symmetric")]
)
def test_weights_of_4_bits_stay_so(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    quantize_checkpoint(tmp_path, model, KINDS[kind])
    runner = gpu_runner(tmp_path, monkeypatch)
    assert all(part.kind is LinearKind.GPU_QUANTIZED for part in products(runner))
    assert error(runner, model) < TOLERANCE


@pytest.mark.deep
def test_tokens_are_those_of_the_weights_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    quantize_checkpoint(tmp_path, model, KINDS["w4a16"])
    prompts = [PROMPT, PROMPT[3:8]]
    found = generate(gpu_runner(tmp_path, monkeypatch), prompts, 3)
    assert found == [transformers_greedy(model, prompt, 3) for prompt in prompts]


@pytest.mark.deep
def test_fused_layers_are_cut_where_they_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_random_model(tmp_path, PHI3, Phi3ForCausalLM)
    quantize_checkpoint(tmp_path, model, KINDS["gptq"])
    assert error(gpu_runner(tmp_path, monkeypatch), model) < TOLERANCE


@pytest.mark.parametrize("blocks", [*deep(False), True])
def test_8_bit_floats_stay_so(tmp_path: Path, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    quantize_to_float8(tmp_path, model, blocks=blocks)
    runner = gpu_runner(tmp_path, monkeypatch)
    assert all(part.kind is LinearKind.GPU_QUANTIZED for part in products(runner))
    assert 0 < error(runner, model) < FLOAT8_TOLERANCE


def test_a_card_without_8_bit_floats_gets_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    reason = gpu_linear.obstacle(torch.device("cuda:3"), FORMATS["fp8"])
    assert reason == "cuda:3 has compute capability 8.0, and 8-bit floats are multiplied from 8.9 on"
    monkeypatch.undo()
    model = write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    quantize_to_float8(tmp_path, model)
    monkeypatch.setattr(gpu_linear, "obstacle", lambda device, form=None: reason)
    with caplog.at_level(logging.INFO):
        runner = gpu_runner(tmp_path, monkeypatch)
    assert f"quantised weights (fp8) become torch.float32: {reason}" in caplog.text
    assert all(part.kind is LinearKind.PLAIN for part in products(runner))
    assert error(runner, model) < TOLERANCE


@pytest.mark.parametrize("kind", ["w8a8", *deep("w8a16", "gptq 8 bits")])
def test_what_is_quantised_otherwise_becomes_numbers_and_that_is_told(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    quantize_checkpoint(tmp_path, model, KINDS[kind])
    with caplog.at_level(logging.INFO):
        runner = gpu_runner(tmp_path, monkeypatch)
    told = [record.getMessage() for record in caplog.records if "become torch.float32" in record.getMessage()]
    # One for each format.
    assert len(told) == len(set(told)) > 0
    assert all("a GPU multiplies by q4_0, q4_1, int4 as they are, not by " in line for line in told)
    assert error(runner, model) < TOLERANCE


@pytest.mark.deep
def test_exact_numerics_take_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    quantize_checkpoint(tmp_path, model, KINDS["w4a16"])
    with caplog.at_level(logging.INFO):
        runner = gpu_runner(tmp_path, monkeypatch, numerics="exact")
    assert "quantised weights become torch.float32: --numerics exact multiplies by numbers on a GPU" in caplog.text
    assert error(runner, model) < TOLERANCE
    monkeypatch.setattr(gpu_linear, "on_gpu", lambda device: True)
    quantized = gpu_runner(tmp_path, monkeypatch).decoder
    assert isinstance(quantized, FusedLlama)
    with pytest.raises(ValueError, match="a weight is multiplied by a GPU's quantized; kernels for a GPU take plain"):
        FusedLlama(quantized._model, exact=True)


def test_a_model_of_transformers_keeps_its_linear_layers_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_random_model(tmp_path, GPTNeoXConfig(**SIZES), GPTNeoXForCausalLM)
    quantize_checkpoint(tmp_path, model, KINDS["w4a16"])
    runner = gpu_runner(tmp_path, monkeypatch)
    assert isinstance(runner.decoder, TransformersModel)
    modules = [each for each in runner.decoder._model.model.modules() if isinstance(each, QuantizedLinearModule)]
    assert len(modules) == 4
    assert error(runner, model) < TOLERANCE
    # Some models multiply with a weight themselves.
    last = model.gpt_neox.layers[-1].mlp.dense_4h_to_h.weight.detach()
    torch.testing.assert_close(modules[-1].weight.cpu(), last, atol=1e-6, rtol=1e-6)


def test_a_model_is_quantised_to_4_bits_as_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    runner = gpu_runner(tmp_path, monkeypatch, quantization="q4_0")
    assert all(part.kind is LinearKind.GPU_QUANTIZED for part in products(runner))
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends = name == "lm_head" or isinstance(module, nn.Embedding)
                module.weight.copy_(quantize(module.weight, FORMATS["q8_0" if ends else "q4_0"]).dequantize())
    assert error(runner, model) < TOLERANCE
    with pytest.raises(ModelConfigError, match=r"--quantization q8_0 would only lose .* not by q8_0"):
        gpu_runner(tmp_path, monkeypatch, quantization="q8_0")


def test_parts_of_several_formats_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_linear, "on_gpu", lambda device: True)
    order_dots(monkeypatch)
    chance = torch.Generator().manual_seed(0)
    weights = [quantize(torch.randn(8, 64, generator=chance), FORMATS[name]) for name in ("q4_0", "q4_1")]
    rows, bias = torch.randn(3, 64, generator=chance), torch.randn(16, generator=chance)
    layer = Linear([weight.to(torch.device(DEVICE)) for weight in weights], bias.to(DEVICE))
    whole = torch.cat([weight.dequantize() for weight in weights])
    torch.testing.assert_close(layer(rows.to(DEVICE)).cpu(), rows @ whole.T + bias, atol=1e-4, rtol=1e-4)
    assert layer.product is not None
    torch.testing.assert_close(layer.product.dequantize().cpu(), whole, atol=1e-6, rtol=1e-6)
    gated = GatedLinear([weight.to(torch.device(DEVICE)) for weight in weights], None, "relu")
    gate, up = (rows @ whole.T).chunk(2, dim=1)
    torch.testing.assert_close(gated(rows.to(DEVICE)).cpu(), gate.relu() * up, atol=1e-4, rtol=1e-4)


def test_a_cpu_computes_8_bit_floats_as_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_random_model(tmp_path, LLAMA, LlamaForCausalLM)
    quantize_to_float8(tmp_path, model)
    with caplog.at_level(logging.INFO):
        runner = ModelRunner(tmp_path, ModelSettings(dtype="float32", num_blocks=16, threads=1))
    assert "quantised weights (fp8) become torch.float32: no CPU multiplies 8-bit floats" in caplog.text
    assert error(runner, model) < TOLERANCE
    # Nothing is multiplied in integers: what lies between is no wider than usual.
    assert ModelRunner(tmp_path, ModelSettings(num_blocks=16, threads=1)).model.dtype == "bfloat16"


def test_a_gpu_without_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "there is no Triton" in (linear.obstacle_to_quantized(torch.device("cuda")) or "")
