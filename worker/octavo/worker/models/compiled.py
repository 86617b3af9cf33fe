"""A Llama-family model whose layers run as one list of native operations on the CPU.

No Python runs between embedding and last norm, except for the sums over ranks.
"""

import time
from collections import Counter
from ctypes import POINTER, Array, addressof, byref, c_int64, c_void_p, cast, sizeof
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from octavo.kernels.backend import AttentionBackend
from octavo.kernels.native.attention import NativeAttention, cache_pointers
from octavo.kernels.native.library import NativeLibrary, load
from octavo.kernels.native.memory import zeros
from octavo.kernels.native.norm import norm_op, rms_norm
from octavo.kernels.native.quantized_linear import NativeQuantizedLinear, quantized_rows
from octavo.kernels.native.structs import (
    DTYPES,
    AttentionOp,
    BufferAt,
    GroupStep,
    Layer,
    LinearOp,
    Op,
    OpKind,
    RopeWriteOp,
    Run,
)
from octavo.worker.models.config import DecoderConfig
from octavo.worker.models.decoder import Decoder, LayerCache, PagedStep
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.layers import Attention, DecoderLayer, RMSNorm, ShardedRMSNorm
from octavo.worker.models.linear import GatedLinear, Linear, LinearKind, NativePart
from octavo.worker.models.llama import LlamaModel
from octavo.worker.models.rotary import RotaryConfig, RotaryTable


class Buffer(IntEnum):
    """Names the buffers that operations read and write, with a row per token."""

    HIDDEN = 0
    SCRATCH = 1
    QKV = 2
    ATTENDED = 3
    GATED = 4
    # What quantised weights are multiplied with; it lies as the kernels want it.
    QUANTIZED = 5


@dataclass(frozen=True, slots=True)
class Reduction:
    """Tells the ranks to add up `Buffer.SCRATCH` once `after` operations are done; `added` times the sum, if `added` is
    given, is then added to `Buffer.HIDDEN`."""

    after: int
    added: float | None


@dataclass(frozen=True, slots=True)
class Program:
    """Holds the operations of all layers.

    `ops` come in their order; `labels` name them in a profile; `widths` holds the elements of a row of each `Buffer`;
    `reductions` come between operations if several ranks share the model. The program points into the model's weights,
    which must outlive it, and into `tables`, by rotary embedding.
    """

    ops: list[Op]
    labels: list[str]
    widths: list[int]
    reductions: list[Reduction]
    tables: dict[RotaryConfig, RotaryTable]


def obstacle(model: LlamaModel) -> str | None:
    """Returns why there is no program for `model`; None if there is one."""
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down):
            if not linear.native:
                return f"a weight is multiplied by {linear.kind.value}"
        if isinstance(attention.q_norm, ShardedRMSNorm):
            return "a norm takes the heads of all ranks"
    return None


def _has_quantized(model: LlamaModel) -> bool:
    """Tells whether any layer multiplies by quantised weights."""
    return any(
        linear.kind is LinearKind.QUANTIZED
        for layer in model.layers
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    )


