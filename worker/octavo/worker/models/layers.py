"""The layers of the Llama family in torch. Their parts are public, so that a compiler may read them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.models.decoder import PagedStep
from octavo.worker.models.linear import GatedLinear, Linear
from octavo.worker.models.rotary import Angles, RotaryTable, rotate
from octavo.worker.tensor_parallel.group import SINGLE, ShardGroup


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Computes x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019), in fp32 as its `weight` is, then
    casts."""

    weight: Tensor
    eps: float

    def __call__(self, inputs: Tensor) -> Tensor:
        return F.rms_norm(inputs.float(), self.weight.shape, self.weight, self.eps).to(inputs.dtype)


@dataclass(frozen=True, slots=True)
class ShardedRMSNorm:
    """Computes `norm` over `size` elements, of which each rank of `group` has as many as its weight has."""

    norm: RMSNorm
    size: int
    group: ShardGroup

    @property
    def weight(self) -> Tensor:
        return self.norm.weight

    def __call__(self, inputs: Tensor) -> Tensor:
        values = inputs.float()
        squares = self.group.all_reduce(values.square().sum(dim=-1, keepdim=True))
        scale = torch.rsqrt(squares / self.size + self.norm.eps)
        return (values * scale * self.weight).to(inputs.dtype)


@dataclass(frozen=True, slots=True)
class Attention:
    """Computes self-attention of one layer, or of some of its heads.

    `qkv` is fused: the rows of all query heads, of all key heads, of all value heads. `q_norm` and `k_norm` are over
    one head if their weight is [head_dim], else over all heads at once. `scale` multiplies products of queries and
    keys, and `softcap` (0: none) bounds them. With `rotary` None, queries and keys get no positions. `kv_scales` are
    the divisors of a key and a value in a cache of fp8.
    """

    qkv: Linear
    output: Linear
    q_norm: RMSNorm | ShardedRMSNorm | None
    k_norm: RMSNorm | ShardedRMSNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    rotary: RotaryTable | None
    kv_scales: tuple[float, float] = (1.0, 1.0)

    def __call__(self, hidden: Tensor, layer: int, step: PagedStep, angles: Angles | None) -> Tensor:
        heads = self.qkv(hidden).view(len(hidden), -1, self.head_dim)
        query_key, value = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=1)
        query_key = self._normed(query_key)
        if angles is not None:
            query_key = rotate(query_key, angles)
        query, key = query_key.tensor_split([self.num_heads], dim=1)
        return self.output(step.attend(layer, query, key, value, self.scale, softcap=self.softcap).flatten(1))

    def _normed(self, query_key: Tensor) -> Tensor:
        if self.q_norm is None or self.k_norm is None:
            return query_key
        query, key = query_key.tensor_split([self.num_heads], dim=1)
        return torch.cat((_norm_heads(self.q_norm, query), _norm_heads(self.k_norm, key)), dim=1)


def _norm_heads(norm: RMSNorm | ShardedRMSNorm, heads: Tensor) -> Tensor:
    return norm(heads.reshape(len(heads), -1, len(norm.weight))).view(heads.shape)


@dataclass(frozen=True, slots=True)
class MLP:
    """Computes down(activation(gate(x)) * up(x)), or some columns' part of that sum."""

    gate_up: GatedLinear
    down: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.gate_up(hidden))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Computes attention and MLP beside a residual, each with a norm before it, after it, or both.

    `input_norm` and `attention_output_norm` stand around attention, `post_attention_norm` and `mlp_output_norm` around
    the MLP. The outputs of both are multiplied with `residual_scale` before they are added to the residual. Each rank
    of `group` has some of the heads and of the MLP's columns; the output of either is the sum over ranks.
    """

    input_norm: RMSNorm | None
    attention: Attention
    attention_output_norm: RMSNorm | None
    post_attention_norm: RMSNorm | None
    mlp: MLP
    mlp_output_norm: RMSNorm | None
    residual_scale: float
    group: ShardGroup = SINGLE

    def __call__(self, hidden: Tensor, layer: int, step: PagedStep, angles: Angles | None) -> Tensor:
        attended = self.attention(_normed(self.input_norm, hidden), layer, step, angles)
        hidden = self._add(hidden, self.attention_output_norm, attended)
        return self._add(hidden, self.mlp_output_norm, self.mlp(_normed(self.post_attention_norm, hidden)))

    def _add(self, hidden: Tensor, norm: RMSNorm | None, part: Tensor) -> Tensor:
        return torch.add(hidden, _normed(norm, self.group.all_reduce(part)), alpha=self.residual_scale)


def _normed(norm: RMSNorm | None, hidden: Tensor) -> Tensor:
    return hidden if norm is None else norm(hidden)
