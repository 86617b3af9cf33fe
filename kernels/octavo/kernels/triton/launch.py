"""Launches the kernels of paged attention in configurations that follow from what the host knows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.backend import GroupBatch
from octavo.kernels.checks import check_block_ids, check_lengths, check_window
from octavo.kernels.triton.paged import attend_kernel, combine_kernel
from octavo.kernels.triton.tiles import Tiles, listed_programs, padded
from octavo.kernels.triton.work_list import WorkList, list_work


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Holds what the host knows of the sequences of a step that are no decodes, in their order: tokens of this step,
    and tokens in the cache once it has written its own."""

    query_lens: Sequence[int]
    context_lens: Sequence[int]


# Of a step without prompts, or whose lengths only the device knows.
NO_PROMPTS = PromptLengths((), ())


@dataclass(frozen=True, slots=True)
class TritonStep:
    """Holds the inputs that all layers of one KV group share in a step.

    On the device: `slot_mapping`: [tokens] int64, slot = block id * block size + offset, -1: nothing is written;
    `block_tables`: [rows, width] int32, entries that no query looks at may be anything; `table_rows`: [sequences]
    int32, the row of each sequence; `context_lens`: [sequences] int32, tokens in the cache once this step has written
    its own, 0: padding, whose output is zeros; `query_starts`: [sequences + 1] int32, the first query row of each
    sequence.

    On the host: the first `num_decodes` sequences have one query token each; `max_query_len` is at least the longest
    query of the others, 0 if there is none, `max_context_len` at least the longest context; `window` 0: none;
    `prompts` are their lengths, where these are known. The others have at most `most_chunk_tokens` tokens, in any rows,
    or with 0 all that are not of decodes: a captured step has places for more decodes than there are, and padding
    behind all.

    `work` keeps the lists of the step's work, and `shares` the sequences of each configuration, by all that decides
    them: the first layer makes both, the others read them.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    table_rows: Tensor
    context_lens: Tensor
    query_starts: Tensor
    num_decodes: int
    max_query_len: int
    num_tokens: int
    max_context_len: int
    window: int
    prompts: PromptLengths = NO_PROMPTS
    most_chunk_tokens: int = 0
    work: dict[tuple["SequenceRange", int, int, int], WorkList] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    shares: dict[tuple[object, ...], tuple["SequenceRange", ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_sequences(self) -> int:
        return self.table_rows.shape[0]

    def most_seen(self, num_queries: int) -> int:
        """Returns the most keys that so many queries of one sequence see, one after the other."""
        seen = self.max_context_len
        return min(seen, self.window + num_queries) if self.window else seen

    @classmethod
    def of(cls, batch: GroupBatch, block_size: int, device: torch.device) -> "TritonStep":
        """Raises `ValueError` on lengths that do not fit the tables, and if a block that is to be read is missing."""
        lengths = check_batch(batch, block_size)
        num_decodes = _leading_ones(lengths[1])
        return cls(
            slot_mapping=batch.slot_mapping.to(device),
            block_tables=batch.block_tables.to(torch.int32).to(device),
            table_rows=torch.arange(lengths.shape[1], dtype=torch.int32, device=device),
            context_lens=lengths[0].to(device),
            query_starts=torch.nn.functional.pad(lengths[1].cumsum(0, dtype=torch.int32), (1, 0)).to(device),
            num_decodes=num_decodes,
            max_query_len=max(batch.query_lens[num_decodes:], default=0),
            num_tokens=sum(batch.query_lens),
            max_context_len=max(batch.context_lens, default=0),
            window=batch.window,
            prompts=PromptLengths(batch.query_lens[num_decodes:], batch.context_lens[num_decodes:]),
        )


def check_batch(batch: GroupBatch, block_size: int) -> Tensor:
    """Returns the contexts and the queries of `batch`, [2, sequences] int32. Raises `ValueError` on lengths that do not
    fit the tables, and if a block that is to be read is missing."""
    check_lengths(batch.block_tables, batch.context_lens, batch.query_lens, block_size)
    check_window(batch.window)
    lengths = torch.tensor((batch.context_lens, batch.query_lens), dtype=torch.int32).view(2, -1)
    check_block_ids(_lowest_block(batch, lengths, block_size))
    return lengths


def _lowest_block(batch: GroupBatch, lengths: Tensor, block_size: int) -> int:
    """Returns the least block id that a query looks at."""
    contexts, queries = lengths[..., None]
    first = (contexts - queries + 1 - batch.window).clamp(min=0) if batch.window else torch.zeros_like(contexts)
    ends = torch.arange(1, batch.block_tables.shape[1] + 1) * block_size
    seen = (ends > first) & (ends - block_size < contexts)
    return int(batch.block_tables[seen].min()) if seen.any() else 0


def _leading_ones(query_lens: Tensor) -> int:
    return int((query_lens == 1).cumprod(0).sum())


# Of what splits leave to be combined. More work than that is cut into launches one after the other.
_SCRATCH_BYTES = 256 << 20
# Splits that are combined at a time, and warps that do.
TILE_SPLITS = 32
COMBINING_WARPS = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """Holds the arguments of one layer's attention, those of
    `octavo.kernels.triton.attention.TritonAttention.attend`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    step: TritonStep
    scale: float
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    key_scale: float
    value_scale: float

    @property
    def kv_heads(self) -> int:
        return self.key_cache.shape[2]

    @property
    def head_dim(self) -> int:
        return self.key_cache.shape[3]

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.kv_heads


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Describes the sequences of a step that one configuration serves: from `first_sequence` up to `last_sequence`.

    `decode`: each has one query token, in the row of its number; else they have up to `max_query_len` query tokens,
    `num_tokens` in all. Their keys are cut by a device that sees how long each sequence is: into splits of `split_keys`
    keys each, or with 0 into `num_splits` of at least `least_keys` keys. With `multiprocessors` the device lists its
    work first, and so many of them share it; with 0 each split has a program of its own.
    """

    first_sequence: int
    last_sequence: int
    num_tokens: int
    max_query_len: int
    tiles: Tiles
    decode: bool = False
    num_splits: int = 1
    split_keys: int = 0
    least_keys: int = 0
    multiprocessors: int = 0

    @property
    def fuses(self) -> bool:
        """Returns whether a product and a sum may be rounded once. Fixed splits promise the same bits from any code
        that computes them, so with them every operation is rounded as written."""
        return self.split_keys == 0

    def mask_all(self, window: int) -> bool:
        """Returns whether all tiles of keys go through the loop with masks: most tiles need masks, memory decides the
        speed anyway, or the bits must be those of one loop."""
        return self.decode or self.split_keys > 0 or window > 0

    def num_tiles(self, group: int) -> int:
        """Returns a bound of the number of tiles of queries: at least as many as there are."""
        sequences = self.last_sequence - self.first_sequence
        return sequences if self.decode else self.num_tokens // (self.tiles.rows // group) + sequences

    def split_rows(self, group: int) -> int:
        """Returns a bound of the rows with a query that a tile has."""
        return min(self.tiles.rows // group, self.max_query_len) * group


def attend(problem: Problem, share: SequenceRange, output: Tensor) -> None:
    """Fills the rows of `output` that belong to the sequences of `share`. Arguments are checked by the caller."""
    tiles, programs = share.num_tiles(problem.group), problem.kv_heads
    if share.num_splits == 1:
        _attend(problem, share, output, (tiles * programs, 1), 0, None, None, None)
        return
    rows = share.split_rows(problem.group)
    tile_bytes = programs * share.num_splits * rows * (problem.head_dim + 2) * 4
    together = min(tiles, max(1, _SCRATCH_BYTES // tile_bytes))
    shape = (together * programs * share.num_splits, rows)
    sums = torch.empty((*shape, problem.head_dim), dtype=torch.float32, device=output.device)
    scores = torch.empty((*shape, 2), dtype=torch.float32, device=output.device)
    for first_tile in range(0, tiles, together):
        count = min(together, tiles - first_tile)
        work, grid = None, (count * programs, share.num_splits)
        if share.multiprocessors:
            work = _work(problem, share, first_tile, count)
            grid = listed_programs(count * programs * share.num_splits, share.multiprocessors), 1
        _attend(problem, share, output, grid, first_tile, work, sums, scores)
        _combine(problem, share, output, (count * programs, rows), first_tile, work, sums, scores)


def _work(problem: Problem, share: SequenceRange, first_tile: int, num_tiles: int) -> WorkList:
    """Returns the list of what there is to do in some tiles of `share`, the same in every layer."""
    made, key = problem.step.work, (share, problem.group, first_tile, num_tiles)
    if key not in made:
        made[key] = list_work(problem.step, share, problem.group, first_tile, num_tiles)
    return made[key]


def _attend(
    problem: Problem,
    share: SequenceRange,
    output: Tensor,
    grid: tuple[int, int],
    first_tile: int,
    work: WorkList | None,
    sums: Tensor | None,
    scores: Tensor | None,
) -> None:
    step = problem.step
    attend_kernel[grid](
        output,
        sums,
        scores,
        work and work.pieces,
        work and work.counts,
        problem.query,
        problem.key_cache,
        problem.value_cache,
        step.block_tables,
        step.table_rows,
        step.context_lens,
        step.query_starts,
        problem.sinks,
        problem.alibi_slopes,
        problem.scale * problem.key_scale,
        problem.softcap,
        problem.value_scale,
        step.window,
        problem.kv_heads,
        share.num_splits,
        first_tile,
        share.first_sequence,
        share.last_sequence,
        share.split_rows(problem.group),
        *problem.query.stride()[:2],
        *output.stride()[:2],
        *problem.key_cache.stride()[:3],
        step.block_tables.stride(0),
        BLOCK_SIZE=problem.key_cache.shape[1],
        WINDOWED=step.window > 0,
        CAPPED=problem.softcap > 0,
        MASK_ALL=share.mask_all(step.window),
        **tile_constants(problem.group, problem.head_dim, share),
        num_warps=share.tiles.warps,
        num_stages=share.tiles.stages,
        enable_fp_fusion=share.fuses,
    )


def _combine(
    problem: Problem,
    share: SequenceRange,
    output: Tensor,
    grid: tuple[int, int],
    first_tile: int,
    work: WorkList | None,
    sums: Tensor,
    scores: Tensor,
) -> None:
    step = problem.step
    combine_kernel[grid](
        output,
        sums,
        scores,
        work and work.counts,
        step.context_lens,
        step.query_starts,
        problem.sinks,
        problem.value_scale,
        step.window,
        problem.kv_heads,
        share.num_splits,
        first_tile,
        share.first_sequence,
        share.last_sequence,
        grid[1],
        *output.stride()[:2],
        **tile_constants(problem.group, problem.head_dim, share),
        TILE_SPLITS=TILE_SPLITS,
        num_warps=COMBINING_WARPS,
        enable_fp_fusion=share.fuses,
    )


def tile_constants(group: int, head_dim: int, share: SequenceRange) -> dict[str, Any]:
    """Returns the constants that both kernels have."""
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded(head_dim),
        "TILE_ROWS": share.tiles.rows,
        "TILE_KEYS": share.tiles.keys,
        "SPLIT_KEYS": share.split_keys,
        "LEAST_KEYS": share.least_keys,
        "DECODE": share.decode,
    }
