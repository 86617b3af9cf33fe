"""The Llama family: RMSNorm, rotary grouped-query attention over paged keys and values, SwiGLU.

Touvron et al., "LLaMA" (2023); Qwen2 adds biases to QKV, Qwen3 norms to queries and keys.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.linear import Linear
from octavo.worker.models.config import DecoderConfig
from octavo.worker.models.decoder import PagedStep
from octavo.worker.models.rotary import Angles, RotaryEmbedding, rotate
from octavo.worker.weights import WeightSource


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    weight: Tensor
    eps: float

    def __call__(self, inputs: Tensor) -> Tensor:
        return F.rms_norm(inputs, self.weight.shape, self.weight, self.eps)


class Attention:
    """Self-attention of one layer. `qkv` is fused: queries, keys, values, head after head."""

    def __init__(self, config: DecoderConfig, qkv: Linear, output: Linear, norms: tuple[RMSNorm, RMSNorm] | None):
        self._query_heads = config.num_heads
        self._rotated_heads = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._qkv = qkv
        self._output = output
        self._norms = norms

    def __call__(self, hidden: Tensor, layer: int, step: PagedStep, angles: Angles) -> Tensor:
        heads = self._qkv(hidden).view(len(hidden), -1, self._head_dim)
        rotated = rotate(self._normed(heads[:, : self._rotated_heads]), angles)
        query, key = rotated[:, : self._query_heads], rotated[:, self._query_heads :]
        value = heads[:, self._rotated_heads :]
        return self._output(step.attend(layer, query, key, value, self._scale).flatten(1))

    def _normed(self, heads: Tensor) -> Tensor:
        if self._norms is None:
            return heads
        query_norm, key_norm = self._norms
        return torch.cat((query_norm(heads[:, : self._query_heads]), key_norm(heads[:, self._query_heads :])), dim=1)


class MLP:
    """down(silu(gate(x)) * up(x)); `gate_up` is fused: gate, then up."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, hidden: Tensor) -> Tensor:
        gate, up = self._gate_up(hidden).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each behind a norm and beside a residual."""

    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: MLP

    def __call__(self, hidden: Tensor, layer: int, step: PagedStep, angles: Angles) -> Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), layer, step, angles)
        return hidden + self.mlp(self.post_attention_norm(hidden))


class LlamaModel:
    """A decoder of the Llama family with its LM head, on one device in one dtype.

    Raises `WeightsError` if the checkpoint is not that of `config`.
    """

    def __init__(self, config: DecoderConfig, checkpoint: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        loader = _Loader(config, checkpoint, dtype, device)
        self.config = config
        self._rotary = RotaryEmbedding(config.rotary, config.head_dim, config.max_model_len, dtype, device)
        self._embedding = loader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [loader.layer(f"model.layers.{index}") for index in range(config.num_layers)]
        self._norm = loader.norm("model.norm", config.hidden_size)
        self._lm_head = loader.lm_head(self._embedding)
        checkpoint.finish()

    def forward(self, step: PagedStep) -> Tensor:
        """The last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""
        angles = self._rotary.at(step.positions)
        hidden = F.embedding(step.input_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, index, step, angles)
        return self._norm(hidden.index_select(0, step.rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size], of what `forward` gave."""
        return self._lm_head(hidden) if len(hidden) else hidden.new_empty((0, self.config.vocab_size))


class _Loader:
    """Builds layers from a checkpoint's tensors, fusing what is multiplied with the same input."""

    def __init__(self, config: DecoderConfig, checkpoint: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.take(name, shape).to(self._device, self._dtype)

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", size), self._config.rms_norm_eps)

    def linear(self, prefix: str, outputs: dict[str, int], inputs: int, bias: bool) -> Linear:
        weight = torch.cat([self.tensor(f"{prefix}.{name}.weight", size, inputs) for name, size in outputs.items()])
        if not bias:
            return Linear(weight)
        return Linear(weight, torch.cat([self.tensor(f"{prefix}.{name}.bias", size) for name, size in outputs.items()]))

    def layer(self, prefix: str) -> DecoderLayer:
        config = self._config
        # Older checkpoints store this table, which follows from the configuration.
        self._checkpoint.drop(f"{prefix}.self_attn.rotary_emb.inv_freq")
        sizes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        down = {"down_proj": config.hidden_size}
        return DecoderLayer(
            input_norm=self.norm(f"{prefix}.input_layernorm", config.hidden_size),
            attention=self._attention(f"{prefix}.self_attn"),
            post_attention_norm=self.norm(f"{prefix}.post_attention_layernorm", config.hidden_size),
            mlp=MLP(
                self.linear(f"{prefix}.mlp", sizes, config.hidden_size, config.mlp_bias),
                self.linear(f"{prefix}.mlp", down, config.intermediate_size, config.mlp_bias),
            ),
        )

    def _attention(self, prefix: str) -> Attention:
        config = self._config
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        norms = None
        if config.qk_norm:
            norms = (
                self.norm(f"{prefix}.q_norm", config.head_dim),
                self.norm(f"{prefix}.k_norm", config.head_dim),
            )
        return Attention(
            config,
            self.linear(prefix, sizes, config.hidden_size, config.qkv_bias),
            self.linear(prefix, {"o_proj": config.hidden_size}, query_size, config.output_bias),
            norms,
        )

    def lm_head(self, embedding: Tensor) -> Linear:
        if self._config.tie_word_embeddings:
            self._checkpoint.drop("lm_head.weight")
            return Linear(embedding)
        return Linear(self.tensor("lm_head.weight", self._config.vocab_size, self._config.hidden_size))
