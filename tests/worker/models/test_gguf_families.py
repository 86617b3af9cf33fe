"""Every architecture of GGUF files, against transformers with the values that the file holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from octavo.kernels.native.quantized_linear import NativeQuantizedLinear
from octavo.runtime.models.directory import resolve_model
from octavo.runtime.models.gguf.families import FAMILIES
from octavo.testbed.models import fp32_runner, last_logits, write_tiny_model
from octavo.testing.native import loaded
from octavo.testing.small.gguf_model import everything, write_model
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.compiled import CompiledLlama
from octavo.worker.models.config import DecoderConfig
from octavo.worker.step.model_runner import ModelRunner

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
DEEP: dict[str, Any] = {**SIZES, "num_hidden_layers": 7}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, tuple[str, Any]] = {
    "ernie 4.5": ("ernie4_5", Ernie4_5Config(**SIZES, head_dim=16)),
    "exaone 4": ("exaone4", Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 2)),
    "exaone 4 with windows": ("exaone4", Exaone4Config(**DEEP, sliding_window=16)),
    "gemma": ("gemma", GemmaConfig(**SIZES, head_dim=32)),
    "gemma 2": ("gemma2", Gemma2Config(**SIZES, head_dim=32, sliding_window=16, query_pre_attn_scalar=32)),
    "gemma 3": ("gemma3", Gemma3TextConfig(**DEEP, head_dim=32, sliding_window=16, query_pre_attn_scalar=32)),
    "glm 4": ("glm4", Glm4Config(**SIZES, head_dim=32)),
    "granite": ("granite", GraniteConfig(**SIZES, **MULTIPLIERS)),
    "llama": ("llama", LlamaConfig(**SIZES)),
    "llama with biases, tied": (
        "llama",
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "llama, scaled linearly": (
        "llama",
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    ),
    "llama, wide heads": ("llama", LlamaConfig(**SIZES, head_dim=32)),
    "olmo 2": ("olmo2", Olmo2Config(**SIZES)),
    "olmo 3": ("olmo2", Olmo3Config(**DEEP, sliding_window=16)),
    "phi 3": ("phi3", Phi3Config(**SIZES)),
    "phi 3, partly rotary, with a window": (
        "phi3",
        Phi3Config(**{**SIZES, "partial_rotary_factor": 0.5, "sliding_window": 16}),
    ),
    "qwen 2": ("qwen2", Qwen2Config(**SIZES)),
    "qwen 2, scaled by yarn": ("qwen2", Qwen2Config(**SIZES, rope_parameters={**YARN, "rope_theta": 10000.0})),
    "qwen 3": ("qwen3", Qwen3Config(**SIZES, head_dim=32)),
    "seed-oss": ("seed_oss", SeedOssConfig(**SIZES, head_dim=16)),
    "smollm 3": ("smollm3", SmolLM3Config(**DEEP)),
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(10, 80))]


def scaled(config: Any) -> Any:
    """Returns what writes the scaling of the rotary embedding, as llama.cpp's converter does."""
    parameters = config.rope_parameters

    def write(writer: Any) -> None:
        kind = parameters.get("rope_type")
        if kind in ("linear", "yarn"):
            writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
            writer.add_rope_scaling_factor(parameters["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])

    return write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def assert_logits_are_those_of(model: Any, file: Path) -> None:
    runner = fp32_runner(resolve_model(str(file)), num_blocks=64, threads=1)
    assert isinstance(runner._model.config, DecoderConfig)
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(last_logits(runner, prompt), expected, atol=2e-4, rtol=2e-4)


def tiny(tmp_path: Path, config: Any) -> Any:
    return write_tiny_model(tmp_path / "model", config)


@pytest.mark.parametrize(("architecture", "config"), CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_those_of_transformers(architecture: str, config: Any, tmp_path: Path) -> None:
    model = tiny(tmp_path, config)
    file = write_model(tmp_path / "tiny.gguf", model, architecture, everything("F32"), extra=scaled(config))
    assert_logits_are_those_of(model, file)


# -- quantised ---------------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {**SIZES, "hidden_size": 256, "intermediate_size": 256}
# What a Q4_K_M file mixes: queries and keys of another format than values, a wider head, and rows too short for blocks.
MIXED = {"attn_v": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q8_0", "k_proj": "Q5_0", "up_proj": "Q5_1"}


def mixed(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return "F32"
    return next((kind for part, kind in MIXED.items() if part in name), "Q4_0")


QUANTIZED: dict[str, tuple[str, Any, Any]] = {
    "llama, mixed": ("llama", LlamaConfig(**WIDE, tie_word_embeddings=True), mixed),
    "gemma 3, mixed": (
        "gemma3",
        Gemma3TextConfig(**{**WIDE, "num_hidden_layers": 6}, head_dim=64, sliding_window=16, query_pre_attn_scalar=64),
        mixed,
    ),
    **{
        f"qwen 3, {kind}": ("qwen3", Qwen3Config(**WIDE, head_dim=64), everything(kind))
        for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    },
    "phi 3, fused": ("phi3", Phi3Config(**WIDE), everything("Q8_0")),
    "glm 4, interleaved": ("glm4", Glm4Config(**WIDE, head_dim=64), everything("Q4_1")),
    "qwen 2, F16": ("qwen2", Qwen2Config(**WIDE), everything("F16")),
    "qwen 2, BF16": ("qwen2", Qwen2Config(**WIDE), everything("BF16")),
}


@pytest.mark.parametrize(("architecture", "config", "choose"), QUANTIZED.values(), ids=QUANTIZED.keys())
def test_quantised_weights_give_nearly_the_logits_of_their_values(
    architecture: str, config: Any, choose: Any, tmp_path: Path
) -> None:
    model = tiny(tmp_path, config)
    file = write_model(tmp_path / "tiny.gguf", model, architecture, choose, extra=scaled(config))
    runner = fp32_runner(resolve_model(str(file)), num_blocks=64, threads=1)
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        found = last_logits(runner, prompt)
        # Activations are rounded to 8 bits before every product: of random weights more than of trained ones.
        assert torch.cosine_similarity(found, expected, dim=0) > 0.99


def test_a_quantised_file_stays_quantised_and_is_computed_in_fp32(tmp_path: Path) -> None:
    loaded()
    model = tiny(tmp_path, LlamaConfig(**WIDE, tie_word_embeddings=True))
    directory = resolve_model(str(write_model(tmp_path / "tiny.gguf", model, "llama", mixed)))
    runner = ModelRunner(directory, ModelSettings(num_blocks=64, num_cpu_blocks=0, threads=1))
    assert runner.model.dtype == "float32"
    assert isinstance(runner._model, CompiledLlama)
    layer = runner._model._model.layers[0]
    formats = [part.format.name for part in layer.attention.qkv.native if isinstance(part, NativeQuantizedLinear)]
    assert formats == ["q4_0", "q5_0", "q4_0"]
    [head] = runner._model._model.lm_head.native
    assert isinstance(head, NativeQuantizedLinear)
    assert head.format.name == "q8_0"


def test_every_architecture_is_tried() -> None:
    assert {architecture for architecture, _ in CONFIGS.values()} == FAMILIES.keys()
