"""Packed weights become the codes and scales that were packed; a tensor that is not right is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from octavo.kernels.quantized import Quantized
from octavo.testing.small.packed import KINDS, Codes, Kind, quantized
from octavo.worker.loading.load_format import open_weights
from octavo.worker.loading.packed_weights import PackedWeight, weight_shape
from octavo.worker.loading.quantization_config import Packing
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightsError

LAYER, OUTPUTS, INPUTS = "model.layers.0.mlp.down_proj", 24, 128
NAME = f"{LAYER}.weight"


def weight_of(kind: Kind, outputs: int = OUTPUTS, inputs: int = INPUTS, seed: int = 0) -> Codes:
    return quantized(torch.randn(outputs, inputs), kind, torch.Generator().manual_seed(seed))


def write(directory: Path, kind: Kind, tensors: dict[str, Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps({"quantization_config": kind.config}))
    save_file(tensors, directory / "model.safetensors")
    return directory


def packed(kind: Kind, weight: Codes) -> dict[str, Tensor]:
    return {f"{LAYER}.{name}": tensor for name, tensor in kind.pack(weight).items()}


def taken(directory: Path, part: TensorPart | None = None) -> Quantized:
    source = open_weights(directory, "auto")
    weight = source.take_weight(NAME, (OUTPUTS, INPUTS), part)
    source.finish()
    assert isinstance(weight, Quantized)
    return weight


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_layer_is_one_tensor_by_the_models_own_name(tmp_path: Path, kind: Kind) -> None:
    weight = weight_of(kind)
    write(tmp_path, kind, packed(kind, weight) | {"model.norm.weight": torch.ones(4)})
    source = open_weights(tmp_path, "auto")
    assert source.shapes() == {NAME: (OUTPUTS, INPUTS), "model.norm.weight": (4,)}
    assert torch.equal(source.take(NAME, (OUTPUTS, INPUTS)), weight.values)
    with pytest.raises(WeightsError, match=r"1 tensors .*: model\.norm\.weight"):
        source.finish()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_layer_that_is_dropped_is_not_missed(tmp_path: Path, kind: Kind) -> None:
    source = open_weights(write(tmp_path, kind, packed(kind, weight_of(kind))), "auto")
    source.drop(NAME)
    source.finish()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_rank_takes_its_rows_or_columns(tmp_path: Path, kind: Kind) -> None:
    weight = weight_of(kind)
    write(tmp_path, kind, packed(kind, weight))
    rows = taken(tmp_path, TensorPart(0, (range(2, 5), range(12, 13))))
    assert torch.equal(rows.dequantize(), weight.values[[2, 3, 4, 12]])
    for columns in (range(32), range(32, 128), range(96, 128)):
        assert torch.equal(taken(tmp_path, TensorPart(1, (columns,))).dequantize(), weight.values[:, columns])
    with pytest.raises(WeightsError, match=f"{NAME} cannot be shared by so many ranks: .* give another --tp"):
        taken(tmp_path, TensorPart(1, (range(48),)))


def read(kind: Kind, weight: Codes, packing: Packing) -> Quantized:
    tensors = packed(kind, weight)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        assert tensors[name].shape == shape
        return tensors[name]

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    (codes,) = (shapes[name] for name in shapes if name.endswith(("weight", "weight_packed", "qweight")))
    return PackedWeight(LAYER, packing, weight_shape(packing, codes), shapes, take).read()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_size_and_group_gives_the_numbers_that_were_packed(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(KINDS)))
    group = data.draw(st.sampled_from([32, 64, 96, 128, None]))
    inputs = (group or 32) * data.draw(st.integers(1, 4))
    # AWQ has no place for other numbers of outputs.
    outputs = data.draw(st.integers(1, 5)) * 8 if name == "awq" else data.draw(st.integers(1, 40))
    base = KINDS[name]
    # In fp32, the products of scales and zero points would be rounded.
    wide = [torch.float32] if base.symmetric and base.bits == 8 else []
    scales = data.draw(st.sampled_from([torch.float16, torch.bfloat16, *wide]))
    kind = Kind(base.config, base.pack, base.bits, group, base.symmetric, scales)
    layouts: dict[str, Any] = {"as_int8": "int-quantized", "as_awq": "awq"}
    layout = layouts.get(base.pack.__name__, "gptq" if "gptq" in name else "pack-quantized")
    packing = Packing(layout, kind.bits, group, kind.symmetric, zero_step=int(base.pack.__name__ == "as_gptq"))
    weight = weight_of(kind, outputs, inputs, seed=data.draw(st.integers(0, 99)))
    found = read(kind, weight, packing)
    assert found.shape == (outputs, inputs)
    assert torch.equal(found.dequantize(), weight.values)


def test_a_format_of_gguf_is_taken_where_it_is_no_larger(tmp_path: Path) -> None:
    formats = {}
    for name, kind in KINDS.items():
        (tmp_path / name).mkdir()
        formats[name] = taken(write(tmp_path / name, kind, packed(kind, weight_of(kind)))).format.name
    assert {name for name, each in formats.items() if each == "q4_0"} == {"w4a16", "w4a16 channel", "gptq symmetric"}
    assert {name for name, each in formats.items() if each == "q8_0"} == {"w8a16"}


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def without(part: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != f"{LAYER}.{part}"}


def having(**parts: Tensor) -> Change:
    return lambda tensors: tensors | {f"{LAYER}.{part}": tensor for part, tensor in parts.items()}


def half(part: str, dim: int = 0) -> Change:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensor = tensors[f"{LAYER}.{part}"]
        return tensors | {f"{LAYER}.{part}": tensor.narrow(dim, 0, tensor.shape[dim] // 2).contiguous()}

    return change


ORDER = torch.arange(INPUTS, dtype=torch.int32) // 32
NAN = torch.full((OUTPUTS, 1), float("nan"), dtype=torch.bfloat16)
ONES = torch.full((4, 3), -1, dtype=torch.int32)
MIDDLE = torch.full((4, 3), -0x77777778, dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("w8a8", without("weight_scale"), "tensor '.*weight' is int8, and no scales are stored beside it"),
        ("w8a8", without("weight"), r"is quantised, and tensor '.*\.weight' is not there"),
        ("w8a8", half("weight_scale"), r"'.*weight_scale' .* is \[12, 1\]; config\.json makes it \[24, 1\]"),
        ("w8a8", having(weight_scale=NAN), "'.*weight_scale' has scales that are not finite"),
        ("w8a8", having(weight=torch.ones(OUTPUTS, INPUTS)), "'.*weight' is float32; it must be int8"),
        ("w8a8", having(weight=torch.ones(3, dtype=torch.int8)), r"'.*weight' is \[3\]; .* calls for a matrix"),
        ("w8a8", having(weight_zero_point=torch.ones(OUTPUTS, 1, dtype=torch.int8)), "says that there are none"),
        ("w4a16", without("weight_scale"), "no tensor '.*weight_scale'"),
        ("w4a16", without("weight_packed"), r"tensor '.*weight_packed' is not there"),
        ("w4a16", half("weight_packed", 1), r"'.*weight' is \[24, 64\]; config\.json makes it \[24, 128\]"),
        ("w4a16", half("weight_scale", 1), r"'.*weight_scale' .* is \[24, 2\]; .* \[24, 4\]"),
        ("w4a16 zeros", without("weight_zero_point"), "no tensor '.*weight_zero_point'"),
        ("gptq", without("qzeros"), "no tensor '.*qzeros'"),
        ("gptq", without("scales"), "no tensor '.*scales'"),
        ("gptq", half("qzeros"), r"'.*qzeros' .* is \[2, 3\]; .* \[4, 3\]"),
        ("gptq", having(qzeros=ONES), "'.*qzeros' has zero points of 15, to which 1 is added"),
        ("gptq", having(g_idx=ORDER.flip(0)), r"'.*g_idx' puts inputs into groups that are not neighbours .*desc_act"),
        ("gptq", having(g_idx=ORDER.float()), "'.*g_idx' is float32; it must be int32 or int64"),
        ("gptq", having(qweight=torch.zeros(16, OUTPUTS)), "'.*qweight' is float32; it must be int32"),
        ("gptq symmetric", having(qzeros=MIDDLE), "'.*qzeros' has zero points, and quantization_config says"),
        ("awq", half("scales"), r"'.*scales' .* is \[1, 24\]; .* \[2, 24\]"),
        ("awq", half("qweight", 1), r"'.*weight' is \[8, 128\]; config\.json makes it \[24, 128\]"),
    ],
)
def test_a_tensor_that_is_not_right_is_named(tmp_path: Path, kind: str, change: Change, message: str) -> None:
    write(tmp_path, KINDS[kind], change(packed(KINDS[kind], weight_of(KINDS[kind]))))
    with pytest.raises(WeightsError, match=message):
        taken(tmp_path)


def test_a_group_that_does_not_divide_the_inputs_is_refused(tmp_path: Path) -> None:
    kind = KINDS["awq"]
    write(tmp_path, kind, packed(kind, weight_of(Kind(kind.config, kind.pack, group=32), inputs=96)))
    source = open_weights(tmp_path, "auto")
    with pytest.raises(WeightsError, match=f"{LAYER} has 96 inputs, no multiple of 64"):
        source.take(NAME, (OUTPUTS, 96))


def test_a_weight_that_is_left_out_stays_as_it_is(tmp_path: Path) -> None:
    kind, head = KINDS["w4a16"], torch.randn(5, 7).bfloat16()
    write(tmp_path, kind, packed(kind, weight_of(kind)) | {"lm_head.weight": head})
    source = open_weights(tmp_path, "auto")
    found = source.take_weight("lm_head.weight", (5, 7))
    assert isinstance(found, Tensor)
    assert torch.equal(found, head)


def test_a_bias_of_zeros_that_gptq_adds_is_left_out(tmp_path: Path) -> None:
    kind = KINDS["gptq"]
    bias = f"{LAYER}.bias"
    write(tmp_path, kind, packed(kind, weight_of(kind)) | {bias: torch.zeros(OUTPUTS)})
    assert open_weights(tmp_path, "auto").shapes().keys() == {NAME}
    taken(tmp_path)
    # A model whose layers have biases takes it all the same.
    assert torch.equal(open_weights(tmp_path, "auto").take(bias, (OUTPUTS,)), torch.zeros(OUTPUTS))


def test_a_bias_of_gptq_that_the_model_has_no_place_for_is_named(tmp_path: Path) -> None:
    kind = KINDS["gptq"]
    bias = torch.arange(OUTPUTS).float()
    write(tmp_path, kind, packed(kind, weight_of(kind)) | {f"{LAYER}.bias": bias})
    with pytest.raises(WeightsError, match=rf"1 layers have a bias that config\.json has no place for: {LAYER}\.bias"):
        taken(tmp_path)
    source = open_weights(tmp_path, "auto")
    assert torch.equal(source.take(f"{LAYER}.bias", (OUTPUTS,)), bias)
    source.take_weight(NAME, (OUTPUTS, INPUTS))
    source.finish()
