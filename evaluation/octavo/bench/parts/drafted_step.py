"""Measures what a worker's step takes with drafts of its sequences' next tokens, beside a step without.

python -m octavo.bench.parts.drafted_step

Each case is run once in each round, in an order at random, and the shortest run is printed: in all, and what of it went
into preparing the batch, into the model, and into choosing the tokens. The drafts are wrong: right ones would cost the
same, but for the logprobs of what they bring. Of one thread the CPU time is taken, so that a busy machine disturbs
little; of several the clock's. The parts are always the clock's.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import click
import torch

from octavo.bench.table import line
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.testbed.models import NO_MOVES, new_sequences
from octavo.wire.sampling import SamplingParams
from octavo.worker.model_settings import ModelSettings
from octavo.worker.sequences import WorkItem
from octavo.worker.step.model_runner import ModelRunner

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_p": 0.95},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
}
CASES = [(1, count) for count in (0, 1, 2, 4, 8, 16, 32)] + [(64, count) for count in (0, 1, 2)]


@dataclass
class Shortest:
    """The shortest run of a case, in milliseconds: in all, prepare, model, sample."""

    total: float = float("inf")
    parts: tuple[float, ...] = ()

    def run(self, runner: ModelRunner, items: list[WorkItem]) -> None:
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        began = clock()
        times = runner.execute(NO_MOVES, items).times
        if (total := 1000 * (clock() - began)) < self.total:
            self.total = total
            self.parts = tuple(each / 1000 for each in (times.prepare_us, times.model_us, times.sample_us))


def items_of(runner: ModelRunner, count: int, num_drafted: int, context: int, params: SamplingParams) -> list[WorkItem]:
    """Makes decodes of `count` sequences after `context` tokens, each with a draft."""
    random = Random(0)
    prompts = [random.choices(range(runner.model.vocab_size), k=context) for _ in range(count)]
    sequences = new_sequences(runner, prompts, num_drafted + 1, params)
    drafts = [random.choices(range(runner.model.vocab_size), k=num_drafted) for _ in range(count)]
    pairs = zip(sequences, drafts, strict=True)
    return [WorkItem(each, context - 1, 1 + num_drafted, (each,), draft) for each, draft in pairs]


def measured(runner: ModelRunner, rounds: int, context: int, params: SamplingParams) -> dict[tuple[int, int], Shortest]:
    steps = {case: items_of(runner, *case, context, params) for case in CASES}
    found, random = {case: Shortest() for case in CASES}, Random(1)
    for _ in range(rounds):
        for case in random.sample(CASES, len(CASES)):
            found[case].run(runner, steps[case])
    return found


_WIDTHS = (11, 8, 10, 8, 10, 10, 10)


def rows(found: dict[tuple[int, int], Shortest]) -> Iterator[str]:
    yield line(("sequences", "drafted", "step", "times", "prepare", "model", "sample"), _WIDTHS)
    for (count, num_drafted), best in found.items():
        times = f"{best.total / found[count, 0].total:.2f}"
        parts = (f"{part:.2f} ms" for part in best.parts)
        yield line((str(count), str(num_drafted), f"{best.total:.2f} ms", times, *parts), _WIDTHS)


@click.command()
@click.option("--model", default=BUNDLED_MODEL, show_default=True, help="A directory, or the bundled model.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--quantization", default="none", show_default=True)
@click.option("--kv-cache-dtype", default="auto", show_default=True)
@click.option("--feature", default="greedy", show_default=True, type=click.Choice(list(FEATURES)))
@click.option("--context", default=256, show_default=True, help="Tokens before those of the step.")
@click.option("--threads", default=2, show_default=True, help="Of torch.")
@click.option("--rounds", default=15, show_default=True)
def main(
    model: str,
    dtype: str,
    quantization: str,
    kv_cache_dtype: str,
    feature: str,
    context: int,
    threads: int,
    rounds: int,
) -> None:
    """Prints milliseconds of steps, and how many times one without drafts that is."""
    settings = ModelSettings(
        dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype, num_blocks=2048, threads=threads
    )
    runner = ModelRunner(resolve_model(model), settings)
    params = SamplingParams(max_tokens=1 << 20, seed=1, **FEATURES[feature])
    click.echo(f"{runner.model.name}, {runner.kernels}, {torch.get_num_threads()} threads, {feature}, best of {rounds}")
    for row in rows(measured(runner, rounds, context, params)):
        click.echo(row)


if __name__ == "__main__":
    main()
