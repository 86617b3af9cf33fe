"""Steps of a runner that has not served yet, made up to be timed: rows of sequences whose context counts as computed,
for keys and values cost as much whatever they are; and moves of blocks that nobody owns."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from octavo.runtime.models.step_times import StepShape
from octavo.wire.costs import attended_pairs
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.runner import Runner
from octavo.worker.sequences import WorkerSequence, WorkItem

GROWTH = 4
# Moving more takes longer in proportion, and memory: what a CPU's swap space is not used for, it does not take.
_MOST_MOVED_BYTES = 32 << 20
_NO_MOVES = BlockMoves()

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: `num_tokens` after `context` others, at the end of which it may choose one."""

    context: int
    num_tokens: int = 1
    samples: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """A step to be timed."""

    shape: StepShape
    execute: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step asked for, and how many seconds it took."""

    shape: StepShape
    seconds: float


def sizes(first: int, last: int, growth: int = GROWTH) -> Iterator[int]:
    """Growing by a factor, up to and with the last, if there is room for any."""
    size = first
    while size < last:
        yield size
        size *= growth
    if last:
        yield last


# -- what is timed ----------------------------------------------------------------------------------------------------


def longest_sequence(runner: Runner) -> int:
    """Tokens of the longest that there is room for."""
    return min(runner.model.max_model_len, runner.num_blocks // len(runner.kv_groups) * runner.block_size)


def blocks_of(runner: Runner, row: Row) -> int:
    """Blocks of its sequence, in all KV groups."""
    return -(-(row.context + row.num_tokens) // runner.block_size) * len(runner.kv_groups)


def rows(runner: Runner, chosen: list[Row], temperature: float = 0.0) -> Run:
    """A step of these rows, each of a sequence of its own with blocks of its own as far as there are so many."""
    items, sequence_ids = _items(runner, chosen, temperature), range(1, len(chosen) + 1)

    def run() -> None:
        runner.execute(_NO_MOVES, items)
        runner.forget(sequence_ids)

    return Run(_shape(runner, chosen), run)


def swaps(runner: Runner) -> Iterator[list[Run]]:
    """Growing numbers of blocks, out and then in."""
    for count in sizes(1, min(runner.num_cpu_blocks, _most_moved(runner))):
        moves = [BlockMove(block_id, block_id) for block_id in range(count)]
        swap_out, swap_in = BlockMoves(swap_out=moves), BlockMoves(swap_in=moves)
        yield [
            Run(StepShape(blocks_out=count), partial(runner.execute, swap_out, [])),
            Run(StepShape(blocks_in=count), partial(runner.execute, swap_in, [])),
        ]


def copies(runner: Runner) -> Iterator[list[Run]]:
    """Growing numbers of blocks, within the device."""
    for count in sizes(1, _most_moved(runner) // 2):
        moves = BlockMoves(copy=[BlockMove(block_id, count + block_id) for block_id in range(count)])
        yield [Run(StepShape(copies=count), partial(runner.execute, moves, []))]


def _most_moved(runner: Runner) -> int:
    block_bytes = max(1, runner.block_size * runner.kv_bytes_per_token // len(runner.kv_groups))
    return min(runner.num_blocks, max(1, _MOST_MOVED_BYTES // block_bytes))


def _shape(runner: Runner, chosen: list[Row]) -> StepShape:
    windows = [group.window for group in runner.kv_groups]
    pairs = [(row.num_tokens == 1, attended_pairs(row.context, row.num_tokens, windows)) for row in chosen]
    return StepShape(
        num_tokens=sum(row.num_tokens for row in chosen),
        num_sampled=sum(row.samples for row in chosen),
        context_tokens=round(sum(attended for decodes, attended in pairs if decodes)),
        prefill_pairs=sum(attended for decodes, attended in pairs if not decodes),
    )


def _items(runner: Runner, chosen: list[Row], temperature: float) -> list[WorkItem]:
    sampling = SamplingParams(max_tokens=1, temperature=temperature)
    items, first_block = [], 0
    for sequence_id, row in enumerate(chosen, 1):
        count = blocks_of(runner, row)
        # Those of one sequence are always different.
        first_block = 0 if first_block + count > runner.num_blocks else first_block
        sequence = _sequence(runner, sequence_id, row, sampling, first_block)
        items.append(WorkItem(sequence, row.context, row.num_tokens, (sequence,) if row.samples else ()))
        first_block += count
    return items


def _sequence(runner: Runner, sequence_id: int, row: Row, sampling: SamplingParams, first_block: int) -> WorkerSequence:
    length, groups = row.context + row.num_tokens, len(runner.kv_groups)
    width = blocks_of(runner, row) // groups
    tables = [list(range(first_block + i * width, first_block + (i + 1) * width)) for i in range(groups)]
    token_ids = [(sequence_id + position) % runner.model.vocab_size for position in range(length)]
    return WorkerSequence(sequence_id, 0, sampling, length, token_ids, row.context, tables)


# -- how long it takes ------------------------------------------------------------------------------------------------


def timed(
    runs: Iterable[list[Run]],
    budget_s: float,
    clock: Clock,
    *,
    rounds: int = 3,
    least_sizes: int = 2,
    typical: Callable[[list[float]], float] = min,
) -> list[Sample]:
    """The typical time of each of `runs`, which come by size and are run once before, to warm up. After `least_sizes` a
    size that is expected to exceed the budget is not begun, and none is repeated once it is spent."""
    times: dict[Run, list[float]] = {}
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
    return [Sample(run.shape, typical(found)) for run, found in times.items()]


def _time(run: Run, clock: Clock) -> float:
    began = clock()
    run.execute()
    return clock() - began
