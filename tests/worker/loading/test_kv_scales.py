"""What a checkpoint that was calibrated for an fp8 cache says of its keys and values."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from octavo.testbed.models import fp32_runner, generate, write_tiny_model
from octavo.worker.loading.weights import WeightsError
from octavo.worker.models.llama import LlamaModel
from octavo.worker.models.registry import load_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, max_position_embeddings=32)
    config.update(sizes)
    write_tiny_model(tmp_path, config)
    return tmp_path


def add(model: Path, **tensors: torch.Tensor) -> None:
    path = model / "model.safetensors"
    stored = load_file(path)
    added = {f"model.layers.{name.replace('__', '.self_attn.')}": tensor for name, tensor in tensors.items()}
    save_file(stored | added, path, metadata={"format": "pt"})


def loaded(model: Path) -> LlamaModel:
    found = load_model(model, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(found, LlamaModel)
    return found


def test_scales_are_read_where_they_are_stored(model: Path) -> None:
    assert loaded(model).kv_scales == [(1.0, 1.0), (1.0, 1.0)]
    add(model, **{"1__k_scale": torch.tensor(0.5), "1__v_scale": torch.tensor([0.25])})
    assert loaded(model).kv_scales == [(1.0, 1.0), (0.5, 0.25)]


def test_a_cache_of_another_type_does_without_them(model: Path) -> None:
    expected = generate(fp32_runner(model, threads=1), [[3, 4, 5]], 4)
    add(model, **{"0__k_scale": torch.tensor(0.5), "0__v_scale": torch.tensor(0.25)})
    assert generate(fp32_runner(model, threads=1), [[3, 4, 5]], 4) == expected


def test_scales_of_single_heads_are_refused(model: Path) -> None:
    add(model, **{"0__k_scale": torch.ones(4)})
    with pytest.raises(WeightsError, match="k_scale"):
        loaded(model)
