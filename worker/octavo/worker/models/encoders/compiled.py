"""An encoder whose layers run as one list of native operations on the CPU, after the pattern of `CompiledLlama`."""

from ctypes import byref, c_void_p
from enum import IntEnum
from itertools import accumulate

import torch
from torch import Tensor

from octavo.kernels.backend import CacheShape, GroupBatch
from octavo.kernels.native.attention import NativeAttention, cache_pointers, obstacle
from octavo.kernels.native.library import NativeLibrary, NativeUnavailable, load
from octavo.kernels.native.linear import NativeLinear
from octavo.kernels.native.norm import layer_norm_op
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
from octavo.worker.models.encoders.config import EncoderConfig
from octavo.worker.models.encoders.encoder import Encoder, EncoderLayer, EncoderModel, LayerNorm, TextBatch
from octavo.worker.models.linear import ActivatedLinear, GatedLinear, Linear, LinearKind

# Tokens of a block of the keys and values that a layer leaves to its own attention. Sixteens of keys are read together.
_BLOCK_SIZE = 16


class Buffer(IntEnum):
    """Names the buffers that operations read and write, with a row per token."""

    HIDDEN = 0
    SCRATCH = 1
    QKV = 2
    ATTENDED = 3
    INNER = 4


def compiled_encoder(model: EncoderModel) -> Encoder:
    """Returns `model` on Octavo's own kernels where they serve it; else `model` itself."""
    try:
        library = load()
    except NativeUnavailable:
        return model
    linears = (linear for layer in model.layers for linear in (layer.qkv, layer.output, layer.up, layer.down))
    shape = CacheShape(_BLOCK_SIZE, model.config.num_heads, model.config.head_dim, model.dtype)
    if obstacle(shape, model.dtype) or any(linear.kind is not LinearKind.NATIVE for linear in linears):
        return model
    return CompiledEncoder(model, library, NativeAttention(library, shape))


