"""The Llama family: RMSNorm, rotary grouped-query attention over paged keys and values, a gated MLP.

Touvron et al., "LLaMA" (2023). `octavo.worker.models.architectures` lists the differences between its members.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.native.library import NativeUnavailable, find
from octavo.kernels.native.sampling import softcap
from octavo.kernels.quantized import BlockFormat, Quantized
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightSource
from octavo.worker.models import gpu_linear
from octavo.worker.models.config import DecoderConfig
from octavo.worker.models.decoder import PagedStep
from octavo.worker.models.layers import MLP, Attention, DecoderLayer, RMSNorm, ShardedRMSNorm
from octavo.worker.models.linear import GatedLinear, Linear, Weight, obstacle_to_quantized
from octavo.worker.models.rotary import Angles, RotaryTable, halves_first
from octavo.worker.tensor_parallel.group import SINGLE, ShardGroup
from octavo.worker.tensor_parallel.shards import ShardedVocabulary, Shards, Share, stacked

logger = logging.getLogger(__name__)


class LayerLoader:
    """Builds layers from a checkpoint's tensors, fusing those that are multiplied with the same input.

    It reads only what this rank computes with. The parameter `config` describes the whole model; the attribute
    describes this rank's share, with its own `num_heads`, `num_kv_heads` and `intermediate_size`. Raises
    `ModelConfigError` if the ranks of `group` cannot share the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        group: ShardGroup,
    ) -> None:
        self.rotary_tables = {
            rotary: RotaryTable.of(rotary, config.max_model_len, device)
            for rotary in dict.fromkeys(config.rotaries)
            if rotary is not None
        }
        shards = Shards(group.rank, group.size)
        self.vocabulary = ShardedVocabulary(config.vocab_size, group)
        self._heads = shards.heads(config.num_heads, config.num_kv_heads)
        # Octavo's own kernels multiply pairs of inputs.
        self._columns = shards.split(config.intermediate_size, "columns of the MLP", unit=2)
        self.config = replace(
            config,
            num_heads=len(self._heads.query),
            num_kv_heads=len(self._heads.kv),
            intermediate_size=len(self._columns),
        )
        self._group = group
        self._architecture = config.architecture
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        # The reasons that were told why quantised weights do not stay so.
        self._told = set[str]()
        # Quantised weights that are multiplied as numbers, by name.
        self._widened = list[str]()

    def embedding_rows(self) -> Callable[[Tensor], Tensor]:
        """Returns what looks up this rank's rows of the embedding, of a model without an LM head."""
        embedding = self._vocabulary_rows("model.embed_tokens.weight")
        if isinstance(embedding, Tensor):
            return partial(F.embedding, weight=embedding)
        return partial(_rows_of, Linear(embedding), self._dtype)

    def vocabulary_layers(self) -> tuple[Callable[[Tensor], Tensor], Linear]:
        """Returns what looks up this rank's rows of the embedding, and the linear layer to the logits of its share.

        A quantised embedding stays so on a CPU, and is the LM head as well where it is tied.
        """
        embedding, name = self._vocabulary_rows("model.embed_tokens.weight", looked_up=True), "lm_head.weight"
        # A stored LM head is meant, whatever config.json says of tying it to the embedding: so transformers has it.
        tied = self.config.tie_word_embeddings and name not in self._checkpoint.shapes()
        if isinstance(embedding, Tensor):
            lm_head = Linear(embedding if tied else self._vocabulary_rows(name))
            return partial(F.embedding, weight=embedding), lm_head
        packed = Linear(embedding)
        return partial(_rows_of, packed, self._dtype), packed if tied else Linear(self._vocabulary_rows(name))

    def norm(self, prefix: str, size: int, part: TensorPart | None = None) -> RMSNorm:
        # What a GGUF file holds is the sum already: fp64 loses none of its bits, and rounds no other sum otherwise.
        weight = self._checkpoint.take(f"{prefix}.weight", (size,), part).double() + self._architecture.norm_offset
        return RMSNorm(weight.to(self._device, torch.float32), self.config.rms_norm_eps)

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
            residual_scale=self.config.residual_scale,
            group=self._group,
        )

    def _layer_norm(self, prefix: str, name: str | None) -> RMSNorm | None:
        return None if name is None else self.norm(f"{prefix}.{name}", self.config.hidden_size)

    def _attention(self, prefix: str, index: int) -> Attention:
        config = self.config
        rotary = config.rotaries[index]
        return Attention(
            qkv=self._qkv(prefix, index),
            output=Linear(*self._summed(f"{prefix}.o_proj", self._head_rows(self._heads.query), config.output_bias)),
            q_norm=self._head_norm(f"{prefix}.q_norm", self._heads.query, 1),
            k_norm=self._head_norm(f"{prefix}.k_norm", self._heads.kv, self._heads.copies),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            rotary=None if rotary is None else self.rotary_tables[rotary],
            kv_scales=(self._number(f"{prefix}.k_scale"), self._number(f"{prefix}.v_scale")),
        )

    def _number(self, name: str) -> float:
        """Returns a number that a checkpoint may hold, as those calibrated for an fp8 cache do; else 1."""
        shape = self._checkpoint.shapes().get(name)
        return 1.0 if shape is None else self._checkpoint.take(name, (1,) if shape == (1,) else ()).item()

    def _qkv(self, prefix: str, index: int) -> Linear:
        config = self.config
        query, kv = self._head_rows(self._heads.query), self._head_rows(self._heads.kv)
        tensors: dict[str, list[Share]] = {"q_proj": [query], "k_proj": [kv], "v_proj": [kv]}
        if self._architecture.fused_qkv:
            tensors = {"qkv_proj": [query, kv, kv]}
        weights, bias = self._rows(prefix, tensors, config.qkv_bias)
        rotary = config.rotaries[index]
        if rotary is not None and self._architecture.interleaved_rotary:
            turning = config.num_heads + config.num_kv_heads
            order = halves_first(turning, config.num_kv_heads, config.head_dim, rotary.rotary_dim).to(self._device)
            weights, bias = _reordered(weights, order), None if bias is None else bias[order]
        return Linear(weights, bias)

    def _head_norm(self, prefix: str, heads: Share, copies: int) -> RMSNorm | ShardedRMSNorm | None:
        """Returns the norm of queries or keys; `copies` is the number of ranks that hold each of `heads`."""
        match self._architecture.qk_norm:
            case None:
                return None
            case "head":
                return self.norm(prefix, self.config.head_dim)
            case "all":
                rows = self._head_rows(heads)
                norm = self.norm(prefix, rows.whole, rows.along(0))
                return norm if self._group.size == 1 else ShardedRMSNorm(norm, rows.whole * copies, self._group)

    def _mlp(self, prefix: str) -> MLP:
        config, columns = self.config, self._columns
        tensors: dict[str, list[Share]] = {"gate_proj": [columns], "up_proj": [columns]}
        if self._architecture.fused_gate_up:
            tensors = {"gate_up_proj": [columns, columns]}
        return MLP(
            gate_up=GatedLinear(*self._rows(prefix, tensors, config.mlp_bias), config.activation),
            down=Linear(*self._summed(f"{prefix}.down_proj", columns, config.mlp_bias)),
        )

    def _head_rows(self, heads: Share) -> Share:
        return heads.times(self.config.head_dim)

    def _rows(self, prefix: str, tensors: Mapping[str, list[Share]], bias: bool) -> tuple[list[Weight], Tensor | None]:
        """Returns this rank's rows of linear layers over all hidden states, layer by layer, and all their biases.

        For each layer in `tensors`, these are the rows of one share after the other.
        """
        weights, biases = list[Weight](), list[Tensor]()
        for name, shares in tensors.items():
            rows, part = sum(share.whole for share in shares), stacked(0, shares)
            weights.append(self._weight(f"{prefix}.{name}.weight", (rows, self.config.hidden_size), part))
            if bias:
                biases.append(self._tensor(f"{prefix}.{name}.bias", (rows,), part))
        if any(isinstance(weight, Tensor) for weight in weights):
            pairs = zip(tensors, weights, strict=True)
            self._widened += [f"{prefix}.{name}.weight" for name, weight in pairs if isinstance(weight, Quantized)]
        return weights, torch.cat(biases) if biases else None

    def _summed(self, name: str, inputs: Share, bias: bool) -> tuple[Weight, Tensor | None]:
        """Returns this rank's columns of a linear layer to hidden states, whose products all ranks add up.

        One of the ranks adds the bias.
        """
        shape = self.config.hidden_size, inputs.whole
        weight = self._weight(f"{name}.weight", shape, inputs.along(1))
        if not bias:
            return weight, None
        if self._group.rank:
            self._checkpoint.drop(f"{name}.bias")
            return weight, None
        return weight, self._tensor(f"{name}.bias", shape[:1])

    def _vocabulary_rows(self, name: str, *, looked_up: bool = False) -> Weight:
        share = self.vocabulary.share
        return self._weight(name, (share.whole, self.config.hidden_size), share.along(0), looked_up=looked_up)

    def _weight(
        self, name: str, shape: tuple[int, ...], part: TensorPart | None = None, *, looked_up: bool = False
    ) -> Weight:
        """Returns a weight as it is stored if it is quantised and can stay so, else in the model's dtype; rows are read
        of one that is `looked_up`."""
        weight = self._checkpoint.take_weight(name, shape, part)
        if isinstance(weight, Quantized):
            reason = obstacle_to_quantized(self._device, weight.format)
            if reason is None and looked_up and gpu_linear.on_gpu(self._device):
                reason = "a GPU looks up rows of an embedding of numbers"
            if reason is None:
                return weight.to(self._device)
            self._tell_once(weight.format, reason)
            weight = weight.dequantize()
        return weight.to(self._device, self._dtype)

    def _tensor(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        weight = self._checkpoint.take_weight(name, shape, part)
        values = weight.dequantize() if isinstance(weight, Quantized) else weight
        return values.to(self._device, self._dtype)

    def tell_widened(self) -> None:
        """Logs which quantised weights are multiplied as numbers, for those that they are fused with are numbers."""
        if self._widened:
            logger.warning(
                "%d quantised weights become %s, because others of their fused layers are not quantised: %s",
                len(self._widened),
                self._dtype,
                ", ".join(self._widened),
            )

    def _tell_once(self, form: BlockFormat, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.info("quantised weights (%s) become %s: %s", form.name, self._dtype, reason)


def _rows_of(packed: Linear, dtype: torch.dtype, places: Tensor) -> Tensor:
    return packed.rows(places).to(dtype)


def _reordered(weights: list[Weight], order: Tensor) -> list[Weight]:
    """Puts the rows of all `weights` together in an `order` that leaves each row in its weight."""
    result, start = list[Weight](), 0
    for weight in weights:
        own = order[start : start + weight.shape[0]] - start
        result.append(weight.rows(own) if isinstance(weight, Quantized) else weight[own])
        start += weight.shape[0]
    return result


class LlamaModel:
    """A decoder of the Llama family with its LM head, on one device in one dtype (norms and rotary tables: fp32).

    Each rank of a `group` has some heads of every layer, some columns of its MLP and some rows of the vocabulary;
    `config` holds this share, except for `vocab_size`, which is the whole model's. Hidden states are the same on all
    ranks.

    `embedding_rows` looks up rows of the embedding, or of this rank's share; `rotary_tables` has one entry for all
    layers with the same rotary embedding. A `headless` model has no LM head, and gives no logits. Raises `WeightsError`
    if the checkpoint does not fit `config`, or `ModelConfigError` if the ranks cannot share the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        group: ShardGroup = SINGLE,
        *,
        headless: bool = False,
    ) -> None:
        loader = LayerLoader(config, checkpoint, dtype, device, group)
        self.group = group
        self.config = loader.config
        self.vocabulary = loader.vocabulary
        self.rotary_tables = list(loader.rotary_tables.values())
        self._lm_head: Linear | None = None
        if headless:
            self.embedding_rows = loader.embedding_rows()
        else:
            self.embedding_rows, self._lm_head = loader.vocabulary_layers()
        self.embedding_scale = _embedding_scale(config, dtype)
        self.layers = [loader.layer(index) for index in range(config.num_layers)]
        self.norm = loader.norm("model.norm", config.hidden_size)
        loader.tell_widened()
        self.logits_scale = config.logits_scale
        self.final_softcap = config.final_softcap
        checkpoint.finish()

    @property
    def lm_head(self) -> Linear:
        """Returns the linear layer to this rank's share of the logits. Raises `ValueError` if there is none."""
        if self._lm_head is None:
            raise ValueError("a model without an LM head gives no logits")
        return self._lm_head

    def embed(self, input_ids: Tensor) -> Tensor:
        """Returns the input of the first layer, [tokens, hidden_size], a tensor of its own."""
        hidden = self.vocabulary.look_up(input_ids, self.embedding_rows)
        return hidden if self.embedding_scale == 1.0 else hidden * self.embedding_scale

    @property
    def kv_scales(self) -> list[tuple[float, float]]:
        """Returns the scales of each layer's keys and values in a cache of fp8."""
        return [layer.attention.kv_scales for layer in self.layers]

    def forward(self, step: PagedStep) -> Tensor:
        """Computes the last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""
        hidden = self.embed(step.input_ids)
        angles = {table: table.at(step.positions, hidden.dtype) for table in self.rotary_tables}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, index, step, _angles_of(layer, angles))
        return self.norm(hidden.index_select(0, step.rows))

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Computes the logits of hidden states from `forward`, [rows, vocab_size] fp32; [0, vocab_size] on ranks after
        the first.

        `out`, if given, receives this rank's share of them.
        """
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self.vocabulary.gather(self.bounded(self.lm_head.to_float(hidden, out=out)))

    def bounded(self, logits: Tensor) -> Tensor:
        """Scales and bounds the LM head's products ([rows, tokens] fp32) as the model does, in place."""
        if self.logits_scale != 1.0:
            logits = logits.mul_(self.logits_scale)
        if self.final_softcap:
            logits = _softcapped(logits, self.final_softcap)
        return logits


def _softcapped(logits: Tensor, cap: float) -> Tensor:
    """Bounds `logits` in place; Octavo's own kernel gives the same bits on every instruction set."""
    library = find()
    if logits.device.type == "cpu" and logits.is_contiguous() and not isinstance(library, NativeUnavailable):
        return softcap(library, logits, cap)
    return logits.div_(cap).tanh_().mul_(cap)


def _angles_of(layer: DecoderLayer, angles: dict[RotaryTable, Angles]) -> Angles | None:
    table = layer.attention.rotary
    return None if table is None else angles[table]


def _embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    if not config.architecture.normalized_embedding:
        return config.embedding_scale
    # These models are trained with the square root rounded like the embeddings.
    return config.embedding_scale * torch.tensor(config.hidden_size**0.5, dtype=dtype).item()
