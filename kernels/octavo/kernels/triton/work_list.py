"""Lists the pieces of a step's attention on the device, largest first, for programs that take one after the other.

A launch that was captured in a CUDA graph has the same programs whatever the sequences' lengths. So few programs share
the list: each takes the next piece when it has done one, as the tile schedulers of FlashAttention-3 do, and one long
sequence among short ones keeps all of them busy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.pieces import pieces_of, queries_of
from octavo.kernels.triton.tiles import DECODE_SPLIT_KEYS, EXACT_SPLIT_KEYS

if TYPE_CHECKING:
    from octavo.kernels.triton.launch import SequenceRange, TritonStep

_BLOCK = 64
_VARYING = ["window", "num_splits", "first_tile", "num_tiles", "first_sequence", "last_sequence"]
_UNALIGNED = ["context_lens", "query_starts"]


@dataclass(frozen=True, slots=True)
class WorkList:
    """Holds what there is to do for some tiles of queries, in each KV head.

    `pieces`: [tiles * splits] int32, tile * splits + split of each piece, larger pieces first; `counts`: [2] int32, how
    many pieces there are, and how many pairs of a piece and a KV head the programs of a launch have taken: 0 before and
    after each layer.
    """

    pieces: Tensor
    counts: Tensor


@triton.jit
def _work_of(
    tile, num_tiles, context_lens, query_starts, window, num_splits, first_tile, first_sequence, last_sequence,
    TILE_TOKENS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, LEAST_KEYS: tl.constexpr,
    DECODE: tl.constexpr,
):  # fmt: skip
    """Returns of each `tile` ([tiles]) its first piece, how many it has, and the keys of one; there is none where no
    tile is."""
    exists = tile < num_tiles
    _, _, first_position, tokens = queries_of(
        first_tile + tile, query_starts, context_lens, first_sequence, last_sequence, exists, DECODE, TILE_TOKENS
    )
    begin, end, _, share, first, count = pieces_of(
        first_position, tokens, window, num_splits, TILE_KEYS, SPLIT_KEYS, LEAST_KEYS
    )
    return first, tl.where(exists & (tokens > 0), count, 0), tl.minimum(share, end - begin)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def list_kernel(
    pieces, counts, context_lens, query_starts, window, num_splits,
    first_tile, num_tiles, first_sequence, last_sequence,
    TILE_TOKENS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, LEAST_KEYS: tl.constexpr,
    DECODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the pieces of `BLOCK` tiles, each tile's behind those of all tiles whose pieces are larger, or as large and
    before it."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, count, size = _work_of(
        tile, num_tiles, context_lens, query_starts, window, num_splits, first_tile, first_sequence,
        last_sequence, TILE_TOKENS, TILE_KEYS, SPLIT_KEYS, LEAST_KEYS, DECODE,
    )  # fmt: skip
    place = tl.zeros([BLOCK], dtype=tl.int32)
    total = 0
    for start in range(0, num_tiles, BLOCK):
        other = start + tl.arange(0, BLOCK)
        _, other_count, other_size = _work_of(
            other, num_tiles, context_lens, query_starts, window, num_splits, first_tile, first_sequence,
            last_sequence, TILE_TOKENS, TILE_KEYS, SPLIT_KEYS, LEAST_KEYS, DECODE,
        )  # fmt: skip
        larger = other_size[None, :] > size[:, None]
        larger |= (other_size[None, :] == size[:, None]) & (other[None, :] < tile[:, None])
        place += tl.sum(tl.where(larger, other_count[None, :], 0), axis=1)
        total += tl.sum(other_count, axis=0)
    for split in range(0, tl.max(count, axis=0)):
        tl.store(pieces + place + split, tile * num_splits + first + split, mask=split < count)
    if tl.program_id(0) == 0:
        tl.store(counts, total)
        tl.store(counts + 1, 0)


def list_work(step: "TritonStep", share: "SequenceRange", group: int, first_tile: int, num_tiles: int) -> WorkList:
    """Lists the work of `num_tiles` tiles of `share` from `first_tile` on; the host waits for nothing."""
    device = step.context_lens.device
    pieces = torch.empty(num_tiles * share.num_splits, dtype=torch.int32, device=device)
    counts = torch.empty(2, dtype=torch.int32, device=device)
    list_kernel[(triton.cdiv(num_tiles, _BLOCK),)](
        pieces,
        counts,
        step.context_lens,
        step.query_starts,
        step.window,
        share.num_splits,
        first_tile,
        num_tiles,
        share.first_sequence,
        share.last_sequence,
        TILE_TOKENS=share.tiles.rows // group,
        TILE_KEYS=share.tiles.keys,
        SPLIT_KEYS=share.split_keys,
        LEAST_KEYS=share.least_keys,
        DECODE=share.decode,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return WorkList(pieces, counts)


def variants() -> Iterator[Variant]:
    """Yields the lists of decodes and of exact attention."""
    arrays = dict.fromkeys(("pieces", "counts", "context_lens", "query_starts"), "*i32")
    signature = arrays | dict.fromkeys(_VARYING, "i32")
    tile = {"TILE_TOKENS": 16, "TILE_KEYS": 64, "BLOCK": _BLOCK}
    decodes = {"SPLIT_KEYS": 0, "LEAST_KEYS": DECODE_SPLIT_KEYS, "DECODE": True}
    exact = {"SPLIT_KEYS": EXACT_SPLIT_KEYS, "LEAST_KEYS": 0, "DECODE": False}
    yield Variant("list of decodes", list_kernel, signature, tile | decodes)
    yield Variant("list of exact attention", list_kernel, signature, tile | exact)
