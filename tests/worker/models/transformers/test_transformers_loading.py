"""Configurations that cannot be served are refused by name, and weights are all used or the model is not served."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM

from octavo.testing.small.architecture_trial import write_random_model
from octavo.worker.loading.load_format import DummyWeights
from octavo.worker.loading.weights import Checkpoint, WeightsError
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.models.transformers.check import UnsupportedModel
from octavo.worker.models.transformers.loading import (
    context_length,
    load,
    model_class,
    read_transformers_config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2 = GPT2Config(**SIZES, bos_token_id=1, eos_token_id=2)
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
LFM2 = {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}


def read(directory: Path, **keys: Any) -> Any:
    (directory / "config.json").write_text(json.dumps(keys))
    return read_transformers_config(directory)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_type": "falcon", "architectures": ["FalconForCausalLM"]}, "computes its attention itself"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "has a recurrent state"),
        ({"model_type": "gpt2", "architectures": ["GPT2Model"]}, "no causal language model"),
        ({"model_type": "gpt2", "architectures": ["OPTForCausalLM"]}, "no causal language model"),
        ({"model_type": "gpt2"}, "architectures None"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder with a decoder"),
        ({**LFM2, "num_hidden_layers": 1, "layer_types": ["conv"]}, "not plain attention: conv"),
        ({"model_type": "x", "auto_map": CODE}, r"no model_type 'x' .* code that auto_map names is never run"),
        ({"model_type": "gpt2", "auto_map": CODE, "architectures": ["XForCausalLM"]}, "no causal language model"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        model_class(read(tmp_path, **keys))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"architectures": 5}', '{"model_type": "no-such-type"}', '{"architectures": ["X"]}']
)
def test_a_configuration_that_transformers_cannot_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        read_transformers_config(tmp_path)


def test_the_context_is_the_configurations_or_shorter(tmp_path: Path) -> None:
    assert context_length(GPT2, None) == 64
    assert context_length(GPT2, 10) == 10
    with pytest.raises(ModelConfigError, match=r"context of 65 tokens .* 1 to 64"):
        context_length(GPT2, 65)


def test_a_context_that_no_configuration_states_must_be_given(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="bloom", architectures=["BloomForCausalLM"])
    with pytest.raises(ModelConfigError, match="--max-model-len"):
        context_length(config, None)
    assert context_length(config, 100) == 100


def test_rotary_embeddings_that_follow_the_longest_sequence_are_refused(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="phi3", hidden_size=32, num_attention_heads=4, **_context(64, LONGROPE))
    with pytest.raises(UnsupportedModel, match=r"longrope.*--max-model-len 32"):
        context_length(config, None)
    assert context_length(config, 32) == 32


def _context(length: int, rotary: dict[str, Any]) -> dict[str, Any]:
    return {
        "max_position_embeddings": length,
        "original_max_position_embeddings": rotary["original_max_position_embeddings"],
        "rope_scaling": rotary,
        "num_hidden_layers": 1,
    }


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    write_random_model(tmp_path, GPT2, GPT2LMHeadModel)
    return tmp_path


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load(read_transformers_config(directory), Checkpoint(directory), dtype)


def test_tensors_arrive_in_the_dtype_asked_for(gpt2: Path) -> None:
    state = loaded(gpt2, torch.bfloat16).state_dict()
    for name, tensor in weights(gpt2).items():
        assert torch.equal(state[name], tensor.to(torch.bfloat16)), name


def test_tied_weights_are_one_tensor(gpt2: Path) -> None:
    assert "lm_head.weight" not in weights(gpt2)
    model = loaded(gpt2)
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()


def test_names_without_the_prefix_of_the_decoder_are_known(gpt2: Path) -> None:
    """As the first checkpoints of GPT-2 have them."""
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights(gpt2).items()}
    expected = loaded(gpt2).state_dict()
    save_file(bare, gpt2 / "model.safetensors", metadata={"format": "pt"})
    state = loaded(gpt2).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_experts_one_by_one_are_put_together(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, num_local_experts=4)
    model = write_random_model(tmp_path, config, MixtralForCausalLM)
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in weights(tmp_path)
    state = loaded(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformer.h.1.mlp.c_fc.weight": None}, r"lack 1 tensors .*transformer\.h\.1\.mlp\.c_fc\.weight"),
        ({"transformer.h.2.ln_1.weight": torch.ones(32)}, r"have 1 tensors .* no place for: .*h\.2\.ln_1"),
        ({"transformer.wpe.weight": torch.ones(63, 32)}, r"wpe.weight' is \[63, 32\] .* \[64, 32\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(gpt2: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    changed = {name: tensor for name, tensor in {**weights(gpt2), **change}.items() if tensor is not None}
    save_file(changed, gpt2 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=message):
        loaded(gpt2)


def test_random_weights_need_no_file_and_are_the_same_every_time(tmp_path: Path) -> None:
    config = OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, architectures=["OPTForCausalLM"])
    first, second = (load(config, DummyWeights(), torch.float32).state_dict() for _ in range(2))
    assert set(first) == set(OPTForCausalLM(config).state_dict())
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert all(tensor.isfinite().all() and tensor.device.type == "cpu" for tensor in first.values())


def test_loading_is_silent(gpt2: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded(gpt2)
    captured = capfd.readouterr()
    assert "Loading weights" not in captured.out + captured.err
