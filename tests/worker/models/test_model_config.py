"""config.json: both layouts are read, and what is not implemented is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import DynamicCache, MistralConfig, Qwen2Config, Qwen3Config

from octavo.worker.models.config import (
    ARCHITECTURES,
    DecoderConfig,
    ModelConfigError,
    RotaryConfig,
    UnsupportedSetting,
    read_config,
)
from octavo.worker.models.config_file import FAMILY_KEYS, ConfigFile
from octavo.worker.models.rotary import LinearScaling, Llama3Scaling, LongRopeScaling

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}
BASE: dict[str, Any] = {**MINIMAL, "num_key_value_heads": 8}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
SLIDING_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 64,
}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 512}


def read_keys(directory: Path, keys: dict[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    (directory / "config.json").write_text(json.dumps(keys))
    return read_config(directory, max_model_len)


def read(directory: Path, max_model_len: int | None = None, **changes: Any) -> DecoderConfig:
    return read_keys(directory, {**BASE, **changes}, max_model_len)


def test_llama_has_neither_biases_nor_norms_nor_windows_by_default(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (8, 8, 1e-6)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.tie_word_embeddings) == (False,) * 4
    assert (config.attention_scale, config.attention_softcap, config.final_softcap) == (8**-0.5, 0.0, 0.0)
    assert (config.embedding_scale, config.residual_scale, config.logits_scale) == (1.0, 1.0, 1.0)
    assert config.rotaries == (RotaryConfig(10000.0, 8),) * 2
    assert config.windows == (0, 0)


def read_by_transformers(directory: Path, keys: dict[str, Any]) -> DecoderConfig:
    """What is read of config.json once transformers has read `keys` and written all it knows."""
    [name] = keys["architectures"]
    config: Any = getattr(transformers, name).config_class.from_dict(keys)
    config.save_pretrained(directory)
    return read_config(directory)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_config_json_lacks_is_as_transformers_has_it(tmp_path: Path, name: str) -> None:
    sizes = {"num_attention_heads": 160, "hidden_size": 1280, "num_hidden_layers": 30}
    keys = {**MINIMAL, **sizes, "architectures": [name]}
    # The one default that makes no head dimension.
    if name == "MinistralForCausalLM":
        keys["head_dim"] = 8
    assert read_keys(tmp_path, keys) == read_by_transformers(tmp_path, keys)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_default_is_of_a_key_that_is_read(name: str) -> None:
    assert set(ConfigFile.__struct_fields__) >= set(ARCHITECTURES[name].defaults) | FAMILY_KEYS


GEMMA3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 5, "head_dim": 16}
LONGROPE: dict[str, Any] = {"short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0]}
PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "head_dim": 8, "partial_rotary_factor": 0.75}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
# Layouts of config.json that are no longer written.
LEGACY: dict[str, dict[str, Any]] = {
    "llama 3.1": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "linear": {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen3, yarn": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": True,
        "head_dim": 16,
        "rope_theta": 1e6,
        "rope_scaling": YARN,
    },
    "gemma": {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "hidden_activation": None, "head_dim": 16},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 144,
        "attn_logit_softcapping": None,
        "sliding_window": 64,
        "rope_theta": 5000.0,
    },
    "gemma3": {
        **GEMMA3,
        "rope_theta": 2e6,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 64,
        "sliding_window_pattern": 2,
    },
    "phi3, longrope": {
        **PHI3,
        "original_max_position_embeddings": 512,
        "rope_scaling": {"type": "longrope", **LONGROPE},
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "rope_theta": 5e5,
        "rope_scaling": {**YARN, "attention_factor": 1.2},
        "sliding_window": 64,
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "rope_theta": 5e6, "no_rope_layers": [1, 0]},
    "glm": {"architectures": ["GlmForCausalLM"], "head_dim": 16, "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
    "keys that the family does not have": {
        "use_sliding_window": True,
        "query_pre_attn_scalar": 3,
        "final_logit_softcapping": 4.0,
        "logits_scaling": 7.0,
        "no_rope_layer_interval": 2,
        "rope_local_base_freq": 3.0,
        "hidden_activation": "relu",
    },
}


@pytest.mark.parametrize("keys", LEGACY.values(), ids=LEGACY.keys())
def test_older_layouts_are_read_as_transformers_reads_them(tmp_path: Path, keys: dict[str, Any]) -> None:
    keys = {**BASE, "num_key_value_heads": 4, **keys}
    assert read(tmp_path, **keys) == read_by_transformers(tmp_path, keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 1e5}, RotaryConfig(1e5, 8)),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, RotaryConfig(1e5, 8)),
        ({"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2}}, RotaryConfig(1e5, 8, LinearScaling(2))),
        # Where it would stretch, no context reaches.
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, RotaryConfig(10000.0, 8)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RotaryConfig(5e5, 8, Llama3Scaling(8.0, 1.0, 4.0, 512)),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RotaryConfig(5e5, 8, Llama3Scaling(8.0, 1.0, 4.0, 512)),
        ),
    ],
)
def test_both_layouts_of_the_rotary_embedding_are_read(
    tmp_path: Path, keys: dict[str, Any], expected: RotaryConfig
) -> None:
    assert set(read(tmp_path, **keys).rotaries) == {expected}


@pytest.mark.parametrize(("context", "factors"), [(512, (1.0, 2.0, 3.0)), (513, (4.0, 5.0, 6.0))])
def test_the_context_decides_between_the_factors_of_longrope(
    tmp_path: Path, context: int, factors: tuple[float, ...], caplog: pytest.LogCaptureFixture
) -> None:
    keys = {**PHI3, "rope_scaling": {"type": "su", **LONGROPE}, "original_max_position_embeddings": 512}
    [rotary] = set(read(tmp_path, context, **keys).rotaries)
    assert rotary is not None
    assert (rotary.rotary_dim, rotary.scaling) == (6, LongRopeScaling(factors))
    # The attention factor is the model's, whatever context it is given: its 4096 tokens are 8 times the 512.
    assert rotary.attention_factor == pytest.approx((1 + 3 / 9) ** 0.5)
    assert ("--max-model-len 512" in caplog.text) == (context > 512)


def test_layers_without_rotary_embedding_have_none(tmp_path: Path) -> None:
    smollm3: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5}
    turns = [rotary is not None for rotary in read(tmp_path, **smollm3).rotaries]
    assert turns == [True, True, True, False, True]
    named = read(tmp_path, **smollm3, no_rope_layers=[0, 1, 1, 0, 0])
    assert [rotary is not None for rotary in named.rotaries] == [False, True, True, False, False]


def test_code_that_a_config_names_is_not_needed(tmp_path: Path) -> None:
    """As in the released files of Phi-3, an architecture that is known here."""
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert read(tmp_path, **PHI3, auto_map=code) == read(tmp_path, **PHI3)


def test_qwen_has_biases_or_norms_whatever_its_config_says(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"], attention_bias=False)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.architecture.qk_norm) == (True, False, None)
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.architecture.qk_norm) == (False, False, "head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"\['GPT2LMHeadModel'\] is none of .*LlamaForCausalLM"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types.*no sliding window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "proportional", "factor": 4}}, "rope_type = 'proportional'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "rope_parameters by layer type"),
        ({**GEMMA3, "rope_parameters": {"rope_theta": 5e5}}, "not by layer type"),
        ({"sliding_window": 64}, r"sliding_window = 64 .*LlamaForCausalLM.*--max-model-len 64"),
        ({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*a sliding window"),
        ({**SLIDING_QWEN3, "layer_types": ["sliding_attention"]}, "2 layers with a sliding window"),
        ({**SLIDING_QWEN3, "layer_types": ["sliding_attention", "chunked_attention"]}, "chunked_attention"),
        ({**GEMMA3, "sliding_window_pattern": "LLG"}, "sliding_window_pattern = 'LLG'"),
        # transformers itself fails on this one, at its first forward pass.
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 2},
            "2 layers with no sliding window",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedSetting, match=message):
        read(tmp_path, **{"max_position_embeddings": 8192, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, "rotary embedding's parameters"),
        ({"rope_theta": 1.0}, "1.0 makes no waves"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "0 is not a positive number"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4}}, "not below"),
        ({**PHI3, "rope_scaling": {"type": "longrope", **LONGROPE, "long_factor": [1.0]}}, "1 longrope factors .* 3"),
        ({**PHI3, "partial_rotary_factor": 0.7}, "5 of a head's 8 dimensions"),
        ({"num_key_value_heads": 3}, "8 attention heads do not share 3"),
        ({**GEMMA3, "rope_parameters": {"sliding_attention": 5}}, "hold no parameters for sliding_attention"),
        ({"hidden_size": 7, "head_dim": None}, "a hidden size of 7 leaves 8 heads nothing each"),
        ({"num_attention_heads": 0}, r"Expected `int` >= 1 - at `\$.num_attention_heads`"),
        ({"num_hidden_layers": 0}, r"Expected `int` >= 1 - at `\$.num_hidden_layers`"),
        ({"vocab_size": "many"}, r"Expected `int`, got `str` - at `\$.vocab_size`"),
        ({"architectures": "LlamaForCausalLM"}, "Expected `array`, got `str`"),
        ({**MISTRAL, "sliding_window": 0}, "nothing to attend to"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "1 entries for 2 layers"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling"),
    ],
)
def test_what_no_model_can_have_is_refused_as_broken(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message) as refusal:
        read(tmp_path, **{"max_position_embeddings": 8192, **changes})
    assert not isinstance(refusal.value, UnsupportedSetting)
    assert str(tmp_path / "config.json") in str(refusal.value)


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
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 64}, (64, 0)),
        ({**GEMMA3, "sliding_window": 64, "sliding_window_pattern": 3}, (64, 64, 0, 64, 64)),
        ({"architectures": ["CwmForCausalLM"], "sliding_window": 64}, (0, 64)),
        ({"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 64, "no_rope_layers": [0, 1]}, (0, 0)),
        (
            {**SLIDING_QWEN3, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 1]},
            (64, 0),
        ),
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


def test_a_context_that_no_request_can_fill_is_refused_unless_a_shorter_one_is_served(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"1000000000 tokens.*1048576: give --max-model-len"):
        read(tmp_path, max_position_embeddings=10**9)
    with pytest.raises(ModelConfigError, match=r"1048577 tokens.*1048576: give --max-model-len"):
        read(tmp_path, max_position_embeddings=10**9, max_model_len=(1 << 20) + 1)
    assert read(tmp_path, max_position_embeddings=10**9, max_model_len=2048).max_model_len == 2048
    assert read(tmp_path, max_position_embeddings=1 << 20).max_model_len == 1 << 20


def test_a_config_that_is_missing_or_incomplete_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelConfigError, match="missing required field"):
        read_config(tmp_path)
