"""config.json: both layouts are read, and what is not implemented is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import DynamicCache, MistralConfig, Qwen2Config, Qwen3Config

from octavo.worker.models.config import ConfigError, DecoderConfig, RotaryConfig, read_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
SLIDING_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 64,
}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 512}


def read(directory: Path, max_model_len: int | None = None, **changes: Any) -> DecoderConfig:
    (directory / "config.json").write_text(json.dumps({**BASE, **changes}))
    return read_config(directory, max_model_len)


def test_defaults_are_those_of_the_family(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (8, 8, 1e-6)
    assert (config.qkv_bias, config.qk_norm, config.tie_word_embeddings) == (False, False, False)
    assert config.rotary == RotaryConfig(theta=10000.0)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 1e5}, RotaryConfig(1e5)),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, RotaryConfig(1e5)),
        ({"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2}}, RotaryConfig(1e5, "linear", 2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RotaryConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RotaryConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512),
        ),
    ],
)
def test_both_layouts_of_the_rotary_embedding_are_read(
    tmp_path: Path, keys: dict[str, Any], expected: RotaryConfig
) -> None:
    assert read(tmp_path, **keys).rotary == expected


def test_qwen_has_biases_or_norms_whatever_its_config_says(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"\['GPT2LMHeadModel'\] is none of LlamaForCausalLM"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "auto_map"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types.*no sliding window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rotary embedding's parameters"),
        ({"num_key_value_heads": 3}, "8 attention heads do not share 3"),
        ({"num_attention_heads": 0}, "0 attention heads"),
        ({"vocab_size": "many"}, r"Expected `int`, got `str` - at `\$.vocab_size`"),
        ({"sliding_window": 64}, r"sliding_window = 64 .*LlamaForCausalLM.*--max-model-len 64"),
        ({**MISTRAL, "sliding_window": 0}, "nothing to attend to"),
        ({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*a sliding window"),
        ({**SLIDING_QWEN3, "layer_types": ["sliding_attention"]}, "2 layers with a sliding window"),
        ({**SLIDING_QWEN3, "layer_types": ["sliding_attention", "chunked_attention"]}, "chunked_attention"),
        # transformers itself fails on this one, at its first forward pass.
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 2},
            "2 layers with no sliding window",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **{"max_position_embeddings": 8192, **changes})


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (0, 0)),
        ({"layer_types": ["full_attention"] * 2}, (0, 0)),
        (MISTRAL, (4096, 4096)),
        ({**MISTRAL, "sliding_window": 64}, (64, 64)),
        ({**MISTRAL, "sliding_window": None}, (0, 0)),
        ({**MISTRAL, "sliding_window": 8192}, (0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 0}, (0, 0)),
        (SLIDING_QWEN3, (0, 0)),
        ({**SLIDING_QWEN3, "max_window_layers": 1}, (0, 64)),
        ({**SLIDING_QWEN3, "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 0}, (64, 64)),
        ({**SLIDING_QWEN3, "layer_types": ["sliding_attention", "full_attention"]}, (64, 0)),
    ],
)
def test_each_layer_has_its_window(tmp_path: Path, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read(tmp_path, **{"max_position_embeddings": 8192, **changes}).windows == windows


@pytest.mark.parametrize("architecture", [MistralConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("use_sliding_window", [False, True])
@pytest.mark.parametrize("max_window_layers", [0, 1, 3, 28])
def test_windows_are_those_of_transformers(
    tmp_path: Path, architecture: Any, use_sliding_window: bool, max_window_layers: int
) -> None:
    config = architecture(
        num_hidden_layers=4,
        sliding_window=64,
        use_sliding_window=use_sliding_window,
        max_window_layers=max_window_layers,
        architectures=[architecture.__name__.replace("Config", "ForCausalLM")],
    )
    config.save_pretrained(tmp_path)
    assert read_config(tmp_path).windows == tuple(64 * slides for slides in DynamicCache(config=config).is_sliding)


def test_a_window_as_long_as_the_shortened_context_is_no_window(tmp_path: Path) -> None:
    mistral = {**MISTRAL, "max_position_embeddings": 8192}
    assert read(tmp_path, 4096, **mistral).windows == (0, 0)
    assert read(tmp_path, 4097, **mistral).windows == (4096, 4096)


def test_a_config_that_is_missing_or_incomplete_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match="missing required field"):
        read_config(tmp_path)
