"""Octavo's own families where they can, transformers otherwise."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from octavo.testing.small.architecture_trial import write_random_model
from octavo.worker.models.config_file import ModelConfigError, UnsupportedSetting
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.llama import LlamaModel
from octavo.worker.models.registry import load_model
from octavo.worker.models.transformers.model import TransformersModel

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_random_model(tmp_path, LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2), LlamaForCausalLM)
    return tmp_path


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    write_random_model(tmp_path, GPT2Config(**SIZES, bos_token_id=1, eos_token_id=2), GPT2LMHeadModel)
    return tmp_path


def loaded(directory: Path, **options: Any) -> Decoder:
    with torch.inference_mode():
        return load_model(directory, dtype=torch.float32, device=torch.device("cpu"), **options)


def test_a_native_family_is_preferred(llama: Path) -> None:
    assert isinstance(loaded(llama), LlamaModel)
    assert isinstance(loaded(llama, model_impl="native"), LlamaModel)


def test_transformers_can_be_asked_for(llama: Path) -> None:
    native, transformers = loaded(llama), loaded(llama, model_impl="transformers", max_model_len=40)
    assert isinstance(transformers, TransformersModel)
    assert transformers.config.max_model_len == 40
    for name in ("vocab_size", "num_kv_heads", "head_dim", "windows"):
        assert getattr(transformers.config, name) == getattr(native.config, name), name


def test_other_architectures_go_to_transformers(gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo.worker.models.registry"):
        assert isinstance(loaded(gpt2), TransformersModel)
    assert "transformers computes this model" in caplog.text


def test_a_setting_that_the_native_family_lacks_goes_to_transformers(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    assert isinstance(loaded(llama), TransformersModel)


def test_only_native_can_be_asked_for(gpt2: Path) -> None:
    with pytest.raises(UnsupportedSetting, match="GPT2LMHeadModel"):
        loaded(gpt2, model_impl="native")


def test_what_neither_serves_is_refused_with_its_directory_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ModelConfigError, match=f"{tmp_path}: MambaForCausalLM has a recurrent state"):
        loaded(tmp_path)
