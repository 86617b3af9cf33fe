"""The steps by which `octavo calibrate` learns how long any takes: decodes, chunks of prompts, both together, moves."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.worker.calibrate.timed_steps import (
    GROWTH,
    Clock,
    Row,
    Run,
    Sample,
    blocks_of,
    copies,
    longest_sequence,
    rows,
    sizes,
    swaps,
    timed,
)
from octavo.worker.runner import Runner

# Of a family of steps: how often each is timed, and in how many seconds all of them.
_ROUNDS = 5
BUDGET_S = 10.0
_MOVES_BUDGET_S = 2.0
# Each must be known at more than a few sizes, however slow the device.
_LEAST_SIZES = 3
_FIRST_CHUNK = 16
_MIXES = ((1, 16), (4, 64), (16, 64), (16, 256), (64, 256))


@dataclass(frozen=True, slots=True)
class Largest:
    """The most sequences and tokens of a step, and the sampling `temperature` of those that choose a token."""

    num_seqs: int
    num_tokens: int
    temperature: float = 0.0


def measured(
    runner: Runner,
    largest: Largest,
    tell: Callable[[str, list[Sample]], object] = lambda family, samples: None,
    clock: Clock = time.perf_counter,
    budget_s: float = BUDGET_S,
) -> dict[str, list[Sample]]:
    """Typical times of the steps of every family that there is room for, of which `tell` hears as they are done."""
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


def _decodes(runner: Runner, largest: Largest) -> Iterator[list[Run]]:
    """Growing batches, after short, middling and long contexts; and such that nobody samples, to tell the cost of that
    from a token's."""
    longest = longest_sequence(runner)
    contexts = sorted({min(longest - 1, context) for context in (runner.block_size, longest // 8, longest // 2)})
    for count in sizes(1, largest.num_seqs, growth=2):
        batches = [count * [Row(context, samples=True)] for context in contexts]
        batches += [count * [Row(contexts[0])]]
        yield [_run(runner, batch, largest) for batch in batches if _fits(runner, batch)]


def _chunks(runner: Runner, largest: Largest) -> Iterator[list[Run]]:
    """Growing chunks, each at the start of a prompt and after some context; the last of a prompt, or not."""
    longest = longest_sequence(runner)
    for num_tokens in sizes(min(_FIRST_CHUNK, longest), min(longest, largest.num_tokens), growth=2):
        contexts = sorted({0, min(longest - num_tokens, GROWTH * num_tokens)})
        yield [
            _run(runner, [Row(context, num_tokens, samples)], largest)
            for context in contexts
            for samples in (False, True)
        ]


def _mixed(runner: Runner, largest: Largest) -> Iterator[list[Run]]:
    """Chunks beside decodes, half of them the last of their prompts."""
    context = longest_sequence(runner) // GROWTH
    for index, (count, num_tokens) in enumerate(_MIXES):
        batch = [*(count * [Row(context, samples=True)]), Row(0, num_tokens, samples=index % 2 == 0)]
        if count < largest.num_seqs and count + num_tokens <= largest.num_tokens and _fits(runner, batch):
            yield [_run(runner, batch, largest)]


def _run(runner: Runner, batch: Sequence[Row], largest: Largest) -> Run:
    return rows(runner, list(batch), largest.temperature)


def _fits(runner: Runner, batch: Sequence[Row]) -> bool:
    longest = max(row.context + row.num_tokens for row in batch)
    return longest <= longest_sequence(runner) and sum(blocks_of(runner, row) for row in batch) <= runner.num_blocks
