"""Holds what all kernels share: how kernels are made, and how matrices multiply inside them."""

import os

# Both are read when a kernel is made. Without a GPU, Triton's interpreter runs kernels on the CPU, slowly: for tests.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl

# The types that models compute in, as Triton names pointers to them.
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def block_for(size: int) -> int:
    """Returns the smallest power of two that is no smaller than `size`, which is at least 1: blocks have such sizes."""
    return 1 << (size - 1).bit_length()


@triton.jit
def dot(a, b, accumulator):
    """Returns `accumulator` + `a` @ `b` in fp32 (true fp32 for fp32 operands)."""
    # Triton's interpreter multiplies bf16 wrongly, and says nothing (triton-lang/triton#11584).
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Returns `values` (fp32) rounded to `dtype`: to the nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # Triton's interpreter cuts the mantissa off instead.
        bits = values.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)
        values = tl.where(values != values, values, nearest)
    return values.to(dtype)


@triton.jit
def cached(values, scale, dtype: tl.constexpr):
    """Returns `values` (fp32) as a cache of `dtype` holds them: rounded, but in fp8 (e4m3) divided by `scale` and
    bounded by +-448, the largest number of e4m3. NaN stays NaN: a sequence whose values are not finite must stay
    visibly so."""
    if dtype == tl.float8e4nv:
        scaled = tl.div_rn(values, scale)
        stored = _to_fp8(tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled)))
    else:
        stored = rounded(values, dtype)
    return stored


@triton.jit
def _to_fp8(values):
    if INTERPRETED:
        # Triton's interpreter rounds ties and what is next to zero wrongly, and makes a number of NaN.
        not_a_number = tl.full(values.shape, 0x7F, tl.uint8).to(tl.float8e4nv, bitcast=True)
        return tl.where(values != values, not_a_number, _on_fp8_grid(values).to(tl.float8e4nv))
    return values.to(tl.float8e4nv)


@triton.jit
def _on_fp8_grid(values):
    """Returns the nearest numbers that e4m3 has, ties to even: 3 bits of mantissa, and below 2^-6 multiples of 2^-9."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    # Next to 2^14, fp32 has multiples of 2^-9 only.
    small = (tl.abs(values) + 16384.0) - 16384.0
    return tl.where(tl.abs(values) < 0.015625, tl.where(values < 0, -small, small), normal)
