"""The Llama family: RMSNorm, rotary grouped-query attention over paged keys and values, a gated MLP.

Touvron et al., "LLaMA" (2023). `octavo.worker.models.architectures` says where its members differ.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.linear import GatedLinear, Linear
from octavo.worker.models.config import DecoderConfig
from octavo.worker.models.decoder import PagedStep
from octavo.worker.models.layers import MLP, Attention, DecoderLayer, RMSNorm
from octavo.worker.models.rotary import Angles, RotaryTable, halves_first
from octavo.worker.weights import WeightSource


class LlamaModel:
    """A decoder of the Llama family with its LM head, on one device in one dtype (norms and rotary tables: fp32).

    `embedding`: [vocab_size, hidden_size]; `rotary_tables`: one for all layers that turn alike. Raises `WeightsError`
    if the checkpoint is not that of `config`.
    """

    def __init__(
        self, config: DecoderConfig, checkpoint: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        loader = _Loader(config, checkpoint, dtype, device)
        self.config = config
        self.rotary_tables = list(loader.rotary_tables.values())
        self.embedding = loader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.embedding_scale = _embedding_scale(config, dtype)
        self.layers = [loader.layer(index) for index in range(config.num_layers)]
        self.norm = loader.norm("model.norm", config.hidden_size)
        self.lm_head = loader.lm_head(self.embedding)
        self.logits_scale = config.logits_scale
        self.final_softcap = config.final_softcap
        checkpoint.finish()

    def embed(self, input_ids: Tensor) -> Tensor:
        """[tokens, hidden_size]: what the first layer begins with, a tensor of its own."""
        hidden = F.embedding(input_ids, self.embedding)
        return hidden if self.embedding_scale == 1.0 else hidden * self.embedding_scale

    @property
    def kv_scales(self) -> list[tuple[float, float]]:
        """Of each layer's keys and values in a cache of fp8."""
        return [layer.attention.kv_scales for layer in self.layers]

    def forward(self, step: PagedStep) -> Tensor:
        """The last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""
        hidden = self.embed(step.input_ids)
        angles = {table: table.at(step.positions, hidden.dtype) for table in self.rotary_tables}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, index, step, _angles_of(layer, angles))
        return self.norm(hidden.index_select(0, step.rows))

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[rows, vocab_size] fp32, of what `forward` gave; in `out` if that is given."""
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self.bounded(self.lm_head.to_float(hidden, out=out))

    def bounded(self, logits: Tensor) -> Tensor:
        """The LM head's products ([rows, vocab_size] fp32) as the model scales and bounds them, in place."""
        if self.logits_scale != 1.0:
            logits = logits.mul_(self.logits_scale)
        if self.final_softcap:
            logits = logits.div_(self.final_softcap).tanh_().mul_(self.final_softcap)
        return logits


def _angles_of(layer: DecoderLayer, angles: dict[RotaryTable, Angles]) -> Angles | None:
    table = layer.attention.rotary
    return None if table is None else angles[table]


def _embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    if not config.architecture.normalized_embedding:
        return config.embedding_scale
    # These models are trained with the square root rounded like the embeddings.
    return config.embedding_scale * torch.tensor(config.hidden_size**0.5, dtype=dtype).item()


