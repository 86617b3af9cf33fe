"""Measures what choosing the tokens of one step takes, feature by feature, beside the least that any choice takes.

python -m octavo.bench.parts.sampler_step

Two kinds of logits: `peaked`, whose ranks fall as those of a language model do, and `flat`, of which half the
vocabulary matters. Every row asks for the feature, but for the mixed batch. One thread's time is its CPU time, so that
a busy machine disturbs little; that of several is the clock's.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import click
import torch
from torch import Tensor

from octavo.bench.table import line
from octavo.wire.sampling import NEUTRAL, PENALTIES, BeamSearch, EarlyStopping, SamplingParams
from octavo.worker.sampling.sampler import choose
from octavo.worker.sequences import Chooser, WorkerSequence

_PROMPT, _GENERATED = 512, 512
_PENALTIES = {name: NEUTRAL[name] + 0.1 for name in PENALTIES}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 40": {"temperature": 0.7, "top_k": 40},
    "top-k 200": {"temperature": 0.7, "top_k": 200},
    "top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "top-k 50, top-p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    **{name.replace("_", " "): {name: value} for name, value in _PENALTIES.items()},
    "all penalties": _PENALTIES,
    "300 biases": {"logit_bias": [(100 * i, 1.0) for i in range(300)]},
    "1024 allowed ids": {"allowed_token_ids": list(range(5000, 6024))},
    "1024 banned ids": {"banned_token_ids": list(range(1024))},
    "logprobs": {"logprobs": 0},
    "logprobs, top 20": {"logprobs": 20},
    "sampled, logprobs, top 20": {"temperature": 1.0, "logprobs": 20},
    "beam search, width 4": {"beam": BeamSearch(4, 1.0, EarlyStopping.OFF)},
}


def sequences(count: int, vocab_size: int, *features: dict[str, Any]) -> list[WorkerSequence]:
    """Makes `count` sequences with these features in turn, half-way through a long answer."""
    tokens = torch.randint(vocab_size, (count, _PROMPT + _GENERATED), generator=_seeded()).tolist()
    params = [SamplingParams(max_tokens=1 << 20, seed=row, **features[row % len(features)]) for row in range(count)]
    return [WorkerSequence(row, 0, params[row], _PROMPT, tokens[row], 0, [[]]) for row in range(count)]


def peaked_logits(rows: int, vocab_size: int) -> Tensor:
    """Makes logits [rows, vocab_size] in fp32: `-s * log(rank)` with an `s` of 1.2 to 3 for each row, at random
    places."""
    falling = -torch.linspace(1.2, 3.0, rows)[:, None] * torch.arange(1, vocab_size + 1).log()
    places = torch.rand(rows, vocab_size, generator=_seeded()).argsort(dim=-1)
    return torch.empty(rows, vocab_size).scatter_(1, places, falling)


def flat_logits(rows: int, vocab_size: int) -> Tensor:
    """Makes normal logits [rows, vocab_size] in fp32, of standard deviation 2."""
    return 2 * torch.randn(rows, vocab_size, generator=_seeded())


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def best_ms(action: Callable[[], object], repeats: int) -> float:
    """Returns the milliseconds of the shortest of `repeats` runs, after one to warm up."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    action()
    took = []
    for _ in range(repeats):
        began = clock()
        action()
        took.append(clock() - began)
    return 1000 * min(took)


_WIDTHS = (28, 10, 8, 10, 8)


@click.command()
@click.option("--rows", default=64, show_default=True, help="Sequences in the step.")
@click.option("--vocab-size", default=49152, show_default=True)
@click.option("--threads", default=1, show_default=True, help="Of torch.")
@click.option("--repeats", default=9, show_default=True, help="The best of so many is printed.")
def main(rows: int, vocab_size: int, threads: int, repeats: int) -> None:
    """Prints milliseconds, and how many times `logits.max(-1)` of the same logits that is."""
    torch.set_num_threads(threads)
    cases = {name: [params] for name, params in FEATURES.items()} | {"all of these, mixed": list(FEATURES.values())}
    click.echo(f"{rows} rows x {vocab_size} fp32, {threads} threads, best of {repeats}")
    click.echo(line(("", "peaked", "ratio", "flat", "ratio"), _WIDTHS))
    both = [peaked_logits(rows, vocab_size), flat_logits(rows, vocab_size)]
    with torch.inference_mode():
        floors = [best_ms(partial(torch.max, logits, dim=-1), repeats) for logits in both]
        _tell("logits.max(-1)", floors, floors)
        for name, features in cases.items():
            choosers = [Chooser(each) for each in sequences(rows, vocab_size, *features)]
            _tell(name, [best_ms(partial(choose, logits, choosers), repeats) for logits in both], floors)


def _tell(name: str, measured: list[float], floors: list[float]) -> None:
    pairs = ((f"{ms:.2f} ms", f"{ms / floor:.1f}") for ms, floor in zip(measured, floors, strict=True))
    click.echo(line((name, *chain(*pairs)), _WIDTHS))


if __name__ == "__main__":
    main()
