"""Measures the store of KV blocks on a disk: `python -m octavo.bench.parts.kv_store --directory DIR`.

Blocks are written and read as a worker does it: eight at a time, by the store's threads. Nothing waits for the disk
itself, so what is measured is what a block costs the machine while the page cache has room. A start is measured with
the tables in the page cache, and again after it was told to let go of them. Last, a store that is too small serves
conversations that come back, beside exact LRU and FIFO, which have room for as many blocks and no
segments: half-empty files and headers are on the store alone.
"""

import argparse
import hashlib
import os
import random
import select
import tempfile
import time
import tracemalloc
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.index import BlockIndex
from octavo.worker.kv_store.room import all_segments
from octavo.worker.kv_store.segment import SegmentLayout, SegmentWriter
from octavo.worker.kv_store.store import KVStore, StoreLimits

_IDENTITY = StoreIdentity("bench", "bfloat16", "bench", "fast", 16, 1)
_AT_ONCE = 8
_LONG_S = 60.0


@dataclass(frozen=True)
class Speed:
    """Holds what one way of moving blocks reached: bytes per second on the clock, and CPU seconds of a block."""

    bytes_per_s: float
    cpu_s: float


def names(count: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(count)]


def measure_moves(directory: Path, block_bytes: int, num_blocks: int, rounds: int) -> tuple[Speed, Speed]:
    """Writes so many blocks and reads them, each round in a directory of its own; returns the best of both."""
    payloads = [random.Random(seed).randbytes(block_bytes) for seed in range(_AT_ONCE)]
    buffers = [bytearray(block_bytes) for _ in payloads]
    chosen = names(num_blocks // _AT_ONCE * _AT_ONCE)
    identity = replace(_IDENTITY, block_bytes=block_bytes)
    writes, reads = list[Speed](), list[Speed]()
    for turn in range(rounds):
        with KVStore(directory / f"moves-{block_bytes}-{turn}", 1 << 40, identity) as store:

            def write(store: KVStore = store) -> None:
                for first in range(0, len(chosen), _AT_ONCE):
                    for name, payload in zip(chosen[first:], payloads, strict=False):
                        if not store.write(name, payload):
                            raise RuntimeError(f"the store has not taken a block: {store.stats().counts}")
                    if not store.flush(_LONG_S):
                        raise RuntimeError(f"the disk has not taken {_AT_ONCE} blocks in {_LONG_S:g} s")

            def read(store: KVStore = store) -> None:
                for first in range(0, len(chosen), _AT_ONCE):
                    store.read(chosen[first : first + _AT_ONCE], buffers)
                    select.select([store], [], [], _LONG_S)
                    (ticket,) = store.poll()
                    if not all(ticket.found) or buffers[0] != payloads[0]:
                        raise RuntimeError("the store has not found what it took")

            writes.append(_speed(write, len(chosen), block_bytes))
            reads.append(_speed(read, len(chosen), block_bytes))
    return _best(writes), _best(reads)


def _speed(call: Callable[[], None], count: int, block_bytes: int) -> Speed:
    began, cpu_began = time.perf_counter(), time.process_time()
    call()
    return Speed(count * block_bytes / (time.perf_counter() - began), (time.process_time() - cpu_began) / count)


def _best(speeds: list[Speed]) -> Speed:
    return Speed(max(speed.bytes_per_s for speed in speeds), min(speed.cpu_s for speed in speeds))


def measure_checksums(block_bytes: int, rounds: int) -> Iterator[tuple[str, float]]:
    """Yields checksums by name, and the bytes per CPU second that each takes."""
    payload = random.Random(0).randbytes(block_bytes)
    checksums: dict[str, Callable[[bytes], int]] = {"xxh3_64": xxh3_64_intdigest, "zlib.crc32": zlib.crc32}
    for name, checksum in checksums.items():
        taken = []
        for _ in range(rounds):
            began = time.thread_time()
            for _ in range(_AT_ONCE):
                checksum(payload)
            taken.append((time.thread_time() - began) / _AT_ONCE)
        yield name, block_bytes / min(taken)


def measure_start(directory: Path, block_bytes: int, rounds: int) -> tuple[float, float, int]:
    """Returns the seconds in which a store of `measure_moves` opens, and in which it does so without the page cache,
    and its bytes."""
    identity = replace(_IDENTITY, block_bytes=block_bytes)
    place = directory / f"moves-{block_bytes}-0"
    files = all_segments(place)
    warm = min(_seconds_to_open(place, identity) for _ in range(rounds))
    os.sync()
    cold = []
    for _ in range(rounds):
        for file in files:
            descriptor = os.open(file.path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        cold.append(_seconds_to_open(place, identity))
    return warm, min(cold), sum(file.num_bytes for file in files)


def _seconds_to_open(place: Path, identity: StoreIdentity) -> float:
    began = time.perf_counter()
    store = KVStore(place, 1 << 40, identity)
    taken = time.perf_counter() - began
    store.close()
    return taken


def measure_memory(directory: Path, num_blocks: int) -> float:
    """Returns the bytes of memory that a block takes in the index."""
    layout = SegmentLayout(_IDENTITY, 128)
    index = BlockIndex(directory / "memory", _IDENTITY)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for age in range(num_blocks // layout.slots):
        writer = SegmentWriter(directory / "memory", age, layout)
        segment = index.add_segment(writer)
        index.add(segment, 0, [os.urandom(32) for _ in range(layout.slots)])
        writer.close()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / len(index)


# -- what makes way ---------------------------------------------------------------------------------------------------


def conversations(seed: int, count: int, turns: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields turns of conversations that take turns at random, some much more often: the blocks of all that was said
    before, of which the first are everybody's, and the new blocks."""
    chance = random.Random(seed)
    often = [1.0 / (rank + 1) for rank in range(count)]
    said = [list(range(8)) for _ in range(count)]
    number = 8
    yield [], said[0].copy()
    for _ in range(turns):
        (which,) = chance.choices(range(count), often)
        if len(said[which]) > 200:
            # It has ended; another begins.
            said[which] = said[which][:8]
        new = list(range(number, number := number + chance.randrange(4, 24)))
        yield said[which].copy(), new
        said[which] += new


def measure_hits(directory: Path, capacity_blocks: int, count: int, turns: int) -> tuple[dict[str, float], float]:
    """Returns the share of blocks that are found of those that come again, by policy; and how many blocks the store has
    written for each that was written for the first time or had been lost."""
    identity = replace(_IDENTITY, block_bytes=4096)
    capacity = capacity_blocks * 4096
    exact, plain = OrderedDict[int, None](), OrderedDict[int, None]()
    hits, asked, missed = {"exact LRU": 0, "FIFO": 0, "the store": 0}, 0, 0
    buffers = [bytearray(4096) for _ in range(256)]
    with KVStore(directory / "hits", capacity, identity, StoreLimits(readers=1)) as store:
        for again, new in conversations(0, count, turns):
            asked += len(again)
            hits["exact LRU"] += sum(number in exact for number in again)
            hits["FIFO"] += sum(number in plain for number in again)
            store.read([number.to_bytes(32, "big") for number in again], buffers[: len(again)])
            select.select([store], [], [], _LONG_S)
            (ticket,) = store.poll()
            hits["the store"] += sum(ticket.found)
            missed += len(again) - sum(ticket.found) + len(new)
            for number in [*again, *new]:
                exact[number] = None
                exact.move_to_end(number)
                plain.setdefault(number)
                for held in (exact, plain):
                    if len(held) > capacity_blocks:
                        held.popitem(last=False)
            found = [*ticket.found, *[False] * len(new)]
            for number, there in zip([*again, *new], found, strict=True):
                if not there and not store.write(number.to_bytes(32, "big"), bytes(4096)):
                    raise RuntimeError(f"the store has not taken a block: {store.stats().counts}")
            if not store.flush(_LONG_S):
                raise RuntimeError("the disk has not taken a turn's blocks")
        written = store.stats().counts["written"]
    return {name: hit / asked for name, hit in hits.items()}, written / missed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="where to write; default: the temporary directory")
    parser.add_argument("--mib", type=int, default=256, help="what is written for each size of blocks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=1500, help="turns of conversations")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        place = Path(directory)
        for name, bytes_per_s in measure_checksums(1 << 20, chosen.rounds):
            print(f"checksum of 1 MiB by {name}: {bytes_per_s / 1e9:.1f} GB in a CPU second")
        for block_bytes in (512 << 10, 1 << 20, 2 << 20):
            write, read = measure_moves(place, block_bytes, (chosen.mib << 20) // block_bytes, chosen.rounds)
            for what, speed in (("written", write), ("read", read)):
                print(
                    f"blocks of {block_bytes >> 10:4} KiB {what:7}: {speed.bytes_per_s / 1e9:5.2f} GB/s,"
                    f" {1e6 * speed.cpu_s:4.0f} us of CPU each"
                )
            warm, cold, num_bytes = measure_start(place, block_bytes, chosen.rounds)
            per_gib = (1 << 30) / num_bytes
            print(
                f"  a start takes {1e3 * warm * per_gib:.1f} ms for each GiB, {1e3 * cold * per_gib:.1f} from the disk"
            )
        print(f"memory of a block in the index: {measure_memory(place, 100_000):.0f} bytes")
        for capacity in (1000, 2000, 4000):
            hits, writes = measure_hits(place / str(capacity), capacity, 40, chosen.turns)
            shares = ", ".join(f"{name} {100 * hit:.1f} %" for name, hit in hits.items())
            print(f"room for {capacity} blocks, found again: {shares}; {writes:.2f} writes for each block kept")


if __name__ == "__main__":
    main()