class _Loader:
    """Builds layers from a checkpoint's tensors, fusing what is multiplied with the same input."""

    def __init__(
        self, config: DecoderConfig, checkpoint: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rotary_tables = {
            rotary: RotaryTable.of(rotary, config.max_model_len, device)
            for rotary in dict.fromkeys(config.rotaries)
            if rotary is not None
        }
        self._config = config
        self._architecture = config.architecture
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.take(name, shape).to(self._device, self._dtype)

    def norm(self, prefix: str, size: int) -> RMSNorm:
        weight = self._checkpoint.take(f"{prefix}.weight", (size,)).to(self._device, torch.float32)
        return RMSNorm(weight + self._architecture.norm_offset, self._config.rms_norm_eps)

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}"
        architecture = self._architecture
        # Older checkpoints store this table, which follows from the configuration.
        self._checkpoint.drop(f"{prefix}.self_attn.rotary_emb.inv_freq")
        return DecoderLayer(
            input_norm=self._layer_norm(prefix, architecture.input_norm),
            attention=self._attention(f"{prefix}.self_attn", index),
            attention_output_norm=self._layer_norm(prefix, architecture.attention_output_norm),
            post_attention_norm=self._layer_norm(prefix, architecture.post_attention_norm),
            mlp=self._mlp(f"{prefix}.mlp"),
            mlp_output_norm=self._layer_norm(prefix, architecture.mlp_output_norm),
            residual_scale=self._config.residual_scale,
        )

    def lm_head(self, embedding: Tensor) -> Linear:
        name = "lm_head.weight"
        # One that is stored is meant, whatever config.json says of tying it to the embedding: so transformers has it.
        if self._config.tie_word_embeddings and name not in self._checkpoint.shapes():
            return Linear(embedding)
        return Linear(self.tensor(name, self._config.vocab_size, self._config.hidden_size))

    def _layer_norm(self, prefix: str, name: str | None) -> RMSNorm | None:
        return None if name is None else self.norm(f"{prefix}.{name}", self._config.hidden_size)

    def _attention(self, prefix: str, index: int) -> Attention:
        config = self._config
        rotary = config.rotaries[index]
        query_size = config.num_heads * config.head_dim
        return Attention(
            qkv=self._qkv(prefix, index),
            output=Linear(*self._rows(prefix, {"o_proj": config.hidden_size}, query_size, config.output_bias)),
            q_norm=self._head_norm(f"{prefix}.q_norm", config.num_heads),
            k_norm=self._head_norm(f"{prefix}.k_norm", config.num_kv_heads),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            rotary=None if rotary is None else self.rotary_tables[rotary],
            kv_scales=(self._number(f"{prefix}.k_scale"), self._number(f"{prefix}.v_scale")),
        )

    def _number(self, name: str) -> float:
        """One that a checkpoint may hold, as those that were calibrated for an fp8 cache do; else 1."""
        shape = self._checkpoint.shapes().get(name)
        return 1.0 if shape is None else self._checkpoint.take(name, (1,) if shape == (1,) else ()).item()

    def _qkv(self, prefix: str, index: int) -> Linear:
        config = self._config
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        if self._architecture.fused_qkv:
            sizes = {"qkv_proj": query_size + 2 * kv_size}
        weight, bias = self._rows(prefix, sizes, config.hidden_size, config.qkv_bias)
        rotary = config.rotaries[index]
        if rotary is not None and self._architecture.interleaved_rotary:
            turning = config.num_heads + config.num_kv_heads
            order = halves_first(turning, config.num_kv_heads, config.head_dim, rotary.rotary_dim).to(self._device)
            weight, bias = weight[order], None if bias is None else bias[order]
        return Linear(weight, bias)

    def _head_norm(self, prefix: str, heads: int) -> RMSNorm | None:
        match self._architecture.qk_norm:
            case None:
                return None
            case "head":
                return self.norm(prefix, self._config.head_dim)
            case "all":
                return self.norm(prefix, heads * self._config.head_dim)

    def _mlp(self, prefix: str) -> MLP:
        config = self._config
        sizes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        if self._architecture.fused_gate_up:
            sizes = {"gate_up_proj": 2 * config.intermediate_size}
        down = {"down_proj": config.hidden_size}
        return MLP(
            gate_up=GatedLinear(*self._rows(prefix, sizes, config.hidden_size, config.mlp_bias), config.activation),
            down=Linear(*self._rows(prefix, down, config.intermediate_size, config.mlp_bias)),
        )

    def _rows(self, prefix: str, sizes: dict[str, int], inputs: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        """The weights of the linear layers named in `sizes`, rows beneath rows, and their biases."""
        weights = [self.tensor(f"{prefix}.{name}.weight", size, inputs) for name, size in sizes.items()]
        biases = [self.tensor(f"{prefix}.{name}.bias", size) for name, size in sizes.items()] if bias else []
        return _joined(weights), _joined(biases) if biases else None


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
