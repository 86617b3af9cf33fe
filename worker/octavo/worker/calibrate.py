"""What steps cost on this worker, measured before it serves: a few chunks of a prompt, and a few moves of blocks.

By least squares without negative costs; the largest chunks and moves weigh most, for they are what is worth weighing.
Nothing of it stays but finite numbers in blocks that nobody owns.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np
import numpy.typing as npt

from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts, attended_pairs
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.runner import Runner
from octavo.worker.sequences import WorkerSequence, WorkItem

# Seconds that timed chunks may take, and timed moves; each is run once before, to warm up.
PREFILL_BUDGET_S = 0.25
SWAP_BUDGET_S = 0.05
_ROUNDS = 3
# Sizes are 1, 4, 16, ... blocks and 16, 64, ... tokens, these also after 4 times as many of context; two at least, for
# one alone does not tell what grows from what does not.
_FIRST_CHUNK = 16
# Well below what a step of a GPU computes at most, so that there is memory for it.
_LAST_CHUNK = 4096
_GROWTH = 4
_LEAST_SIZES = 2
# Moving more takes longer in proportion, and memory: what a CPU's swap space is not used for, it does not take.
_MOST_MOVED_BYTES = 32 << 20
_SEQUENCE_ID = 1

# Quantities whose proportion varies less than this are told apart by noise alone.
_SAME = 1e-6

Clock = Callable[[], float]
Numbers = npt.NDArray[np.float64]
Quantities = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step asked for, in the units of its costs, and how many seconds it took."""

    quantities: Quantities
    seconds: float


@dataclass(frozen=True, eq=False, slots=True)
class _Run:
    """A step to be timed."""

    quantities: Quantities
    execute: Callable[[], object]


def calibrate(runner: Runner, clock: Clock = time.perf_counter) -> StepCosts | None:
    """Times steps of a runner that has not served yet; None if it has no CPU blocks, for then nothing is to be weighed.
    Raises whatever the runner does."""
    if not runner.num_cpu_blocks:
        return None
    prefill = fit(_timed(_chunks(runner), PREFILL_BUDGET_S, clock))
    swap = fit(_timed(_moves(runner), SWAP_BUDGET_S, clock))
    return StepCosts(PrefillCosts(*prefill), SwapCosts(*swap))


def fit(samples: list[Sample]) -> list[float]:
    """The costs, none negative, that explain samples with the least sum of squares: of all sets of costs that may be
    above zero, the best whose solution is. Costs that the samples do not tell apart are not in a set together."""
    quantities = np.array([sample.quantities for sample in samples]).reshape(-1, 3)
    seconds = np.array([sample.seconds for sample in samples])
    # They are of very different sizes.
    scales = np.where(quantities.any(axis=0), quantities.max(axis=0, initial=0.0), 1.0)
    kept = (list(each) for size in (1, 2, 3) for each in combinations(range(3), size))
    solutions = [found for each in kept if (found := _solve(quantities / scales, seconds, each)) is not None]
    least: list[float] = (min(solutions, key=lambda found: found[0])[1] / scales if solutions else np.zeros(3)).tolist()
    return least


def _solve(quantities: Numbers, seconds: Numbers, kept: list[int]) -> tuple[float, Numbers] | None:
    """Least squares with only the costs `kept`: the sum of squares and the costs; None if they are not told apart, or
    not all are positive."""
    solution, _, rank, _ = np.linalg.lstsq(quantities[:, kept], seconds, rcond=_SAME)
    if rank < len(kept) or solution.min() < 0.0:
        return None
    costs = np.zeros(3)
    costs[kept] = solution
    return float(np.square(quantities @ costs - seconds).sum()), costs


# -- what is timed ----------------------------------------------------------------------------------------------------


def _chunks(runner: Runner) -> Iterator[list[_Run]]:
    """Growing chunks, each at the start of a prompt and after some context, as far as there is room."""
    longest = min(runner.model.max_model_len, runner.num_blocks // len(runner.kv_groups) * runner.block_size)
    for num_tokens in _sizes(_FIRST_CHUNK, min(longest, _LAST_CHUNK)):
        contexts = sorted({0, min(longest - num_tokens, _GROWTH * num_tokens)})
        yield [_chunk(runner, context, num_tokens) for context in contexts]


def _chunk(runner: Runner, context: int, num_tokens: int) -> _Run:
    """Of a sequence whose context counts as computed: keys and values cost as much whatever they are. It chooses no
    token, as most chunks of a long prompt do not."""
    length = context + num_tokens
    width = -(-length // runner.block_size)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(len(runner.kv_groups))]
    token_ids = [position % runner.model.vocab_size for position in range(length)]
    sequence = WorkerSequence(_SEQUENCE_ID, 0, SamplingParams(max_tokens=1), length, token_ids, context, tables)

    def run() -> None:
        runner.execute(BlockMoves(), [WorkItem(sequence, context, num_tokens, ())])
        runner.forget([_SEQUENCE_ID])

    windows = [group.window for group in runner.kv_groups]
    return _Run((1.0, float(num_tokens), attended_pairs(context, num_tokens, windows)), run)


def _moves(runner: Runner) -> Iterator[list[_Run]]:
    """Growing numbers of blocks, out and then in."""
    block_bytes = max(1, runner.block_size * runner.kv_bytes_per_token // len(runner.kv_groups))
    most = min(runner.num_blocks, runner.num_cpu_blocks, max(1, _MOST_MOVED_BYTES // block_bytes))
    for count in _sizes(1, most):
        moves = [BlockMove(block_id, block_id) for block_id in range(count)]
        swaps = BlockMoves(swap_out=moves), BlockMoves(swap_in=moves)
        yield [
            _Run((1.0, float(len(swap.swap_out)), float(len(swap.swap_in))), partial(runner.execute, swap, []))
            for swap in swaps
        ]


def _sizes(first: int, last: int) -> Iterator[int]:
    """Growing by a factor, up to and with the last, if there is room for any."""
    size = first
    while size < last:
        yield size
        size *= _GROWTH
    if last:
        yield last


# -- how long it takes ------------------------------------------------------------------------------------------------


def _timed(sizes: Iterable[list[_Run]], budget_s: float, clock: Clock) -> list[Sample]:
    """The least time of each run. A size that is expected to exceed the budget is not begun, and none is repeated once
    it is spent."""
    least: dict[_Run, float] = {}
    last_s = 0.0
    for index, runs in enumerate(sizes):
        if index >= _LEAST_SIZES and _GROWTH * last_s > budget_s:
            break
        for run in runs:
            run.execute()
            least[run] = _time(run, clock)
        last_s = sum(least[run] for run in runs)
        budget_s -= last_s
    for run in (_ROUNDS - 1) * list(least):
        if budget_s > 0.0:
            seconds = _time(run, clock)
            budget_s -= seconds
            least[run] = min(least[run], seconds)
    return [Sample(run.quantities, seconds) for run, seconds in least.items()]


def _time(run: _Run, clock: Clock) -> float:
    began = clock()
    run.execute()
    return clock() - began
