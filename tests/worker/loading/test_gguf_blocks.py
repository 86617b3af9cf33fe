"""GGUF's blocks as codes and scales: the numbers that the format's own package finds, and no bit lost."""

from collections.abc import Callable

import gguf
import pytest
import torch
from torch import Tensor

from octavo.kernels.quantized import Quantized
from octavo.testing.small.gguf_model import random_blocks
from octavo.worker.loading.gguf_blocks import unpack

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
SHAPE = (5, 768)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_formats_own_package(kind: str) -> None:
    rows = random_blocks(kind, SHAPE, 0.1)
    expected = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    found = unpack(kind, torch.from_numpy(rows)).dequantize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_all_that_a_block_holds(kind: str) -> None:
    rows = random_blocks(kind, SHAPE, 0.1)
    weight = unpack(kind, torch.from_numpy(rows))
    assert torch.equal(packed(kind, weight), torch.from_numpy(rows))


def packed(kind: str, weight: Quantized) -> Tensor:
    """The bytes of a file again."""
    outputs = weight.shape[0]
    unit = weight.format.unit
    codes = weight.codes.reshape(-1, unit)
    return torch.cat([part.reshape(len(codes), -1) for part in PACKERS[kind](weight, codes)], dim=1).view(outputs, -1)


def as_bytes(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8)


def nibbles(codes: Tensor) -> Tensor:
    low, high = codes.chunk(2, dim=-1)
    return (low & 15) | (high & 15) << 4


def highest(codes: Tensor, bit: int = 4) -> Tensor:
    weights = torch.tensor([1 << n for n in range(8)])
    return ((codes >> bit & 1).view(len(codes), -1, 8).long() * weights).sum(-1).to(torch.uint8)


def six_bits(weight: Quantized) -> Tensor:
    assert weight.mins is not None
    scales, mins = (each.reshape(-1, 8) for each in (weight.scales, weight.mins))
    return torch.cat(
        (
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            mins[:, :4] | mins[:, 4:] >> 4 << 6,
            (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4,
        ),
        dim=1,
    )


def pairs(codes: Tensor) -> Tensor:
    return nibbles(codes.view(-1, 4, 64)).flatten(1)


def q5_k_bits(codes: Tensor) -> Tensor:
    weights = torch.tensor([1 << n for n in range(8)]).view(8, 1)
    return ((codes.view(-1, 8, 32) >> 4 & 1).long() * weights).sum(1).to(torch.uint8)


def q6_k_low(codes: Tensor) -> Tensor:
    return nibbles(codes.view(-1, 2, 128)).flatten(1)


def q6_k_high(codes: Tensor) -> Tensor:
    weights = torch.tensor([1, 4, 16, 64]).view(4, 1)
    return ((codes.view(-1, 2, 4, 32) >> 4).long() * weights).sum(2).to(torch.uint8).flatten(1)


PACKERS: dict[str, Callable[[Quantized, Tensor], list[Tensor]]] = {
    "Q4_0": lambda weight, codes: [as_bytes(weight.scales), nibbles(codes)],
    "Q4_1": lambda weight, codes: [as_bytes(weight.scales), as_bytes(weight.mins), nibbles(codes)],
    "Q5_0": lambda weight, codes: [as_bytes(weight.scales), highest(codes), nibbles(codes)],
    "Q5_1": lambda weight, codes: [as_bytes(weight.scales), as_bytes(weight.mins), highest(codes), nibbles(codes)],
    "Q8_0": lambda weight, codes: [as_bytes(weight.scales), codes ^ 128],
    "IQ4_NL": lambda weight, codes: [as_bytes(weight.scales), nibbles(codes)],
    "Q4_K": lambda weight, codes: [
        as_bytes(weight.block_scales),
        as_bytes(weight.block_mins),
        six_bits(weight),
        pairs(codes),
    ],
    "Q5_K": lambda weight, codes: [
        as_bytes(weight.block_scales),
        as_bytes(weight.block_mins),
        six_bits(weight),
        q5_k_bits(codes),
        pairs(codes),
    ],
    "Q6_K": lambda weight, codes: [
        q6_k_low(codes),
        q6_k_high(codes),
        weight.scales.view(torch.uint8),
        as_bytes(weight.block_scales),
    ],
}
