"""Implements `octavo.kernels.backend.AttentionBackend`, paged attention on the CPU, with Octavo's own kernels."""

from ctypes import byref, c_int64
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from octavo.kernels.backend import CacheShape, GroupBatch
from octavo.kernels.checks import (
    check_block_ids,
    check_caches,
    check_lengths,
    check_new_keys,
    check_query,
    check_scores,
    check_window,
)
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.structs import CACHE_DTYPES, DTYPES, AttentionOp, GroupStep, LayerCachePointers

# Tokens that one thread attends for at a time: enough to make use of keys in its cache, few enough to share out. A
# multiple of the rows that kernels take at a time.
_UNIT_TOKENS = 24
_LANES = 16
# Elements of a head whose products' sums a 32-bit integer holds.
_MOST_CODES = 512


@dataclass(frozen=True, slots=True)
class NativeStep:
    """Holds the inputs that all layers of one KV group share in a step.

    `pointers` point into `tensors`, which keep the memory alive. `slot_mapping`, `num_tokens` and `largest_block`, the
    highest block that is read or written, are for the checks.
    """

    pointers: GroupStep
    tensors: tuple[Tensor, ...]
    slot_mapping: Tensor
    num_tokens: int
    largest_block: int


class NativeAttention:
    """Computes attention for decode and prefill alike by one kernel; a row's result depends neither on the rows beside
    it nor on how a prompt is cut into chunks.

    `dtype` is that of queries, new keys and values, and the result. With `exact` the bits are the same on every
    instruction set; with a cache of int8 they always are.
    """

    masks_unwritten = True

    def __init__(
        self, library: NativeLibrary, shape: CacheShape, dtype: torch.dtype | None = None, *, exact: bool = False
    ) -> None:
        """Takes `dtype` None for the cache's. Raises `ValueError` if `obstacle` names one."""
        self.dtype = shape.dtype if dtype is None else dtype
        self.exact = exact
        if reason := obstacle(shape, self.dtype):
            raise ValueError(reason)
        self.name = f"native {library.variant}"
        self._functions = library.functions
        self._shape = shape

    @property
    def cache_dtype(self) -> torch.dtype:
        """Returns the dtype of keys and values in their blocks."""
        return self._shape.dtype

    def step(self, batch: GroupBatch) -> NativeStep:
        shape = self._shape
        check_lengths(batch.block_tables, batch.context_lens, batch.query_lens, shape.block_size)
        check_window(batch.window)
        first_tokens = list(accumulate(batch.query_lens, initial=0))
        tables, slots = _integers("block tables", batch.block_tables), _integers("slots", batch.slot_mapping)
        if slots.shape != (first_tokens[-1],):
            raise ValueError(f"{len(slots)} slots for {first_tokens[-1]} query tokens")
        contexts, firsts = torch.tensor(batch.context_lens), torch.tensor(first_tokens)
        num_units = shape.num_kv_heads * sum(-(-length // _UNIT_TOKENS) for length in batch.query_lens)
        units = torch.empty((num_units, 4), dtype=torch.int32)
        tensors = slots, tables, contexts, firsts, units
        sizes = num_units, tables.shape[1], shape.block_size, batch.window
        pointers = GroupStep(*(tensor.data_ptr() for tensor in tensors), *sizes)
        return NativeStep(
            pointers=pointers,
            tensors=tensors,
            slot_mapping=batch.slot_mapping,
            num_tokens=first_tokens[-1],
            largest_block=self._plan(pointers, len(contexts)),
        )

    def _plan(self, step: GroupStep, num_sequences: int) -> int:
        """Fills in the units of `step`; the largest id of the blocks that are read or written."""
        blocks = (c_int64 * 2)()
        sizes = num_sequences, self._shape.num_kv_heads, _UNIT_TOKENS
        self._functions.octavo_plan(byref(step), *sizes, step.units, blocks)
        lowest, largest = blocks
        check_block_ids(lowest)
        return int(largest)

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, step: NativeStep) -> None:
        shape = self._shape
        check_new_keys(key, value, (shape.num_kv_heads, shape.head_dim), self.dtype, step.slot_mapping)
        self.check(key_cache, value_cache, step)
        cache = cache_pointers(key_cache, value_cache)
        key, value = _rows(key), _rows(value)
        self._functions.octavo_write(
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
            byref(cache),
            byref(step.pointers),
            step.num_tokens,
            *key.shape[1:],
            DTYPES[key.dtype],
            torch.get_num_threads(),
        )

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: NativeStep,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        check_query(query, (self._shape.num_kv_heads, self._shape.head_dim), self.dtype, step.num_tokens)
        check_scores(query, softcap, sinks)
        self.check(key_cache, value_cache, step)
        cache = cache_pointers(key_cache, value_cache)
        query = _rows(query)
        floats = None if sinks is None else sinks.float().contiguous()
        _, heads, head_dim = query.shape
        output = torch.empty(query.shape, dtype=query.dtype)
        op = AttentionOp(
            None if floats is None else floats.data_ptr(),
            heads,
            key_cache.shape[2],
            head_dim,
            query.stride(0),
            output.stride(0),
            scale,
            softcap,
            self.exact,
        )
        self._functions.octavo_attend(
            byref(op),
            query.data_ptr(),
            output.data_ptr(),
            byref(step.pointers),
            byref(cache),
            DTYPES[query.dtype],
            torch.get_num_threads(),
        )
        return output

    def check(self, key_cache: Tensor, value_cache: Tensor, step: NativeStep) -> None:
        """Raises `ValueError` unless the caches are of this backend's shape and hold every block of `step`."""
        check_caches(key_cache, value_cache)
        if not key_cache[:1].is_contiguous():
            raise ValueError(f"a block of strides {key_cache.stride()[1:]} has gaps; it must be contiguous")
        shape = self._shape
        expected = (shape.block_size, shape.num_kv_heads, shape.width)
        if key_cache.shape[1:] != expected or key_cache.dtype != shape.dtype:
            raise ValueError(f"a cache {list(key_cache.shape)} {key_cache.dtype} for blocks of {list(expected)}")
        if step.largest_block >= len(key_cache):
            raise ValueError(f"block {step.largest_block} is named; the cache has {len(key_cache)}")


def cache_pointers(key_cache: Tensor, value_cache: Tensor) -> LayerCachePointers:
    """Returns pointers to the caches of one layer; the pointers hold as long as the tensors."""
    dtype = CACHE_DTYPES[key_cache.dtype]
    return LayerCachePointers(key_cache.data_ptr(), value_cache.data_ptr(), key_cache.stride(0), dtype)


def obstacle(shape: CacheShape, dtype: torch.dtype) -> str | None:
    """Returns the reason why the kernels cannot compute in `dtype` over a cache of this shape, or None if they can."""
    if dtype not in DTYPES:
        return f"they compute in float32 and bfloat16, not {_name(dtype)}"
    if shape.dtype not in CACHE_DTYPES or (dtype, shape.dtype) == (torch.bfloat16, torch.float32):
        kept = "bfloat16 and int8" if dtype == torch.bfloat16 else "float32, bfloat16 and int8"
        return f"in {_name(dtype)} they keep keys and values as {kept}, not {_name(shape.dtype)}"
    if shape.block_size % _LANES:
        return f"they want blocks of a multiple of {_LANES} tokens, not {shape.block_size}"
    if shape.head_dim % _LANES:
        return f"they want heads of a multiple of {_LANES} elements, not {shape.head_dim}"
    if shape.dtype == torch.int8 and shape.head_dim > _MOST_CODES:
        return f"in int8 they keep heads of {_MOST_CODES} elements at most, not {shape.head_dim}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _integers(name: str, tensor: Tensor) -> Tensor:
    """Returns `tensor` without gaps, or raises `ValueError` if it is not of 64-bit integers, which the kernels read."""
    if tensor.dtype != torch.int64:
        raise ValueError(f"{name} are of {tensor.dtype}; the kernels read torch.int64")
    return tensor.contiguous()


def _rows(heads: Tensor) -> Tensor:
    """Returns `heads` ([tokens, heads, head_dim]), or a copy that has no gaps inside a token."""
    dense = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if dense else heads.contiguous()
