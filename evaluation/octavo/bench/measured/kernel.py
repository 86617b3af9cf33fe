"""Measures attention over blocks against attention over contiguous keys and values, at decode (paper Fig. 18a).

`contiguous` is our own kernel with one huge block for each sequence, and so a block table of one entry: what remains is
the price of paging alone. `sdpa` is torch's attention on contiguous tensors. Calls rotate over layers whose keys and
values together do not fit into a cache; the contenders take turns, round by round.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.bench.measured.experiment import Findings, Options, Value
from octavo.kernels.backend import AttentionBackend, CacheShape, GroupBatch
from octavo.kernels.choice import choose_attention

_DTYPE = torch.bfloat16
# Together more than the caches of most machines.
_ROTATED_BYTES = 96 << 20
_MOST_LAYERS = 30
_LANES = 16
# Of bf16 against bf16: the norm of the difference over that of the result.
_TOLERANCE = 2e-2
# One stands for all sizes that our own kernels do not take.
_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 15, 2.0

Call = Callable[[int], Tensor]


@dataclass(frozen=True)
class HeadShape:
    """Holds the sizes of one layer's attention."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * _DTYPE.itemsize


SMOLLM = HeadShape("SmolLM2-135M", 9, 3, 64)
OPT = HeadShape("OPT-13B", 40, 40, 128)


@dataclass(frozen=True)
class _Problem:
    """Holds `keys` and `values` [layers, batch, context, kv_heads, head_dim] and `queries` [layers, batch, query_heads,
    head_dim]: one new token of each sequence, the last of its context."""

    shape: HeadShape
    keys: Tensor
    values: Tensor
    queries: Tensor

    @classmethod
    def draw(cls, shape: HeadShape, batch: int, context: int) -> "_Problem":
        layer_bytes = batch * context * shape.bytes_per_token
        layers = min(_MOST_LAYERS, math.ceil(_ROTATED_BYTES / layer_bytes))
        size = layers, batch, context, shape.kv_heads, shape.head_dim
        generator = torch.Generator().manual_seed(0)
        keys, values = (torch.empty(size, dtype=_DTYPE).normal_(generator=generator) for _ in range(2))
        queries = torch.randn((layers, batch, shape.query_heads, shape.head_dim), generator=generator)
        return cls(shape, keys, values, queries.to(_DTYPE))

    @property
    def layers(self) -> int:
        return self.queries.shape[0]

    @property
    def batch(self) -> int:
        return self.keys.shape[1]

    @property
    def context(self) -> int:
        return self.keys.shape[2]

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)


def measure(options: Options) -> Iterator[Findings]:
    """Measures every context and batch, for each block size."""
    with torch.inference_mode():
        torch.set_num_threads(options.threads)
        rows = [row for case in _cases(quick=options.quick) for row in _rows(*case)]
    yield Findings(
        name="kernel",
        title="Attention of one decode step by block size, against contiguous keys and values (paper Fig. 18a)",
        machine=options.machine,
        settings={"dtype": str(_DTYPE).removeprefix("torch."), "rotated_bytes": _ROTATED_BYTES},
        notes=[
            "A call is one layer's; the steps' block tables are read in advance once for all layers, as in serving.",
            "over_contiguous_x is over our kernel with one huge block per sequence; the paper has 1.20 to 1.26.",
            "Our kernels take blocks of a multiple of 16 tokens; others are gathered and computed by torch.",
        ],
        rows=rows,
    )


def _cases(*, quick: bool) -> Iterator[tuple[HeadShape, int, int]]:
    if quick:
        yield SMOLLM, 2, 64
        return
    for batch in (8, 32):
        yield from ((SMOLLM, batch, context) for context in (64, 128, 256, 512, 1024))
    yield from ((OPT, 8, context) for context in (64, 256))


