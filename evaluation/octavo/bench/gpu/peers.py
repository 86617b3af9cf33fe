"""Calls other attention kernels: each function makes the calls of a problem, and raises where it cannot."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.bench.gpu.cases import is_there
from octavo.bench.gpu.problems import DTYPE, PagedProblem, each_layer
from octavo.bench.gpu.timing import Call

Peer = Callable[[PagedProblem], list[Call]]

FLASH, CUDNN, FLEX = "SDPA flash", "cuDNN", "FlexAttention"
FLASHINFER, FA3, VLLM = "FlashInfer", "FA3", "vLLM FA"
# What each of them is imported from.
MODULES = {FLASH: "torch", CUDNN: "torch", FLEX: "torch.nn.attention.flex_attention", FLASHINFER: "flashinfer"}
MODULES |= {FA3: "flash_attn_interface", VLLM: "vllm.vllm_flash_attn", "generate_batch": "transformers"}


def found() -> dict[str, bool]:
    """Tells for each peer whether it can be imported."""
    return {name: is_there(module) for name, module in MODULES.items()}


def sdpa(problem: PagedProblem, backend: SDPBackend) -> list[Call]:
    """Calls torch's fused attention on contiguous keys and values. A decode's query heads stand where queries do, so
    that a group reads its keys once."""
    decodes = problem.num_queries == 1
    mask = None if decodes else _lower_right(problem, backend)

    def call(layer: int) -> Call:
        keys, values = problem.contiguous(layer)
        query = problem.packed_query(layer) if decodes else problem.query(layer)

        def run() -> Tensor:
            with sdpa_kernel(backend):
                if mask is None:
                    return F.scaled_dot_product_attention(
                        query, keys, values, is_causal=not decodes, scale=problem.scale, enable_gqa=not decodes
                    )
                return F.scaled_dot_product_attention(
                    query, keys, values, attn_mask=mask, scale=problem.scale, enable_gqa=True
                )

        return run

    return each_layer(problem, call)


def _lower_right(problem: PagedProblem, backend: SDPBackend) -> Tensor | None:
    """Makes the causal mask that is aligned with the last key, where there is history. None means that torch's own
    causal mask will do."""
    if problem.num_queries == problem.context:
        return None
    if backend is SDPBackend.CUDNN_ATTENTION:
        raise RuntimeError("torch gives cuDNN no causal mask for queries after a history")
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(problem.num_queries, problem.context)


def flex(problem: PagedProblem) -> list[Call]:
    """Calls torch's flex attention on contiguous keys and values, compiled."""
    module: Any = import_module(MODULES[FLEX])
    compiled: Any = torch.compile(module.flex_attention, dynamic=False)
    decodes = problem.num_queries == 1
    history = problem.context - problem.num_queries
    mask: Any = None
    if not decodes:
        mask = module.create_block_mask(
            lambda b, h, q, k: q + history >= k, None, None, problem.num_queries, problem.context, device=problem.device
        )

    def call(layer: int) -> Call:
        keys, values = problem.contiguous(layer)
        query = problem.query(layer).contiguous()
        return partial(compiled, query, keys, values, block_mask=mask, scale=problem.scale, enable_gqa=True)

    return each_layer(problem, call)


def flashinfer(problem: PagedProblem) -> list[Call]:
    """Calls FlashInfer's decode on blocks of FlashInfer's own layout, [blocks, 2, kv_heads, block_size, head_dim]."""
    module: Any = import_module(MODULES[FLASHINFER])
    shape, width = problem.shape, problem.tables.shape[1]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=problem.device)
    wrapper: Any = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    last = problem.context - (width - 1) * shape.block_size
    wrapper.plan(
        torch.arange(0, (problem.num_sequences + 1) * width, width, dtype=torch.int32, device=problem.device),
        problem.tables.flatten(),
        torch.full((problem.num_sequences,), last, dtype=torch.int32, device=problem.device),
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        shape.block_size,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
        sm_scale=problem.scale,
    )
    return each_layer(
        problem, lambda layer: partial(wrapper.run, problem.queries[layer], problem.blocks[:, layer].contiguous())
    )


def flash_attention_3(problem: PagedProblem) -> list[Call]:
    """Calls FlashAttention 3 on blocks of [block_size, kv_heads, head_dim]."""
    function: Any = import_module(MODULES[FA3]).flash_attn_with_kvcache
    lengths = torch.full((problem.num_sequences,), problem.context, dtype=torch.int32, device=problem.device)

    def call(layer: int) -> Call:
        query = problem.query(layer).transpose(1, 2).contiguous()
        return partial(
            function,
            query,
            *_contiguous_caches(problem, layer),
            cache_seqlens=lengths,
            page_table=problem.tables,
            softmax_scale=problem.scale,
            causal=True,
        )

    return each_layer(problem, call)


def vllm_flash_attention(problem: PagedProblem) -> list[Call]:
    """Calls vLLM's build of FlashAttention on blocks of [block_size, kv_heads, head_dim]."""
    function: Any = import_module(MODULES[VLLM]).flash_attn_varlen_func
    lengths = torch.full((problem.num_sequences,), problem.context, dtype=torch.int32, device=problem.device)
    starts = torch.arange(problem.num_sequences + 1, dtype=torch.int32, device=problem.device) * problem.num_queries

    def call(layer: int) -> Call:
        keys, values = _contiguous_caches(problem, layer)
        return partial(
            function,
            q=problem.queries[layer],
            k=keys,
            v=values,
            max_seqlen_q=problem.num_queries,
            cu_seqlens_q=starts,
            max_seqlen_k=problem.context,
            seqused_k=lengths,
            block_table=problem.tables,
            softmax_scale=problem.scale,
            causal=True,
            fa_version=3,
        )

    return each_layer(problem, call)


def _contiguous_caches(problem: PagedProblem, layer: int) -> tuple[Tensor, Tensor]:
    keys, values = problem.caches(layer)
    return keys.contiguous(), values.contiguous()


_DECODE: dict[str, Peer] = {
    CUDNN: partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    FLASH: partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    FLEX: flex,
    FLASHINFER: flashinfer,
    FA3: flash_attention_3,
    VLLM: vllm_flash_attention,
}
_PREFILL = (FLASH, CUDNN, FLEX, FA3, VLLM)


def of_decodes() -> dict[str, Peer]:
    """Returns the decode kernels that are installed, by name."""
    return {name: peer for name, peer in _DECODE.items() if is_there(MODULES[name])}


def of_chunks() -> dict[str, Peer]:
    return {name: peer for name, peer in of_decodes().items() if name in _PREFILL}
