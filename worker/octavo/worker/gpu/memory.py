"""The GPU memory left for KV blocks: running the largest steps shows how much steps take."""

import gc
import logging
from dataclasses import replace
from pathlib import Path

import torch

from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMoves
from octavo.worker.gpu.executor import GpuExecutor
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.decoder import Decoder
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step.forward import Paging
from octavo.worker.step.kv_cache import KVCache, KVCacheError, KVLayout

logger = logging.getLogger(__name__)

_GIB = 1 << 30
# What captured graphs take beside the tensors of a step.
_GRAPHS_BYTES = 256 << 20


def memory_for_blocks(model: Decoder, layout: KVLayout, paging: Paging, settings: ModelSettings) -> int:
    """Returns the bytes left for KV blocks. Raises `KVCacheError` if nothing is left."""
    prefill, captured_step, tables = _step_bytes(model, layout, paging, settings)
    free, total = torch.cuda.mem_get_info(paging.device)
    # A captured step has memory of its own, and puts its logits where those of all sizes lie.
    logits = 4 * settings.graph_batch * model.config.vocab_size
    captured = captured_step + logits + _GRAPHS_BYTES if settings.cuda_graphs else 0
    reserved = prefill + captured + tables
    left = int(settings.gpu_memory_utilization * total) - (total - free) - reserved
    logger.info(
        "of %.1f GiB on %s, %.1f are in use; a step of %d tokens takes %.2f, captured decode steps %.2f, tables of %d"
        " sequences %.2f; %.1f are left",
        total / _GIB, paging.device, (total - free) / _GIB, settings.max_num_batched_tokens, prefill / _GIB,
        captured / _GIB, settings.max_num_seqs, tables / _GIB, left / _GIB,
    )  # fmt: skip
    if left < layout.bytes_per_block:
        raise KVCacheError(
            f"{settings.gpu_memory_utilization:.0%} of the {total / _GIB:.1f} GiB on {paging.device} leave no room for"
            f" KV blocks: {(total - free) / _GIB:.1f} GiB are in use, most of it weights, and steps take"
            f" {reserved / _GIB:.1f}; raise --gpu-memory-utilization, lower --max-num-batched-tokens, or serve a"
            " smaller model"
        )
    return left


def _step_bytes(model: Decoder, layout: KVLayout, paging: Paging, settings: ModelSettings) -> tuple[int, int, int]:
    """Returns the peak bytes of the largest prefill and of the largest captured step, beside weights and blocks, and
    the bytes of the sequences' tables."""
    prompts = profile_prompts(settings.max_num_batched_tokens, paging.max_model_len)
    num_blocks = sum(-(-length // layout.block_size) for length in prompts) * len(layout.groups)
    cache = KVCache(layout, num_blocks=num_blocks, num_cpu_blocks=0, device=paging.device)
    # Its steps choose no token.
    executor = GpuExecutor(model, cache, paging, Grammars(Path()), replace(settings, cuda_graphs=False))
    items = _items(prompts, layout)
    decodes = [WorkItem(item.sequence, 0, 1, ()) for item in _items([1] * settings.graph_batch, layout, num_blocks)]
    chunks = _items(profile_prompts(min(settings.graph_tokens, sum(prompts)), paging.max_model_len), layout)
    prefill, *captured = (_peak(executor, each, paging.device) for each in (items, decodes, chunks))
    # Graphs are replayed one after the other, in the same memory.
    found = prefill, max(captured), executor.table_bytes
    del executor, cache
    gc.collect()
    torch.cuda.empty_cache()
    return found


def profile_prompts(num_tokens: int, max_model_len: int) -> list[int]:
    """Returns the lengths of the fewest prompts that are `num_tokens` together."""
    whole, rest = divmod(num_tokens, max_model_len)
    return [max_model_len] * whole + [rest] * (rest > 0)


def _items(lengths: list[int], layout: KVLayout, num_blocks: int | None = None) -> list[WorkItem]:
    """Makes prompts of these `lengths` in consecutive blocks, which start over after `num_blocks`."""
    items, used = [], 0
    for index, length in enumerate(lengths):
        width = -(-length // layout.block_size)
        tables = []
        for _ in layout.groups:
            tables.append([block % num_blocks if num_blocks else block for block in range(used, used + width)])
            used += width
        sequence = WorkerSequence(index, 0, SamplingParams(max_tokens=1), length, [0] * length, 0, tables)
        items.append(WorkItem(sequence, 0, length, (sequence,)))
    return items


def _peak(executor: GpuExecutor, items: list[WorkItem], device: torch.device) -> int:
    """Returns the bytes that computing `items` takes at most, of those that are free now."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    executor.launch(BlockMoves(), items).output()
    executor.forget(item.sequence.sequence_id for item in items)
    return int(torch.cuda.max_memory_allocated(device)) - before
