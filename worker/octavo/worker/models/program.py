"""From the layers of a Llama-family model to one list of native operations."""

from dataclasses import dataclass, field
from enum import IntEnum

from octavo.kernels.native.linear import NativeLinear
from octavo.kernels.native.norm import norm_op
from octavo.kernels.native.structs import AttentionOp, BufferAt, Op, OpKind, RopeWriteOp
from octavo.worker.models.layers import Attention, DecoderLayer, RMSNorm, ShardedRMSNorm
from octavo.worker.models.llama import LlamaModel


class Buffer(IntEnum):
    """What operations read and write: a row per token."""

    HIDDEN = 0
    SCRATCH = 1
    QKV = 2
    ATTENDED = 3
    GATED = 4


@dataclass(frozen=True, slots=True)
class Reduction:
    """Once `after` operations are done, the ranks add up `Buffer.SCRATCH`; `added` times the sum, if that is given, is
    then added to `Buffer.HIDDEN`."""

    after: int
    added: float | None


@dataclass(frozen=True, slots=True)
class Program:
    """`ops` in their order, what each is called in a profile, the elements of a row of each `Buffer`, and between the
    operations the `reductions` of a model that several ranks share.

    It points into the model's weights: the model must outlive it.
    """

    ops: list[Op]
    labels: list[str]
    widths: list[int]
    reductions: list[Reduction]


def obstacle(model: LlamaModel) -> str | None:
    """Why there is no program for `model`; None if there is one."""
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down):
            if linear.native is None:
                return f"a weight is multiplied by {linear.kind.value}"
        if isinstance(attention.q_norm, ShardedRMSNorm):
            return "a norm takes the heads of all ranks"
    return None


def compile_layers(model: LlamaModel) -> Program:
    """The program of all of `model`'s layers, from embeddings to the last hidden states, both in `Buffer.HIDDEN`.

    Raises `ValueError` if `obstacle` names one.
    """
    if reason := obstacle(model):
        raise ValueError(reason)
    config = model.config
    heads = (config.num_heads + 2 * config.num_kv_heads, config.num_heads)
    widths = [
        config.hidden_size,
        config.hidden_size,
        *(count * config.head_dim for count in heads),
        config.intermediate_size,
    ]
    compiler = _Compiler(widths, sharded=model.group.size > 1)
    for index, layer in enumerate(model.layers):
        compiler.layer(index, layer)
    return Program(compiler.ops, compiler.labels, widths, compiler.reductions)


@dataclass
class _Compiler:
    """Appends operations, layer by layer."""

    widths: list[int]
    sharded: bool
    ops: list[Op] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)

    def layer(self, index: int, layer: DecoderLayer) -> None:
        scale = layer.residual_scale
        attention, mlp = layer.attention, layer.mlp
        self._linear("qkv", attention.qkv.native, self._normed(layer.input_norm), Buffer.QKV)
        self._attention(index, attention)
        self._residual("output", attention.output.native, Buffer.ATTENDED, layer.attention_output_norm, scale)
        self._linear("gate_up", mlp.gate_up.native, self._normed(layer.post_attention_norm), Buffer.GATED)
        self._residual("down", mlp.down.native, Buffer.GATED, layer.mlp_output_norm, scale)

    def _normed(self, norm: RMSNorm | None) -> Buffer:
        """Where the hidden states lie once they are normed."""
        if norm is None:
            return Buffer.HIDDEN
        self._norm("norm", norm, (Buffer.HIDDEN, 0), (Buffer.SCRATCH, 0))
        return Buffer.SCRATCH

    def _residual(
        self, label: str, linear: NativeLinear | None, source: Buffer, norm: RMSNorm | None, scale: float
    ) -> None:
        if norm is None and not self.sharded:
            self._linear(label, linear, source, Buffer.HIDDEN, added=scale)
            return
        self._linear(label, linear, source, Buffer.SCRATCH)
        if self.sharded:
            self.reductions.append(Reduction(len(self.ops), scale if norm is None else None))
        if norm is not None:
            self._norm("norm", norm, (Buffer.SCRATCH, 0), (Buffer.HIDDEN, 0), added=scale)

    def _attention(self, index: int, attention: Attention) -> None:
        head_dim = attention.head_dim
        q_norm, k_norm = _norms(attention)
        for norm, first in ((q_norm, 0), (k_norm, attention.num_heads)):
            if norm is not None and len(norm.weight) != head_dim:
                place = (Buffer.QKV, first * head_dim)
                self._norm("norm", norm, place, place)
        self._append("rope_write", (Buffer.QKV, 0), (Buffer.QKV, 0), layer=index, rope_write=self._rope(attention))
        op = AttentionOp(
            None,
            attention.num_heads,
            attention.num_kv_heads,
            head_dim,
            self.widths[Buffer.QKV],
            self.widths[Buffer.ATTENDED],
            attention.scale,
            attention.softcap,
        )
        self._append("attention", (Buffer.QKV, 0), (Buffer.ATTENDED, 0), layer=index, attention=op)

    def _rope(self, attention: Attention) -> RopeWriteOp:
        rotary = attention.rotary
        per_head = [
            norm if norm is not None and len(norm.weight) == attention.head_dim else None for norm in _norms(attention)
        ]
        return RopeWriteOp(
            None if rotary is None else rotary.cos.data_ptr(),
            None if rotary is None else rotary.sin.data_ptr(),
            *(None if norm is None else norm.weight.data_ptr() for norm in per_head),
            0 if rotary is None else 2 * rotary.cos.shape[1],
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            self.widths[Buffer.QKV],
            next((norm.eps for norm in per_head if norm is not None), 0.0),
        )

    def _norm(
        self,
        label: str,
        norm: RMSNorm,
        source: tuple[Buffer, int],
        target: tuple[Buffer, int],
        added: float | None = None,
    ) -> None:
        strides = self.widths[source[0]], self.widths[target[0]]
        op = norm_op(norm.weight, norm.eps, x_stride=strides[0], y_stride=strides[1], added=added)
        self._append(label, source, target, norm=op)

    def _linear(
        self, label: str, linear: NativeLinear | None, source: Buffer, target: Buffer, added: float | None = None
    ) -> None:
        assert linear is not None, "obstacle() was asked"
        self._append(label, (source, 0), (target, 0), linear=linear.op(added=added))

    def _append(
        self, label: str, source: tuple[Buffer, int], target: tuple[Buffer, int], *, layer: int = 0, **member: object
    ) -> None:
        [kind] = member
        op = Op(kind=OpKind[kind.upper()], layer=layer, input=BufferAt(*source), output=BufferAt(*target))
        setattr(op, kind, member[kind])
        self.ops.append(op)
        self.labels.append(label)


def _norms(attention: Attention) -> tuple[RMSNorm | None, RMSNorm | None]:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    assert not isinstance(q_norm, ShardedRMSNorm), "obstacle() was asked"
    assert not isinstance(k_norm, ShardedRMSNorm), "obstacle() was asked"
    return q_norm, k_norm
