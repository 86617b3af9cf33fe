"""The options of a worker on a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuOptions:
    """Holds the options of a worker on a GPU.

    `memory_utilization`: the share of the device's memory that this process and all others on it may take together.
    `max_num_batched_tokens`: the largest step that room is left for; a larger one may be computed in parts.
    `max_num_seqs`: the number of sequences that have a row from the start; more make the tables grow, slowly.
    `graph_batch`: the largest decode step that is captured as a CUDA graph, if `cuda_graphs`.
    """

    memory_utilization: float = 0.9
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    graph_batch: int = 256
    cuda_graphs: bool = True
