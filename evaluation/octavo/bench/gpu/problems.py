"""Makes attention problems over a paged cache as a model has it: blocks in shuffled order, all layers of a block
together."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.bench.gpu.cases import NotMeasured
from octavo.bench.gpu.shapes import AttentionShape
from octavo.bench.gpu.timing import Call

DTYPE = torch.bfloat16
# Of a kernel in bf16 against fp32: the norm of the difference over that of the result.
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class PagedProblem:
    """Holds a problem in which every sequence has `num_queries` new tokens at the end of `context`, or of its own of
    `contexts`, whose first and longest is `context`. The layers are what calls rotate over.

    `blocks`: [num_blocks, layers, 2, kv_heads, block_size, head_dim]; `tables`: [sequences, blocks] int32; `queries`:
    [layers, sequences * num_queries, query_heads, head_dim].
    """

    shape: AttentionShape
    num_sequences: int
    num_queries: int
    context: int
    blocks: Tensor
    tables: Tensor
    queries: Tensor
    contexts: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.contexts or (self.context,) * self.num_sequences

    @property
    def num_layers(self) -> int:
        return self.blocks.shape[1]

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def caches(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values, [num_blocks, block_size, kv_heads, head_dim] each, not contiguous."""
        keys, values = self.blocks[:, layer].transpose(2, 3).unbind(1)
        return keys, values

    def contiguous(self, layer: int) -> tuple[Tensor, Tensor]:
        """Gathers keys and values of a layer without blocks: [sequences, kv_heads, context, head_dim] each."""
        keys, values = (
            cache[self.tables.long()].flatten(1, 2)[:, : self.context].transpose(1, 2).contiguous()
            for cache in self.caches(layer)
        )
        return keys, values

    def query(self, layer: int) -> Tensor:
        """Returns the queries of a layer, [sequences, query_heads, num_queries, head_dim]."""
        rows = self.queries[layer]
        return rows.view(self.num_sequences, self.num_queries, *rows.shape[1:]).transpose(1, 2)

    def packed_query(self, layer: int) -> Tensor:
        """Returns the queries of a decode, [sequences, kv_heads, group, head_dim]: one read of the keys serves a group
        of query heads."""
        rows = self.queries[layer]
        return rows.view(len(rows), self.shape.kv_heads, self.shape.group, self.shape.head_dim)


def paged_problem(
    shape: AttentionShape,
    device: torch.device,
    *,
    num_sequences: int,
    context: int,
    num_layers: int,
    num_queries: int = 1,
    shuffled: bool = True,
    contexts: tuple[int, ...] = (),
    pool_blocks: int = 0,
) -> PagedProblem:
    """Draws a problem of random numbers; the blocks of a sequence lie wherever chance has put them, or one after the
    other, among `pool_blocks` if those are more than the sequences take."""
    width = -(-context // shape.block_size)
    widths = [-(-length // shape.block_size) for length in contexts or [context] * num_sequences]
    num_blocks = max(sum(widths), pool_blocks)
    order = torch.randperm(num_blocks) if shuffled else torch.arange(num_blocks)
    # Rounded to the cache's type in pieces: in fp32 the whole would take twice the room.
    blocks = torch.empty(
        num_blocks, num_layers, 2, shape.kv_heads, shape.block_size, shape.head_dim, dtype=DTYPE, device=device
    ).normal_()
    queries = torch.randn(
        num_layers, num_sequences * num_queries, shape.query_heads, shape.head_dim, dtype=DTYPE, device=device
    )
    tables = torch.zeros(num_sequences, width, dtype=torch.int32)
    for table, own in zip(tables, torch.split(order[: sum(widths)], widths), strict=True):
        table[: len(own)] = own
    return PagedProblem(shape, num_sequences, num_queries, context, blocks, tables.to(device), queries, contexts)


def make_attention(shape: AttentionShape, device: torch.device, *, splits: bool = True) -> Any:
    """Makes Octavo's own attention; without `splits`, one that reads a sequence's keys in one pass whatever its
    length."""
    from octavo.kernels.backend import CacheShape
    from octavo.kernels.triton.attention import TritonAttention

    class OnePass(TritonAttention):
        def _decode_splits(self, *_: Any) -> int:
            return 1

    kind = TritonAttention if splits else OnePass
    return kind(CacheShape(shape.block_size, shape.kv_heads, shape.head_dim, DTYPE), device)


def make_step(problem: PagedProblem) -> Any:
    """Makes the `TritonStep` of a problem; nothing is written."""
    from octavo.kernels.triton.attention import TritonStep

    sequences, queries = problem.num_sequences, problem.num_queries
    decodes = queries == 1
    return TritonStep(
        slot_mapping=torch.full((sequences * queries,), -1, dtype=torch.int64, device=problem.device),
        block_tables=problem.tables,
        table_rows=_int32(range(sequences), problem.device),
        context_lens=_int32(problem.lengths, problem.device),
        query_starts=_int32(accumulate([queries] * sequences, initial=0), problem.device),
        num_decodes=sequences if decodes else 0,
        max_query_len=0 if decodes else queries,
        num_tokens=sequences * queries,
        max_context_len=problem.context,
        window=0,
    )


def ours(problem: PagedProblem, *, splits: bool = True) -> list[Call]:
    """Makes a call for each layer, once the first has been found right."""
    attention, step = make_attention(problem.shape, problem.device, splits=splits), make_step(problem)
    check(problem, attention.attend(problem.queries[0], *problem.caches(0), step, problem.scale))

    def call(layer: int) -> Call:
        query, caches = problem.queries[layer], problem.caches(layer)
        return lambda: attention.attend(query, *caches, step, problem.scale)

    return each_layer(problem, call)


def check(problem: PagedProblem, attended: Tensor) -> None:
    """Raises `NotMeasured` if the first sequence's result is wrong: the speed of a wrong kernel is worth nothing."""
    rows = attended[: problem.num_queries].transpose(0, 1).float()
    expected = expected_rows(problem)
    error = float((rows - expected).norm() / expected.norm())
    if not error < _TOLERANCE:
        raise NotMeasured(f"its result is wrong: off by {error:.2g} from attention in fp32, {_TOLERANCE:g} is allowed")


def expected_rows(problem: PagedProblem) -> Tensor:
    """Computes in fp32 what attention gives for the first layer's first sequence, [query_heads, num_queries,
    head_dim]."""
    keys, values = (each[:1].float().repeat_interleave(problem.shape.group, 1) for each in problem.contiguous(0))
    positions = torch.arange(problem.context, device=problem.device)
    mask = positions <= positions[problem.context - problem.num_queries :, None]
    query = problem.query(0)[:1].float()
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=problem.scale)[0]


def each_layer(problem: PagedProblem, make: Callable[[int], Call]) -> list[Call]:
    """Makes a call for each layer: contenders rotate over them."""
    return [make(layer) for layer in range(problem.num_layers)]


def _int32(values: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)
