"""The decoder of a Llama-family model on a GPU, which runs Octavo's Triton kernels between the matrix products."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor

from octavo.worker.models.config import DecoderConfig
from octavo.worker.models.decoder import PagedStep
from octavo.worker.models.layers import Attention, DecoderLayer, RMSNorm, ShardedRMSNorm
from octavo.worker.models.linear import GatedLinear, Linear
from octavo.worker.models.llama import LlamaModel

# x W^T + b of x.
Product = Callable[[Tensor], Tensor]


class FusedLlama:
    """An `octavo.worker.models.decoder.Decoder` with the results of `model`, except for rounding.

    A fused kernel computes in fp32 and rounds once, where torch's operations round after each. Fused are: residual
    additions with the norms before and after them; norms of heads with rotary embedding and the write of keys and
    values; activations with the gate. Norms over all heads at once (OLMo 2) are kernels of their own before that; the
    embedding and the bounds of the logits are torch's. Layers run as they stand for every architecture of the family.
    `step.attention` is `octavo.kernels.triton.attention.TritonAttention`. Nothing waits for the device, and no shape
    depends on its data: a step may be captured in a CUDA graph.

    With `exact`, each token's bits depend on no other tokens of a step but those it attends to, if attention's do not.

    Raises `ValueError` on a model whose weights neither lie as `F.linear` takes them nor are quantised for a GPU, and
    if `exact` on one with such quantised weights.
    """

    def __init__(self, model: LlamaModel, *, exact: bool = False) -> None:
        # An install for the CPU has no Triton, but imports this class all the same.
        from octavo.kernels.triton.layers.gate import gated
        from octavo.kernels.triton.layers.matmul import linear
        from octavo.kernels.triton.layers.norm import add_rms_norm, rms_norm
        from octavo.kernels.triton.layers.rope import rope_and_cache

        self._gated, self._rope_and_cache = gated, rope_and_cache
        self._rms_norm, self._add_rms_norm = rms_norm, add_rms_norm
        self.exact = exact
        self._model = model
        for table in model.rotary_tables:
            # Triton's interpreter computes on a CPU, where tables begin with their first rows.
            table.reach(len(table.cos) - 1)
        self.group = model.group
        multiply = linear if exact else F.linear
        self._lm_head = _product(model.lm_head, partial(linear, out_float=True) if exact else F.linear)
        self._layers = [_Layer.of(layer, multiply) for layer in model.layers]
        self._next_norms = [*(layer.input_norm for layer in model.layers[1:]), model.norm]

    @property
    def config(self) -> DecoderConfig:
        return self._model.config

    def forward(self, step: PagedStep) -> Tensor:
        """Computes the last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""
        residual = self._model.embed(step.input_ids)
        hidden = self._first_norm(residual)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            update = self._attention(layer, hidden, index, step)
            if layer is self._layers[-1]:
                # No later layer attends to other rows, so only the wanted ones go on.
                residual, update = (tensor.index_select(0, step.rows) for tensor in (residual, update))
            given = layer.given
            hidden = self._add(residual, update, given.attention_output_norm, given.post_attention_norm)
            update = self._mlp(layer, hidden)
            hidden = self._add(residual, update, given.mlp_output_norm, next_norm)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of hidden states from `forward`, [rows, vocab_size].

        They are fp32 if the model is `exact` or bounds them; else they have the LM head's dtype, to which they are
        rounded anyway.
        """
        if self.exact:
            return self._gathered(self._model.bounded(self._lm_head(hidden)))
        if self.config.logits_scale != 1.0 or self.config.final_softcap:
            return self._model.logits(hidden)
        return self._gathered(self._lm_head(hidden))

    def _gathered(self, logits: Tensor) -> Tensor:
        return self._model.vocabulary.gather(logits) if len(logits) else logits.new_empty((0, self.config.vocab_size))

    def _first_norm(self, residual: Tensor) -> Tensor:
        norm = self._layers[0].given.input_norm
        return residual if norm is None else self._rms_norm(residual, norm.weight, norm.eps)

    def _attention(self, layer: "_Layer", hidden: Tensor, index: int, step: PagedStep) -> Tensor:
        given, cache = layer.given.attention, step.caches[index]
        group = step.groups[cache.group]
        qkv = layer.qkv(hidden)
        q_weight, k_weight = self._head_norms(given, qkv)
        cos, sin = (given.rotary.cos, given.rotary.sin) if given.rotary else (None, None)
        query = self._rope_and_cache(
            qkv,
            step.positions,
            cos,
            sin,
            q_weight,
            k_weight,
            self.config.rms_norm_eps,
            cache.keys,
            cache.values,
            group.slot_mapping,
            given.num_heads,
            given.num_kv_heads,
            cache.key_scale,
            cache.value_scale,
        )
        # Scales are not among the arguments that all kinds of attention take.
        attention: Any = step.attention
        attended: Tensor = attention.attend(
            query,
            cache.keys,
            cache.values,
            group,
            given.scale,
            softcap=given.softcap,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )
        return self.group.all_reduce(layer.output(attended.flatten(1)))

    def _head_norms(self, attention: Attention, qkv: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the weights of norms over each head, of queries and of keys. Norms over all heads are applied here,
        in `qkv`."""
        q_norm, k_norm, head_dim = attention.q_norm, attention.k_norm, attention.head_dim
        if q_norm is None or k_norm is None:
            return None, None
        sharded = isinstance(q_norm, ShardedRMSNorm) or isinstance(k_norm, ShardedRMSNorm)
        if not sharded and len(q_norm.weight) == len(k_norm.weight) == head_dim:
            return q_norm.weight, k_norm.weight
        borders = [attention.num_heads * head_dim, (attention.num_heads + attention.num_kv_heads) * head_dim]
        query, key, _ = qkv.tensor_split(borders, dim=1)
        for heads, norm in ((query, q_norm), (key, k_norm)):
            if isinstance(norm, ShardedRMSNorm):
                heads.copy_(norm(heads))
            else:
                self._rms_norm(heads, norm.weight, norm.eps, out=heads)
        return None, None

    def _mlp(self, layer: "_Layer", hidden: Tensor) -> Tensor:
        gated = self._gated(layer.gate_up(hidden), layer.given.mlp.gate_up.activation)
        return self.group.all_reduce(layer.down(gated))

    def _add(self, residual: Tensor, update: Tensor, update_norm: RMSNorm | None, norm: RMSNorm | None) -> Tensor:
        """Adds `update` to `residual`, in place, and returns the sum, normed."""
        weight, update_weight = (None if given is None else given.weight for given in (norm, update_norm))
        config = self.config
        return self._add_rms_norm(
            residual, update, weight, config.rms_norm_eps, scale=config.residual_scale, update_weight=update_weight
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer as it was `given`, and its products."""

    given: DecoderLayer
    qkv: Product
    output: Product
    gate_up: Product
    down: Product

    @classmethod
    def of(cls, layer: DecoderLayer, multiply: Callable[..., Tensor]) -> Self:
        parts = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        return cls(layer, *(_product(part, multiply) for part in parts))


def _product(layer: Linear | GatedLinear, multiply: Callable[..., Tensor]) -> Product:
    """Returns what multiplies by the weight of `layer`: `multiply` if it is plain."""
    if layer.plain is not None:
        return partial(multiply, weight=layer.plain.weight, bias=layer.plain.bias)
    if layer.product is None or multiply is not F.linear:
        raise ValueError(f"a weight is multiplied by {layer.kind.value}; kernels for a GPU take plain ones")
    return layer.product
