"""Blocks of small integers with scales are the numbers that the library of their file format makes of them."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from octavo.kernels.quantized import FORMATS, Quantized, stacked


def q4_1(outputs: int, inputs: int, seed: int = 0) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales, mins = torch.randn((2, outputs, inputs // 32), generator=generator).half()
    return Quantized(FORMATS["q4_1"], codes, scales, mins)


def test_a_block_of_q4_1_is_what_gguf_makes_of_it() -> None:
    weight = q4_1(1, 32)
    codes = weight.codes[0].numpy()
    assert weight.mins is not None
    block = np.concatenate(
        [weight.scales.numpy().view(np.uint8)[0], weight.mins.numpy().view(np.uint8)[0], codes[:16] | codes[16:] << 4]
    )
    expected = gguf.quants.dequantize(block[None], gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(weight.dequantize().numpy(), expected)


def test_rows_columns_and_stacks_are_those_of_the_numbers() -> None:
    weight, other = q4_1(6, 96), q4_1(3, 96, seed=1)
    values = weight.dequantize()
    order = torch.tensor([4, 1])
    torch.testing.assert_close(weight.rows(order).dequantize(), values[order], rtol=0, atol=0)
    torch.testing.assert_close(weight.columns(range(32, 96)).dequantize(), values[:, 32:], rtol=0, atol=0)
    joined = torch.cat((values, other.dequantize()))
    torch.testing.assert_close(stacked([weight, other]).dequantize(), joined, rtol=0, atol=0)


def test_a_cut_inside_of_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="cut a group of 32"):
        q4_1(2, 96).columns(range(16, 96))


def test_tensors_that_do_not_fit_are_refused() -> None:
    weight = q4_1(2, 96)
    with pytest.raises(ValueError, match="q4_1 wants mins"):
        replace(weight, mins=None)
    with pytest.raises(ValueError, match="no multiple of 32"):
        replace(weight, codes=weight.codes[:, :80])
    with pytest.raises(ValueError, match="scales"):
        replace(weight, scales=weight.scales.float())


@pytest.mark.parametrize("group", [32, 64, 96, 192])
@pytest.mark.parametrize("columns", [range(32), range(32, 96), range(64, 160), range(96, 192), range(192)])
def test_a_group_with_a_scale_in_fp32_is_cut_at_any_multiple_of_32(group: int, columns: range) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 192), dtype=torch.uint8, generator=generator)
    weight = Quantized(FORMATS["int8"], codes, torch.randn(3, 192 // group, generator=generator))
    assert torch.equal(weight.columns(columns).dequantize(), weight.dequantize()[:, columns])
