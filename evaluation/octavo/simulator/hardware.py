"""Lists models and GPUs by their published sizes, and computes by arithmetic how long a step takes on them, and for how
many tokens' KV there is memory."""

from dataclasses import dataclass
from typing import Final

from octavo.runtime.models.step_times import StepShape
from octavo.simulator.device import ReplicaSpec
from octavo.wire.costs import PrefillCosts, RowCost, StepCosts, SwapCosts, attended_pairs

# -- models and GPUs --------------------------------------------------------------------------------------------------


GIB: Final = 1 << 30


@dataclass(frozen=True)
class ModelShape:
    """Describes a decoder-only transformer by the numbers in its configuration. Weights, keys and values have
    `dtype_bytes` each; an MLP has `mlp_matrices` (2; 3 with a gate). Biases and norms, less than 0.1 % of the weights,
    do not count."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_hidden: int
    mlp_matrices: int
    vocab_size: int
    max_model_len: int
    # Whether one matrix serves to embed tokens and to make logits; and rows of a table of learned positions.
    tied: bool = False
    positions: int = 0
    dtype_bytes: int = 2

    @property
    def layer_parameters(self) -> int:
        """Returns the number of parameters of all layers together: each token is multiplied with them."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.mlp_hidden)

    @property
    def head_parameters(self) -> int:
        """Returns the number of parameters of the matrix that makes logits."""
        return self.vocab_size * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = (0 if self.tied else self.head_parameters) + self.positions * self.hidden
        return self.layer_parameters + self.head_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True)
class Gpu:
    """Describes a GPU by its data sheet: bytes of memory and bytes/s from it, dense flops/s in 16 bits, bytes/s in one
    direction to the host, and to other GPUs of the same machine."""

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    host_bandwidth: float
    peer_bandwidth: float


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    """Returns the shape of an OPT model: Zhang et al., "OPT: Open Pre-trained Transformer Language Models", table 1;
    the vocabulary and the positions are those of the published checkpoints."""
    return ModelShape(
        name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, 2, 50272, 2048, tied=True, positions=2050
    )


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, length: int, **more: bool
) -> ModelShape:
    """Returns the shape of a model of LLaMA's kind.

    The numbers come from Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", table 2; Grattafiori
    et al., "The Llama 3 Herd of Models", table 3; and the configurations of the published checkpoints of these, Qwen3
    and SmolLM2.
    """
    head_dim = hidden // heads
    return ModelShape(name, layers, hidden, heads, kv_heads, head_dim, mlp, 3, vocab, length, **more)


# An H200's 141 GB are reported by its driver as 140.4 GiB; NVIDIA's GB of memory are GiB, those of bandwidth are not.
# Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (40 GB PCIe and SXM: 1,555 GB/s; 80 GB SXM: 2,039 GB/s; NVLink
# 600 GB/s and PCIe 4.0 x16 64 GB/s, both directions together), "H100 Tensor Core GPU" and "H200 Tensor Core GPU" (SXM;
# NVLink 900 GB/s, PCIe 5.0 x16 128 GB/s; the 1,979 TFLOPS they print are with sparsity).
_GPUS: Final = (
    Gpu("a100-40gb", 40 * GIB, 1555e9, 312e12, 32e9, 300e9),
    Gpu("a100-80gb", 80 * GIB, 2039e9, 312e12, 32e9, 300e9),
    Gpu("h100-80gb", 80 * GIB, 3350e9, 989e12, 64e9, 450e9),
    Gpu("h200", 140 * GIB, 4800e9, 989e12, 64e9, 450e9),
)
_MODELS: Final = (
    _opt("opt-1.3b", 24, 2048, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
    _opt("opt-175b", 96, 12288, 96),
    _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048),
    _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000, 2048),
    _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
    _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 131072),
    _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 131072),
    _llama("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, 40960),
    _llama("smollm2-135m", 30, 576, 9, 3, 1536, 49152, 8192, tied=True),
)
GPUS: Final[dict[str, Gpu]] = {gpu.name: gpu for gpu in _GPUS}
MODELS: Final[dict[str, ModelShape]] = {model.name: model for model in _MODELS}


# -- step times -------------------------------------------------------------------------------------------------------


# As many rows as workers time at their start.
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)


def _drafted(num_guesses: int) -> StepShape:
    """Returns the shape of a step of one token with guesses, without context."""
    return StepShape(1 + num_guesses, 1 + num_guesses, 1, attended_pairs(1, num_guesses, (0,)))


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
        swap = SwapCosts(self._overhead.transfer_s, self._block_s, self._block_s)
        rows = [RowCost(count, self.seconds(_drafted(count - 1))) for count in _ROWS]
        return StepCosts(prefill, swap, rows)


# -- memory -----------------------------------------------------------------------------------------------------------


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
        kv_bytes_per_token=model.kv_bytes_per_token,
    )
