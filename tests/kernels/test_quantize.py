"""Weights are quantised to the very codes and scales of the library of GGUF files."""

import gguf
import numpy as np
import pytest
import torch

from octavo.kernels.quantize import QUANTIZERS, quantize
from octavo.kernels.quantized import FORMATS, Quantized

QK = 32


def as_in_a_file(weight: Quantized) -> np.ndarray:
    """Packs each group as ggml lays it out: scale, min, the fifth bits, then nibbles or bytes."""
    codes = weight.codes.view(-1, QK).numpy()
    parts: list[np.ndarray] = [weight.scales.view(-1, 1).numpy().view(np.uint8)]
    if weight.mins is not None:
        parts.append(weight.mins.view(-1, 1).numpy().view(np.uint8))
    if weight.format.bits == 5:
        parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
    if weight.format.bits == 8:
        parts.append(codes ^ 0x80)
    else:
        parts.append((codes[:, :16] & 15) | (codes[:, 16:] & 15) << 4)
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_those_of_the_library(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3000, 256, generator=generator) * torch.rand(3000, 1, generator=generator)
    weight = weight.to(dtype)
    # Groups of zeros, of one value, and with a value and its negative as the largest, in both orders.
    weight[0], weight[1, :40], weight[2, 5], weight[2, 7], weight[3, 5], weight[3, 7] = 0, 0.25, 9, -9, -9, 9
    expected = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[name.upper()])
    quantized = quantize(weight, FORMATS[name])
    np.testing.assert_array_equal(as_in_a_file(quantized).reshape(3000, -1), expected)
    np.testing.assert_array_equal(
        quantized.dequantize().numpy(), gguf.quants.dequantize(expected, gguf.GGMLQuantizationType[name.upper()])
    )


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_value_is_off_by_a_step_at_most(name: str) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    quantized = quantize(weight, FORMATS[name])
    step = quantized.scales.float().abs().repeat_interleave(QK, dim=1)
    assert ((quantized.dequantize() - weight).abs() <= step * 1.02).all()


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
def test_values_that_no_scale_holds_are_refused(name: str, value: float) -> None:
    weight = torch.ones(40, 64)
    weight[7, 9] = value
    with pytest.raises(ValueError, match=f"not finite, or too large for the fp16 scales of {name}"):
        quantize(weight, FORMATS[name])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_values_too_small_for_a_scale_become_zero(name: str) -> None:
    assert quantize(torch.full((1, 32), 1e-42), FORMATS[name]).dequantize().abs().max() == 0


def test_inputs_that_fill_no_group_are_refused() -> None:
    with pytest.raises(ValueError, match="48 inputs are no multiple of 32, as q4_0 wants them"):
        quantize(torch.ones(2, 48), FORMATS["q4_0"])
