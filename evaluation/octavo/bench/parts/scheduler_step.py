"""Measures what the scheduler's core takes per step, per admission and per block: `make bench-scheduler`.

All times are CPU time of the one thread there is, so that a busy machine disturbs little; garbage is collected as in
production. A step is the core's `schedule()` and its `handle()` of one result, two steps in flight, prefix cache on.
Making the result is not part of it, nor are the messages' bytes: the time of encoding plan and deltas and decoding the
result stands apart, as `wire`.
"""

import argparse
import cProfile
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType
from typing import ParamSpec, TypeVar

from octavo.bench.parts.scheduler_alone import SchedulerAlone, make_request, the_plan
from octavo.bench.table import keep, table
from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import SendToFrontend, SendToReplica
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.scheduler.kv.prefix_cache import block_hashes
from octavo.wire.codec import decode_from_worker, encode
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import KVDisk

P = ParamSpec("P")
T = TypeVar("T")


def timed(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Calls `function`, and returns its result and its CPU time in microseconds."""
    began = time.thread_time_ns()
    returned = function(*args, **kwargs)
    return returned, (time.thread_time_ns() - began) / 1000


class Profiler(cProfile.Profile):
    """Profiles the CPU time of the calls that it runs (`runcall`)."""

    def __init__(self) -> None:
        super().__init__(time.thread_time)

    def hottest(self, count: int) -> list[tuple[str, float]]:
        """Returns the `count` functions in which most time is spent, callees aside, each with its share."""
        entries = sorted(self.getstats(), key=lambda entry: -entry.inlinetime)
        total = sum(entry.inlinetime for entry in entries)
        return [(_name(entry.code), entry.inlinetime / total) for entry in entries[:count]]


def _name(code: CodeType | str) -> str:
    return code if isinstance(code, str) else f"{Path(code.co_filename).stem}.{code.co_qualname}"


_BLOCK_SIZE = 16
_NUM_BLOCKS = 256


@dataclass(frozen=True)
class BlockCosts:
    """Holds medians in nanoseconds per block: hashing its tokens; giving it to a sequence, as a new one (`allocate`) or
    found in the prefix cache (`share`); offering it to the cache (`index`); looking it up there; and taking it back."""

    hash: float
    allocate: float
    index: float
    look_up: float
    share: float
    free: float


def block_costs(repeat: int = 200) -> BlockCosts:
    """Takes prompts of 256 full blocks and one token, one after the other, through a pool of 16 times as many
    blocks."""
    kv = KVCacheManager(16 * _NUM_BLOCKS, _BLOCK_SIZE)
    costs: defaultdict[str, list[float]] = defaultdict(list)
    for index in range(repeat):
        for name, microseconds in _life(kv, index):
            costs[name].append(1000 * microseconds / _NUM_BLOCKS)
    return BlockCosts(**{name: statistics.median(values) for name, values in costs.items()})


def _life(kv: KVCacheManager, index: int) -> list[tuple[str, float]]:
    """A prompt is computed and goes; another one like it comes, and finds all of its full blocks."""
    first_group, twin_group = _group(index), _group(index)
    (first,), (twin,) = first_group.sequences, twin_group.sequences
    block_hashes(twin, _BLOCK_SIZE)
    costs = [
        ("hash", timed(block_hashes, first, _BLOCK_SIZE)[1]),
        ("allocate", timed(kv.allocate, first_group, index)[1]),
    ]
    first.placement.num_computed = first.num_known
    costs.append(("index", timed(kv.index, first, index)[1]))
    kv.step_answered(index, valid=True)
    costs.append(("free", timed(kv.free, first)[1]))
    uncomputed, look_up = timed(kv.num_uncomputed, twin_group)
    assert uncomputed == 1, f"{uncomputed} tokens are not found"
    costs += [("look_up", look_up), ("share", timed(kv.allocate, twin_group, index)[1])]
    kv.free(twin)
    return costs


def _group(index: int) -> RequestGroup:
    tokens = list(range(index, index + _NUM_BLOCKS * _BLOCK_SIZE + 1))
    request = make_request("r", tokens, SamplingParams(max_tokens=1))
    return RequestGroup(request, 0.0, (0.0, index), frontend_id=1)


_LONG_PROMPT = 4096


@dataclass(frozen=True)
class DecodeCost:
    """Holds the cost of a step in which all of `sequences` decode: medians in microseconds, and the 99th percentile of
    `step`.

    `growth` is the cost per sequence over that of the first case; 1 is linear.
    """

    sequences: int
    schedule: float
    handle: float
    step: float
    step_p99: float
    per_sequence: float
    growth: float
    steps_per_s: float
    wire: float
    plan_bytes: float


def decode_cost(num_sequences: int, num_steps: int) -> DecodeCost:
    """Measures `num_steps` steps; `growth` is 1."""
    measured = list(_timed_steps(decoding(num_sequences, num_steps), num_steps))
    schedule, handle, wire, plan_bytes = (statistics.median(column) for column in zip(*measured, strict=True))
    steps = [each[0] + each[1] for each in measured]
    return DecodeCost(
        sequences=num_sequences,
        schedule=schedule,
        handle=handle,
        step=statistics.median(steps),
        step_p99=statistics.quantiles(steps, n=100)[98],
        per_sequence=statistics.median(steps) / num_sequences,
        growth=1.0,
        steps_per_s=1e6 / statistics.fmean(steps),
        wire=wire,
        plan_bytes=plan_bytes,
    )


def decoding(num_sequences: int, num_steps: int, kv_disk: KVDisk | None = None) -> SchedulerAlone:
    """Makes a scheduler with one step outstanding whose sequences are all past their prompts and decode for `num_steps`
    more; of a worker with CPU blocks, and a disk if one is given."""
    longest, max_tokens = 4 * _BLOCK_SIZE, num_steps + 4
    config = SchedulerConfig(
        max_num_seqs=num_sequences, max_num_batched_tokens=longest * num_sequences, max_waiting=num_sequences
    )
    num_blocks = num_sequences * (2 + (longest + max_tokens) // _BLOCK_SIZE)
    alone = SchedulerAlone(
        config, num_blocks=num_blocks, block_size=_BLOCK_SIZE, num_cpu_blocks=num_blocks, kv_disk=kv_disk
    )
    for index in range(num_sequences):
        prompt = alone.draw_tokens(longest - index % _BLOCK_SIZE)
        alone.submit(make_request(str(index), prompt, SamplingParams(max_tokens=max_tokens)))
    alone.find_nothing_on_disk()
    alone.schedule()
    alone.accept(alone.next_result())
    return alone


def _timed_steps(alone: SchedulerAlone, num_steps: int) -> Iterator[tuple[float, float, float, int]]:
    """Yields the microseconds of `schedule`, `handle` and the wire, and the plan's bytes."""
    for _ in range(num_steps):
        planned, schedule = timed(alone.schedule)
        result = alone.next_result()
        frame = encode(result)
        effects, handle = timed(alone.accept, result)
        plan = the_plan(planned)
        assert len(plan.work) == len(result.sampled) == alone.replica.num_running_seqs, "not all sequences decode"
        messages = [e.message for e in (*planned, *effects) if isinstance(e, SendToFrontend | SendToReplica)]
        wire = timed(decode_from_worker, frame)[1] + sum(timed(encode, message)[1] for message in messages)
        yield schedule, handle, wire, len(encode(plan))


@dataclass(frozen=True)
class DiskCost:
    """Holds what a step of so many sequences takes of a worker without a disk, in microseconds, and the ratios to that
    with a disk and with a mirror on it: means, because what is stored comes in some steps only."""

    sequences: int
    without: float
    disk_ratio: float
    mirror_ratio: float


def disk_cost(num_sequences: int = 256, num_steps: int = 600) -> DiskCost:
    """Measures three schedulers, step by step in turns."""
    disks = (None, KVDisk(), KVDisk(mirror=True))
    runs = [_timed_steps(decoding(num_sequences, num_steps, disk), num_steps) for disk in disks]
    taken = [[schedule + handle for schedule, handle, _, _ in steps] for steps in zip(*runs, strict=True)]
    # The slowest of fifty are of other things: garbage, and whoever else has the machine.
    kept = len(taken) - len(taken) // 50
    without, disk, mirror = (statistics.fmean(sorted(column)[:kept]) for column in zip(*taken, strict=True))
    return DiskCost(num_sequences, without, disk / without, mirror / without)


@dataclass(frozen=True)
class AdmissionCost:
    """Holds medians in microseconds for submitting a prompt of 4,096 tokens and planning the first step with it."""

    cold: float
    warm: float


def admission_cost(repeat: int = 50) -> AdmissionCost:
    """Measures admissions by an otherwise idle replica. Every prompt comes once as a new one (cold), and once more when
    all but its last block is found in the prefix cache (warm)."""
    alone = SchedulerAlone(SchedulerConfig(), num_blocks=8 * _LONG_PROMPT // _BLOCK_SIZE, block_size=_BLOCK_SIZE)
    costs = []
    for index in range(repeat):
        prompt = alone.draw_tokens(_LONG_PROMPT)
        costs.append((_admit(alone, f"cold {index}", prompt, 0), _admit(alone, f"warm {index}", prompt, 4080)))
    cold, warm = (statistics.median(column) for column in zip(*costs, strict=True))
    return AdmissionCost(cold, warm)


def _admit(alone: SchedulerAlone, request_id: str, prompt: list[int], expected_hit: int) -> float:
    _, submission = timed(alone.submit, make_request(request_id, prompt, SamplingParams(max_tokens=1)))
    _, planning = timed(alone.schedule)
    (group,) = alone.core.groups
    assert group.cached_prompt_tokens == expected_hit, f"{group.cached_prompt_tokens} tokens were found computed"
    for _ in alone.run():
        pass
    return submission + planning


def profile(num_sequences: int = 256, num_steps: int = 300) -> list[tuple[str, float]]:
    """Returns the five functions in which most of a step of that many sequences is spent, with their shares."""
    alone, profiler = decoding(num_sequences, num_steps), Profiler()
    for _ in range(num_steps):
        profiler.runcall(alone.schedule)
        profiler.runcall(alone.accept, alone.next_result())
    return profiler.hottest(5)


@dataclass(frozen=True)
class StepReport:
    """Holds all that is measured."""

    decode: list[DecodeCost]
    disk: DiskCost
    admission: AdmissionCost
    blocks: BlockCosts
    profile: list[tuple[str, float]]

    def to_text(self) -> str:
        heads = ("sequences", "schedule us", "handle us", "step us", "p99 us", "us/sequence", "growth", "steps/s",
                 "wire us", "plan bytes")  # fmt: skip
        rows = [
            (str(c.sequences), *(f"{us:.0f}" for us in (c.schedule, c.handle, c.step, c.step_p99)),
             f"{c.per_sequence:.2f}", f"{c.growth:.2f}", f"{c.steps_per_s:.0f}", f"{c.wire:.0f}", f"{c.plan_bytes:.0f}")
            for c in self.decode
        ]  # fmt: skip
        blocks = "  ".join(f"{name} {nanoseconds:.0f}" for name, nanoseconds in asdict(self.blocks).items())
        lines = [
            *table([heads, *rows]),
            f"step of {self.disk.sequences}: {self.disk.without:.0f} us without a disk; with one"
            f" {self.disk.disk_ratio:.3f} of that, with a mirror {self.disk.mirror_ratio:.3f}",
            f"admission of {_LONG_PROMPT} tokens: cold {self.admission.cold:.0f} us, warm {self.admission.warm:.0f} us",
            f"ns per block: {blocks}",
            "most of a step of 256, in the profiler:",
            *(f"  {share:6.1%}  {name}" for name, share in self.profile),
        ]
        return "\n".join(lines)


def measure(sizes: list[int], num_steps: int) -> StepReport:
    """Measures all cases. Larger ones take fewer steps, but never below 200."""
    decode = [decode_cost(size, max(200, min(num_steps, (1 << 19) // size))) for size in sizes]
    first = decode[0].per_sequence
    decode = [replace(cost, growth=cost.per_sequence / first) for cost in decode]
    return StepReport(decode, disk_cost(), admission_cost(), block_costs(), profile())


def main() -> int:
    """Prints a table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="octavo.bench.parts.scheduler_step")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=1000, help="steps per case, at most")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    collect_seldom()
    report = measure(options.sequences, options.steps)
    print(report.to_text())
    keep(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