class CompiledEncoder:
    """An `Encoder` with the results of `model`. A text's are the same, to the last bit, whatever is beside it.

    Keys and values lie in blocks as those of a decoder do, one set for all layers: each layer's attention is over
    before the next one writes.
    """

    def __init__(self, model: EncoderModel, library: NativeLibrary, attention: NativeAttention) -> None:
        self._model = model
        self._library = library
        self._attention = attention
        config = model.config
        self._widths = [
            config.hidden_size,
            config.hidden_size,
            3 * config.hidden_size,
            config.hidden_size,
            config.intermediate_size,
        ]
        # One group of layers for each window: what a step looks like differs in that alone.
        self._windows = list(dict.fromkeys(config.windows))
        ops = _Compiler(model, self._widths).compiled()
        self._ops = (Op * len(ops))(*ops)
        self._workspace: list[Tensor] = []
        self._keys = self._values = torch.empty(0)

    @property
    def config(self) -> EncoderConfig:
        return self._model.config

    def forward(self, batch: TextBatch) -> Tensor:
        hidden = self._model.embed(batch)
        tokens, config = len(hidden), self.config
        blocks = [-(-length // _BLOCK_SIZE) for length in batch.lengths]
        firsts = list(accumulate(blocks, initial=0))
        self._make_room(tokens, firsts[-1], hidden.dtype)
        if config.rotaries[0] is not None:
            for table in self._model.tables.values():
                table.reach(max(batch.lengths) - 1)
        tables = torch.tensor([[*range(first, first + max(blocks))] for first in firsts[:-1]])
        # Rows of the tables end where another text's blocks begin; what lies behind is never read.
        tables.clamp_(max=firsts[-1] - 1)
        offsets = torch.tensor(firsts[:-1]).repeat_interleave(torch.tensor(batch.lengths)) * _BLOCK_SIZE
        slots = offsets + batch.positions
        steps = [
            self._attention.step(GroupBatch(slots, tables, list(batch.lengths), list(batch.lengths), window))
            for window in self._windows
        ]
        for step in steps:
            self._attention.check(self._keys, self._values, step)
        cache = cache_pointers(self._keys, self._values)
        layers = [Layer(cache, self._windows.index(window)) for window in config.windows]
        buffers = [hidden, *self._workspace]
        run = Run(
            self._ops,
            len(self._ops),
            (c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers)),
            batch.positions.data_ptr(),
            (GroupStep * len(steps))(*(step.pointers for step in steps)),
            (Layer * len(layers))(*layers),
            None,
            tokens,
            DTYPES[hidden.dtype],
            torch.get_num_threads(),
        )
        self._library.functions.octavo_run(byref(run))
        return hidden if self._model.final_norm is None else self._model.final_norm(hidden)

    def _make_room(self, tokens: int, num_blocks: int, dtype: torch.dtype) -> None:
        """Makes buffers and blocks, which are kept for the largest step so far."""
        if not self._workspace or len(self._workspace[0]) < tokens:
            self._workspace = [torch.empty(tokens, width, dtype=dtype) for width in self._widths[1:]]
        if len(self._keys) < num_blocks:
            shape = num_blocks, _BLOCK_SIZE, self.config.num_heads, self.config.head_dim
            self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


class _Compiler:
    """Makes the operations of all layers, from what `embed` gives to the last hidden states, both in
    `Buffer.HIDDEN`."""

    def __init__(self, model: EncoderModel, widths: list[int]) -> None:
        self._model, self._widths = model, widths
        self._ops: list[Op] = []

    def compiled(self) -> list[Op]:
        for index, layer in enumerate(self._model.layers):
            source = Buffer.HIDDEN
            if self._model.config.pre_norm and layer.attention_norm is not None:
                source = self._norm(layer.attention_norm, Buffer.SCRATCH)
            self._linear(layer.qkv, source, Buffer.QKV)
            self._attention(index, layer)
            self._linear(layer.output, Buffer.ATTENDED, Buffer.HIDDEN, added=1.0)
            source = Buffer.SCRATCH if self._model.config.pre_norm else Buffer.HIDDEN
            if self._model.config.pre_norm:
                self._norm(layer.mlp_norm, source)
            elif layer.attention_norm is not None:
                self._norm(layer.attention_norm, source)
            self._linear(layer.up, source, Buffer.INNER)
            self._linear(layer.down, Buffer.INNER, Buffer.HIDDEN, added=1.0)
            if not self._model.config.pre_norm:
                self._norm(layer.mlp_norm, Buffer.HIDDEN)
        return self._ops

    def _norm(self, norm: LayerNorm, target: Buffer) -> Buffer:
        """Appends a norm of the hidden states, and returns where the result is."""
        op = layer_norm_op(norm.weight, norm.bias, norm.eps, stride=self._model.config.hidden_size)
        self._append(OpKind.NORM, Buffer.HIDDEN, target, norm=op)
        return target

    def _attention(self, index: int, layer: EncoderLayer) -> None:
        config = self._model.config
        table = None if layer.rotary is None else self._model.tables[layer.rotary]
        rope = RopeWriteOp(
            None if table is None else table.cos.data_ptr(),
            None if table is None else table.sin.data_ptr(),
            None,
            None,
            0 if table is None else config.head_dim,
            config.num_heads,
            config.num_heads,
            config.head_dim,
            self._widths[Buffer.QKV],
            0.0,
            False,
        )
        self._append(OpKind.ROPE_WRITE, Buffer.QKV, Buffer.QKV, layer=index, rope_write=rope)
        op = AttentionOp(
            None,
            config.num_heads,
            config.num_heads,
            config.head_dim,
            self._widths[Buffer.QKV],
            self._widths[Buffer.ATTENDED],
            self._model.scale,
            0.0,
            False,
            True,
        )
        self._append(OpKind.ATTENTION, Buffer.QKV, Buffer.ATTENDED, layer=index, attention=op)

    def _linear(
        self,
        linear: Linear | ActivatedLinear | GatedLinear,
        source: Buffer,
        target: Buffer,
        added: float | None = None,
    ) -> None:
        [part] = linear.native
        assert isinstance(part, NativeLinear), "its kind says so"
        op: LinearOp = part.op(added=added)
        self._append(OpKind.LINEAR, source, target, linear=op)

    def _append(self, kind: OpKind, source: Buffer, target: Buffer, *, layer: int = 0, **member: object) -> None:
        op = Op(kind=kind, layer=layer, input=BufferAt(source, 0), output=BufferAt(target, 0))
        for name, value in member.items():
            setattr(op, name, value)
        self._ops.append(op)
