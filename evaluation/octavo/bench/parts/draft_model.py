"""Measures how often a draft model guesses right, by depth, and what it takes.

python -m octavo.bench.parts.draft_model --draft-model DIR

The same prompts are answered by a worker's runner alone and by one with the draft model, which guesses so many tokens
in every step, priced or not, or none (`idle`: what is lost by its presence, and by following where it does not sleep).
All tokens must be equal. Of one thread the CPU time is taken, so that a busy machine disturbs little. `expected` is
what guesses that come true as often would gain beside a model whose step takes so many times as long as one guess, at
the best depth up to 8, with a further row of its step taking 2 % of that.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer

from octavo.bench.table import table
from octavo.bench.whole.speculation_works import WORKS
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.testbed.models import NO_MOVES, new_sequences
from octavo.wire.sampling import SamplingParams
from octavo.worker.model_settings import ModelSettings
from octavo.worker.runner import Runner
from octavo.worker.sequences import WorkItem
from octavo.worker.step.model_runner import ModelRunner

TIMES_AS_LONG = (5, 10, 20, 50)
_ROW_SHARE = 0.02
_DEEPEST = 8


@dataclass
class Figures:
    """Holds the answers to prompts, the seconds and steps after each prompt's own, and of guesses how many were checked
    and right, by depth."""

    answers: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    checked: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    propose_us: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer) - 1 for answer in self.answers) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return sum(len(answer) - 1 for answer in self.answers) / self.steps

    @property
    def chances(self) -> list[float]:
        """Returns how often a guess was right if those before it were, by depth."""
        return [right / max(1, checked) for right, checked in zip(self.right, self.checked, strict=True)]


def answer(runner: Runner, prompt: list[int], count: int, depth: int, params: SamplingParams, into: Figures) -> None:
    """Answers a prompt with `count` tokens or some more, which are cut off."""
    [sequence] = new_sequences(runner, [prompt], count + 2 * depth + 2, params)
    tokens, draft, start = sequence.token_ids, list[int](), 0
    while len(tokens) < len(prompt) + count:
        item = WorkItem(sequence, start, len(tokens) - start + len(draft), (sequence,), draft, depth)
        began = time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
        output = runner.execute(NO_MOVES, [item])
        taken = (time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()) - began
        further = output.further[0].token_ids if output.further else []
        if start:
            into.seconds += taken
            into.steps += 1
            into.propose_us.append(output.times.propose_us)
            for place in range(min(len(draft), len(further) + 1)):
                into.checked[place] += 1
                into.right[place] += place < len(further)
        start = len(tokens) + len(further)
        tokens += [output.sampled[0].token_id, *further]
        draft = output.proposed[0].token_ids if output.proposed else []
    runner.forget([sequence.sequence_id])
    into.answers.append(tokens[len(prompt) :][:count])


def expected_gain(chances: Sequence[float], times_as_long: float) -> tuple[float, int]:
    """Returns the best gain beside a model whose step takes so many times as long as a guess, and its depth. Deeper
    guesses than were measured come true as often as the deepest of these."""
    chances = [*chances, *[chances[-1]] * (_DEEPEST - len(chances))]
    gains = accumulate(accumulate(chances[:_DEEPEST], mul))
    return max(
        ((1 + gain) / (1 + depth * (_ROW_SHARE + 1 / times_as_long)), depth) for depth, gain in enumerate(gains, 1)
    )


@click.command()
@click.option("--model", default=BUNDLED_MODEL, show_default=True)
@click.option("--draft-model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--works", default="chat,edit", show_default=True, help="Of octavo.bench.whole.speculation_works.")
@click.option("--temperatures", default="0,0.7", show_default=True)
@click.option("--prompts", default=4, show_default=True)
@click.option("--tokens", default=48, show_default=True)
@click.option("--depth", default=4, show_default=True, help="Guesses of each step.")
@click.option("--dtype", default="bfloat16", show_default=True)
def main(
    model: str, draft_model: Path, works: str, temperatures: str, prompts: int, tokens: int, depth: int, dtype: str
) -> None:
    """Prints a row for each work and temperature."""
    directory = resolve_model(model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = ModelSettings(dtype=dtype, threads=1, num_blocks=512)
    alone = ModelRunner(directory, settings)
    together = ModelRunner(directory, settings, draft_directory=draft_model)
    click.echo(f"{draft_model.name} beside {directory.name}, {dtype}, {depth} guesses a step")
    heads = (
        "work",
        "temperature",
        "alone/s",
        "idle",
        "gain",
        "tokens/step",
        "ms/guess",
        "right by depth",
        "expected",
    )
    rows: list[Sequence[str]] = [heads]
    for work in works.split(","):
        asked = [each.said[-1] for each in WORKS[work].prompts(0, prompts)]
        texts = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in asked]
        for temperature in map(float, temperatures.split(",")):
            found = {name: Figures(checked=[0] * depth, right=[0] * depth) for name in ("alone", "idle", "with")}
            for number, text in enumerate(texts):
                prompt = tokenizer.encode(text).ids[-600:]
                params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=number)
                answer(alone, prompt, tokens, 0, params, found["alone"])
                answer(together, prompt, tokens, 0, params, found["idle"])
                answer(together, prompt, tokens, depth, params, found["with"])
            if not found["alone"].answers == found["idle"].answers == found["with"].answers:
                raise click.ClickException(f"{work}: the draft model has changed tokens")
            rows.append(_cells(work, temperature, found, depth))
    click.echo("\n".join(table(rows)))


def _cells(work: str, temperature: float, found: dict[str, Figures], depth: int) -> list[str]:
    alone, idle, both = found["alone"], found["idle"], found["with"]
    guess_ms = sorted(both.propose_us)[len(both.propose_us) // 2] / 1000 / depth
    gains = (f"{gain:.2f} ({at}) at {n}x" for n in TIMES_AS_LONG for gain, at in [expected_gain(both.chances, n)])
    return [
        work,
        f"{temperature:g}",
        f"{alone.tokens_per_s:.1f}",
        f"{idle.tokens_per_s / alone.tokens_per_s:.2f}",
        f"{both.tokens_per_s / alone.tokens_per_s:.2f}",
        f"{both.tokens_per_step:.2f}",
        f"{guess_ms:.2f}",
        " ".join(f"{chance:.2f}" for chance in both.chances),
        ", ".join(gains),
    ]


if __name__ == "__main__":
    main()
