"""FlashInfer's paged prefill as its sources describe it (0.7.4, flashinfer/prefill.py), computed in plain torch.

The parameters, their order and defaults are recorded from `BatchPrefillWithPagedKVCacheWrapper`; a test compares them
with an installed FlashInfer's. What is asked of arguments there is asserted here.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The parameters that are used, in the order in which they may be given by place.
INIT = ("float_workspace_buffer", "kv_layout")
PLAN = (
    *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
    *("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
)
PLAN_NAMED = ("causal", "sm_scale", "q_data_type", "kv_data_type")
RUN, RUN_NAMED = ("q", "paged_kv_cache"), ("out",)


class BatchPrefillWithPagedKVCacheWrapper:
    """Plans once and runs for each layer; `plans` and `runs` count over all wrappers."""

    plans = 0
    runs = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "HND", "the layout that is recorded here"
        self._planned = False

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        lengths = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert all(each.dtype == torch.int32 for each in (*lengths, paged_kv_indices))
        # On a device each of them would be waited for.
        assert all(each.device.type == "cpu" for each in lengths)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert paged_kv_indices.shape == (int(paged_kv_indptr[-1]),)
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert (paged_kv_indptr.diff() > 0).all()
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type in (torch.float16, torch.bfloat16)
        self._starts, self._page_starts = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._pages, self._last = paged_kv_indices, paged_kv_last_page_len.tolist()
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._page_size, self._causal = page_size, causal
        self._scale = 1 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale
        self._dtypes = q_data_type, q_data_type if kv_data_type is None else kv_data_type
        self._planned = True
        type(self).plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        assert self._planned, "plan() comes first"
        type(self).runs += 1
        heads, kv_heads, head_dim = self._heads
        keys, values = paged_kv_cache
        assert q.shape == (self._starts[-1], heads, head_dim)
        assert q.is_contiguous()
        assert (q.dtype, keys.dtype, values.dtype) == (self._dtypes[0], self._dtypes[1], self._dtypes[1])
        for cache in (keys, values):
            # Pages may be any distance apart; elements of a head may not.
            assert cache.shape[1:] == (kv_heads, self._page_size, head_dim)
            assert cache.stride(3) == 1
        assert keys.stride() == values.stride(), "versions before 0.7 read values by the strides of keys"
        output = torch.empty_like(q) if out is None else out
        assert output.dtype == q.dtype
        assert output.shape == q.shape
        assert output.is_contiguous()
        for index, (start, end) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            pages = self._pages[self._page_starts[index] : self._page_starts[index + 1]].tolist()
            length = (len(pages) - 1) * self._page_size + self._last[index]
            output[start:end] = self._attended(
                q[start:end], *(_gathered(each, pages, length) for each in (keys, values))
            )
        return output

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`keys`, `values`: [kv_heads, tokens, head_dim] fp32."""
        tokens, heads, _ = query.shape
        group = heads // len(keys)
        scores = torch.einsum("qhd,hkd->hqk", query.float(), keys.repeat_interleave(group, dim=0)) * self._scale
        if self._causal:
            # The last query token sees all keys.
            places = torch.arange(keys.shape[1] - tokens, keys.shape[1], device=query.device)
            later = torch.arange(keys.shape[1], device=query.device)[None, :] > places[:, None]
            scores = scores.masked_fill(later, -math.inf)
        weights = scores.softmax(dim=-1)
        return torch.einsum("hqk,hkd->qhd", weights, values.repeat_interleave(group, dim=0)).to(query.dtype)


def _gathered(cache: Tensor, pages: Sequence[int], length: int) -> Tensor:
    return torch.cat([cache[page] for page in pages], dim=1)[:, :length].float()


class Module:
    """What `import flashinfer` gives."""

    BatchPrefillWithPagedKVCacheWrapper: Any = BatchPrefillWithPagedKVCacheWrapper
