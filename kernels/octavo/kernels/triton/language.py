"""What all kernels share: how they are made, and how matrices multiply inside them."""

import os

# Both are read when a kernel is made. Without a GPU, Triton's interpreter runs kernels on the CPU, slowly: for tests.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, accumulator):
    """`accumulator` + `a` @ `b` in fp32 (true fp32 for fp32 operands)."""
    # Triton's interpreter multiplies bf16 wrongly, and says nothing (triton-lang/triton#11584).
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator, input_precision="ieee")