def _rows(shape: HeadShape, batch: int, context: int) -> Iterator[dict[str, Value]]:
    problem = _Problem.draw(shape, batch, context)
    huge = -(-context // _LANES) * _LANES
    attentions = {f"{size}": _attention(shape, size) for size in _BLOCK_SIZES}
    calls = {"contiguous": _paged(problem, huge, _attention(shape, huge)), "sdpa": _sdpa(problem)}
    calls |= {name: _paged(problem, int(name), attention) for name, attention in attentions.items()}
    _check(calls)
    seconds = _race(calls, problem.layers)
    for name, attention in attentions.items():
        yield {
            "heads": shape.name,
            "batch": batch,
            "context": context,
            "block_size": int(name),
            "kernel": attention.name,
            "paged_us": 1e6 * statistics.median(seconds[name]),
            "contiguous_us": 1e6 * statistics.median(seconds["contiguous"]),
            "sdpa_us": 1e6 * statistics.median(seconds["sdpa"]),
            "over_contiguous_x": _ratio(seconds[name], seconds["contiguous"]),
            "over_sdpa_x": _ratio(seconds[name], seconds["sdpa"]),
        }


def _attention(shape: HeadShape, block_size: int) -> AttentionBackend:
    cache = CacheShape(block_size, shape.kv_heads, shape.head_dim, _DTYPE)
    return choose_attention(cache, torch.device("cpu")).attention


def _paged(problem: _Problem, block_size: int, attention: AttentionBackend) -> Call:
    """Blocks of all layers as a worker has them, those of a sequence wherever chance has put them."""
    width = -(-problem.context // block_size)
    shape, num_blocks = problem.shape, problem.batch * width
    pool = torch.zeros((num_blocks, problem.layers, 2, block_size, shape.kv_heads, shape.head_dim), dtype=_DTYPE)
    tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).view(problem.batch, width)
    caches = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(problem.layers)]
    prompt = attention.step(_batch(problem, tables, block_size, problem.context))
    for layer, cache in enumerate(caches):
        attention.write(problem.keys[layer].flatten(0, 1), problem.values[layer].flatten(0, 1), *cache, prompt)
    decode = attention.step(_batch(problem, tables, block_size, 1))
    return lambda layer: attention.attend(problem.queries[layer], *caches[layer], decode, problem.scale)


def _batch(problem: _Problem, tables: Tensor, block_size: int, num_queries: int) -> GroupBatch:
    positions = torch.arange(problem.context - num_queries, problem.context)
    slots = tables[:, positions // block_size] * block_size + positions % block_size
    contexts, queries = [problem.context] * problem.batch, [num_queries] * problem.batch
    return GroupBatch(slots.flatten(), tables, contexts, queries, window=0)


def _sdpa(problem: _Problem) -> Call:
    """The query heads of a group stand where torch expects positions: one read of their keys serves them all."""
    shape = problem.shape
    keys, values = (each.transpose(2, 3).contiguous() for each in (problem.keys, problem.values))
    queries = problem.queries.view(problem.layers, problem.batch, shape.kv_heads, -1, shape.head_dim)

    def call(layer: int) -> Tensor:
        attended = F.scaled_dot_product_attention(queries[layer], keys[layer], values[layer], scale=problem.scale)
        return attended.flatten(1, 2)

    return call


def _check(calls: dict[str, Call]) -> None:
    """Checks the results, as the speed of a wrong kernel is worth nothing."""
    expected = calls["sdpa"](0).float()
    for name, call in calls.items():
        error = float((call(0).float() - expected).norm() / expected.norm())
        if not error < _TOLERANCE:
            raise RuntimeError(f"attention over blocks of {name} is off by {error:.2g}; {_TOLERANCE:g} is allowed")


def _race(calls: dict[str, Call], layers: int) -> dict[str, list[float]]:
    """Returns the seconds of a call, by contender and round, of as many rounds as the time allows. A round before them
    warms up."""
    _round(calls, layers)
    rounds, began = list[dict[str, float]](), time.perf_counter()
    while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and time.perf_counter() - began < _SECONDS):
        rounds.append(_round(calls, layers))
    return {name: [each[name] for each in rounds] for name in calls}


def _round(calls: dict[str, Call], layers: int) -> dict[str, float]:
    return {name: _seconds(call, layers) for name, call in calls.items()}


def _seconds(call: Call, layers: int) -> float:
    began = time.perf_counter()
    for layer in range(layers):
        call(layer)
    return (time.perf_counter() - began) / layers


def _ratio(ours: list[float], others: list[float]) -> float:
    """Returns the median ratio of times of the same rounds: the machine's speed drifts from round to round."""
    return statistics.median(mine / other for mine, other in zip(ours, others, strict=True))
