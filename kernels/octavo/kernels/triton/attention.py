"""Implements `octavo.kernels.backend.AttentionBackend`, paged attention on a GPU, in Triton."""

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.backend import CacheShape, GroupBatch
from octavo.kernels.checks import check_scores, check_slopes
from octavo.kernels.triton import launch
from octavo.kernels.triton.arguments import check_dtypes, check_query
from octavo.kernels.triton.devices import multiprocessors, shared_memory
from octavo.kernels.triton.language import POINTERS
from octavo.kernels.triton.launch import Problem, SequenceRange, TritonStep
from octavo.kernels.triton.tiles import (
    DECODE_SPLIT_KEYS,
    EXACT_SPLIT_KEYS,
    MAX_GROUP,
    Tiles,
    decode_tiles,
    exact_tiles,
    fitted,
    num_decode_splits,
    num_splits,
    prefill_tiles,
)
from octavo.kernels.triton.write import reshape_and_cache

__all__ = ["TritonAttention", "TritonStep", "obstacle"]

_LARGEST_HEAD = 256


def obstacle(shape: CacheShape) -> str | None:
    """Returns the reason why the kernels cannot serve a cache of this shape, or None if they can."""
    if shape.dtype not in (*POINTERS, torch.float8_e4m3fn):
        return f"keys and values of {shape.dtype}: the Triton kernels take bf16, fp16, fp32 and float8_e4m3fn"
    if not (0 < shape.head_dim <= _LARGEST_HEAD and shape.head_dim % 8 == 0):
        return f"heads of {shape.head_dim}: the Triton kernels take multiples of 8 up to {_LARGEST_HEAD}"
    return None


class TritonAttention:
    """Decodes and chunks of prompts in kernels of their own; `exact`, all in one whose every sum has one order, so that
    a token's bits are those that it would have alone, in any chunk, in any batch.

    Raises `ValueError` on a `shape` that the kernels do not take.
    """

    name = "triton"
    masks_unwritten = True

    def __init__(self, shape: CacheShape, device: torch.device, *, exact: bool = False) -> None:
        if reason := obstacle(shape):
            raise ValueError(reason)
        self._shape = shape
        self._device = device
        self._exact = exact
        self._multiprocessors = multiprocessors(device)
        self._shared = shared_memory(device)

    def step(self, batch: GroupBatch) -> TritonStep:
        return TritonStep.of(batch, self._shape.block_size, self._device)

    def write(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: TritonStep,
        *,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Writes `key` and `value` into their slots; a cache of fp8 gets `key` / `key_scale` and `value` /
        `value_scale`."""
        reshape_and_cache(
            key, value, key_cache, value_cache, step.slot_mapping, key_scale=key_scale, value_scale=value_scale
        )

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: TritonStep,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        """Computes the attention of a step's queries. `scale` must be positive; keys and values are what is in the
        cache times `key_scale` and `value_scale`."""
        check_query(query, key_cache, value_cache, step.num_tokens)
        check_dtypes(query, key_cache, key_scale, value_scale)
        check_scores(query, softcap, sinks)
        check_slopes(query, alibi_slopes)
        if scale <= 0:
            raise ValueError(f"scores have a scale of {scale}; it must be positive")
        problem = Problem(
            query, key_cache, value_cache, step, scale, softcap, sinks, alibi_slopes, key_scale, value_scale
        )
        if problem.group > MAX_GROUP:
            raise ValueError(f"{problem.group} query heads share a KV head; the kernels take up to {MAX_GROUP}")
        # Nothing attends for padding, which is to hold numbers all the same.
        make = torch.zeros if step.most_chunk_tokens else torch.empty
        output = make(query.shape, dtype=query.dtype, device=query.device)
        key = (self, problem.group, problem.kv_heads, problem.head_dim, query.dtype, key_cache.dtype)
        shares = step.shares.get(key)
        if shares is None:
            # The host's time for a layer counts: most have the same heads.
            shares = step.shares[key] = tuple(self._shares(problem))
        for share in shares:
            launch.attend(problem, share, output)
        return output

    def _shares(self, problem: Problem) -> Iterator[SequenceRange]:
        step = problem.step
        if self._exact:
            yield self._exact_share(problem)
            return
        if step.num_decodes:
            yield self._decode(problem)
        if step.num_decodes < step.num_sequences:
            yield self._prefill(problem)

    def _decode(self, problem: Problem) -> SequenceRange:
        count = problem.step.num_decodes
        tiles = decode_tiles(problem.group, problem.head_dim, problem.query.dtype, problem.key_cache.dtype)
        tiles = self._fitted(tiles, problem)
        splits = self._decode_splits(problem)
        return SequenceRange(
            0,
            count,
            count,
            1,
            tiles,
            decode=True,
            num_splits=splits,
            least_keys=DECODE_SPLIT_KEYS,
            multiprocessors=self._multiprocessors,
        )

    def _prefill(self, problem: Problem) -> SequenceRange:
        step = problem.step
        tiles = prefill_tiles(problem.group, problem.head_dim, problem.query.dtype, step.max_query_len)
        tiles = self._fitted(tiles, problem)
        tokens = step.most_chunk_tokens or step.num_tokens - step.num_decodes
        share = SequenceRange(step.num_decodes, step.num_sequences, tokens, step.max_query_len, tiles)
        # Of a captured step's sequences most are not there.
        num_tiles = (
            tokens // (tiles.rows // problem.group) + 1 if step.most_chunk_tokens else share.num_tiles(problem.group)
        )
        splits = num_splits(num_tiles * problem.kv_heads, step.most_seen(step.max_query_len), self._multiprocessors)
        return SequenceRange(step.num_decodes, step.num_sequences, tokens, step.max_query_len, tiles, num_splits=splits)

    def _decode_splits(self, problem: Problem) -> int:
        return num_decode_splits(problem.kv_heads, problem.step.most_seen(1), self._multiprocessors)

    def _exact_share(self, problem: Problem) -> SequenceRange:
        step = problem.step
        tiles = exact_tiles(problem.group, problem.head_dim, problem.query.dtype)
        return SequenceRange(
            0,
            step.num_sequences,
            step.num_tokens,
            max(1, step.max_query_len),
            self._fitted(tiles, problem, keeps_rows=True),
            num_splits=max(1, -(-step.max_context_len // EXACT_SPLIT_KEYS)),
            split_keys=EXACT_SPLIT_KEYS,
            multiprocessors=self._multiprocessors,
        )

    def _fitted(self, tiles: Tiles, problem: Problem, *, keeps_rows: bool = False) -> Tiles:
        dtypes = problem.query.dtype, problem.key_cache.dtype
        return fitted(tiles, problem.group, problem.head_dim, *dtypes, self._shared, keeps_rows=keeps_rows)
