"""Lists models and GPUs by their published sizes: what a simulation needs to know of hardware that is not there."""

from dataclasses import dataclass
from typing import Final

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
