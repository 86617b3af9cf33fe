"""Weights of 8-bit floats are read with their scales, for whole tensors, outputs or blocks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.kernels.quantized import Quantized
from octavo.testing.small.packed import float8_compressed
from octavo.worker.loading.load_format import open_weights
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightsError

LAYER, OUTPUTS, INPUTS = "model.layers.0.mlp.down_proj", 200, 320
NAME = f"{LAYER}.weight"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}


def codes() -> Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)).mul_(9).to(torch.float8_e4m3fn)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5


def blocks(of: Tensor) -> Tensor:
    """The scale of each number, of blocks of 128 x 128 of which the last ones are cut off."""
    return of.repeat_interleave(128, dim=0)[:OUTPUTS].repeat_interleave(128, dim=1)[:, :INPUTS]


def write(directory: Path, config: Any, **tensors: Tensor) -> Path:
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def taken(directory: Path, part: TensorPart | None = None) -> Quantized:
    source = open_weights(directory, "auto")
    weight = source.take_weight(NAME, (OUTPUTS, INPUTS), part)
    source.finish()
    assert isinstance(weight, Quantized)
    assert weight.format.name == "fp8"
    return weight


@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        (float8_compressed("tensor"), "weight_scale", (1,)),
        (float8_compressed("tensor"), "weight_scale", ()),
        (float8_compressed("channel"), "weight_scale", (OUTPUTS, 1)),
        ({**float8_compressed("channel"), "format": "naive-quantized"}, "weight_scale", (OUTPUTS,)),
        (FP8, "weight_scale", ()),
        ({"quant_method": "finegrained_fp8"}, "weight_scale_inv", (1,)),
        (float8_compressed("block"), "weight_scale", (2, 3)),
        (BLOCKS, "weight_scale_inv", (2, 3)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_read_with_its_scales(
    tmp_path: Path, config: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values, given = codes(), scales(*shape).to(dtype)
    unused = {} if config is BLOCKS else {"input_scale": torch.ones(1)}
    write(tmp_path, config, weight=values, **{name: given}, **unused)
    wide = blocks(given.float()) if shape == (2, 3) else given.float().reshape(-1, 1)
    found = taken(tmp_path)
    # Groups end where blocks do, and where the weight does.
    assert found.group == (64 if shape == (2, 3) else INPUTS)
    assert torch.equal(found.dequantize(), values.float() * wide)
    assert torch.equal(open_weights(tmp_path, "auto").take(NAME, (OUTPUTS, INPUTS)), values.float() * wide)


@pytest.mark.parametrize("part", [TensorPart(0, (range(3, 9), range(150, 190))), TensorPart(1, (range(64, 160),))])
def test_a_share_has_its_own_scales(tmp_path: Path, part: TensorPart) -> None:
    values, given = codes(), scales(2, 3)
    write(tmp_path, BLOCKS, weight=values, weight_scale_inv=given)
    whole = values.float() * blocks(given)
    places = torch.cat([torch.arange(each.start, each.stop) for each in part.ranges])
    assert torch.equal(taken(tmp_path, part).dequantize(), whole.index_select(part.dim, places))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (BLOCKS, {"weight_scale_inv": scales(2, 2)}, r"'model.*weight_scale_inv' .* is \[2, 2\]"),
        (BLOCKS, {"weight_scale_inv": scales(2, 3) / 0}, "scales that are not finite"),
        (FP8, {"weight_scale": scales(3)}, r"weight_scale' .* is \[3\]"),
        (FP8, {"weight_scale": torch.ones(1, dtype=torch.int32)}, "is int32; it must be float16"),
        (FP8, {"weight_scale": scales(1), "weight": torch.ones(OUTPUTS, INPUTS)}, "float32; it must be float8_e4m3fn"),
    ],
)
def test_a_tensor_that_is_not_right_is_named(
    tmp_path: Path, config: Any, tensors: dict[str, Tensor], message: str
) -> None:
    write(tmp_path, config, **({"weight": codes()} | tensors))
    with pytest.raises(WeightsError, match=message):
        taken(tmp_path)


def test_floats_without_scales_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FP8, weight=codes())
    with pytest.raises(WeightsError, match="float8_e4m3fn, and no scales are stored beside it"):
        open_weights(tmp_path, "auto").take(NAME, (OUTPUTS, INPUTS))
