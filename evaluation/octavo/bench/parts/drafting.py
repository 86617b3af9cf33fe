"""Measures what drafts cost the scheduler: `python -m octavo.bench.parts.drafting`.

By kind of text, the microseconds for each token of indexing a text, in long pieces and as it grows by one token at a
time; the bytes of its index for each token; and the microseconds of a proposal, with the look at the token that came
since the last one. Then a step of many sequences: asking each for its guesses, and deciding about them, beside the
scheduler's own work of such a step and, with a model, the worker's. At last the scheduler plays recorded answers with
speculation off and auto: CPU time of a step, its tokens, and how much faster they come by the given costs of rows. All
but that is CPU time.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tokenizers

from octavo.bench.parts.recorded_answers import CURVES, KINDS, Curve, Played, RecordedReplica, Recording, recordings
from octavo.bench.parts.scheduler_alone import VOCAB_SIZE, SchedulerAlone, make_request
from octavo.bench.table import keep, table
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.core.speculation.pricing import Offer, Prices, decide
from octavo.scheduler.core.speculation.text import Text
from octavo.wire.costs import RowCost
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import MAX_DRAFT_TOKENS, StepResult

_ROOT = Path(__file__).parents[4]
_PIECE = 2048
_CONTEXT = 128


@dataclass(frozen=True)
class TextCost:
    """Holds what the drafts of one kind of text cost: microseconds for each token, and for each proposal; bytes for
    each token."""

    kind: str
    indexed_at_once_us: float
    indexed_one_by_one_us: float
    index_bytes: float
    proposal_us: float
    guessed_share: float


@dataclass(frozen=True)
class StepCost:
    """Holds the microseconds of one step of so many sequences: of their drafts, of the scheduler without them, and of
    the worker (0: not measured)."""

    kind: str
    num_sequences: int
    drafts_us: float
    scheduler_us: float
    worker_us: float

    @property
    def share(self) -> float:
        """Returns the drafts' share of all."""
        return self.drafts_us / (self.drafts_us + self.scheduler_us + self.worker_us)


@dataclass(frozen=True)
class PlayedCost:
    """Holds what recorded answers took without guesses and with them."""

    kind: str
    num_sequences: int
    off: Played
    auto: Played

    @property
    def gain(self) -> float:
        """Returns how many times as fast tokens come with guesses."""
        return self.auto.tokens_per_s / self.off.tokens_per_s


def streams(length: int, model: Path) -> dict[str, list[int]]:
    """Returns tokens of each kind: code and prose of this repository, and random ones."""
    source, tokenizer = random.Random(0), tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    files = {"code": _ROOT.glob("*/octavo/**/*.py"), "prose": _ROOT.glob("docs/*.md")}
    found = {kind: _tokens(tokenizer, sorted(paths), length) for kind, paths in files.items()}
    return found | {"random": [source.randrange(VOCAB_SIZE) for _ in range(length)]}


def _tokens(tokenizer: tokenizers.Tokenizer, paths: Sequence[Path], length: int) -> list[int]:
    tokens: list[int] = []
    for path in paths:
        tokens += tokenizer.encode(path.read_text(encoding="utf-8")).ids
        if len(tokens) >= length:
            return tokens[:length]
    raise ValueError(f"the files have {len(tokens)} tokens; give --tokens {len(tokens)} or fewer")


def text_cost(kind: str, tokens: list[int]) -> TextCost:
    """Measures one text, half of which is a prompt for the proposals that go through the other half."""
    at_once, one_by_one = Text(tokens, most_scanned=0), Text(tokens, most_scanned=0)
    pieces = _cpu_us(lambda: [at_once.index(_PIECE) for _ in range(0, len(tokens), _PIECE)])
    growing = _cpu_us(lambda: [one_by_one.index(1) for _ in tokens])
    half = len(tokens) // 2
    proposals, guessed = _proposals(tokens[:half], tokens[half:])
    count = len(tokens)
    return TextCost(kind, pieces / count, growing / count, at_once.num_bytes / count, proposals, guessed)


