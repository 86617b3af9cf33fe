"""Measures what KV events cost the scheduler: `python -m octavo.bench.parts.kv_events_cost`.

Two cores serve the same requests side by side, step by step, and one of them publishes what its replica holds, as often
as it does where a step takes ten milliseconds. A step is the core's `schedule()` and its `handle()` of one result, in
CPU time of one thread; making the result is not part of it, nor are the messages of workers and frontends. The blocks
do for a little more than what runs, so that as many are removed as are stored. A subscriber is connected, and does not
read.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from octavo.bench.parts.scheduler_alone import SchedulerAlone, make_request
from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.runtime.transport.sockets import connect_stranger
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.server.kv_events import KVEventsConfig, KVEventStream, kv_events
from octavo.wire.sampling import SamplingParams

_BLOCK_SIZE = 16
_STEP_S = 0.01
_STEPS_OF_A_BATCH = round(KVEventsConfig().kv_events_interval_s / _STEP_S)


@dataclass(frozen=True)
class Load:
    """Describes what is served: so many sequences at once, each of a prompt of which a part is everybody's, and an
    answer; a step computes at most `budget` tokens."""

    sequences: int
    prompt: int
    shared: int
    answer: int
    budget: int

    @property
    def num_blocks(self) -> int:
        """Counts the blocks of a replica that keeps some for those who come again."""
        return self.sequences * (self.prompt + self.answer) * 5 // (4 * _BLOCK_SIZE)


# As chats on a CPU, and as a GPU's steps; the third is all prefill, where every step fills many blocks.
LOADS = (
    Load(sequences=16, prompt=512, shared=256, answer=128, budget=512),
    Load(sequences=256, prompt=512, shared=256, answer=128, budget=8192),
    Load(sequences=64, prompt=2048, shared=0, answer=4, budget=8192),
)


@dataclass(frozen=True)
class EventCost:
    """Holds the CPU time of a step without events and with them, in microseconds, and how many blocks a step tells
    of."""

    off_us: float
    on_us: float
    blocks: float

    @property
    def share(self) -> float:
        """Returns what the events add, as a share of a step."""
        return self.on_us / self.off_us - 1.0


class _Side:
    """One of the two, with the time that it has taken."""

    def __init__(self, load: Load, stream: KVEventStream | None, alone: SchedulerAlone) -> None:
        self.seconds = 0.0
        self._load = load
        self._alone = alone
        self._stream = stream
        self._num_steps = 0
        self._random = random.Random(1)
        self._shared = self._random.choices(range(1 << 16), k=load.shared)
        self._num_requests = 0

    def step(self) -> None:
        """Plans and books a step, after new requests have come in place of those that have ended."""
        self._num_steps += 1
        alone, load = self._alone, self._load
        while len(alone.core.groups) < load.sequences:
            self._num_requests += 1
            prompt = self._shared + self._random.choices(range(1 << 16), k=load.prompt - load.shared)
            sampling = SamplingParams(max_tokens=load.answer)
            alone.submit(make_request(f"r{self._num_requests}", prompt, sampling))
        for _ in range(alone.core.config.max_steps_in_flight - len(alone.replica.outstanding)):
            self._timed(alone.schedule)
        result = alone.next_result()
        self._timed(lambda: alone.accept(result))

    def _timed(self, turn: Callable[[], object]) -> None:
        began = time.thread_time()
        turn()
        if self._stream is not None and self._num_steps % _STEPS_OF_A_BATCH == 0:
            self._stream.publish()
        self.seconds += time.thread_time() - began


def measure(load: Load, *, steps: int) -> EventCost:
    """Measures the cost under a load, after as many steps that are not counted as fill all blocks."""
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{Path(directory) / 'events.sock'}"
        with (
            kv_events(KVEventsConfig(kv_events_endpoint=endpoint, kv_events_interval_s=0.0)) as published,
            zmq.Context() as context,
            connect_stranger(context, zmq.SUB, endpoint) as subscriber,
        ):
            subscriber.subscribe(b"")
            config = SchedulerConfig(max_num_batched_tokens=load.budget)
            off, on = (
                _Side(load, stream, SchedulerAlone(config, num_blocks=load.num_blocks, census=census))
                for stream, census in ((None, None), (published.stream, published.census))
            )
            assert published.stream
            for index in range(2 * steps):
                if index == steps:
                    off.seconds = on.seconds = 0.0
                    told = published.stream.num_blocks_told
                # Who comes first finds colder caches.
                for side in (off, on) if index % 2 else (on, off):
                    side.step()
            told = published.stream.num_blocks_told - told
    return EventCost(1e6 * off.seconds / steps, 1e6 * on.seconds / steps, told / steps)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps that are counted")
    chosen = parser.parse_args(arguments)
    collect_seldom()
    for load in LOADS:
        cost = measure(load, steps=chosen.steps)
        print(
            f"{load.sequences:>4} sequences, {load.prompt}+{load.answer} tokens: {cost.off_us:8.1f} us a step,"
            f" {cost.on_us:8.1f} us with events of {cost.blocks:.1f} blocks: {100 * cost.share:+.1f} %"
        )


if __name__ == "__main__":
    main()
