"""Counts how much KV memory paging wastes and sharing saves, beside the paper's figures: `make memory-figures`.

From lengths alone: the production scheduler with a replica that computes nothing. The lengths are drawn from lognormal
distributions with the means that the paper gives for its traces (Fig. 11); each output ends after the length drawn.
The pool is that of the paper's OPT-13B (Table 1: 15.7K slots), all requests wait from the start, and whatever a figure
averages is summed over all steps.
"""

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import msgspec

from octavo.bench.parts.scheduler_alone import SchedulerAlone, make_request
from octavo.bench.table import line
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams

BLOCK_SIZE = 16
NUM_BLOCKS = 15_700 // BLOCK_SIZE
_COUNT = 2000
_MIN_TOKENS, _MAX_PROMPT_TOKENS, _MAX_TOKENS = 4, 1024, 2048


@dataclass(frozen=True)
class LengthMoments:
    """Describes a distribution of prompt and output lengths, in tokens: lognormal, by mean and sigma."""

    name: str
    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float

    def draw(self, count: int, seed: int = 0) -> list[tuple[int, int]]:
        """Draws pairs of lengths. Pairs out of bounds are drawn again: 4 to 1,024 prompt tokens, 4 or more of output,
        2,048 together."""
        rng, pairs = random.Random(seed), list[tuple[int, int]]()
        while len(pairs) < count:
            prompt = _lognormal(rng, self.prompt_mean, self.prompt_sigma)
            output = _lognormal(rng, self.output_mean, self.output_sigma)
            if min(prompt, output) >= _MIN_TOKENS and prompt <= _MAX_PROMPT_TOKENS and prompt + output <= _MAX_TOKENS:
                pairs.append((prompt, output))
        return pairs


def _lognormal(rng: random.Random, mean: float, sigma: float) -> int:
    return round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))


SHAREGPT = LengthMoments("ShareGPT", 161.31, 1.12, 337.99, 1.02)
ALPACA = LengthMoments("Alpaca", 19.31, 0.72, 58.45, 0.88)


def kv_waste(lengths: list[tuple[int, int]]) -> float:
    """Returns the share of reserved slots that hold no token, one sequence per request."""
    reserved = filled = 0
    for alone in _steps(lengths, SamplingParams(max_tokens=1)):
        kv = alone.replica.kv
        reserved += (kv.num_blocks - kv.num_free) * BLOCK_SIZE
        filled += sum(sequence.placement.num_computed for group in alone.replica.running for sequence in group.live)
    return 1.0 - filled / reserved


def sampling_savings(lengths: list[tuple[int, int]], num_sequences: int) -> float:
    """Blocks that parallel sampling saves by sharing, over those that unshared sequences would take (paper Fig. 15)."""
    return _savings(lengths, SamplingParams(max_tokens=1, temperature=1.0, num_sequences=num_sequences))


def beam_savings(lengths: list[tuple[int, int]], width: int) -> float:
    """The same of beam search over random candidates (`SchedulerAlone`): no beam is better than others but by luck."""
    beam = BeamSearch(width, length_penalty=1.0, early_stopping=EarlyStopping.OFF)
    return _savings(lengths, SamplingParams(max_tokens=1, num_sequences=width, beam=beam))


def _savings(lengths: list[tuple[int, int]], sampling: SamplingParams) -> float:
    unshared = taken = 0
    for alone in _steps(lengths, sampling):
        kv = alone.replica.kv
        taken += kv.num_blocks - kv.num_free
        unshared += sum(_unshared_blocks(alone, group) for group in alone.replica.running)
    return 1.0 - taken / unshared


def _unshared_blocks(alone: SchedulerAlone, group: SequenceGroup) -> int:
    """A beam search is one sequence at first; its copies would be `width` then too."""
    kv = alone.replica.kv
    blocks = [len(kv.block_table(sequence.placement.leader or sequence)[0]) for sequence in group.live]
    return sum(blocks) * group.parallel // len(blocks)


def _steps(lengths: list[tuple[int, int]], sampling: SamplingParams) -> Iterator[SchedulerAlone]:
    """Runs requests of these lengths; yields once per step, all of whose blocks are taken then."""
    alone = SchedulerAlone(SchedulerConfig(max_waiting=len(lengths)), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    for index, (prompt, output) in enumerate(lengths):
        params = msgspec.structs.replace(sampling, max_tokens=output)
        alone.submit(make_request(str(index), alone.draw_tokens(prompt), params))
    for _ in alone.run():
        yield alone


_WIDTHS = (36, 8, 8)


def main() -> int:
    """Prints the table."""
    for lengths in (SHAREGPT, ALPACA):
        prompts, outputs = zip(*lengths.draw(_COUNT), strict=True)
        print(f"{lengths.name}: {fmean(prompts):.1f} prompt and {fmean(outputs):.1f} output tokens on average")
    print()
    print(line(("", "paper", "here"), _WIDTHS))
    _print_row("ShareGPT, reserved and unfilled", 3.7, kv_waste(SHAREGPT.draw(_COUNT)))
    _print_row("Alpaca, reserved and unfilled", None, kv_waste(ALPACA.draw(_COUNT)))
    for num_sequences, paper in ((2, 6.1), (4, 8.5), (6, 9.8)):
        here = sampling_savings(ALPACA.draw(_COUNT), num_sequences)
        _print_row(f"Alpaca, parallel sampling {num_sequences}, saved", paper, here)
    for width, paper in ((2, 37.6), (4, 53.1), (6, 55.2)):
        _print_row(f"Alpaca, beam width {width}, saved", paper, beam_savings(ALPACA.draw(_COUNT // 2), width))
    return 0


def _print_row(name: str, paper: float | None, here: float) -> None:
    print(line((name, "" if paper is None else f"{paper:.1f} %", f"{100 * here:.1f} %"), _WIDTHS), flush=True)


if __name__ == "__main__":
    sys.exit(main())
