"""The Llama family: RMSNorm, rotary grouped-query attention over paged keys and values, a gated MLP.

Touvron et al., "LLaMA" (2023). `octavo.worker.models.architectures` says where its members differ.
"""

import torch
from torch import Tensor

from octavo.worker.loading.weights import WeightSource
from octavo.worker.models.config import DecoderConfig
from octavo.worker.models.decoder import PagedStep
from octavo.worker.models.layers import DecoderLayer
from octavo.worker.models.llama_loading import LayerLoader
from octavo.worker.models.rotary import Angles, RotaryTable
from octavo.worker.tensor_parallel.group import SINGLE, ShardGroup


class LlamaModel:
    """A decoder of the Llama family with its LM head, on one device in one dtype (norms and rotary tables: fp32).

    Of a `group` each rank has some heads of every layer, some columns of its MLP and some rows of the vocabulary: so
    says `config`, but for `vocab_size`, which is that of all. Hidden states are the same on all ranks.

    `embedding`: [vocab_size, hidden_size], or this rank's share of the rows; `rotary_tables`: one for all layers that
    turn alike. Raises `WeightsError` if the checkpoint is not that of `config`, or `ConfigError` if the ranks cannot
    share the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        group: ShardGroup = SINGLE,
    ) -> None:
        loader = LayerLoader(config, checkpoint, dtype, device, group)
        self.group = group
        self.config = loader.config
        self.vocabulary = loader.vocabulary
        self.rotary_tables = list(loader.rotary_tables.values())
        self.embedding = loader.embedding()
        self.embedding_scale = _embedding_scale(config, dtype)
        self.layers = [loader.layer(index) for index in range(config.num_layers)]
        self.norm = loader.norm("model.norm", config.hidden_size)
        self.lm_head = loader.lm_head(self.embedding)
        self.logits_scale = config.logits_scale
        self.final_softcap = config.final_softcap
        checkpoint.finish()

    def embed(self, input_ids: Tensor) -> Tensor:
        """[tokens, hidden_size]: what the first layer begins with, a tensor of its own."""
        hidden = self.vocabulary.embed(input_ids, self.embedding)
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
        """[rows, vocab_size] fp32, of what `forward` gave; on ranks after the first [0, vocab_size]. `out`, if given,
        is where this rank's share of them is put."""
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self.vocabulary.gather(self.bounded(self.lm_head.to_float(hidden, out=out)))

    def bounded(self, logits: Tensor) -> Tensor:
        """The LM head's products ([rows, tokens] fp32) as the model scales and bounds them, in place."""
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
