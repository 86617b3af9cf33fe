"""Describes the paper's servers (its table 1), its datasets, and replicas that take as long as the servers by
arithmetic."""

from dataclasses import dataclass
from typing import Final

from octavo.runtime.models.step_times import StepShape
from octavo.simulator.device import LatencyModel, ReplicaSpec
from octavo.simulator.hardware import GPUS, MODELS, PAPER_OVERHEAD, Gpu, ModelShape, Roofline, kv_slots
from octavo.workload.synthetic import DATASETS, Chatbot, Dataset, LogNormal


@dataclass(frozen=True)
class Setup:
    """Puts a model on `tp` GPUs. `slots`: tokens for whose KV there is memory, as the paper has it (None: the paper
    does not say, and arithmetic does)."""

    model: ModelShape
    gpu: Gpu
    tp: int
    slots: int | None

    @property
    def computed_slots(self) -> int:
        return kv_slots(self.model, self.gpu, self.tp)

    def spec(self, block_size: int = 16, *, blockwise_reads: bool = False, beam_gap: float = 1.0) -> ReplicaSpec:
        """Returns a replica with as many whole blocks as there are slots, and as many again in CPU memory."""
        roofline = Roofline(self.model, self.gpu, self.tp, block_size=block_size, overhead=PAPER_OVERHEAD)
        num_blocks = (self.slots or self.computed_slots) // block_size
        return ReplicaSpec(
            num_blocks=num_blocks,
            block_size=block_size,
            latency=BlockwiseReads(roofline, block_size) if blockwise_reads else roofline,
            num_cpu_blocks=num_blocks,
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.vocab_size,
            costs=roofline.costs,
            name=self.model.name,
            beam_gap=beam_gap,
        )


# What reading a block costs beside its bytes, in tokens whose KV could be read meanwhile. Blocks of 16 are so read 25 %
# slower than contiguous memory, as in the paper's figure 18 a; that it is the same for all sizes is assumed.
BLOCK_COST_TOKENS: Final = 4.0


class BlockwiseReads:
    """Step times where each block that is read costs as much as `BLOCK_COST_TOKENS` tokens more."""

    def __init__(self, contiguous: LatencyModel, block_size: int) -> None:
        self._contiguous = contiguous
        one, two = (contiguous.seconds(StepShape(1, 1, context, 0.0, 0, 0, 0)) for context in (0, 1))
        self._context_token_s = (two - one) * BLOCK_COST_TOKENS / block_size

    def seconds(self, shape: StepShape) -> float:
        return self._contiguous.seconds(shape) + shape.context_tokens * self._context_token_s


SETUPS: Final = {
    "opt-13b": Setup(MODELS["opt-13b"], GPUS["a100-40gb"], 1, 15_700),
    "opt-66b": Setup(MODELS["opt-66b"], GPUS["a100-40gb"], 4, 9_700),
    "opt-175b": Setup(MODELS["opt-175b"], GPUS["a100-80gb"], 8, 60_100),
    "llama-13b": Setup(MODELS["llama-13b"], GPUS["a100-40gb"], 1, None),
}

# Lengths of sentences of news and of their translations: neither means nor spread are in the paper; assumed.
WMT16: Final = Dataset("wmt16", LogNormal(32.0, 0.55, low=4, high=256), LogNormal(42.0, 0.55, low=4, high=256))
LENGTHS: Final[dict[str, Dataset | Chatbot]] = {**DATASETS, WMT16.name: WMT16}


def with_lengths(dataset: str, sigma: float) -> Dataset | Chatbot:
    """Returns a dataset by name, its spread times `sigma`."""
    return LENGTHS[dataset] if sigma == 1.0 else LENGTHS[dataset].scaled_sigma(sigma)
