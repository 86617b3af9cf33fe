"""A model of the Llama family on several ranks computes what it does on one. Here the ranks are threads."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config, GraniteConfig, LlamaConfig, Olmo2Config, Phi3Config, Qwen3Config

from octavo.testbed.models import write_tiny_model
from octavo.testing.depth import every
from octavo.testing.native import kernels, loaded
from octavo.testing.shard_threads import RankRunner, ThreadGroup, lone_rank, run_ranks
from octavo.testing.small.tiny_configs import causal_class, causal_model_types, tiny_config
from octavo.worker.models.architectures import ARCHITECTURES
from octavo.worker.models.compiled import CompiledLlama
from octavo.worker.models.config import DecoderConfig
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.models.llama import LlamaModel
from octavo.worker.models.registry import load_model

__all__ = ["kernels"]

SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
UNEVEN: dict[str, Any] = {
    **SIZES,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 98,
}
# What the tiny configurations of all architectures leave out.
CONFIGS: dict[str, Any] = {
    "biases, tied": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "exact gelu": LlamaConfig(**SIZES, hidden_act="gelu"),
    "scaled residuals": GraniteConfig(
        **SIZES, residual_multiplier=0.7, embedding_multiplier=1.7, logits_scaling=3.0, tie_word_embeddings=True
    ),
    "shares that differ": LlamaConfig(**UNEVEN),
    "shares that differ, norms of all heads": Olmo2Config(**UNEVEN),
    "one KV head": Qwen3Config(**{**SIZES, "num_key_value_heads": 1}),
    "one tensor of queries, keys and values, shares that differ": Phi3Config(
        **{**UNEVEN, "partial_rotary_factor": 0.75}
    ),
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 180))]
MODEL_TYPES = {
    causal_class(model_type).__name__: model_type
    for model_type in causal_model_types()
    if causal_class(model_type).__name__ in ARCHITECTURES
}


@dataclass(frozen=True)
class Outcome:
    """What a rank found: the logits after `PROMPTS`, greedy ids, its model's own numbers."""

    logits: Tensor
    token_ids: list[list[int]]
    decoder: type
    config: DecoderConfig


def outcome(directory: Path, **options: Any) -> Callable[[ThreadGroup], Outcome]:
    def work(group: ThreadGroup) -> Outcome:
        runner = RankRunner(directory, group, **options)
        assert isinstance(runner.model, LlamaModel)
        logits, token_ids = runner.prompt_logits(PROMPTS), runner.generate(PROMPTS, 6)
        return Outcome(logits, token_ids, type(runner.decoder), runner.model.config)

    return work


def assert_like_one_rank(directory: Path, sizes: tuple[int, ...], **options: Any) -> None:
    [alone] = run_ranks(1, outcome(directory, **options))
    for size in sizes:
        first, *others = run_ranks(size, outcome(directory, **options))
        torch.testing.assert_close(first.logits, alone.logits, atol=1e-4, rtol=0)
        assert first.token_ids == alone.token_ids
        assert sum(each.config.intermediate_size for each in (first, *others)) == alone.config.intermediate_size
        assert {len(other.logits) for other in others} == {0}


# Those of one way of computing are alike to the ranks; ways that differ are below.
@pytest.mark.parametrize("name", every(6, sorted(ARCHITECTURES)))
def test_logits_and_tokens_of_every_architecture_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    model_type = MODEL_TYPES[name]
    write_tiny_model(tmp_path, tiny_config(model_type, causal_class(model_type).config_class))
    assert_like_one_rank(tmp_path, (2, 4))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("biases, tied", (2, 4)),
        ("exact gelu", (2, 4)),
        ("scaled residuals", (2, 4)),
        ("shares that differ", (2, 3, 6)),
        ("shares that differ, norms of all heads", (2, 6)),
        ("one KV head", (2, 3, 4)),
        ("one tensor of queries, keys and values, shares that differ", (2, 6)),
    ],
)
def test_logits_and_tokens_are_those_of_one_rank(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS[name])
    assert_like_one_rank(tmp_path, sizes)


@pytest.mark.parametrize("size", [2, 3])
def test_a_cache_of_8_bits_holds_each_ranks_heads(size: int, tmp_path: Path) -> None:
    loaded()
    write_tiny_model(tmp_path, CONFIGS["shares that differ"])
    assert_like_one_rank(tmp_path, (size,), kept=torch.int8)


