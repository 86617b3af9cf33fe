"""Measures the products of a model's layers with quantised weights beside those of bf16: `python -m
octavo.bench.parts.quantized_products`.

The sizes are those of SmolLM2-135M, all its layers, since weights of four bits must outgrow the caches too; k-quants,
which want multiples of 256 inputs, have inputs of 512 in the place of 576. A program runs all products of all layers
and nothing else, with the quantising of rows, as a step does; of many rows, for fewer layers. Formats take turns; the
least of the rounds counts, on the clock, or in seconds of CPU of a single thread.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_void_p, cast
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary, load
from octavo.kernels.native.linear import NativeLinear
from octavo.kernels.native.quantized_linear import NativeQuantizedLinear, quantized_rows
from octavo.kernels.native.structs import DTYPES, Activation, BufferAt, Op, OpKind, Run
from octavo.kernels.quantized import BLOCK, FORMATS, GROUP, BlockFormat, Quantized

_LAYERS, _HEADS, _HIDDEN, _GATED = 30, 960, 576, 1536
# Groups of checkpoints that are no GGUF.
_WIDE = 128
_ROUNDS, _SECONDS = 30, 4.0
# Rows below this take all layers.
_FEW = 32
# The buffers of a program: of inputs, of outputs, and of quantised rows.
_INPUTS, _OUTPUTS, _QUANTIZED = range(3)


def random_weight(form: BlockFormat, outputs: int, inputs: int) -> Quantized:
    """Makes a weight of any integers, whose values are about 1."""
    group = form.group or next(size for size in (_WIDE, GROUP) if inputs % size == 0)
    shape = outputs, inputs // group
    codes = torch.randint(0, 1 << form.bits, (outputs, inputs), dtype=torch.uint8)
    step = 2.0**-form.bits
    if not form.blocks:
        scales = torch.full(shape, step, dtype=torch.float16 if form.group else torch.float32)
        return Quantized(form, codes, scales, -8 * scales if form.mins else None)
    small = torch.full(shape, 50, dtype=torch.int8 if form.group < GROUP else torch.uint8)
    wide = torch.full((outputs, inputs // BLOCK), step / 50, dtype=torch.float16)
    return Quantized(form, codes, small, *((small, wide, wide) if form.mins else (None, wide)))


class Products:
    """Holds the weights of all layers in `form`, None: bf16, and the program that multiplies by them."""

    def __init__(self, library: NativeLibrary, form: BlockFormat | None) -> None:
        self.dtype = torch.bfloat16 if form is None else torch.float32
        hidden = _HIDDEN if form is None or not form.blocks else _HIDDEN // BLOCK * BLOCK
        self._library = library
        self.bytes = self.weights = 0
        self._linears: list[NativeLinear | NativeQuantizedLinear] = []
        ops = list[Op]()
        for rows, inputs, activation in (
            (_HEADS, hidden, None),
            (hidden, hidden, None),
            (2 * _GATED, hidden, Activation.SILU),
            (hidden, _GATED, None),
        ) * _LAYERS:
            ops += self._product(library, form, rows, inputs, activation)
            self.weights += rows * inputs
        self._ops = (Op * len(ops))(*ops)

    def _product(
        self, library: NativeLibrary, form: BlockFormat | None, rows: int, inputs: int, activation: Activation | None
    ) -> Iterator[Op]:
        if form is None:
            linear = NativeLinear(library, torch.randn(rows, inputs, dtype=torch.bfloat16), None, activation)
            self.bytes += 2 * rows * inputs
            self._linears.append(linear)
            yield _op(OpKind.LINEAR, _INPUTS, _OUTPUTS, linear=linear.op())
            return
        quantized = NativeQuantizedLinear(library, random_weight(form, rows, inputs), None, activation)
        self.bytes += quantized.weight_bytes
        self._linears.append(quantized)
        yield _op(OpKind.QUANTIZE, _INPUTS, _QUANTIZED, quantize=quantized.quantize_op(x_stride=_GATED))
        yield _op(OpKind.QUANTIZED_LINEAR, _QUANTIZED, _OUTPUTS, quantized_linear=quantized.op())

    def runner(self, tokens: int) -> Callable[[], float]:
        """Returns what multiplies `tokens` rows once by all weights and gives the seconds that it took."""
        shape = tokens, _GATED
        buffers = [
            torch.randn(shape).to(self.dtype),
            torch.empty(shape, dtype=self.dtype),
            quantized_rows(self._library, tokens, _GATED),
        ]
        run = Run(
            cast(self._ops, POINTER(Op)),
            len(self._ops) * _layers(tokens) // _LAYERS,
            (c_void_p * len(buffers))(*(each.data_ptr() for each in buffers)),
            *(None,) * 4,
            tokens,
            DTYPES[self.dtype],
            torch.get_num_threads(),
        )
        return partial(self._seconds, run, buffers)

    def _seconds(self, run: Run, _: list[Tensor]) -> float:
        clock = time.process_time if run.threads == 1 else time.perf_counter
        began = clock()
        self._library.functions.octavo_run(byref(run))
        return clock() - began


def _layers(tokens: int) -> int:
    """Returns how many layers multiply: where weights stay in the caches anyway, one of them tells as much."""
    return _LAYERS if tokens < _FEW else 1


def _op(kind: OpKind, source: int, target: int, **member: object) -> Op:
    op = Op(kind=kind, layer=0, input=BufferAt(source, 0), output=BufferAt(target, 0))
    [(name, value)] = member.items()
    setattr(op, name, value)
    return op


def measure(products: dict[str, Products], tokens: int) -> dict[str, float]:
    """Returns the least seconds of each, by turns."""
    runners = {name: each.runner(tokens) for name, each in products.items()}
    rounds, began = list[dict[str, float]](), time.perf_counter()
    while len(rounds) < 3 or (len(rounds) < _ROUNDS and time.perf_counter() - began < _SECONDS):
        rounds.append({name: run() for name, run in runners.items()})
    return {name: min(each[name] for each in rounds) for name in products}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="quantized_products", description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["q4_0", "q4_k", "q6_k", "q8_0"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    library = load()
    products = {"bf16": Products(library, None)}
    products |= {name: Products(library, FORMATS[name]) for name in options.formats}
    print(f"{library.variant}, {options.threads} threads, {_LAYERS} layers")
    print("rows  format       ms    GB/s  GMAC/s  of bf16")
    for tokens in options.rows:
        seconds = measure(products, tokens)
        part = _layers(tokens) / _LAYERS
        rates = {name: part * each.weights * tokens / seconds[name] / 1e9 for name, each in products.items()}
        for name, each in products.items():
            share = rates[name] / rates["bf16"]
            speed = part * each.bytes / seconds[name] / 1e9
            print(f"{tokens:4}  {name:6} {seconds[name] * 1e3:8.2f} {speed:7.1f} {rates[name]:7.0f} {share:8.2f}")


if __name__ == "__main__":
    main()
