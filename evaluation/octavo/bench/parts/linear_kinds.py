"""Measures bf16 linear layers by Octavo's own kernels beside oneDNN's: `python -m octavo.bench.parts.linear_kinds`.

The sizes are those of SmolLM2-135M and one larger. So many layers of a size as outgrow most second caches take their
turn, one kind after the other; the least of the rounds counts.
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from octavo.bench.table import line
from octavo.kernels.native.library import load
from octavo.worker.models.linear import Linear, LinearKind

# [outputs, inputs] of each.
SIZES: Mapping[str, tuple[int, int]] = {
    "qkv": (960, 576),
    "output": (576, 576),
    "gate and up": (3072, 576),
    "down": (576, 1536),
    "LM head": (49152, 576),
    "4096": (4096, 4096),
}
_KINDS = LinearKind.NATIVE, LinearKind.ONEDNN
_WEIGHTS = 60_000_000
_WIDTHS = (16, 10, 16, 16, 16)


def seconds(
    outputs: int, inputs: int, rows: Iterable[int], rounds: int, weights: int
) -> Iterator[tuple[int, float, float]]:
    """Yields each number of rows with the seconds of one layer by Octavo's kernels and by oneDNN.

    Of each kind there are layers of `weights` weights together.
    """
    count = max(1, weights // (outputs * inputs))
    layers = {
        kind: [Linear(torch.randn(outputs, inputs).bfloat16(), kind=kind) for _ in range(count)] for kind in _KINDS
    }
    for number in rows:
        x = torch.randn(number, inputs).bfloat16()
        best = dict.fromkeys(_KINDS, float("inf"))
        for _ in range(rounds):
            for kind in _KINDS:
                began = time.perf_counter()
                for layer in layers[kind]:
                    layer(x)
                best[kind] = min(best[kind], (time.perf_counter() - began) / count)
        yield number, best[LinearKind.NATIVE], best[LinearKind.ONEDNN]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="linear_kinds", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--weights", type=int, default=_WEIGHTS, help="of all layers of a size")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(line(("", "rows", f"{load().variant}, us", "oneDNN, us", "share of it"), _WIDTHS))
    for name in options.sizes:
        for rows, ours, theirs in seconds(*SIZES[name], options.rows, options.rounds, options.weights):
            cells = name, str(rows), f"{1e6 * ours:.0f}", f"{1e6 * theirs:.0f}", f"{ours / theirs:.2f}"
            print(line(cells, _WIDTHS), flush=True)


if __name__ == "__main__":
    main()
