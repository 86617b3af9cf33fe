"""Computes by arithmetic how many tokens' KV a replica has memory for."""

from dataclasses import dataclass

from octavo.simulator.catalog import GIB, Gpu, ModelShape
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.roofline import Efficiency, Overhead, Roofline


@dataclass(frozen=True)
class Reserve:
    """Sizes the part of each GPU's memory that holds neither weights nor KV: a share kept free, and bytes for the
    context, activations and buffers of communication. With the defaults, the memory that the paper's servers had left
    for KV comes out within 2 %."""

    share: float = 0.06
    nbytes: int = int(1.6 * GIB)


def kv_bytes(model: ModelShape, gpu: Gpu, tp: int = 1, reserve: Reserve | None = None) -> int:
    """Returns the bytes left for KV on `tp` GPUs that share a model. Raises `ValueError` if the model's weights leave
    none."""
    reserve = reserve or Reserve()
    usable = tp * (int(gpu.memory_bytes * (1 - reserve.share)) - reserve.nbytes)
    if usable <= model.weight_bytes:
        raise ValueError(
            f"{model.name} has {model.weight_bytes / GIB:.1f} GiB of weights, which do not fit into the"
            f" {usable / GIB:.1f} GiB that {tp} x {gpu.name} can give: use more GPUs per replica (tp) or larger ones"
        )
    return usable - model.weight_bytes


def kv_slots(model: ModelShape, gpu: Gpu, tp: int = 1, reserve: Reserve | None = None) -> int:
    """Returns the number of tokens whose keys and values fit."""
    return kv_bytes(model, gpu, tp, reserve) // model.kv_bytes_per_token


def replica(
    model: ModelShape,
    gpu: Gpu,
    tp: int = 1,
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    num_cpu_blocks: int | None = None,
    efficiency: Efficiency | None = None,
    overhead: Overhead | None = None,
) -> ReplicaSpec:
    """Returns a replica of the model with as many blocks as fit (None), and as many of them in CPU memory (None).
    Raises `ValueError` if the model does not fit."""
    latency = Roofline(model, gpu, tp, block_size=block_size, efficiency=efficiency, overhead=overhead)
    blocks = kv_slots(model, gpu, tp) // block_size if num_blocks is None else num_blocks
    return ReplicaSpec(
        num_blocks=blocks,
        block_size=block_size,
        latency=latency,
        num_cpu_blocks=blocks if num_cpu_blocks is None else num_cpu_blocks,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        costs=latency.costs,
        name=model.name,
    )
