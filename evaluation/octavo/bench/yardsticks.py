"""Measures what this machine gives at this moment: the rate at which it reads memory, and that of torch's matrix
products in the shapes of a model. `python -m octavo.bench.yardsticks MODEL DTYPE THREADS` is a child
(`octavo.bench.child`)."""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.bench.child import Answer, serve
from octavo.bench.figures import LinearShapes, Yardsticks

# Far beyond any cache.
_BUFFER_BYTES = 1 << 29
_PREPACK_ROWS = 64
# Each is timed at least so many times, and until so much time has gone.
_LEAST_TIMES, _LEAST_S = 3, 0.1

Product = Callable[[Tensor], Tensor]


def read_rate(num_bytes: int = _BUFFER_BYTES) -> float:
    """Bytes per second at which all of torch's threads together read memory; the best of several ways."""
    integers = torch.ones(num_bytes // 8, dtype=torch.int64)
    floats = integers.view(torch.float32)
    return num_bytes / min(best_s(integers.sum), best_s(floats.norm))


class Products:
    """Holds the matrix products of a model with random weights, each with weights of its own as in the model."""

    def __init__(self, shapes: LinearShapes, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._layers = [
            (product(_random(out, size, dtype)), size) for _ in range(shapes.num_layers) for out, size in shapes.layer
        ]
        self._head = [(product(_random(*shapes.head, dtype)), shapes.head[1])]

    def layers_s(self, rows: int) -> float:
        """Returns the seconds of all layers' products with `rows` rows."""
        return self._seconds(self._layers, rows)

    def head_s(self, rows: int) -> float:
        """Returns the seconds of the LM head's product with `rows` rows."""
        return self._seconds(self._head, rows)

    def _seconds(self, products: list[tuple[Product, int]], rows: int) -> float:
        inputs = {size: _random(rows, size, self._dtype) for _, size in products}

        def multiply() -> None:
            for multiplied, size in products:
                multiplied(inputs[size])

        return best_s(multiply)


def product(weight: Tensor) -> Product:
    """Returns x -> x W^T as fast as torch has it: with weights prepacked for oneDNN, else `F.linear`."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PREPACK_ROWS)
        multiply = functools.partial(_prepacked, packed)
        multiply(weight.new_ones(2, weight.shape[1]))
    except (AttributeError, RuntimeError, NotImplementedError):
        return functools.partial(F.linear, weight=weight)
    return multiply


def _prepacked(packed: Tensor, inputs: Tensor) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")
    return outputs


def _random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns).to(dtype)


def best_s(call: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of several calls, the first one aside."""
    call()
    times, began = list[float](), time.perf_counter()
    while len(times) < _LEAST_TIMES or time.perf_counter() - began < _LEAST_S:
        called = time.perf_counter()
        call()
        times.append(time.perf_counter() - called)
    return min(times)


def _answers(model: Path, dtype: str, threads: int) -> dict[str, Answer]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    products = Products(LinearShapes.read(model), getattr(torch, dtype))

    @torch.inference_mode()
    def measure(rows: dict[str, Any]) -> dict[str, object]:
        layers_s = {tokens: products.layers_s(tokens) for tokens in rows["layers"]}
        head_s = {logit_rows: products.head_s(logit_rows) for logit_rows in rows["head"]}
        return Yardsticks(read_rate(), layers_s, head_s).to_json()

    return {"measure": measure}


if __name__ == "__main__":
    sys.exit(serve(lambda: _answers(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
