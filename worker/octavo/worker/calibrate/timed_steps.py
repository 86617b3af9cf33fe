"""Steps of a runner that has not served yet, made up to be timed.

They are rows of sequences whose context counts as computed, for keys and values cost as much whatever they are; and
moves of free blocks. `octavo calibrate` times decodes, chunks of prompts, both together, and moves.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from octavo.runtime.models.step_times import StepShape
from octavo.wire.costs import attended_pairs
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.runner import Runner, StepOutput
from octavo.worker.sequences import WorkerSequence, WorkItem

GROWTH = 4
# Moving more blocks takes longer in proportion, and more memory: a CPU's swap space takes none until it is used.
_MOST_MOVED_BYTES = 32 << 20
_NO_MOVES = BlockMoves()

Clock = Callable[[], float]


# For a family of steps: the repetitions of each, and the seconds for all of them.
_ROUNDS = 5
BUDGET_S = 10.0
_MOVES_BUDGET_S = 2.0
# Each family must be timed at more than a few sizes, however slow the device.
_LEAST_SIZES = 3
_FIRST_CHUNK = 16
_MIXES = ((1, 16), (4, 64), (16, 64), (16, 256), (64, 256))


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence's share of a step: `num_tokens` after `context` others, at the end of which it may choose one. The
    last of them may be a `draft`, of which each token chooses too; `proposed` tokens may be guessed to follow."""

    context: int
    num_tokens: int = 1
    samples: bool = False
    draft: tuple[int, ...] = ()
    proposed: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class TimedRun:
    """Holds a step to be timed."""

    shape: StepShape
    execute: Callable[[], StepOutput]


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Holds the size of a step, and the seconds it took."""

    shape: StepShape
    seconds: float


def sizes(first: int, last: int, growth: int = GROWTH) -> Iterator[int]:
    """Yields sizes that grow by a factor, up to and with the last, if there is room for any."""
    size = first
    while size < last:
        yield size
        size *= growth
    if last:
        yield last


def longest_sequence(runner: Runner) -> int:
    """Returns the tokens of the longest sequence that there is room for."""
    return min(runner.model.max_model_len, runner.num_blocks // len(runner.kv_groups) * runner.block_size)


def blocks_of(runner: Runner, row: StepRow) -> int:
    """Returns the blocks of a row's sequence, in all KV groups."""
    return -(-(row.context + row.num_tokens + row.proposed) // runner.block_size) * len(runner.kv_groups)


def rows(runner: Runner, chosen: list[StepRow], temperature: float = 0.0) -> TimedRun:
    """Makes a step of these rows, each of a sequence of its own, with blocks of its own as far as there are so many."""
    items, sequence_ids = _items(runner, chosen, temperature), range(1, len(chosen) + 1)

    def run() -> StepOutput:
        output = runner.execute(_NO_MOVES, items)
        runner.forget(sequence_ids)
        return output

    return TimedRun(_shape(runner, chosen), run)


def swaps(runner: Runner) -> Iterator[list[TimedRun]]:
    """Yields growing numbers of blocks, out and then in."""
    for count in sizes(1, min(runner.num_cpu_blocks, _most_moved(runner))):
        moves = [BlockMove(block_id, block_id) for block_id in range(count)]
        swap_out, swap_in = BlockMoves(swap_out=moves), BlockMoves(swap_in=moves)
        yield [
            TimedRun(StepShape(blocks_out=count), partial(runner.execute, swap_out, [])),
            TimedRun(StepShape(blocks_in=count), partial(runner.execute, swap_in, [])),
        ]


def copies(runner: Runner) -> Iterator[list[TimedRun]]:
    """Yields growing numbers of blocks, copied within the device."""
    for count in sizes(1, _most_moved(runner) // 2):
        moves = BlockMoves(copy=[BlockMove(block_id, count + block_id) for block_id in range(count)])
        yield [TimedRun(StepShape(copies=count), partial(runner.execute, moves, []))]


def _most_moved(runner: Runner) -> int:
    block_bytes = max(1, runner.block_size * runner.kv_bytes_per_token // len(runner.kv_groups))
    return min(runner.num_blocks, max(1, _MOST_MOVED_BYTES // block_bytes))


def _shape(runner: Runner, chosen: list[StepRow]) -> StepShape:
    windows = [group.window for group in runner.kv_groups]
    pairs = [(row.num_tokens == 1, attended_pairs(row.context, row.num_tokens, windows)) for row in chosen]
    return StepShape(
        num_tokens=sum(row.num_tokens for row in chosen),
        num_sampled=sum(row.samples + len(row.draft) for row in chosen),
        context_tokens=round(sum(attended for decodes, attended in pairs if decodes)),
        prefill_pairs=sum(attended for decodes, attended in pairs if not decodes),
    )


def _items(runner: Runner, chosen: list[StepRow], temperature: float) -> list[WorkItem]:
    sampling = SamplingParams(max_tokens=1, temperature=temperature)
    items, first_block = [], 0
    for sequence_id, row in enumerate(chosen, 1):
        count = blocks_of(runner, row)
        # The blocks of one sequence are always different.
        first_block = 0 if first_block + count > runner.num_blocks else first_block
        sequence = _sequence(runner, sequence_id, row, sampling, first_block)
        choosers = (sequence,) if row.samples else ()
        items.append(WorkItem(sequence, row.context, row.num_tokens, choosers, list(row.draft), row.proposed))
        first_block += count
    return items


def _sequence(
    runner: Runner, sequence_id: int, row: StepRow, sampling: SamplingParams, first_block: int
) -> WorkerSequence:
    length, groups = row.context + row.num_tokens, len(runner.kv_groups)
    width = blocks_of(runner, row) // groups
    tables = [list(range(first_block + i * width, first_block + (i + 1) * width)) for i in range(groups)]
    known = range(length - len(row.draft))
    token_ids = [(sequence_id + position) % runner.model.vocab_size for position in known]
    return WorkerSequence(sequence_id, 0, sampling, length, token_ids, row.context, tables)


def timed(
    runs: Iterable[list[TimedRun]],
    budget_s: float,
    clock: Clock,
    *,
    rounds: int = 3,
    least_sizes: int = 2,
    typical: Callable[[list[float]], float] = min,
) -> list[TimedStep]:
    """Returns the typical time of each of `runs`, which come by size and are run once before, to warm up.

    After `least_sizes`, a size that is expected to exceed `budget_s` is not begun, and none is repeated once the budget
    is spent.
    """
    times: dict[TimedRun, list[float]] = {}
    last_s = 0.0
    for index, size in enumerate(runs):
        if index >= least_sizes and GROWTH * last_s > budget_s:
            break
        for run in size:
            run.execute()
            times[run] = [_time(run, clock)]
        last_s = sum(times[run][0] for run in size)
        budget_s -= last_s
    for run in (rounds - 1) * list(times):
        if budget_s > 0.0:
            seconds = _time(run, clock)
            budget_s -= seconds
            times[run].append(seconds)
    return [TimedStep(run.shape, typical(found)) for run, found in times.items()]


def _time(run: TimedRun, clock: Clock) -> float:
    began = clock()
    run.execute()
    return clock() - began


@dataclass(frozen=True, slots=True)
class Largest:
    """Holds the most sequences and tokens of a step, and the sampling `temperature` of those that choose a token."""

    num_seqs: int
    num_tokens: int
    temperature: float = 0.0


def measured(
    runner: Runner,
    largest: Largest,
    tell: Callable[[str, list[TimedStep]], object] = lambda family, samples: None,
    clock: Clock = time.perf_counter,
    budget_s: float = BUDGET_S,
) -> dict[str, list[TimedStep]]:
    """Returns the typical times of the steps of every family that there is room for, and calls `tell` with each
    family."""
    families = {
        "decode": (_decodes(runner, largest), budget_s),
        "prefill": (_chunks(runner, largest), budget_s),
        "mixed": (_mixed(runner, largest), budget_s),
        "swap": (swaps(runner), _MOVES_BUDGET_S),
        "copy": (copies(runner), _MOVES_BUDGET_S),
    }
    found = {}
    for family, (runs, family_budget_s) in families.items():
        found[family] = timed(
            runs, family_budget_s, clock, rounds=_ROUNDS, least_sizes=_LEAST_SIZES, typical=statistics.median
        )
        tell(family, found[family])
    return {family: samples for family, samples in found.items() if samples}


def _decodes(runner: Runner, largest: Largest) -> Iterator[list[TimedRun]]:
    """Yields growing batches, after short, medium and long contexts, some of them without sampling to separate its
    cost."""
    longest = longest_sequence(runner)
    contexts = sorted({min(longest - 1, context) for context in (runner.block_size, longest // 8, longest // 2)})
    for count in sizes(1, largest.num_seqs, growth=2):
        batches = [count * [StepRow(context, samples=True)] for context in contexts]
        batches += [count * [StepRow(contexts[0])]]
        yield [_run(runner, batch, largest) for batch in batches if _fits(runner, batch)]


def _chunks(runner: Runner, largest: Largest) -> Iterator[list[TimedRun]]:
    """Yields growing chunks, each at the start of a prompt and after some context; the last of a prompt, or not."""
    longest = longest_sequence(runner)
    for num_tokens in sizes(min(_FIRST_CHUNK, longest), min(longest, largest.num_tokens), growth=2):
        contexts = sorted({0, min(longest - num_tokens, GROWTH * num_tokens)})
        yield [
            _run(runner, [StepRow(context, num_tokens, samples)], largest)
            for context in contexts
            for samples in (False, True)
        ]


def _mixed(runner: Runner, largest: Largest) -> Iterator[list[TimedRun]]:
    """Yields chunks beside decodes, half of them the last of their prompts."""
    context = longest_sequence(runner) // GROWTH
    for index, (count, num_tokens) in enumerate(_MIXES):
        batch = [*(count * [StepRow(context, samples=True)]), StepRow(0, num_tokens, samples=index % 2 == 0)]
        if count < largest.num_seqs and count + num_tokens <= largest.num_tokens and _fits(runner, batch):
            yield [_run(runner, batch, largest)]


def _run(runner: Runner, batch: Sequence[StepRow], largest: Largest) -> TimedRun:
    return rows(runner, list(batch), largest.temperature)


def _fits(runner: Runner, batch: Sequence[StepRow]) -> bool:
    longest = max(row.context + row.num_tokens for row in batch)
    return longest <= longest_sequence(runner) and sum(blocks_of(runner, row) for row in batch) <= runner.num_blocks
