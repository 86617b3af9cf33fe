"""Computes how long a step takes on a GPU: by what the step reads, what it computes, and what is lost on the way."""

from dataclasses import dataclass
from typing import Final

from octavo.runtime.models.step_times import StepShape
from octavo.simulator.catalog import Gpu, ModelShape
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's figures that software reaches: memory, matrix products, attention over prompts, the
    link to the host, and those between GPUs."""

    memory: float = 0.85
    matmul: float = 0.6
    attention: float = 0.4
    host: float = 0.8
    peers: float = 0.7


@dataclass(frozen=True)
class Overhead:
    """Gives the seconds that the hardware does not explain: for every step, for each sequence in it that samples, for
    each all-reduce between GPUs, and for each transfer to or from the host. `scattered` says whether every layer's
    keys, and its values, of a block are transfers of their own, rather than all that a step moves one."""

    step_s: float = 2e-3
    sequence_s: float = 1e-5
    all_reduce_s: float = 1.5e-5
    transfer_s: float = 1e-5
    scattered: bool = False


# A server in Python as the paper's: its scheduler, the preparation of inputs and the sampler run between two steps, not
# beside them. `step_s` is fitted to one figure of the paper: OPT-13B with paged memory has 30.4 requests in its batches
# at 2 ShareGPT requests/s (figure 13a).
PAPER_OVERHEAD: Final = Overhead(step_s=1e-2, sequence_s=5e-5, scattered=True)


class Roofline:
    """Computes the step times of a model on `tp` GPUs of one machine that split every layer (Megatron).

    Each layer has two all-reduces, and each GPU a link to the host. A step's matrices take the longer of reading and
    computing them. Sizes of blocks are in tokens. Raises `ValueError` if the model cannot be split so.
    """

    def __init__(
        self,
        model: ModelShape,
        gpu: Gpu,
        tp: int = 1,
        *,
        block_size: int = 16,
        efficiency: Efficiency | None = None,
        overhead: Overhead | None = None,
    ) -> None:
        if tp < 1 or model.heads % tp:
            raise ValueError(f"{model.name} has {model.heads} heads, which {tp} GPUs cannot share evenly")
        efficiency, overhead = efficiency or Efficiency(), overhead or Overhead()
        bandwidth, flops = tp * gpu.bandwidth * efficiency.memory, tp * gpu.flops * efficiency.matmul
        block_bytes = block_size * model.kv_bytes_per_token
        self._overhead = overhead
        self._weights_s = (model.layer_parameters + model.head_parameters) * model.dtype_bytes / bandwidth
        self._token_s = 2 * model.layer_parameters / flops
        self._head_s = 2 * model.head_parameters / flops
        self._context_token_s = model.kv_bytes_per_token / bandwidth
        # A product with the key and one with the value.
        pair_flops = 4 * model.layers * model.heads * model.head_dim
        self._pair_s = pair_flops / (tp * gpu.flops * efficiency.attention)
        self._copy_s = 2 * block_bytes / bandwidth
        reduced_bytes = 2 * (tp - 1) / tp * model.hidden * model.dtype_bytes
        self._reduced_token_s = 2 * model.layers * reduced_bytes / (gpu.peer_bandwidth * efficiency.peers)
        self._reductions_s = 2 * model.layers * overhead.all_reduce_s if tp > 1 else 0.0
        transfers = 2 * model.layers if overhead.scattered else 0
        self._block_s = block_bytes / (tp * gpu.host_bandwidth * efficiency.host) + transfers * overhead.transfer_s

    def seconds(self, shape: StepShape) -> float:
        """Returns the seconds that a step of this shape takes."""
        return self._compute_s(shape) + self._move_s(shape.blocks_out) + self._move_s(shape.blocks_in)

    def _compute_s(self, shape: StepShape) -> float:
        seconds = shape.copies * self._copy_s
        if shape.num_tokens:
            multiplied_s = shape.num_tokens * self._token_s + shape.num_sampled * self._head_s
            seconds += (
                max(self._weights_s, multiplied_s)
                + shape.context_tokens * self._context_token_s
                + shape.prefill_pairs * self._pair_s
                + self._reductions_s
                + shape.num_tokens * self._reduced_token_s
                + self._overhead.step_s
                + shape.num_sampled * self._overhead.sequence_s
            )
        return seconds

    def _move_s(self, blocks: int) -> float:
        """Returns the seconds of `blocks` that move one way."""
        return self._overhead.transfer_s + blocks * self._block_s if blocks else 0.0

    @property
    def costs(self) -> StepCosts:
        """Returns the costs that a worker with these step times would measure at its start."""
        step_s = self._overhead.step_s + self._reductions_s + self._weights_s
        prefill = PrefillCosts(step_s, self._token_s + self._reduced_token_s, self._pair_s)
        return StepCosts(prefill, SwapCosts(self._overhead.transfer_s, self._block_s, self._block_s))
