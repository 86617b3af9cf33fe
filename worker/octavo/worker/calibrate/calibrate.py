"""The costs that the scheduler weighs, measured before the worker serves: a few chunks of a prompt, a few moves of
blocks.

They are fitted by least squares without negative costs; the largest chunks and moves weigh most, for they are the ones
worth weighing. Measuring leaves only finite numbers in free blocks.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np

from octavo.runtime.models.step_times import StepShape
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts
from octavo.worker.calibrate.fit import least_costs
from octavo.worker.calibrate.timed_steps import (
    GROWTH,
    Clock,
    StepRow,
    TimedRun,
    TimedStep,
    longest_sequence,
    rows,
    sizes,
    swaps,
    timed,
)
from octavo.worker.runner import Runner

# Seconds that timed chunks may take, and timed moves; each is run once before, to warm up.
PREFILL_BUDGET_S = 0.25
SWAP_BUDGET_S = 0.05
# Sizes are 1, 4, 16, ... blocks and 16, 64, ... tokens, these also after 4 times as many of context. There are two
# sizes at least, for one alone does not tell a constant cost from a growing one.
_FIRST_CHUNK = 16
# Well below what a step of a GPU computes at most, so that there is memory for it.
_LAST_CHUNK = 4096


def calibrate(runner: Runner, clock: Clock = time.perf_counter) -> StepCosts | None:
    """Times steps of a runner that has not served yet. Returns None if it has no CPU blocks: then there is nothing to
    weigh.

    Raises whatever the runner raises.
    """
    if not runner.num_cpu_blocks:
        return None
    prefill = _fitted(timed(_chunks(runner), PREFILL_BUDGET_S, clock), _of_prefill)
    swap = _fitted(timed(swaps(runner), SWAP_BUDGET_S, clock), _of_swap)
    return StepCosts(PrefillCosts(*prefill), SwapCosts(*swap))


def _fitted(samples: list[TimedStep], quantities: Callable[[StepShape], list[float]]) -> list[float]:
    asked = np.array([quantities(sample.shape) for sample in samples], dtype=np.float64).reshape(-1, 3)
    costs: list[float] = least_costs(asked, np.array([sample.seconds for sample in samples])).tolist()
    return costs


def _of_prefill(shape: StepShape) -> list[float]:
    return [1.0, shape.num_tokens, shape.context_tokens + shape.prefill_pairs]


def _of_swap(shape: StepShape) -> list[float]:
    return [1.0, shape.blocks_out, shape.blocks_in]


def _chunks(runner: Runner) -> Iterator[list[TimedRun]]:
    """Yields growing chunks, each at the start of a prompt and after some context, as far as there is room.

    They choose no token, as most chunks of a long prompt do not.
    """
    longest = longest_sequence(runner)
    for num_tokens in sizes(_FIRST_CHUNK, min(longest, _LAST_CHUNK)):
        contexts = sorted({0, min(longest - num_tokens, GROWTH * num_tokens)})
        yield [rows(runner, [StepRow(context, num_tokens)]) for context in contexts]
