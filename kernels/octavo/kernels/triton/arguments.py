"""Checks the arguments of paged attention's host functions; here a cache may be of fp8."""

from torch import Tensor, float8_e4m3fn, int64

from octavo.kernels.checks import check_caches
from octavo.kernels.triton.language import POINTERS


def check_dtypes(computed: Tensor, key_cache: Tensor, key_scale: float, value_scale: float) -> None:
    """Raises `ValueError` unless `computed` has a dtype that kernels compute in, its cache that one or fp8, and scales
    are positive, and 1 without fp8."""
    if computed.dtype not in POINTERS:
        raise ValueError(f"kernels compute in {', '.join(map(str, POINTERS))}, not in {computed.dtype}")
    if key_cache.dtype not in (computed.dtype, float8_e4m3fn):
        raise ValueError(f"a cache of {key_cache.dtype} for {computed.dtype}; it may be of that or {float8_e4m3fn}")
    if not (key_scale > 0 and value_scale > 0):
        raise ValueError(f"scales of keys and values are {key_scale} and {value_scale}; they must be positive")
    if key_cache.dtype != float8_e4m3fn and (key_scale, value_scale) != (1.0, 1.0):
        raise ValueError(f"scales {key_scale} and {value_scale} for a cache of {key_cache.dtype}; only fp8 has some")


def check_new_tokens(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raises `ValueError` unless `key` and `value` are [tokens, kv_heads, head_dim] for those caches, one slot each."""
    check_caches(key_cache, value_cache)
    expected = (len(slot_mapping), *key_cache.shape[2:])
    for name, tensor in (("key", key), ("value", value)):
        if not (tensor.shape == expected and tensor.stride(2) == 1 and tensor.dtype == key.dtype):
            raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}, expected {list(expected)} {key.dtype}")
    if not (slot_mapping.dim() == 1 and slot_mapping.dtype == int64 and slot_mapping.is_contiguous()):
        raise ValueError(f"slot_mapping is {list(slot_mapping.shape)} {slot_mapping.dtype}, expected [tokens] {int64}")


def check_query(query: Tensor, key_cache: Tensor, value_cache: Tensor, num_tokens: int) -> None:
    """Raises `ValueError` unless `query` is [num_tokens, query_heads, head_dim] with whole groups per KV head."""
    check_caches(key_cache, value_cache)
    kv_heads, head_dim = key_cache.shape[2:]
    if not (query.dim() == 3 and query.shape[0] == num_tokens and query.shape[2] == head_dim and query.stride(2) == 1):
        raise ValueError(f"query is {list(query.shape)}, expected [{num_tokens}, query_heads, {head_dim}]")
    if query.shape[1] % kv_heads != 0:
        raise ValueError(f"{query.shape[1]} query heads do not share {kv_heads} KV heads evenly")