def compile_layers(model: LlamaModel, *, exact: bool = False) -> Program:
    """Compiles all layers of `model`, from embeddings to the last hidden states, both in `Buffer.HIDDEN`.

    With `exact`, what stands between products of weights has the same bits on every instruction set. Raises
    `ValueError` if `obstacle` names one.
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
        0,
    ]
    compiler = _Compiler(widths, model.group.size > 1, exact, _tables(model, exact=exact))
    for index, layer in enumerate(model.layers):
        compiler.layer(index, layer, config.rotaries[index])
    return Program(compiler.ops, compiler.labels, widths, compiler.reductions, compiler.tables)


def _tables(model: LlamaModel, *, exact: bool) -> dict[RotaryConfig, RotaryTable]:
    """Returns the tables of `model` by rotary embedding, computed anew if they must be `exact`."""
    given = {
        rotary: layer.attention.rotary
        for rotary, layer in zip(model.config.rotaries, model.layers, strict=True)
        if rotary is not None and layer.attention.rotary is not None
    }
    if not exact:
        return given
    return {
        rotary: RotaryTable.of(rotary, len(table.cos), table.cos.device, exact=True) for rotary, table in given.items()
    }


@dataclass
class _Compiler:
    """Appends operations, layer by layer."""

    widths: list[int]
    sharded: bool
    exact: bool
    tables: dict[RotaryConfig, RotaryTable]
    ops: list[Op] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)

    def layer(self, index: int, layer: DecoderLayer, rotary: RotaryConfig | None) -> None:
        scale = layer.residual_scale
        attention, mlp = layer.attention, layer.mlp
        self._linear("qkv", attention.qkv, self._normed(layer.input_norm), Buffer.QKV)
        self._attention(index, attention, None if rotary is None else self.tables[rotary])
        self._residual("output", attention.output, Buffer.ATTENDED, layer.attention_output_norm, scale)
        self._linear("gate_up", mlp.gate_up, self._normed(layer.post_attention_norm), Buffer.GATED)
        self._residual("down", mlp.down, Buffer.GATED, layer.mlp_output_norm, scale)

    def _normed(self, norm: RMSNorm | None) -> Buffer:
        """Appends a norm and returns the buffer that holds the result; without a norm, that of the hidden states."""
        if norm is None:
            return Buffer.HIDDEN
        self._norm("norm", norm, (Buffer.HIDDEN, 0), (Buffer.SCRATCH, 0))
        return Buffer.SCRATCH

    def _residual(self, label: str, linear: Linear, source: Buffer, norm: RMSNorm | None, scale: float) -> None:
        if norm is None and not self.sharded:
            self._linear(label, linear, source, Buffer.HIDDEN, added=scale)
            return
        self._linear(label, linear, source, Buffer.SCRATCH)
        if self.sharded:
            self.reductions.append(Reduction(len(self.ops), scale if norm is None else None))
        if norm is not None:
            self._norm("norm", norm, (Buffer.SCRATCH, 0), (Buffer.HIDDEN, 0), added=scale)

    def _attention(self, index: int, attention: Attention, table: RotaryTable | None) -> None:
        head_dim = attention.head_dim
        q_norm, k_norm = _norms(attention)
        for norm, first in ((q_norm, 0), (k_norm, attention.num_heads)):
            if norm is not None and len(norm.weight) != head_dim:
                place = (Buffer.QKV, first * head_dim)
                self._norm("norm", norm, place, place)
        rope = self._rope(attention, table)
        self._append("rope_write", (Buffer.QKV, 0), (Buffer.QKV, 0), layer=index, rope_write=rope)
        op = AttentionOp(
            None,
            attention.num_heads,
            attention.num_kv_heads,
            head_dim,
            self.widths[Buffer.QKV],
            self.widths[Buffer.ATTENDED],
            attention.scale,
            attention.softcap,
            self.exact,
        )
        self._append("attention", (Buffer.QKV, 0), (Buffer.ATTENDED, 0), layer=index, attention=op)

    def _rope(self, attention: Attention, rotary: RotaryTable | None) -> RopeWriteOp:
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
            self.exact,
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
        op = norm_op(norm.weight, norm.eps, x_stride=strides[0], y_stride=strides[1], added=added, exact=self.exact)
        self._append(label, source, target, norm=op)

    def _linear(
        self, label: str, linear: Linear | GatedLinear, source: Buffer, target: Buffer, added: float | None = None
    ) -> None:
        assert linear.native, "obstacle() was asked"
        rows = self._quantized(linear.native[0], source) if linear.kind is LinearKind.QUANTIZED else source
        ops = linear.operations(added=added) if isinstance(linear, Linear) else linear.operations()
        for place, op in ops:
            if isinstance(op, LinearOp):
                self._append(label, (rows, 0), (target, place), linear=op)
            else:
                self._append(label, (rows, 0), (target, place), quantized_linear=op)

    def _quantized(self, linear: NativePart, source: Buffer) -> Buffer:
        """Appends the quantising of rows that `linear` will read and returns the buffer that holds them."""
        assert isinstance(linear, NativeQuantizedLinear), "the kind says so"
        self.widths[Buffer.QUANTIZED] = max(self.widths[Buffer.QUANTIZED], linear.inputs)
        op = linear.quantize_op(x_stride=self.widths[source])
        self._append("quantize", (source, 0), (Buffer.QUANTIZED, 0), quantize=op)
        return Buffer.QUANTIZED

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


class CompiledLlama:
    """An `octavo.worker.models.decoder.Decoder` on Octavo's own CPU kernels, with the results of `model`.

    With `exact`, all but the products of weights has the same bits on every instruction set. `op_times` adds up the
    nanoseconds of each kind of operation while `profiling`. Raises `ValueError` if there is no
    program for `model`.
    """

    def __init__(self, model: LlamaModel, library: NativeLibrary, *, exact: bool = False) -> None:
        self._model = model
        self._library = library
        self._exact = exact
        self._program = compile_layers(model, exact=exact)
        self._ops = (Op * len(self._program.ops))(*self._program.ops)
        self._positions = min((len(table.cos) for table in model.rotary_tables), default=1 << 62)
        self._workspace: list[Tensor] = []
        self._logits = torch.empty(0, len(model.vocabulary.share))
        self._caches: list[LayerCache] = []
        self._layers = (Layer * 0)()
        self.profiling = False
        self.op_times: Counter[str] = Counter()

    @property
    def config(self) -> DecoderConfig:
        return self._model.config

    def forward(self, step: PagedStep) -> Tensor:
        """Computes the last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""
        hidden = self._model.embed(step.input_ids)
        self._run(step, hidden)
        norm = self._model.norm
        return rms_norm(self._library, hidden.index_select(0, step.rows), norm.weight, norm.eps, exact=self._exact)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of hidden states from `forward`, [rows, vocab_size] fp32.

        The next call writes to the same memory: new pages for every step's logits would take a tenth of the time that
        computing them does.
        """
        if len(self._logits) < len(hidden):
            self._logits = zeros((len(hidden), self._logits.shape[1]), torch.float32)
        return self._model.logits(hidden, out=self._logits[: len(hidden)])

    def _run(self, step: PagedStep, hidden: Tensor) -> None:
        """Computes all layers, in place on `hidden`."""
        tokens = len(hidden)
        self._check(step, tokens)
        buffers = [hidden, *self._buffers(tokens, hidden.dtype)]
        times = (c_int64 * len(self._ops))() if self.profiling else None
        run = Run(
            None,
            0,
            (c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers)),
            step.positions.data_ptr(),
            (GroupStep * len(step.groups))(*(group.pointers for group in step.groups)),
            self._layer_caches(step),
            None,
            tokens,
            DTYPES[hidden.dtype],
            torch.get_num_threads(),
        )
        start = 0
        for reduction in self._program.reductions:
            self._run_ops(run, range(start, reduction.after), times)
            self._reduce(reduction, hidden, buffers[Buffer.SCRATCH][:tokens])
            start = reduction.after
        self._run_ops(run, range(start, len(self._ops)), times)
        if times is not None:
            for label, nanoseconds in zip(self._program.labels, times, strict=True):
                self.op_times[label] += nanoseconds

    def _run_ops(self, run: Run, ops: range, times: "Array[c_int64] | None") -> None:
        """Runs the operations of the program at the places `ops`."""
        run.ops = cast(byref(self._ops, ops.start * sizeof(Op)), POINTER(Op))
        run.num_ops = len(ops)
        run.nanoseconds = None if times is None else addressof(times) + ops.start * sizeof(c_int64)
        self._library.functions.octavo_run(byref(run))

    def _reduce(self, reduction: Reduction, hidden: Tensor, parts: Tensor) -> None:
        """Replaces this rank's `parts` by their sum over ranks."""
        began = time.monotonic_ns()
        summed = self._model.group.all_reduce(parts)
        if self.profiling:
            self.op_times["all_reduce"] += time.monotonic_ns() - began
        if reduction.added is not None:
            hidden.add_(summed, alpha=reduction.added)

    def _check(self, step: PagedStep, tokens: int) -> None:
        """Raises `ValueError` on a step that would read or write outside of the tensors."""
        assert isinstance(step.attention, NativeAttention), "a program reads and writes native blocks only"
        lowest, highest = (int(position) for position in step.positions.aminmax())
        if lowest < 0 or highest >= self._positions:
            raise ValueError(f"positions {lowest} to {highest} for a model of {self._positions}")
        for table in self._program.tables.values():
            table.reach(highest)
        for cache in {cache.group: cache for cache in step.caches}.values():
            group = step.groups[cache.group]
            if not tokens == len(step.positions) == group.num_tokens:
                raise ValueError(f"{tokens} tokens, {len(step.positions)} positions and {group.num_tokens} slots")
            step.attention.check(cache.keys, cache.values, group)

    def _buffers(self, tokens: int, dtype: torch.dtype) -> list[Tensor]:
        """Returns all buffers but the first, which are kept for the largest step so far."""
        if not self._workspace or len(self._workspace[0]) < tokens:
            _, *widths, inputs = self._program.widths
            self._workspace = [torch.empty(tokens, width, dtype=dtype) for width in widths]
            self._workspace.append(quantized_rows(self._library, tokens, inputs))
        return self._workspace

    def _layer_caches(self, step: PagedStep) -> "Array[Layer]":
        """Returns pointers to the caches of all layers, made once for each set of caches."""
        if self._caches is not step.caches:
            self._caches = step.caches
            layers = [Layer(cache_pointers(cache.keys, cache.values), cache.group) for cache in step.caches]
            self._layers = (Layer * len(layers))(*layers)
        return self._layers


def compiled(model: Decoder, attention: AttentionBackend, *, exact: bool = False) -> Decoder:
    """Returns `model` on Octavo's own kernels, where these exist for the device of `attention`; else `model` itself.

    With `exact`, no row may depend on the others: the CPU's kernels never do, a GPU's take a slower way.
    """
    if not isinstance(model, LlamaModel):
        return model
    if isinstance(attention, NativeAttention):
        if obstacle(model):
            return model
        # What is fp32 throughout keeps its products fused, where there is an instruction for it.
        whole = attention.cache_dtype == attention.dtype and not _has_quantized(model)
        return CompiledLlama(model, load(), exact=exact and not whole)
    return FusedLlama(model, exact=exact) if attention.name == "triton" else model
