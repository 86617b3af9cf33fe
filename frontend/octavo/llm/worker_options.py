"""Options of workers for engines: `python -m tests.option_pages` writes this file."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Holds the options of workers; None leaves a choice to them. `octavo worker --help` says more.

    A field sets the variable of its name: `block_size` sets OCTAVO_BLOCK_SIZE.
    """

    load_format: str | None = None
    model_impl: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    draft_model: str | None = None
    kv_cache_dtype: str | None = None
    numerics: str | None = None
    pooling: str | None = None
    block_size: int | None = None
    kv_layout: int | str | None = None
    kv_cache_memory: int | str | None = None
    num_blocks: int | None = None
    swap_memory: int | str | None = None
    num_cpu_blocks: int | None = None
    max_model_len: int | None = None
    threads: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    attention_backend: str | None = None
    cuda_graphs: bool | None = None