@pytest.mark.parametrize("size", [2, 4])
def test_bfloat16_strays_hardly_further_than_on_one_rank(size: int, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, Gemma2Config(**SIZES, sliding_window=20))
    [truth] = run_ranks(1, outcome(tmp_path))
    [alone] = run_ranks(1, outcome(tmp_path, dtype=torch.bfloat16))
    shared = run_ranks(size, outcome(tmp_path, dtype=torch.bfloat16))[0]
    errors = [(each.logits - truth.logits).abs().mean() for each in (alone, shared)]
    assert errors[1] < 1.5 * errors[0]


def test_a_rank_has_its_own_heads_and_columns_and_the_whole_vocabulary(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS["shares that differ"])
    found = [each.config for each in run_ranks(2, outcome(tmp_path))]
    assert [(config.num_heads, config.num_kv_heads) for config in found] == [(4, 2), (2, 1)]
    assert [config.intermediate_size for config in found] == [50, 48]
    assert {config.vocab_size for config in found} == {301}


def test_a_native_program_adds_up_twice_per_layer(tmp_path: Path) -> None:
    loaded()
    write_tiny_model(tmp_path, CONFIGS["biases, tied"])

    def reduces(group: ThreadGroup) -> int:
        runner = RankRunner(tmp_path, group)
        assert isinstance(runner.decoder, CompiledLlama)
        runner.decoder.profiling = True
        runner.prompt_logits(PROMPTS)
        assert runner.decoder.op_times["all_reduce"] > 0
        assert runner.decoder.op_times["down"] > 0
        return group.num_reduces

    # Once more for the embedding.
    assert run_ranks(2, reduces) == [5, 5]


def test_norms_over_the_heads_of_all_ranks_are_not_left_to_the_native_program(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS["shares that differ, norms of all heads"])
    assert {each.decoder for each in run_ranks(2, outcome(tmp_path))} == {LlamaModel}


def test_a_row_is_the_same_to_the_last_bit_whatever_is_beside_it(tmp_path: Path) -> None:
    loaded()
    write_tiny_model(tmp_path, CONFIGS["biases, tied"])

    def rows(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        runner = RankRunner(tmp_path, group)
        alone = [runner.prompt_logits([prompt]) for prompt in PROMPTS]
        return torch.cat(alone), runner.prompt_logits(PROMPTS)

    for size in (2, 4):
        alone, together = run_ranks(size, rows)[0]
        assert torch.equal(alone, together)


@pytest.mark.parametrize("config", [CONFIGS["biases, tied"], Phi3Config(**SIZES)], ids=["llama", "phi3"])
def test_of_the_file_each_byte_is_read_by_the_ranks_that_need_it(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path, config)
    reads, preadv = [0], os.preadv

    def counted(file: int, buffers: list[memoryview], offset: int) -> int:
        reads.extend(map(len, buffers))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)

    def bytes_of(rank: int, size: int) -> int:
        reads.clear()
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), group=lone_rank(rank, size))
        return sum(reads)

    whole = bytes_of(0, 1)
    # In fp32: those before and after each MLP and the last; keys and values, which two of four ranks hold alike.
    norms, keys_and_values = 4 * 64 * 5, 4 * 2 * (2 * 32) * (65 if isinstance(config, LlamaConfig) else 64)
    for size, again in ((2, norms), (4, 3 * norms + keys_and_values)):
        found = [bytes_of(rank, size) for rank in range(size)]
        assert sum(found) == whole + again
        assert max(found) < 1.3 * min(found)


def test_what_the_heads_do_not_allow_is_refused(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    for size, message in ((3, "one of 1, 2, 4 does"), (8, "--tp 8 does not fit a model of 4 attention heads")):
        with pytest.raises(ModelConfigError, match=message):
            run_ranks(size, lambda group: RankRunner(tmp_path, group, load_format="dummy"))


def test_every_rank_makes_its_part_of_the_same_dummy_weights(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert_like_one_rank(tmp_path, (2, 4), load_format="dummy")


def test_a_stored_head_and_scales_of_the_cache_are_read_by_every_rank(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS["biases, tied"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_like_one_rank(tmp_path, (2,))

    def scales(group: ThreadGroup) -> list[tuple[float, float]]:
        model = RankRunner(tmp_path, group).model
        assert isinstance(model, LlamaModel)
        return model.kv_scales

    assert run_ranks(2, scales) == [[(0.5, 1.0), (1.0, 1.0)]] * 2


def test_the_test_covers_every_architecture() -> None:
    assert set(MODEL_TYPES) == set(ARCHITECTURES)
