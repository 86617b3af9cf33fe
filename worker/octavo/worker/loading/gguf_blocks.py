"""The blocks of GGUF's quantised types, taken apart into codes and scales; no bit is lost.

How they lie: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.kernels.quantized import FORMATS, Quantized


def unpack(kind: str, rows: Tensor) -> Quantized:
    """Returns the weight whose `rows` ([outputs, bytes] uint8) are blocks of the GGUF type `kind`."""
    unpacked, block_bytes = _KINDS[kind]
    outputs = len(rows)
    parts = unpacked(rows.view(-1, block_bytes))
    return Quantized(FORMATS[kind.lower()], **{name: part.view(outputs, -1) for name, part in parts.items()})


def _halves(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Returns the bytes as fp16, [blocks, numbers]."""
    return blocks[:, start:stop].contiguous().view(torch.float16)


def _nibbles(blocks: Tensor) -> Tensor:
    """Returns the low nibbles of a block's bytes, then the high ones."""
    return torch.cat((blocks & 15, blocks >> 4), dim=-1)


def _bits(blocks: Tensor) -> Tensor:
    """Returns the bits of a block's bytes, the lowest of the first byte first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> dict[str, Tensor]:
    return {"scales": _halves(blocks, 0, 2), "codes": _nibbles(blocks[:, 2:])}


def _q4_1(blocks: Tensor) -> dict[str, Tensor]:
    return {"scales": _halves(blocks, 0, 2), "mins": _halves(blocks, 2, 4), "codes": _nibbles(blocks[:, 4:])}


def _q5_0(blocks: Tensor) -> dict[str, Tensor]:
    return {"scales": _halves(blocks, 0, 2), "codes": _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4}


def _q5_1(blocks: Tensor) -> dict[str, Tensor]:
    return {
        "scales": _halves(blocks, 0, 2),
        "mins": _halves(blocks, 2, 4),
        "codes": _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4,
    }


def _q8_0(blocks: Tensor) -> dict[str, Tensor]:
    # Signed in the file: 128 more is the same number with its highest bit turned.
    return {"scales": _halves(blocks, 0, 2), "codes": blocks[:, 2:] ^ 128}


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and the mins of eight groups, six bits each in twelve bytes."""
    first, second, mixed = blocks[:, :4], blocks[:, 4:8], blocks[:, 8:]
    scales = torch.cat((first & 63, (mixed & 15) | (first >> 6) << 4), dim=1)
    mins = torch.cat((second & 63, (mixed >> 4) | (second >> 6) << 4), dim=1)
    return scales, mins


def _in_pairs(nibbles: Tensor) -> Tensor:
    """Returns the codes of a block whose bytes hold two groups at a time, low nibbles and high ones."""
    return _nibbles(nibbles.view(-1, 4, 32)).flatten(1)


def _q4_k(blocks: Tensor) -> dict[str, Tensor]:
    scales, mins = _six_bits(blocks[:, 4:16])
    return {
        "block_scales": _halves(blocks, 0, 2),
        "block_mins": _halves(blocks, 2, 4),
        "scales": scales,
        "mins": mins,
        "codes": _in_pairs(blocks[:, 16:].contiguous()),
    }


def _q5_k(blocks: Tensor) -> dict[str, Tensor]:
    scales, mins = _six_bits(blocks[:, 4:16])
    # Byte `i` has the highest bit of the code `i` of each of the eight groups.
    highest = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    return {
        "block_scales": _halves(blocks, 0, 2),
        "block_mins": _halves(blocks, 2, 4),
        "scales": scales,
        "mins": mins,
        "codes": _in_pairs(blocks[:, 48:].contiguous()) | highest.flatten(1) << 4,
    }


def _q6_k(blocks: Tensor) -> dict[str, Tensor]:
    low, high = blocks[:, :128].view(-1, 2, 64), blocks[:, 128:192].view(-1, 2, 1, 32)
    # Each byte has the two highest bits of four codes, 32 apart.
    highest = (high >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(4, 1) & 3).flatten(2)
    return {
        "block_scales": _halves(blocks, 208, 210),
        "scales": blocks[:, 192:208].contiguous().view(torch.int8),
        "codes": (_nibbles(low) | highest << 4).flatten(1),
    }


_KINDS = MappingProxyType[str, tuple[Callable[[Tensor], dict[str, Tensor]], int]](
    {
        "Q4_0": (_q4_0, 18),
        "Q4_1": (_q4_1, 20),
        "Q5_0": (_q5_0, 22),
        "Q5_1": (_q5_1, 24),
        "Q8_0": (_q8_0, 34),
        "Q4_K": (_q4_k, 144),
        "Q5_K": (_q5_k, 176),
        "Q6_K": (_q6_k, 210),
        "IQ4_NL": (_q4_0, 18),
    }
)
