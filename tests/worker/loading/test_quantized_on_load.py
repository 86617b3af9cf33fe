"""Weights are quantised as they are loaded; what no group holds, and what is quantised already, is not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.kernels.quantize import QUANTIZERS, quantize
from octavo.kernels.quantized import FORMATS, Quantized
from octavo.runtime.options.common import QUANTIZATION
from octavo.runtime.options.option import OneOf
from octavo.testing.small.packed import KINDS
from octavo.worker.loading.load_format import open_weights
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightsError

LAYER, EMBEDDING, HEAD = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {name: torch.randn(6, 64).bfloat16() for name in (LAYER, EMBEDDING, HEAD)}
    tensors |= {"model.norm.weight": torch.ones(64), "odd.weight": torch.randn(4, 48)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def taken(model: Path, name: str, quantization: str, part: TensorPart | None = None) -> Tensor | Quantized:
    source = open_weights(model, "auto", quantization=quantization)
    return source.take_weight(name, source.shapes()[name], part)


def test_the_option_has_the_formats_that_there_are_quantisers_for() -> None:
    assert isinstance(QUANTIZATION.values, OneOf)
    assert sorted(QUANTIZATION.values.words) == sorted(("none", *QUANTIZERS))


@pytest.mark.parametrize("quantization", QUANTIZERS)
def test_a_weight_is_of_the_format_and_both_ends_of_a_wider_one(model: Path, quantization: str) -> None:
    for name, expected in ((LAYER, quantization), (EMBEDDING, "q8_0"), (HEAD, "q8_0")):
        stored = open_weights(model, "auto").take(name, (6, 64))
        weight = taken(model, name, quantization)
        assert isinstance(weight, Quantized)
        assert weight.format is FORMATS[expected]
        assert torch.equal(weight.codes, quantize(stored, FORMATS[expected]).codes)


def test_a_rank_quantises_its_part_as_the_whole_is(model: Path) -> None:
    whole, part = taken(model, LAYER, "q4_0"), taken(model, LAYER, "q4_0", TensorPart(1, (range(32, 64),)))
    assert isinstance(whole, Quantized)
    assert isinstance(part, Quantized)
    assert torch.equal(part.dequantize(), whole.dequantize()[:, 32:])


@pytest.mark.parametrize("name", ["odd.weight", "model.norm.weight"])
def test_what_fills_no_group_stays_as_it_is(model: Path, name: str) -> None:
    stored, weight = taken(model, name, "none"), taken(model, name, "q4_0")
    assert isinstance(stored, Tensor)
    assert isinstance(weight, Tensor)
    assert torch.equal(weight, stored)


def test_values_that_cannot_be_quantised_are_named(model: Path) -> None:
    save_file({LAYER: torch.full((2, 32), float("nan"))}, model / "model.safetensors")
    with pytest.raises(WeightsError, match=f"tensor '{LAYER}' cannot be quantised: values that are not finite"):
        taken(model, LAYER, "q4_0")


def test_a_tensor_that_is_not_taken_is_missed(model: Path) -> None:
    source = open_weights(model, "auto", quantization="q4_0")
    for name in (EMBEDDING, HEAD, "odd.weight"):
        source.drop(name)
    source.take_weight(LAYER, (6, 64))
    with pytest.raises(WeightsError, match=r"1 tensors .*: model\.norm\.weight"):
        source.finish()


def test_random_weights_can_be_quantised() -> None:
    weight = open_weights(Path("none"), "dummy", quantization="q8_0").take_weight(LAYER, (6, 64))
    assert isinstance(weight, Quantized)


def test_what_is_quantised_already_is_refused(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"quantization_config": KINDS["gptq"].config}))
    with pytest.raises(WeightsError, match="quantised already, and would only lose by --quantization q8_0; leave it"):
        open_weights(model, "auto", quantization="q8_0")
