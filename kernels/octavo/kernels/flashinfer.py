"""Computes the prompts of a step by FlashInfer where that is installed and takes them, and everything else in Triton.

FlashInfer (Ye et al., 2025, https://github.com/flashinfer-ai/flashinfer) reads our blocks where they lie: a page is
[kv_heads, tokens, head_dim] (its layout HND), pages may be any distance apart, and keys and values have equal strides.
"""

import importlib
import importlib.util
import logging
from collections import deque
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.backend import CacheShape, GroupBatch
from octavo.kernels.triton.attention import TritonAttention, TritonStep
from octavo.kernels.triton.launch import NO_PROMPTS

logger = logging.getLogger(__name__)

# What FlashInfer has kernels for, of what is asked of it here.
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
# As its documentation recommends, for what splits leave to be combined. All plans share it: they run one by one.
_WORKSPACE_BYTES = 128 << 20
# Plans that are kept: a plan's host memory is written anew only once the device has copied it, and it is some steps
# behind. A step has a plan for each of its KV groups.
_PLANS = 8


def obstacle(shape: CacheShape) -> str | None:
    """Returns why FlashInfer cannot compute the prompts of a cache of this shape; None if it can, as far as is known
    without a GPU."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed; pip install '.[flashinfer]' in Octavo's source tree"
    if shape.dtype not in _DTYPES:
        return f"keys and values of {shape.dtype}: FlashInfer takes bf16 and fp16 here"
    if shape.head_dim not in _HEAD_DIMS:
        return f"heads of {shape.head_dim}: FlashInfer takes {', '.join(map(str, _HEAD_DIMS))}"
    return None


@dataclass(frozen=True, slots=True)
class _Plan:
    """A wrapper of FlashInfer, planned for the prompts of `step`, a mark after what the plan copies, and the rest of
    the step."""

    step: TritonStep | None
    problem: tuple[Any, ...]
    wrapper: Any
    copied: Any
    decodes: TritonStep


class FlashInferAttention:
    """An `octavo.kernels.backend.AttentionBackend` with the interface of `TritonAttention`, which computes decodes, and
    prompts with a window, a bound of the scores, sinks or slopes.

    Steps whose lengths the host does not know, and those that are captured, are Triton's whole: a plan is made on the
    host. Raises `ValueError` on a `shape` that `obstacle` names a reason against, and what FlashInfer raises if it does
    not work on `device`: it compiles its kernels there.
    """

    # Its steps, writes and decodes are Triton's.
    name = "triton"
    masks_unwritten = True

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        if reason := obstacle(shape):
            raise ValueError(reason)
        self._triton = TritonAttention(shape, device)
        self._shape = shape
        self._device = device
        self._flashinfer: Any = importlib.import_module("flashinfer")
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans: deque[_Plan] = deque()
        self._try()

    def step(self, batch: GroupBatch) -> TritonStep:
        return self._triton.step(batch)

    def write(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, step: TritonStep, **scales: float
    ) -> None:
        self._triton.write(key, value, key_cache, value_cache, step, **scales)

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
        """Computes as `TritonAttention.attend`."""
        special = softcap > 0 or sinks is not None or alibi_slopes is not None
        if special or not self._takes(query, key_cache, value_cache, step):
            return self._triton.attend(
                query, key_cache, value_cache, step, scale,
                softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, key_scale=key_scale, value_scale=value_scale,
            )  # fmt: skip
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        plan, decodes = self._planned(query, key_cache, step, scale), step.num_decodes
        if decodes:
            # The first rows are the decodes', one each.
            output[:decodes] = self._triton.attend(
                query[:decodes], key_cache, value_cache, plan.decodes, scale,
            )  # fmt: skip
        # Its pages are [kv_heads, tokens, head_dim].
        pages = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
        plan.wrapper.run(query[decodes:].contiguous(), pages, out=output[decodes:])
        return output

    def _takes(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, step: TritonStep) -> bool:
        known = len(step.prompts.query_lens) == step.num_sequences - step.num_decodes > 0
        captured = query.is_cuda and torch.cuda.is_current_stream_capturing()
        alike = query.dtype == key_cache.dtype and key_cache.stride() == value_cache.stride()
        return known and step.window == 0 and not captured and alike and key_cache.stride(-1) == 1

    def _planned(self, query: Tensor, key_cache: Tensor, step: TritonStep, scale: float) -> _Plan:
        """Returns the plan of `step`, which all layers of a group share."""
        problem = (query.shape[1], scale, query.dtype)
        for plan in self._plans:
            if plan.step is step and plan.problem == problem:
                return plan
        wrapper = self._free_wrapper()
        lengths = step.prompts
        block_size = self._shape.block_size
        pages = [-(-length // block_size) for length in lengths.context_lens]
        wrapper.plan(
            _whole(accumulate(lengths.query_lens, initial=0)),
            _whole(accumulate(pages, initial=0)),
            self._page_ids(step, pages),
            _whole((length - 1) % block_size + 1 for length in lengths.context_lens),
            query.shape[1],
            key_cache.shape[2],
            key_cache.shape[3],
            block_size,
            causal=True,
            sm_scale=scale,
            q_data_type=query.dtype,
            kv_data_type=key_cache.dtype,
        )
        copied: Any = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        plan = _Plan(step, problem, wrapper, copied, _decodes_of(step))
        self._plans.append(plan)
        return plan

    def _free_wrapper(self) -> Any:
        """Returns a new wrapper, or the one that was planned first, once the device has what its plan copies."""
        if len(self._plans) < _PLANS:
            return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        oldest = self._plans.popleft()
        if oldest.copied is not None:
            oldest.copied.synchronize()
        return oldest.wrapper

    def _page_ids(self, step: TritonStep, pages: list[int]) -> Tensor:
        """Returns the block ids of all prompts, one after the other, read on the device from its tables."""
        first = torch.repeat_interleave(
            torch.arange(step.num_decodes, step.num_sequences), torch.tensor(pages), output_size=sum(pages)
        )
        column = torch.cat([torch.arange(count) for count in pages])
        places = torch.stack((first, column))
        if self._device.type == "cuda":
            places = places.pin_memory()
        sequences, columns = places.to(self._device, non_blocking=True)
        return step.block_tables[step.table_rows[sequences].long(), columns].int()

    def _try(self) -> None:
        """Computes one small prompt: FlashInfer compiles its kernels when it first needs them, and a request must not
        find out that it cannot."""
        shape = self._shape
        cache = torch.zeros(
            2, 2, shape.num_kv_heads, shape.block_size, shape.head_dim, dtype=shape.dtype, device=self._device
        )
        keys, values = cache.transpose(2, 3).unbind(1)
        tokens = min(2, shape.block_size)
        step = self._triton.step(GroupBatch(torch.arange(tokens), torch.tensor([[1]]), [tokens], [tokens], 0))
        query = torch.zeros(tokens, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=self._device)
        if self._takes(query, keys, values, step):
            found = self.attend(query, keys, values, step, 1.0)
            if found.any():
                raise ValueError("FlashInfer computes something else than zeros from zeros")
        self._plans = deque(replace(plan, step=None) for plan in self._plans)


def _decodes_of(step: TritonStep) -> TritonStep:
    count = step.num_decodes
    return replace(
        step,
        table_rows=step.table_rows[:count],
        context_lens=step.context_lens[:count],
        query_starts=step.query_starts[: count + 1],
        num_tokens=count,
        max_query_len=0,
        prompts=NO_PROMPTS,
    )


def _whole(numbers: Any) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32)
