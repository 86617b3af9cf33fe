"""Where a step of all layers writes keys and values: where one call at a time does, whether whole sixteens of slots are
written together or not."""

from ctypes import byref, c_void_p

import pytest
import torch

from octavo.kernels.backend import CacheShape, GroupBatch
from octavo.kernels.native.attention import NativeAttention, cache_pointers
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.structs import DTYPES, BufferAt, GroupStep, Layer, Op, OpKind, RopeWriteOp, Run
from octavo.testing.native import library

__all__ = ["library"]

_QUERY_HEADS, _KV_HEADS, _DIM = 4, 2, 48
_WIDTH = (_QUERY_HEADS + 2 * _KV_HEADS) * _DIM
SLOTS = {
    "whole sixteens": [*range(32, 64), *range(112, 128)],
    "sixteens among others": [3, *range(64, 80), 5, 6, *range(16, 32), 127],
    "none from its first slot on": [*range(33, 64)],
    "backwards": [*range(31, 15, -1)],
    "one left out": [*range(32, 40), *range(41, 49)],
    "fewer than sixteen": [*range(96, 111)],
}
# What is computed, and what is kept, which is never wider.
KINDS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
]


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("dtype", "cache_dtype"), KINDS)
@pytest.mark.parametrize("rotates", [False, True])
def test_keys_and_values_lie_where_they_belong(
    library: NativeLibrary, name: str, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, rotates: bool
) -> None:
    slots, count = torch.tensor(SLOTS[name]), len(SLOTS[name])
    torch.manual_seed(1)
    x, positions = torch.randn(count, _WIDTH).to(dtype), torch.randperm(count)
    cos, sin = torch.randn(2, count, _DIM // 2)
    attention = NativeAttention(library, CacheShape(block_size, _KV_HEADS, _DIM, cache_dtype), dtype)
    width = CacheShape(block_size, _KV_HEADS, _DIM, cache_dtype).width
    caches = [torch.zeros(128 // block_size, block_size, _KV_HEADS, width, dtype=cache_dtype) for _ in range(4)]
    tables = torch.arange(128 // block_size)[None]
    step = attention.step(GroupBatch(slots, tables, [count], [count], 0))

    written = x.clone()
    rotated = _QUERY_HEADS + _KV_HEADS
    angles = (cos.data_ptr(), sin.data_ptr()) if rotates else (None, None)
    op = RopeWriteOp(*angles, None, None, _DIM if rotates else 0, _QUERY_HEADS, _KV_HEADS, _DIM, _WIDTH, 0.0, 0)
    ops = (Op * 1)(Op(kind=OpKind.ROPE_WRITE, layer=0, input=BufferAt(0, 0), output=BufferAt(0, 0)))
    ops[0].rope_write = op
    run = Run(
        ops,
        1,
        (c_void_p * 1)(written.data_ptr()),
        positions.data_ptr(),
        (GroupStep * 1)(step.pointers),
        (Layer * 1)(Layer(cache_pointers(caches[0], caches[1]), 0)),
        None,
        count,
        DTYPES[dtype],
        1,
    )
    library.functions.octavo_run(byref(run))

    heads = written.view(count, -1, _DIM)
    if rotates:
        before = x.view(count, -1, _DIM)[:, :rotated].float()
        one, other = before[..., : _DIM // 2], before[..., _DIM // 2 :]
        c, s = cos[positions][:, None], sin[positions][:, None]
        expected = torch.cat([one * c - other * s, other * c + one * s], dim=-1).to(dtype)
        torch.testing.assert_close(
            heads[:, :rotated], expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 0.01
        )
    else:
        assert torch.equal(written, x)
    attention.write(heads[:, _QUERY_HEADS:rotated], heads[:, rotated:], caches[2], caches[3], step)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    assert caches[0].any()
