"""Writes a step's keys and values into their slots of the paged cache (paper §5.1: fused reshape and block write)."""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.arguments import check_dtypes, check_new_tokens
from octavo.kernels.triton.language import cached

# Of keys, and as many of values: 16 bytes of bf16 per thread and load, a few loads per thread.
_ELEMENTS = 4096


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping"])
def write_kernel(
    key_cache,
    value_cache,
    key,
    value,
    slot_mapping,
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    key_scale,
    value_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Writes all heads of a few tokens in one program."""
    tokens = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
    columns = tl.arange(0, TILE_WIDTH)
    heads, dims = columns // HEAD_DIM, columns % HEAD_DIM
    written = (slots >= 0)[:, None] & (columns < WIDTH)[None, :]
    tokens = tokens.to(tl.int64)[:, None]
    key_offsets = tokens * key_token_stride + (heads * key_head_stride + dims)[None, :]
    value_offsets = tokens * value_token_stride + (heads * value_head_stride + dims)[None, :]
    targets = (slots // BLOCK_SIZE * block_stride + slots % BLOCK_SIZE * slot_stride)[:, None]
    targets += (heads.to(tl.int64) * head_stride + dims)[None, :]
    keys = tl.load(key + key_offsets, mask=written)
    values = tl.load(value + value_offsets, mask=written)
    if key_cache.dtype.element_ty != key.dtype.element_ty:
        keys = cached(keys.to(tl.float32), key_scale, key_cache.dtype.element_ty)
        values = cached(values.to(tl.float32), value_scale, value_cache.dtype.element_ty)
    tl.store(key_cache + targets, keys, mask=written)
    tl.store(value_cache + targets, values, mask=written)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Writes each token's key and value into its slot, in place; tokens of slot -1 are skipped.

    `key`, `value`: [tokens, kv_heads, head_dim]; caches: [num_blocks, block_size, kv_heads, head_dim]; `slot_mapping`:
    [tokens] int64; any strides whose last is 1. A cache of torch.float8_e4m3fn gets key / `key_scale` and value /
    `value_scale`, cut off at +-448; NaN stays NaN. Raises `ValueError` on other shapes or dtypes.
    """
    check_new_tokens(key, value, key_cache, value_cache, slot_mapping)
    check_dtypes(key, key_cache, key_scale, value_scale)
    tokens, kv_heads, head_dim = key.shape
    if tokens == 0:
        return
    width = kv_heads * head_dim
    tile_width, tile_tokens = _tile(width)
    write_kernel[(triton.cdiv(tokens, tile_tokens),)](
        key_cache,
        value_cache,
        key,
        value,
        slot_mapping,
        tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        key_scale,
        value_scale,
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_DIM=head_dim,
        WIDTH=width,
        TILE_WIDTH=tile_width,
        TILE_TOKENS=tile_tokens,
        num_warps=4,
    )


def _tile(width: int) -> tuple[int, int]:
    """Returns columns and tokens of a program's tile, both powers of two."""
    tile_width: int = triton.next_power_of_2(width)
    return tile_width, max(1, _ELEMENTS // tile_width)


_INTEGERS = [name for name in write_kernel.arg_names if name.endswith("_stride")]


def _variant(dtype: str, cache: str, kv_heads: int, head_dim: int, block_size: int) -> Variant:
    signature = {"key_cache": f"*{cache}", "value_cache": f"*{cache}", "key": f"*{dtype}", "value": f"*{dtype}"}
    signature |= {"slot_mapping": "*i64", "num_tokens": "i32", "key_scale": "fp32", "value_scale": "fp32"}
    width = kv_heads * head_dim
    sizes = dict(zip(("TILE_WIDTH", "TILE_TOKENS"), _tile(width), strict=True))
    return Variant(
        name=f"write {dtype} to {cache}, {kv_heads} heads of {head_dim}, blocks of {block_size}",
        kernel=write_kernel,
        signature=signature | dict.fromkeys(_INTEGERS, "i32"),
        constants={"BLOCK_SIZE": block_size, "HEAD_DIM": head_dim, "WIDTH": width, **sizes},
        aligned=frozenset(_INTEGERS),
    )


def variants() -> Iterator[Variant]:
    """Yields a covering set of dtypes, head sizes and block sizes."""
    yield _variant("bf16", "bf16", 8, 128, 16)
    yield _variant("bf16", "fp8e4nv", 8, 128, 32)
    yield _variant("fp16", "fp16", 1, 80, 1)
    yield _variant("fp16", "fp8e4nv", 4, 96, 64)
    yield _variant("fp32", "fp32", 3, 64, 256)
    yield _variant("bf16", "bf16", 32, 256, 16)
