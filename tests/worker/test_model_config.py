"""config.json: both layouts are read, and what is not implemented is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

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
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rotary embedding's parameters"),
        ({"num_key_value_heads": 3}, "8 attention heads do not share 3"),
        ({"num_attention_heads": 0}, "0 attention heads"),
        ({"vocab_size": "many"}, r"Expected `int`, got `str` - at `\$.vocab_size`"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window = 4096.*--max-model-len 4096"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64}, "= 64"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"], "sliding_window": 64}, "= 64"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **{"max_position_embeddings": 8192, **changes})


def test_a_window_as_long_as_the_context_is_no_window(tmp_path: Path) -> None:
    mistral: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}
    assert read(tmp_path, 4096, **mistral).max_model_len == 4096
    assert read(tmp_path, **mistral, sliding_window=None).max_model_len == 8192


def test_a_config_that_is_missing_or_incomplete_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match="missing required field"):
        read_config(tmp_path)
