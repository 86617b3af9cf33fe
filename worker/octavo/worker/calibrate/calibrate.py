"""The costs that the scheduler weighs, measured before the worker serves: a few chunks of a prompt, a few moves of
blocks, and a few drafts.

Those of chunks and moves are fitted by least squares without negative costs; the largest weigh most, for they are the
ones worth weighing. Measuring leaves only finite numbers in free blocks.
"""

import time
from collections.abc import Callable, Iterator
from itertools import accumulate

import numpy as np

from octavo.runtime.models.step_times import StepShape
from octavo.wire.costs import PrefillCosts, RowCost, StepCosts, SwapCosts
from octavo.worker.calibrate.fit import least_costs
from octavo.worker.calibrate.timed_steps import (
    GROWTH,
    Clock,
    StepRow,
    TimedRun,
    TimedStep,
    blocks_of,
    longest_sequence,
    rows,
    sizes,
    swaps,
    timed,
)
from octavo.worker.runner import Runner

# Seconds that timed chunks may take, timed moves, and timed drafts; each is run once before, to warm up.
PREFILL_BUDGET_S = 0.25
SWAP_BUDGET_S = 0.05
ROWS_BUDGET_S = 0.25
# Sizes are 1, 4, 16, ... blocks and 16, 64, ... tokens, these also after 4 times as many of context. There are two
# sizes at least, for one alone does not tell a constant cost from a growing one.
_FIRST_CHUNK = 16
# Well below what a step of a GPU computes at most, so that there is memory for it.
_LAST_CHUNK = 4096
# Rows of a step that all choose. Those of the first two groups are timed on any device, the others where it is fast.
_ROWS = ((1, 4), (16,), (2, 8, 32, 64))
# Sequences of a step with proposals, the guesses of each, and how often these are timed.
_PROPOSING = (1, 4, 16)
_GUESSES = 4
_PROPOSING_ROUNDS = 3


def calibrate(runner: Runner, clock: Clock = time.perf_counter) -> StepCosts:
    """Times steps of a runner that has not served yet. Moves cost nothing where there are no CPU blocks, and there are
    no costs of rows where the runner checks no drafts.

    Raises whatever the runner raises.
    """
    prefill = _fitted(timed(_chunks(runner), PREFILL_BUDGET_S, clock), _of_prefill)
    swap = _fitted(timed(swaps(runner), SWAP_BUDGET_S, clock), _of_swap)
    return StepCosts(PrefillCosts(*prefill), SwapCosts(*swap), _row_costs(runner, clock), _proposal_costs(runner))


def _fitted(samples: list[TimedStep], quantities: Callable[[StepShape], list[float]]) -> list[float]:
    asked = np.array([quantities(sample.shape) for sample in samples], dtype=np.float64).reshape(-1, 3)
    costs: list[float] = least_costs(asked, np.array([sample.seconds for sample in samples])).tolist()
    return costs


def _of_prefill(shape: StepShape) -> list[float]:
    return [1.0, shape.num_tokens, shape.context_tokens + shape.prefill_pairs]


def _of_swap(shape: StepShape) -> list[float]:
    return [1.0, shape.blocks_out, shape.blocks_in]


def _row_costs(runner: Runner, clock: Clock) -> list[RowCost]:
    """Times one sequence with drafts of some lengths; with more rows no step takes less time."""
    if not _checks_drafts(runner):
        return []
    samples = timed(_drafts(runner), ROWS_BUDGET_S, clock)
    found = sorted((sample.shape.num_sampled, sample.seconds) for sample in samples)
    seconds = accumulate((each for _, each in found), max)
    return [RowCost(count, each) for (count, _), each in zip(found, seconds, strict=True)]


def _proposal_costs(runner: Runner) -> list[RowCost]:
    """Returns what the runner says that a guess of its draft model takes, of so many sequences together; the least of
    some rounds."""
    if runner.draft_model is None or longest_sequence(runner) <= _GUESSES:
        return []
    found: list[RowCost] = []
    for count in _PROPOSING:
        row = StepRow(0, samples=True, proposed=_GUESSES)
        if count * blocks_of(runner, row) > runner.num_blocks:
            break
        run = rows(runner, count * [row])
        least = min(run.execute().times.propose_us for _ in range(_PROPOSING_ROUNDS))
        found.append(RowCost(count, max(1, least) / 1e6 / _GUESSES))
    return found


def _checks_drafts(runner: Runner) -> bool:
    """Tells whether the runner checks drafts, as it need not: whether one that guesses right brings a token."""
    if longest_sequence(runner) < 2:
        return False
    guess = tuple(each.token_id for each in rows(runner, [StepRow(0, samples=True)]).execute().sampled)
    return bool(guess) and bool(rows(runner, [StepRow(0, 2, samples=True, draft=guess)]).execute().further)


def _drafts(runner: Runner) -> Iterator[list[TimedRun]]:
    """Yields drafts as far as there is room, after one token: what a context costs comes on top, draft or not."""
    longest, vocab_size = longest_sequence(runner), runner.model.vocab_size
    for group in _ROWS:
        drafts = [tuple(token % vocab_size for token in range(count - 1)) for count in group if count <= longest]
        yield [rows(runner, [StepRow(0, 1 + len(draft), samples=True, draft=draft)]) for draft in drafts]


def _chunks(runner: Runner) -> Iterator[list[TimedRun]]:
    """Yields growing chunks, each at the start of a prompt and after some context, as far as there is room.

    They choose no token, as most chunks of a long prompt do not.
    """
    longest = longest_sequence(runner)
    for num_tokens in sizes(_FIRST_CHUNK, min(longest, _LAST_CHUNK)):
        contexts = sorted({0, min(longest - num_tokens, GROWTH * num_tokens)})
        yield [rows(runner, [StepRow(context, num_tokens)]) for context in contexts]
