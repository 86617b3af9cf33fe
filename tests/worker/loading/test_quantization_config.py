"""What a checkpoint says of its quantisation is understood, or refused with the reason and a way out."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.testing.small.packed import KINDS, compressed, float8_compressed
from octavo.worker.loading.load_format import open_weights
from octavo.worker.loading.quantization_config import Packing, Scheme, read_scheme
from octavo.worker.loading.weights import WeightsError

WAY_OUT = "serve a checkpoint that is quantised by compressed-tensors .* GPTQ or AWQ, a GGUF file, or .* --quantization"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def scheme(directory: Path, config: Any) -> Scheme | None:
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return read_scheme(directory)


def changed(config: dict[str, Any], **group: Any) -> dict[str, Any]:
    """`config` with other entries in its group of layers."""
    config = copy.deepcopy(config)
    config["config_groups"]["group_0"].update(group)
    return config


W8A8, W4A16, FLOAT8 = KINDS["w8a8"].config, KINDS["w4a16"].config, float8_compressed("channel")


@pytest.mark.parametrize("config", [None, {}, {"quant_method": "gguf"}])
def test_a_checkpoint_that_says_nothing_of_its_layers_has_no_scheme(tmp_path: Path, config: Any) -> None:
    assert scheme(tmp_path, config) is None


@pytest.mark.parametrize(
    ("config", "packing"),
    [
        (W8A8, Packing("int-quantized", 8, None, symmetric=True)),
        (W4A16, Packing("pack-quantized", 4, 32, symmetric=True)),
        (changed(W4A16, weights={"num_bits": 4, "group_size": 64}), Packing("pack-quantized", 4, 64, symmetric=True)),
        (changed(W4A16, weights={"num_bits": 4, "group_size": -1}), Packing("pack-quantized", 4, None, symmetric=True)),
        (changed(W4A16, weights={"num_bits": 4}), Packing("pack-quantized", 4, None, symmetric=True)),
        (
            changed(W4A16, weights={"num_bits": 4, "group_size": 64, "actorder": "static", "symmetric": False}),
            Packing("pack-quantized", 4, 64, symmetric=False),
        ),
        ({**W8A8, "format": "mixed-precision"} | changed(W8A8, format="int-quantized"), None),
        (GPTQ, Packing("gptq", 4, 128, symmetric=True, zero_step=1)),
        ({**GPTQ, "sym": False, "group_size": -1}, Packing("gptq", 4, None, symmetric=False, zero_step=1)),
        ({**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, Packing("gptq", 8, 128, symmetric=True)),
        ({**GPTQ, "dynamic": {"-:.*mlp.*": {}}}, Packing("gptq", 4, 128, symmetric=True, zero_step=1)),
        (AWQ, Packing("awq", 4, 128, symmetric=False)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Packing("awq", 4, 64, symmetric=False)),
        (FLOAT8, Packing("float-quantized", 8, None, symmetric=True)),
        (float8_compressed("block"), Packing("float-quantized", 8, 128, symmetric=True, outputs=128)),
        ({"quant_method": "fp8"}, Packing("float-quantized", 8, None, symmetric=True)),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 128]},
            Packing("fp8", 8, 128, symmetric=True, outputs=64),
        ),
    ],
)
def test_what_is_served_is_understood(tmp_path: Path, config: Any, packing: Packing | None) -> None:
    found = scheme(tmp_path, config)
    assert found is not None
    assert found.packing("model.layers.0.mlp.down_proj") == (packing or Packing("int-quantized", 8, None, True))


def test_a_layers_own_name_or_pattern_goes_before_its_class(tmp_path: Path) -> None:
    config = compressed("pack-quantized", 4, 32)
    groups = config["config_groups"]
    groups["named"] = {"targets": ["lm_head"], "weights": {"num_bits": 8, "strategy": "channel"}}
    groups["matched"] = {"targets": ["re:.*down_proj$"], "weights": {"num_bits": 8, "group_size": 128}}
    found = scheme(tmp_path, config)
    assert found is not None
    assert found.packing("model.layers.0.mlp.up_proj") == Packing("pack-quantized", 4, 32, symmetric=True)
    assert found.packing("model.layers.0.mlp.down_proj") == Packing("pack-quantized", 8, 128, symmetric=True)
    assert found.packing("lm_head") == Packing("pack-quantized", 8, None, symmetric=True)


def test_a_quantised_layer_that_no_group_is_for_is_named(tmp_path: Path) -> None:
    found = scheme(tmp_path, changed(W4A16, targets=["re:.*mlp.*"]))
    assert found is not None
    with pytest.raises(WeightsError, match="lm_head is quantised, and no group of quantization_config"):
        found.packing("lm_head")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "8-bit floats of e5m2; e4m3 is served"),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "each 100 inputs; multiples of 32"),
        ({"quant_method": "fbgemm_fp8"}, "bounds the scales of inputs"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes', whose layout is its GPU kernels' own"),
        ({"quant_method": "hqq"}, "zero points that are no integers"),
        ({"quant_method": "mxfp4"}, "4-bit floats"),
        ({"quant_method": "quip"}, "tables"),
        ({"quant_method": "torchao"}, "quant_method 'torchao'"),
        ({"quant_method": "exl2"}, "quant_method 'exl2'"),
        ({"bits": 4}, "quant_method None"),
        (changed(W8A8, weights={"num_bits": 8, "type": "float"}), r"8-bit floats beside inputs of 8 bits \(int\)"),
        (changed(W4A16, weights={"num_bits": 8, "type": "float"}), "of 8-bit floats, float-quantized is read"),
        (changed(FLOAT8, weights={"num_bits": 8, "type": "float", "symmetric": False}), "floats with zero points"),
        (changed(FLOAT8, weights={"num_bits": 8, "type": "float", "group_size": 32}), "a scale for each group"),
        (changed(FLOAT8, weights={"num_bits": 8, "type": "float", "strategy": "block"}), "a scale for each block"),
        (changed(W8A8, weights={"num_bits": 4, "type": "float", "strategy": "tensor_group"}), "floats of 4 bits"),
        (changed(W8A8, input_activations={"num_bits": 8, "type": "float"}), "floats of 8 bits"),
        (changed(W4A16, input_activations={"num_bits": 4}), "inputs of 4 bits"),
        (changed(W8A8, output_activations={"num_bits": 8}), "outputs of layers"),
        (changed(W8A8, weights=None), "no weights"),
        (changed(W8A8, weights={"num_bits": 8, "symmetric": False}), "8 bits with zero points"),
        (changed(W4A16, weights={"num_bits": 3, "group_size": 32}), "weights of 3 bits"),
        (changed(W4A16, weights={"num_bits": 4, "group_size": 16}), "each 16 inputs; multiples of 32"),
        (changed(W4A16, weights={"num_bits": 4, "strategy": "group"}), "each 0 inputs"),
        (changed(W8A8, weights={"num_bits": 8, "strategy": "block"}), "a scale for each block"),
        (changed(W4A16, weights={"num_bits": 4, "group_size": 32, "actorder": "group"}), "activation order"),
        ({**W4A16, "format": "marlin-24"}, "stored as 'marlin-24'"),
        ({**W4A16, "format": "nvfp4-pack-quantized"}, "stored as 'nvfp4-pack-quantized'"),
        ({**W4A16, "config_groups": {}}, "no config_groups"),
        ({**W4A16, "sparsity_config": {"format": "sparse-24-bitmask"}}, "leaves out zeros"),
        ({**W4A16, "transform_config": {"config_groups": {"u": {}}}}, "turns the inputs"),
        ({**GPTQ, "bits": 3}, "weights of 3 bits"),
        ({**GPTQ, "bits": 8, "sym": False}, "8 bits with zero points"),
        ({**GPTQ, "group_size": 0}, "each 0 inputs"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "stored as 'marlin', the layout of GPU kernels"),
        ({**GPTQ, "is_marlin_format": True}, "stored as 'marlin'"),
        ({**GPTQ, "dynamic": {"+:.*mlp.*": {"bits": 8}}}, "differs from layer to layer"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**AWQ, "zero_point": False}, "without zero points"),
        ({**AWQ, "bits": 8}, "8 bits with zero points"),
        ({"quant_method": "awq", "bits": 4}, "how many inputs share a scale"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason_and_a_way_out(tmp_path: Path, config: Any, reason: str) -> None:
    with pytest.raises(WeightsError, match=f"{tmp_path}/config.json describes .*{reason}.*; {WAY_OUT}"):
        scheme(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "missing required field `bits`"),
        ({**GPTQ, "bits": "four"}, "Expected `int`, got `str`"),
        ({**GPTQ, "group_size": -2}, "Expected `int` >= -1"),
        ({**W4A16, "config_groups": [1]}, "Expected `object`, got `array`"),
        (changed(W4A16, targets=["re:("]), "unterminated subpattern"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "`array` of length 2"),
        ([1], "Expected `object`, got `array`"),
    ],
)
def test_a_broken_description_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=f"cannot read quantization_config in {tmp_path}/config.json: .*{message}"):
        scheme(tmp_path, config)


def test_random_weights_of_a_quantised_model_are_refused(tmp_path: Path) -> None:
    scheme(tmp_path, GPTQ)
    with pytest.raises(WeightsError, match=r"--load-format dummy makes no such weights; .* give --quantization"):
        open_weights(tmp_path, "dummy")
