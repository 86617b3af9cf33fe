"""Paged attention on the CPU by Octavo's own kernels: `octavo.kernels.backend.AttentionBackend`."""

from ctypes import byref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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
from octavo.kernels.native.structs import DTYPES, AttentionOp, GroupStep, LayerCachePointers

# Tokens that one thread attends for at a time: enough to make use of keys in its cache, few enough to share out.
_UNIT_TOKENS = 16
_LANES = 16


@dataclass(frozen=True, slots=True)
class NativeStep:
    """What the layers of one KV group need in one step: `pointers` into `arrays`, which keep what they point to, and
    for the checks `slot_mapping`, `num_tokens` and the `largest_block` that is read or written."""

    pointers: GroupStep
    arrays: tuple[npt.NDArray[np.generic], ...]
    slot_mapping: Tensor
    num_tokens: int
    largest_block: int


class NativeAttention:
    """Attention for decode and prefill alike by one kernel; a row's result depends neither on the rows beside it nor on
    how a prompt is cut into chunks."""

    masks_unwritten = True

    def __init__(self, library: NativeLibrary, shape: CacheShape) -> None:
        """Raises `ValueError` if `obstacle` names one."""
        if reason := obstacle(shape):
            raise ValueError(reason)
        self.name = f"native {library.variant}"
        self._functions = library.functions
        self._shape = shape

    def step(self, batch: GroupBatch) -> NativeStep:
        shape = self._shape
        check_lengths(batch.block_tables, batch.context_lens, batch.query_lens, shape.block_size)
        check_window(batch.window)
        contexts, lengths = np.array(batch.context_lens, np.int64), np.array(batch.query_lens, np.int64)
        tables, slots = _integers("block tables", batch.block_tables), _integers("slots", batch.slot_mapping)
        if slots.shape != (lengths.sum(),):
            raise ValueError(f"{len(slots)} slots for {lengths.sum()} query tokens")
        lowest, largest = _read_blocks(tables, contexts, lengths, shape.block_size, batch.window)
        check_block_ids(min(lowest, int(slots.min())))
        first_tokens = np.concatenate(([0], np.cumsum(lengths)))
        units = _units(contexts, lengths, shape.num_kv_heads)
        arrays = slots, tables, contexts, first_tokens, units
        return NativeStep(
            pointers=GroupStep(
                *(array.ctypes.data for array in arrays),
                len(units),
                tables.shape[1],
                shape.block_size,
                batch.window,
            ),
            arrays=arrays,
            slot_mapping=batch.slot_mapping,
            num_tokens=len(slots),
            largest_block=max(largest, int(slots.max()) // shape.block_size),
        )

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, step: NativeStep) -> None:
        check_new_keys(key, value, key_cache, step.slot_mapping)
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
        check_query(query, key_cache, step.num_tokens)
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
        shape = self._shape
        expected = (shape.block_size, shape.num_kv_heads, shape.head_dim)
        if key_cache.shape[1:] != expected or key_cache.dtype != shape.dtype:
            raise ValueError(f"a cache {list(key_cache.shape)} {key_cache.dtype} for blocks of {list(expected)}")
        if step.largest_block >= len(key_cache):
            raise ValueError(f"block {step.largest_block} is named; the cache has {len(key_cache)}")


def cache_pointers(key_cache: Tensor, value_cache: Tensor) -> LayerCachePointers:
    """Of one layer; they hold as long as the tensors."""
    return LayerCachePointers(key_cache.data_ptr(), value_cache.data_ptr())


def obstacle(shape: CacheShape) -> str | None:
    """Why the kernels cannot serve a cache of this shape; None if they can."""
    if shape.dtype not in DTYPES:
        return f"they compute in float32 and bfloat16, not {str(shape.dtype).removeprefix('torch.')}"
    if shape.block_size % _LANES:
        return f"they want blocks of a multiple of {_LANES} tokens, not {shape.block_size}"
    if shape.head_dim % _LANES:
        return f"they want heads of a multiple of {_LANES} elements, not {shape.head_dim}"
    return None


def _integers(name: str, tensor: Tensor) -> npt.NDArray[np.int64]:
    """What the kernels read without gaps, as 64-bit integers."""
    if tensor.dtype != torch.int64:
        raise ValueError(f"{name} are of {tensor.dtype}; the kernels read torch.int64")
    return np.ascontiguousarray(tensor.numpy())


def _rows(heads: Tensor) -> Tensor:
    """`heads` ([tokens, heads, head_dim]) or a copy, with no gaps inside a token."""
    dense = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if dense else heads.contiguous()


def _read_blocks(
    tables: npt.NDArray[np.int64],
    contexts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    block_size: int,
    window: int,
) -> tuple[int, int]:
    """The lowest and the largest block id that a query looks at."""
    firsts = np.maximum(contexts - lengths + 1 - window, 0) // block_size if window else np.zeros_like(contexts)
    ends = -(-contexts // block_size)
    logical = np.arange(tables.shape[1])
    read = tables[(logical >= firsts[:, None]) & (logical < ends[:, None])]
    return int(read.min()), int(read.max())


def _units(contexts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], kv_heads: int) -> npt.NDArray[np.int32]:
    """[units, 4] as `Unit` of src/types.h, those with most work first; the heads of the same tokens side by side."""
    counts = -(-lengths // _UNIT_TOKENS)
    sequences = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * _UNIT_TOKENS
    ends = np.minimum(starts + _UNIT_TOKENS, lengths[sequences])
    work = (ends - starts) * (contexts[sequences] - lengths[sequences] + ends)
    order = np.argsort(-work, kind="stable")
    units = np.empty((len(order), kv_heads, 4), np.int32)
    units[..., 0], units[..., 1] = sequences[order, None], np.arange(kv_heads)
    units[..., 2], units[..., 3] = starts[order, None], ends[order, None]
    return units.reshape(-1, 4)
