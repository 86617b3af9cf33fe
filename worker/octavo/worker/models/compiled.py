"""A Llama-family model whose layers run as one native program: no Python between embedding and last norm, but for the
sums of what several ranks compute."""

import time
from collections import Counter
from ctypes import POINTER, Array, addressof, byref, c_int64, c_void_p, cast, sizeof

import torch
from torch import Tensor

from octavo.kernels.backend import AttentionBackend
from octavo.kernels.native.attention import NativeAttention, cache_pointers
from octavo.kernels.native.library import NativeLibrary, load
from octavo.kernels.native.memory import zeros
from octavo.kernels.native.norm import rms_norm
from octavo.kernels.native.structs import DTYPES, GroupStep, Layer, Op, Run
from octavo.worker.models.config import DecoderConfig
from octavo.worker.models.decoder import Decoder, PagedStep
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.llama import LlamaModel
from octavo.worker.models.program import Buffer, Reduction, compile_layers, obstacle
from octavo.worker.step.kv_cache import LayerCache


class CompiledLlama:
    """`octavo.worker.models.decoder.Decoder` by Octavo's own CPU kernels, with the results of `model`.

    `op_times` adds up the nanoseconds of each kind of operation while `profiling`. Raises `ValueError` if there is no
    program for `model`.
    """

    def __init__(self, model: LlamaModel, library: NativeLibrary) -> None:
        self._model = model
        self._library = library
        self._program = compile_layers(model)
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
        """The last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""
        hidden = self._model.embed(step.input_ids)
        self._run(step, hidden)
        norm = self._model.norm
        return rms_norm(self._library, hidden.index_select(0, step.rows), norm.weight, norm.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] fp32, of what `forward` gave. The next call writes to the same memory: new pages for every
        step's logits would take a tenth of the time that computing them does."""
        if len(self._logits) < len(hidden):
            self._logits = zeros((len(hidden), self._logits.shape[1]), torch.float32)
        return self._model.logits(hidden, out=self._logits[: len(hidden)])

    def _run(self, step: PagedStep, hidden: Tensor) -> None:
        """All layers, in place on `hidden`."""
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
        """Of the program those at the places `ops`."""
        run.ops = cast(byref(self._ops, ops.start * sizeof(Op)), POINTER(Op))
        run.num_ops = len(ops)
        run.nanoseconds = None if times is None else addressof(times) + ops.start * sizeof(c_int64)
        self._library.functions.octavo_run(byref(run))

    def _reduce(self, reduction: Reduction, hidden: Tensor, parts: Tensor) -> None:
        """Makes of this rank's `parts` the sum over ranks."""
        began = time.monotonic_ns()
        summed = self._model.group.all_reduce(parts)
        if self.profiling:
            self.op_times["all_reduce"] += time.monotonic_ns() - began
        if reduction.added is not None:
            hidden.add_(summed, alpha=reduction.added)

    def _check(self, step: PagedStep, tokens: int) -> None:
        """Raises `ValueError` on what would read or write outside of the tensors."""
        assert isinstance(step.attention, NativeAttention), "a program reads and writes native blocks only"
        lowest, highest = (int(position) for position in step.positions.aminmax())
        if lowest < 0 or highest >= self._positions:
            raise ValueError(f"positions {lowest} to {highest} for a model of {self._positions}")
        for cache in {cache.group: cache for cache in step.caches}.values():
            group = step.groups[cache.group]
            if not tokens == len(step.positions) == group.num_tokens:
                raise ValueError(f"{tokens} tokens, {len(step.positions)} positions and {group.num_tokens} slots")
            step.attention.check(cache.keys, cache.values, group)

    def _buffers(self, tokens: int, dtype: torch.dtype) -> list[Tensor]:
        """Room for all buffers but the first; kept, for the largest step so far."""
        if not self._workspace or len(self._workspace[0]) < tokens:
            self._workspace = [torch.empty(tokens, width, dtype=dtype) for width in self._program.widths[1:]]
        return self._workspace

    def _layer_caches(self, step: PagedStep) -> "Array[Layer]":
        """Pointers to the caches of all layers, made once for each set of caches."""
        if self._caches is not step.caches:
            self._caches = step.caches
            layers = [Layer(cache_pointers(cache.keys, cache.values), cache.group) for cache in step.caches]
            self._layers = (Layer * len(layers))(*layers)
        return self._layers


def compiled(model: Decoder, attention: AttentionBackend, *, exact: bool = False) -> Decoder:
    """`model`, or the same computed by Octavo's own kernels where they are for what `attention` runs on. `exact`: no
    row may depend on the others; the CPU's kernels know no other way, a GPU's take one that is slower."""
    if not isinstance(model, LlamaModel):
        return model
    if isinstance(attention, NativeAttention):
        return model if obstacle(model) else CompiledLlama(model, load())
    return FusedLlama(model, exact=exact) if attention.name == "triton" else model