def _proposals(prompt: list[int], answer: list[int]) -> tuple[float, float]:
    """Asks for a draft before each token of the answer; returns the microseconds of each, and the share of tokens that
    were preceded by one."""
    drafter, group = Drafter(), _group("r", prompt)
    sequence, drafts = group.sequences[0], []
    # A long prompt is indexed over some steps: that is not what a proposal costs.
    for _ in range(0, len(prompt), _PIECE):
        drafter.begin_step()
        drafter.propose(group, sequence, MAX_DRAFT_TOKENS)

    def ask() -> None:
        for token in answer:
            sequence.append(token)
            drafter.begin_step()
            drafts.append(drafter.propose(group, sequence, MAX_DRAFT_TOKENS))

    # One by one, looking at the clock would take longer than most proposals.
    taken = _cpu_us(ask)
    return taken / len(answer), sum(draft is not None for draft in drafts) / len(answer)


def step_cost(kind: str, tokens: list[int], num_sequences: int, worker_us: float, steps: int = 20) -> StepCost:
    """Measures steps in which every sequence is asked for its draft, whether or not any could pay, and all are decided
    about; each sequence repeats a text of its own."""
    length = len(tokens) // num_sequences
    groups = [_group(str(i), tokens[i * length : (i + 1) * length]) for i in range(num_sequences)]
    drafter, prices = Drafter(), Prices([RowCost(1, 0.01), RowCost(64, 0.02)])
    taken = []
    for step in range(steps):
        for group in groups:
            group.sequences[0].append(group.request.prompt_token_ids[step % length])
        taken.append(_cpu_us(partial(_draft, drafter, prices, groups)))
    # The first steps index prompts.
    return StepCost(
        kind, num_sequences, statistics.median(taken[steps // 2 :]), _scheduler_us(num_sequences), worker_us
    )


def _draft(drafter: Drafter, prices: Prices, groups: list[RequestGroup]) -> None:
    drafter.begin_step()
    drafts = [drafter.propose(group, group.sequences[0], MAX_DRAFT_TOKENS) for group in groups]
    offers = [Offer(draft.chances) for draft in drafts if draft is not None]
    decide(prices, offers, len(groups), 0, 10_000)


def _group(request_id: str, prompt: list[int]) -> RequestGroup:
    sampling = SamplingParams(max_tokens=1 << 16)
    return RequestGroup(make_request(request_id, prompt, sampling), 0.0, (0.0, 0), frontend_id=1)


def _scheduler_us(num_sequences: int, steps: int = 40) -> float:
    """Returns what the scheduler's core takes for a step that decodes so many sequences, two steps in flight."""
    alone = SchedulerAlone(
        SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=64 * num_sequences),
        num_blocks=8 * num_sequences,
    )
    for i in range(num_sequences):
        alone.submit(make_request(str(i), alone.draw_tokens(16), SamplingParams(max_tokens=steps + 8)))
    alone.schedule()
    alone.schedule()
    taken = []
    for _ in range(steps):
        taken.append(_cpu_us(partial(_step, alone, alone.next_result())))
    return statistics.median(taken)


def _step(alone: SchedulerAlone, result: StepResult) -> None:
    alone.accept(result)
    alone.schedule()


def _worker_us(model: Path, num_sequences: int) -> float:
    """Returns the CPU time, of all threads, of a worker's step that decodes so many sequences of a short context."""
    from octavo.worker.calibrate.timed_steps import StepRow, rows
    from octavo.worker.model_settings import ModelSettings
    from octavo.worker.step.model_runner import ModelRunner

    step = rows(ModelRunner(model, ModelSettings()), num_sequences * [StepRow(_CONTEXT, samples=True)])
    step.execute()
    began = time.process_time()
    for _ in range(3):
        step.execute()
    return 1e6 * (time.process_time() - began) / 3


def played_cost(kind: str, recorded: Sequence[Recording], curve: Curve, rounds: int = 3) -> PlayedCost:
    """Plays recordings with speculation off and auto in turns; returns the rounds of each that took the scheduler
    least."""
    played = [[RecordedReplica(recorded, setting, curve).play() for setting in ("off", "auto")] for _ in range(rounds)]
    off, auto = (min(each, key=lambda one: one.us_a_step) for each in zip(*played, strict=True))
    return PlayedCost(kind, len(recorded), off, auto)


def _cpu_us(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1000


def _text_rows(costs: Sequence[TextCost]) -> Iterator[tuple[str, ...]]:
    yield ("", "at once", "one by one", "bytes/token", "proposal", "guessed")
    for cost in costs:
        yield (
            cost.kind,
            f"{cost.indexed_at_once_us:.2f} us/token",
            f"{cost.indexed_one_by_one_us:.2f} us/token",
            f"{cost.index_bytes:.1f}",
            f"{cost.proposal_us:.1f} us",
            f"{cost.guessed_share:.0%}",
        )


def _step_rows(costs: Sequence[StepCost]) -> Iterator[tuple[str, ...]]:
    yield ("", "sequences", "drafts", "scheduler", "worker", "share of drafts")
    for cost in costs:
        worker = f"{cost.worker_us:,.0f} us" if cost.worker_us else "-"
        figures = f"{cost.drafts_us:,.0f} us", f"{cost.scheduler_us:,.0f} us", worker
        yield (cost.kind, str(cost.num_sequences), *figures, f"{cost.share:.1%}")


def _played_rows(costs: Sequence[PlayedCost]) -> Iterator[tuple[str, ...]]:
    yield ("", "sequences", "off", "auto", "more", "tokens/step off", "auto", "gain", "guesses", "right")
    for cost in costs:
        off, auto = cost.off, cost.auto
        yield (
            *(cost.kind, str(cost.num_sequences), f"{off.us_a_step:,.0f} us", f"{auto.us_a_step:,.0f} us"),
            *(f"{auto.us_a_step - off.us_a_step:,.0f} us", f"{off.tokens_a_step:.2f}", f"{auto.tokens_a_step:.2f}"),
            *(f"{cost.gain:.3f}", str(auto.spent), str(auto.guessed)),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints three tables to stdout, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL, help="whose tokenizer, and worker, are taken")
    parser.add_argument("--tokens", type=int, default=1 << 16, help="tokens of each text")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256], help="sequences of a step")
    parser.add_argument("--play", nargs="+", default=["random", "edit", "json"], choices=KINDS, help="answers to play")
    parser.add_argument("--played", type=int, nargs="+", default=[1, 4, 64], help="of so many requests at a time")
    parser.add_argument("--curve", default="cpu", choices=CURVES, help="what rows cost where answers are played")
    parser.add_argument("--no-worker", action="store_true", help="leave the worker's step out, which takes seconds")
    parser.add_argument("--json", type=Path, help="write the findings here too")
    options = parser.parse_args(arguments)
    model = resolve_model(options.model)
    texts = streams(options.tokens, model)
    costs = [text_cost(kind, tokens) for kind, tokens in texts.items()]
    steps = []
    for count in options.sequences:
        worker_us = 0.0 if options.no_worker else _worker_us(model, count)
        steps += [step_cost(kind, tokens, count, worker_us) for kind, tokens in texts.items()]
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    played = [
        played_cost(kind, recordings(kind, count, lambda text: tokenizer.encode(text).ids), CURVES[options.curve])
        for kind in options.play
        for count in options.played
    ]
    tables = table(list(_text_rows(costs))), table(list(_step_rows(steps))), table(list(_played_rows(played)))
    print("\n\n".join("\n".join(each) for each in tables))
    keep({"texts": costs, "steps": steps, "played": played}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
