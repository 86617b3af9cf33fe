"""Tiny random models of every family, against the logits and tokens of transformers' own implementation."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    HeliumConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from octavo.testbed.models import (
    fp32_runner,
    generate,
    last_logits,
    transformers_greedy,
    write_tiny_model,
)
from octavo.testing.depth import deep, every_row
from octavo.testing.native import kernels
from octavo.worker.loading.weights import Checkpoint
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.architectures import ARCHITECTURES
from octavo.worker.models.config import DecoderConfig, read_config
from octavo.worker.models.llama import LlamaModel
from octavo.worker.step.model_runner import ModelRunner

__all__ = ["kernels"]

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
DEEP: dict[str, Any] = {**SIZES, "num_hidden_layers": 4}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
FAMILIES = {
    "ernie 4.5": Ernie4_5Config(**SIZES, head_dim=16),
    "ernie 4.5 with biases": Ernie4_5Config(**SIZES, head_dim=16, use_bias=True, tie_word_embeddings=False),
    "exaone 4 without windows": Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 2),
    "gemma": GemmaConfig(**SIZES, head_dim=32),
    "glm": GlmConfig(**SIZES, head_dim=16),
    "glm4": Glm4Config(**SIZES, head_dim=24, attention_bias=False),
    "granite": GraniteConfig(**SIZES, **MULTIPLIERS),
    "helium": HeliumConfig(**{**SIZES, "num_key_value_heads": 4}, head_dim=16),
    "llama": LlamaConfig(**SIZES),
    "llama with biases, tied": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama with gelu": LlamaConfig(**SIZES, hidden_act="gelu"),
    "mistral": MistralConfig(**SIZES, head_dim=24, sliding_window=None),
    "olmo2": Olmo2Config(**SIZES),
    "phi3": Phi3Config(**SIZES),
    "phi3, partly rotary": Phi3Config(**{**SIZES, "partial_rotary_factor": 0.75}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "seed-oss": SeedOssConfig(**SIZES, head_dim=16, attention_out_bias=True),
    "smollm3": SmolLM3Config(**DEEP),
    "smollm3, layers named": SmolLM3Config(**SIZES, no_rope_layers=[0, 1], attention_bias=True),
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 180))]
FULL = ["full_attention"]


def assert_logits_are_those_of(model: Any, runner: ModelRunner, prompts: list[list[int]]) -> None:
    assert isinstance(runner._model.config, DecoderConfig), "transformers computes this model"
    for prompt in prompts:
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(last_logits(runner, prompt), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
def test_logits_and_tokens_are_those_of_transformers(config: Any, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, config)
    runner = fp32_runner(tmp_path, num_blocks=64, threads=1)
    assert_logits_are_those_of(model, runner, PROMPTS)
    tokens = [transformers_greedy(model, prompt, 8) for prompt in PROMPTS]
    assert generate(runner, PROMPTS, 8, budget=13) == tokens


THETA = {"rope_theta": 10000.0}
ORIGINAL: dict[str, Any] = {"original_max_position_embeddings": 64}
SHORT, LONG = [1.0, 1.1, 1.3, 1.5, 1.6, 2.0, 2.5, 3.0], [1.0, 1.5, 2.5, 4.0, 6.0, 9.0, 14.0, 20.0]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTARY: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3, **ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **ORIGINAL},
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rotary", ROTARY.values(), ids=ROTARY.keys())
def test_every_kind_of_rotary_scaling_is_that_of_transformers(rotary: dict[str, Any], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, LlamaConfig(**SIZES, rope_parameters={**THETA, **rotary}))
    runner = fp32_runner(tmp_path, num_blocks=64, threads=1)
    # The factors of longrope follow the longest sequence that is possible; transformers' follow the one at hand.
    prompts = PROMPTS[2:] if rotary["rope_type"] == "longrope" else PROMPTS
    assert_logits_are_those_of(model, runner, prompts)
    tokens = [transformers_greedy(model, prompt, 8) for prompt in prompts]
    assert generate(runner, prompts, 8, budget=13) == tokens


def test_longrope_has_its_short_factors_where_the_context_is_the_original_one(tmp_path: Path) -> None:
    config = Phi3Config(**SIZES, **ORIGINAL, rope_parameters={**THETA, **ROTARY["longrope"]})
    model = write_tiny_model(tmp_path, config)
    runner = fp32_runner(tmp_path, num_blocks=64, threads=1, max_model_len=64)
    prompts = [PROMPTS[1], PROMPTS[2][:50]]
    assert_logits_are_those_of(model, runner, prompts)
    assert generate(runner, prompts, 8, budget=13) == [transformers_greedy(model, prompt, 8) for prompt in prompts]


def sliding(family: Any, **changes: Any) -> Any:
    return family(**{**DEEP, "use_sliding_window": True, "sliding_window": 20, **changes})


SLIDING_GEMMA: dict[str, Any] = {
    "sliding_window": 20,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    # Others of transformers' implementations leave the soft-cap out.
    "attn_implementation": "eager",
}
BY_LAYER_TYPE: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
}
OLMO3_YARN: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "full_attention": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, **ORIGINAL},
}
# Most of 4 layers attend to the last 20 tokens only; the windows are those of the KV groups. The longest prompt has 80.
WINDOWS: dict[str, tuple[Any, list[int]]] = {
    "mistral, all layers": (MistralConfig(**DEEP, sliding_window=20), [20]),
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
MORE_WINDOWS: dict[str, tuple[Any, list[int]]] = {
    "cwm": (CwmConfig(**DEEP, head_dim=16, sliding_window=20), [0, 20, 20, 20]),
    "exaone 4, full layers unrotated": (Exaone4Config(**DEEP, sliding_window=20), [20, 20, 20, 0]),
    "gemma2": (Gemma2Config(**DEEP, **SLIDING_GEMMA), [20, 0]),
    "gemma2, tight soft-caps": (
        Gemma2Config(**DEEP, **SLIDING_GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=1.5),
        [20, 0],
    ),
    "gemma3": (Gemma3TextConfig(**{**DEEP, "num_hidden_layers": 7}, **SLIDING_GEMMA), [20] * 6 + [0]),
    "gemma3, rotary by layer type": (
        Gemma3TextConfig(
            **DEEP, **SLIDING_GEMMA, layer_types=["sliding_attention", *FULL] * 2, rope_parameters=BY_LAYER_TYPE
        ),
        [20, 0],
    ),
    "ministral": (
        MinistralConfig(**DEEP, head_dim=16, sliding_window=20, layer_types=[*FULL, "sliding_attention"] * 2),
        [0, 20],
    ),
    "olmo3": (Olmo3Config(**DEEP, sliding_window=20, rope_parameters=OLMO3_YARN), [20, 20, 20, 0]),
    "phi3": (Phi3Config(**DEEP, sliding_window=20), [20]),
    "smollm3, unrotated layers": (sliding(SmolLM3Config, no_rope_layers=[1, 0, 1, 0]), [0, 20]),
}


def assert_windows_are_those_of_transformers(config: Any, groups: list[int], block_size: int, directory: Path) -> None:
    model = write_tiny_model(directory, config)
    runner = fp32_runner(directory, block_size=block_size, threads=1)
    assert [group.window for group in runner.kv_groups] == groups
    assert_logits_are_those_of(model, runner, PROMPTS)
    tokens = [transformers_greedy(model, prompt, 30) for prompt in PROMPTS]
    assert generate(runner, PROMPTS, 30, budget=13) == tokens
    assert generate(runner, PROMPTS, 30) == tokens


@pytest.mark.parametrize("block_size", [*deep(1), 8, *deep(32)])
@pytest.mark.parametrize(("config", "groups"), WINDOWS.values(), ids=WINDOWS.keys())
def test_sliding_windows_give_the_logits_and_tokens_of_transformers(
    config: Any, groups: list[int], block_size: int, tmp_path: Path
) -> None:
    assert_windows_are_those_of_transformers(config, groups, block_size, tmp_path)


@pytest.mark.parametrize("block_size", [8, *deep(16)])
@pytest.mark.parametrize(("config", "groups"), every_row(2, MORE_WINDOWS.values()), ids=MORE_WINDOWS.keys())
def test_families_with_windows_give_the_logits_and_tokens_of_transformers(
    config: Any, groups: list[int], block_size: int, tmp_path: Path
) -> None:
    assert_windows_are_those_of_transformers(config, groups, block_size, tmp_path)


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


def test_every_native_architecture_is_tried_here() -> None:
    windowed = [config for config, _ in (*WINDOWS.values(), *MORE_WINDOWS.values())]
    tried = {type(config).__name__.removesuffix("Config") for config in (*FAMILIES.values(), *windowed)}
    assert {f"{name.removesuffix('Text')}ForCausalLM" for name in tried} == set(ARCHITECTURES)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("config", [FAMILIES["qwen3"], MORE_WINDOWS["gemma2"][0]], ids=["qwen3", "gemma2"])
def test_bfloat16_is_as_close_to_fp32_as_transformers_is(config: Any, tmp_path: Path) -> None:
    exact = write_tiny_model(tmp_path, config)
    rounded = copy.deepcopy(exact).bfloat16()
    runner = ModelRunner(tmp_path, ModelSettings(dtype="bfloat16", num_blocks=64, threads=1))
    for prompt in PROMPTS[1:]:
        with torch.inference_mode():
            expected, theirs = (model(torch.tensor([prompt])).logits[0, -1].float() for model in (exact, rounded))
        error, their_error = ((logits.float() - expected).norm() for logits in (last_logits(runner, prompt), theirs))
        assert error < 1.5 * their_error
        assert error < 0.1 * expected.norm()


def load_native(directory: Path, dtype: torch.dtype, max_model_len: int | None = None) -> LlamaModel:
    return LlamaModel(read_config(directory, max_model_len), Checkpoint(directory), dtype, torch.device("cpu"))


def test_gemma_rounds_the_scale_of_its_embeddings_as_its_embeddings(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, GemmaConfig(**{**SIZES, "hidden_size": 72}, head_dim=32)).bfloat16()
    native = load_native(tmp_path, torch.bfloat16)
    ids = torch.tensor(PROMPTS[1])
    with torch.inference_mode():
        assert torch.equal(native.embedding_rows(ids) * native.embedding_scale, model.model.embed_tokens(ids))


def test_layers_that_turn_alike_share_one_table_of_angles(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, MORE_WINDOWS["gemma3, rotary by layer type"][0])
    model = load_native(tmp_path, torch.float32, 100)
    sliding_table, full_table = model.rotary_tables
    assert [layer.attention.rotary for layer in model.layers] == [sliding_table, full_table] * 2
    assert (sliding_table.cos.shape, sliding_table.cos.dtype) == ((100, 16), torch.float32)


@pytest.mark.parametrize("differs", [True, False])
def test_a_stored_head_is_used_though_embeddings_are_tied(tmp_path: Path, differs: bool) -> None:
    write_tiny_model(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=True))
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head.flip(0).contiguous() if differs else head
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[1]])).logits[0, -1]
    torch.testing.assert_close(last_logits(fp32_runner(tmp_path, num_blocks=64, threads=1), PROMPTS[1]), expected)


def test_sharded_weights_load_like_whole_ones(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "whole", FAMILIES["qwen3"])
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    whole, sharded = (fp32_runner(tmp_path / name, num_blocks=64, threads=1) for name in ("whole", "sharded"))
    assert torch.equal(last_logits(whole, PROMPTS[1]), last_logits(sharded, PROMPTS[1]))
