"""Counts the greedy tokens that depend on what a sequence is computed with.

python -m octavo.bench.parts.batch_invariance
OCTAVO_CPU_KERNELS=none python -m octavo.bench.parts.batch_invariance

Prompts of text (Python's own help, cut to rising lengths) are continued alone, and then all together, in chunks, on
another number of threads, or several of these at once. A token counts as differing if another one stands in its place:
after the first that differs, nearly all do. The second line measures torch and oneDNN in place of Octavo's own kernels.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import click
import torch
from tokenizers import Tokenizer

from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.testbed.models import generate
from octavo.worker.model_settings import ModelSettings
from octavo.worker.step.model_runner import ModelRunner

_BLOCK_SIZE = 16
Tokens = list[list[int]]


@dataclass(frozen=True)
class Company:
    """Describes what a sequence is computed with: all others or none, in an order of a seed's, in steps of at most
    `budget` tokens, on as many threads as alone or on the other number."""

    together: bool
    budget: int = 1 << 20
    other_threads: bool = False
    seed: int | None = None


COMPANIES = {
    "all together": Company(together=True),
    "all together, in another order": Company(together=True, seed=1),
    "alone, prompts in chunks of 37": Company(together=False, budget=37),
    "all together, steps of at most 64": Company(together=True, budget=64),
    "alone, on another number of threads": Company(together=False, other_threads=True),
    "all together, of 64, on as many threads": Company(together=True, budget=64, other_threads=True),
}


def make_prompts(tokenizer: Tokenizer, count: int, step: int) -> Tokens:
    """Makes `count` prompts of `step`, 2 * `step`, ... token ids, or less where a text ends."""
    texts = [topics[name] for name in sorted(topics, key=lambda name: -len(topics[name]))[:count]]
    return [tokenizer.encode(text).ids[: step * (index + 1)] for index, text in enumerate(texts)]


def make_runner(model: str, dtype: str, prompts: Tokens, num_tokens: int, threads: int) -> ModelRunner:
    """Makes a runner with room for all prompts and what follows them."""
    blocks = sum(-(-(len(prompt) + num_tokens) // _BLOCK_SIZE) for prompt in prompts)
    return ModelRunner(
        resolve_model(model),
        ModelSettings(dtype=dtype, block_size=_BLOCK_SIZE, num_blocks=blocks, num_cpu_blocks=0, threads=threads),
    )


def continued(runner: ModelRunner, prompts: Tokens, num_tokens: int, company: Company) -> Tokens:
    """Generates `num_tokens` tokens after each of the prompts, and returns them in the order of the prompts."""
    if not company.together:
        return [generate(runner, [prompt], num_tokens, budget=company.budget)[0] for prompt in prompts]
    order = list(range(len(prompts)))
    if company.seed is not None:
        random.Random(company.seed).shuffle(order)
    found = generate(runner, [prompts[row] for row in order], num_tokens, budget=company.budget)
    return [tokens for _, tokens in sorted(zip(order, found, strict=True))]


def differing(tokens: Tokens, alone: Tokens) -> tuple[int, int]:
    """Counts the tokens that differ, and the sequences in which any differs."""
    counts = [
        sum(a != b for a, b in zip(row, row_alone, strict=True)) for row, row_alone in zip(tokens, alone, strict=True)
    ]
    return sum(counts), sum(count > 0 for count in counts)


def compare(
    runner: ModelRunner, prompts: Tokens, num_tokens: int, threads: int, other_threads: int
) -> Iterator[tuple[str, int, int]]:
    """Counts, by name of the company, the tokens that differ from those alone, and their sequences."""
    alone = continued(runner, prompts, num_tokens, Company(together=False))
    for name, company in COMPANIES.items():
        torch.set_num_threads(other_threads if company.other_threads else threads)
        yield name, *differing(continued(runner, prompts, num_tokens, company), alone)
        torch.set_num_threads(threads)


@click.command()
@click.option("--model", default=BUNDLED_MODEL, show_default=True)
@click.option("--dtype", "dtypes", multiple=True, default=["bfloat16", "float32"], show_default=True)
@click.option("--prompts", "num_prompts", default=16, show_default=True)
@click.option("--step", default=24, show_default=True, help="How much longer each prompt is than the one before.")
@click.option("--tokens", "num_tokens", default=64, show_default=True, help="What follows each prompt.")
@click.option("--threads", default=1, show_default=True, help="Of a sequence alone.")
@click.option("--other-threads", default=2, show_default=True, help="Where it is another number.")
def main(
    model: str,
    dtypes: tuple[str, ...],
    num_prompts: int,
    step: int,
    num_tokens: int,
    threads: int,
    other_threads: int,
) -> None:
    """Prints one line for every dtype and company."""
    tokenizer = Tokenizer.from_file(str(resolve_model(model) / "tokenizer.json"))
    prompts = make_prompts(tokenizer, num_prompts, step)
    for dtype in dtypes:
        runner = make_runner(model, dtype, prompts, num_tokens, threads)
        click.echo(f"{dtype}, {runner.kernels}: tokens that differ from those alone, of {num_prompts * num_tokens}")
        began = time.perf_counter()
        for name, tokens, sequences in compare(runner, prompts, num_tokens, threads, other_threads):
            click.echo(f"  {name:42s}{tokens:6d}  in {sequences} of {num_prompts} sequences")
        click.echo(f"  ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
