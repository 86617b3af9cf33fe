"""Predicts by arithmetic how evenly a GPU's programs share a ragged decode: `python -m octavo.bench.gpu.balance`.

A program reads at the rate that its loads under way allow, and all together at the device's. Nothing is measured.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.bench.gpu.floors import NOMINAL
from octavo.bench.gpu.shapes import AttentionShape

_MULTIPROCESSORS = 132
# Programs of the kernel for decodes that one multiprocessor has room for; and a program's 64 KiB under way, each for a
# microsecond.
_RESIDENT = 3
_PROGRAM_BYTES_PER_S = 64 * 1024 / 1e-6
_TILE_KEYS = 64
BATCHES = (
    (32_768, *[1024] * 15),
    (32_768, *[1024] * 63),
    (32_768, *[1024] * 255),
    (1024,) * 64,
    (32_768,),
)


@dataclass(frozen=True)
class Balance:
    """Tells how long a decode's attention lasts over the time to read its keys and values once (`over_floor`), and what
    the busiest multiprocessor reads over the mean of all (`busiest`)."""

    over_floor: float
    busiest: float


def in_one_pass(contexts: Iterable[int], kv_heads: int) -> list[int]:
    """Returns the keys of each program where each takes one sequence and KV head, in their order."""
    return [context for context in contexts for _ in range(kv_heads)]


def listed(contexts: Iterable[int], kv_heads: int) -> list[int]:
    """Returns the keys of the pieces that `octavo.kernels.triton.work_list` lists, in its order."""
    from octavo.kernels.triton.tiles import num_decode_splits

    pieces = []
    for context in contexts:
        splits = num_decode_splits(kv_heads, context, _MULTIPROCESSORS)
        tiles = -(-context // _TILE_KEYS)
        share = -(-tiles // splits) * _TILE_KEYS
        pieces += [min(share, context - first) for first in range(0, context, share)] * kv_heads
    return sorted(pieces, reverse=True)


def balance(pieces: Sequence[int], shape: AttentionShape) -> Balance:
    """Lets a GPU's programs take one of the `pieces` (keys of one KV head) after the other, the first that is free the
    next one."""
    bytes_per_key = shape.kv_bytes_per_token / shape.kv_heads
    slots = [slot % _MULTIPROCESSORS for slot in range(_MULTIPROCESSORS * _RESIDENT)]
    read = [0.0] * _MULTIPROCESSORS
    # All programs that are at work read at one rate, so they end in the order of what each will have read by then.
    reading: list[tuple[float, int]] = []
    each_has_read = now = 0.0
    waiting = [keys * bytes_per_key for keys in reversed(pieces)]
    free = slots[::-1]
    while waiting or reading:
        while waiting and free:
            slot, work = free.pop(), waiting.pop()
            read[slot] += work
            heapq.heappush(reading, (each_has_read + work, slot))
        rate = min(_PROGRAM_BYTES_PER_S, NOMINAL.copy_bytes_per_s / len(reading))
        ends, slot = heapq.heappop(reading)
        now += (ends - each_has_read) / rate
        each_has_read = ends
        free.append(slot)
    total = sum(read)
    return Balance(now * NOMINAL.copy_bytes_per_s / total, max(read) * _MULTIPROCESSORS / total)


def main() -> None:
    """Prints a line for each batch."""
    shape = AttentionShape()
    print(
        f"By arithmetic, {shape.query_heads}/{shape.kv_heads} heads on {_MULTIPROCESSORS} multiprocessors: time over"
        " that to read keys and values once, and what the busiest multiprocessor reads over the mean."
    )
    print(f"{'contexts':24} | one program a sequence | listed pieces")
    for contexts in BATCHES:
        one, other = (balance(make(contexts, shape.kv_heads), shape) for make in (in_one_pass, listed))
        print(
            f"{_name(contexts):24} | {one.over_floor:9.2f}x {one.busiest:10.2f}x |"
            f" {other.over_floor:5.2f}x {other.busiest:5.2f}x"
        )


def _name(contexts: Sequence[int]) -> str:
    return ", ".join(f"{count} x {context}" for context, count in Counter(contexts).items())


if __name__ == "__main__":
    main()
