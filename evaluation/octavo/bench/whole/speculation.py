"""Measures what speculation gains: `python -m octavo.bench.whole.speculation [--works ...] [--batches ...]`.

Two stacks of real processes stand side by side, one with `--speculation off` and one with `auto`, or what is given
instead, where given with a draft model; they differ in nothing else. They get the same requests in turns, so that one
of them is idle while the other is measured, for several rounds. The prompts are in their caches. What was answered
before, no request can guess from: each has a tenant of its own.

For each work, and each number of requests at a time, a table says

* gain: tokens per second with speculation by those without, of the best rounds of each; and the median of the rounds
* CPU: CPU seconds of all processes without speculation by those with it, which other work on the machine changes less
* steady: gain of the requests' times, without the outputs that fell into a loop, which flatter any guess
* loops: the share of the outputs that did, their last 64 tokens being the same 16 or fewer again and again
* copied: how alike outputs are to the answers that they should be, as far as they go
* p50 and p99: milliseconds between two tokens of a request, without speculation and with it; 0 where they come together
* tokens: those that a sequence with guesses gets in a step; and depth: the share of the first, second, ... guesses that
  were right, of those that were checked

All tokens must be equal, or the command fails.

Each round is told as it ends, and each cell, a work at a batch, as soon as its rounds are done; it is kept then
(`--json`) whatever becomes of later ones. `--seconds` bounds a cell: no round begins later than that. Until the command
ends the last few steps of a cell may be missing in tokens and depth, for the scheduler's log of events is buffered.
"""

import argparse
import asyncio
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any, Final

import grpc

from octavo.bench.formats import Format, read_format
from octavo.bench.measurement import process_cpu_s
from octavo.bench.table import keep, table
from octavo.bench.whole.speculation_works import WORKS, Prompt, Work
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.scheduler.core.events import StepAnswered
from octavo.scheduler.server.event_log import Handled, Planned, Record, read_records
from octavo.testbed.stack import Stack
from octavo.v1 import generation_pb2 as pb
from octavo.workload.guesses import Guesses

SETTINGS: Final = ("off", "auto")
_LOOP_TOKENS, _LONGEST_PERIOD = 64, 16
# A batch of one is measured over several requests, one after the other.
_FEWEST_PROMPTS: Final = 8
_SHOWN_DEPTHS: Final = 6
_TIMEOUT_S: Final = 600.0


class UnequalTokensError(Exception):
    """Speculation has changed the tokens of a request."""


@dataclass(frozen=True)
class Answer:
    """Holds what one request got: its tokens and text, when it was sent, and when each token came, in seconds."""

    token_ids: list[int]
    text: str
    sent_at: float
    token_at: list[float]

    @property
    def seconds(self) -> float:
        return self.token_at[-1] - self.sent_at

    @property
    def loops(self) -> bool:
        """Tells whether the answer ends in a loop."""
        last = self.token_ids[-_LOOP_TOKENS:]
        return len(last) == _LOOP_TOKENS and any(
            last[period:] == last[:-period] for period in range(1, _LONGEST_PERIOD + 1)
        )


@dataclass(frozen=True)
class Round:
    """Holds the answers of one round of one stack, when it began and ended, by the machine's monotonic clock, and the
    CPU seconds of the stack's processes."""

    answers: list[Answer]
    began_at: float
    ended_at: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / (self.ended_at - self.began_at)

    def seconds(self, wanted: Sequence[bool]) -> float:
        """Returns the time of the wanted requests together."""
        return sum(answer.seconds for answer, is_wanted in zip(self.answers, wanted, strict=True) if is_wanted)


@dataclass(frozen=True)
class Row:
    """Holds the figures of a work at a batch; tokens per second are those of each round, by setting."""

    work: str
    batch: int
    tokens: int
    tokens_per_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    steady_gain: float | None
    loops: float
    copied: float | None
    p50_ms: dict[str, float]
    p99_ms: dict[str, float]
    steps_with_guesses: int
    tokens_per_step: float
    right_by_depth: list[float]

    @property
    def gain(self) -> float:
        return max(self.tokens_per_s["auto"]) / max(self.tokens_per_s["off"])

    @property
    def cpu_gain(self) -> float:
        return min(self.cpu_s["off"]) / min(self.cpu_s["auto"])

    @property
    def median_gain(self) -> float:
        pairs = zip(self.tokens_per_s["auto"], self.tokens_per_s["off"], strict=True)
        return statistics.median(auto / off for auto, off in pairs)


class Pair(ExitStack):
    """Runs the two stacks; all their processes end with the `with` block."""

    def __init__(
        self,
        model: Path,
        form: Format,
        threads: int | None,
        blocks: int,
        speculation: str = "auto",
        draft_model: Path | None = None,
    ) -> None:
        super().__init__()
        with_guesses = {"OCTAVO_SPECULATION": speculation}
        if draft_model is not None:
            with_guesses["OCTAVO_DRAFT_MODEL"] = str(draft_model.resolve())
        own = {"off": {"OCTAVO_SPECULATION": "off"}, "auto": with_guesses}
        self._directory = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
        settings = {**(form.settings or {}), "num_blocks": str(blocks), "device": "cpu"}
        if threads is not None:
            settings["threads"] = str(threads)
        environment = {f"OCTAVO_{name.upper()}": value for name, value in settings.items()}
        self.stacks = {
            setting: self.enter_context(
                Stack(
                    model,
                    self._directory / setting,
                    {**environment, **own[setting], "OCTAVO_EVENT_LOG": str(self.log(setting))},
                )
            )
            for setting in SETTINGS
        }
        # One after the other: each worker measures its steps as it starts.
        for stack in self.stacks.values():
            stack.start_all()

    def log(self, setting: str) -> Path:
        """Returns the path of a stack's event log."""
        return self._directory / f"{setting}.events"

    def end(self, setting: str) -> None:
        """Ends a stack's scheduler, whose event log is whole then."""
        self.stacks[setting].kill("scheduler", signal.SIGTERM)

    def records(self, setting: str) -> Iterator[Record]:
        """Yields the records of a stack's event log, as far as it is written."""
        with self.log(setting).open("rb") as file:
            yield from read_records(file)


def run_round(stack: Stack, requests: Sequence[pb.GenerateRequest], batch: int) -> Round:
    """Sends the requests, `batch` at a time, and reads all answers."""
    pids = [process.pid for process in stack.processes.values()]
    before_s = sum(map(process_cpu_s, pids))
    began_at = time.monotonic()
    raw = asyncio.run(_send_all(stack.address, requests, batch))
    ended_at = time.monotonic()
    cpu_s = sum(map(process_cpu_s, pids)) - before_s
    return Round([_answer(*each) for each in raw], began_at, ended_at, cpu_s)


_Raw = tuple[float, list[tuple[float, bytes]]]


async def _send_all(address: str, requests: Sequence[pb.GenerateRequest], batch: int) -> list[_Raw]:
    """Returns of each request when it was sent, and its messages with their times. They are decoded afterwards, for the
    client runs on the cores that the model wants."""
    places = asyncio.Semaphore(batch)
    async with grpc.aio.insecure_channel(address) as channel:
        generate: Any = channel.unary_stream(
            "/octavo.v1.GenerationService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=bytes,
        )

        async def send(request: pb.GenerateRequest) -> _Raw:
            async with places:
                sent_at = time.monotonic()
                stream = generate(request, timeout=_TIMEOUT_S)
                return sent_at, [(time.monotonic(), message) async for message in stream]

        return await asyncio.gather(*map(send, requests))


def _answer(sent_at: float, messages: list[tuple[float, bytes]]) -> Answer:
    token_ids: list[int] = []
    token_at: list[float] = []
    text = ""
    for at, message in messages:
        response = pb.GenerateResponse.FromString(message)
        if response.HasField("delta"):
            token_ids += response.delta.token_ids
            token_at += [at] * len(response.delta.token_ids)
            text += response.delta.text
    return Answer(token_ids, text, sent_at, token_at)


def make_request(work: Work, prompt: Prompt, seed: int, tenant: str, max_tokens: int) -> pb.GenerateRequest:
    """Asks for the answer of a prompt."""
    roles = cycle(("user", "assistant"))
    return pb.GenerateRequest(
        chat=pb.ChatPrompt(
            messages=[pb.ChatMessage(role=role, content=said) for role, said in zip(roles, prompt.said, strict=False)],
            add_generation_prompt=not prompt.goes_on,
            continue_final_message=prompt.goes_on,
        ),
        sampling=pb.SamplingParams(temperature=work.temperature, top_p=1.0, top_k=0, repetition_penalty=1.0, seed=seed),
        stopping=pb.StoppingCriteria(max_new_tokens=max_tokens, ignore_eos=not work.ends),
        # What a tenant's requests were answered is a guess for its others; the cache of prompts all tenants share.
        scheduling=pb.SchedulingHints(tenant=tenant),
    )


def measure(
    pair: Pair,
    name: str,
    batch: int,
    rounds: int,
    max_tokens: int,
    seed: int,
    num_requests: int | None = None,
    seconds: float = math.inf,
) -> dict[str, list[Round]]:
    """Returns the rounds of each stack, as many as begin within so many seconds. Raises `UnequalTokensError`."""
    work = WORKS[name]
    prompts = work.prompts(seed, num_requests or max(batch, _FEWEST_PROMPTS))

    def requests(tag: str, tokens: int) -> list[pb.GenerateRequest]:
        return [
            make_request(work, prompt, seed + number, f"{name}-{batch}-{tag}-{number}", tokens)
            for number, prompt in enumerate(prompts)
        ]

    began_at = time.monotonic()
    for stack in pair.stacks.values():
        # Of one token: prompts are computed here, and not again.
        run_round(stack, requests("before", 1), batch)
    found: dict[str, list[Round]] = {setting: [] for setting in SETTINGS}
    for number in range(rounds):
        if number and time.monotonic() - began_at > seconds:
            break
        for setting in SETTINGS if number % 2 else reversed(SETTINGS):
            done = run_round(pair.stacks[setting], requests(str(number), max_tokens), batch)
            found[setting].append(done)
            taken = f"{done.tokens_per_s:.1f} tokens/s in {done.ended_at - done.began_at:.0f} s"
            print(f"{name}, {batch} at a time, round {number + 1}, {setting}: {taken}", file=sys.stderr)
        check_equal(name, batch, [each.answers for setting in SETTINGS for each in found[setting]])
    return found


def check_equal(work: str, batch: int, rounds: Sequence[Sequence[Answer]]) -> None:
    first, *others = rounds
    for number, answer in enumerate(first):
        if not answer.token_ids:
            raise UnequalTokensError(f"{work}, {batch} at a time: request {number} got no token")
        for other in others:
            if other[number].token_ids != answer.token_ids:
                raise UnequalTokensError(
                    f"{work}, {batch} at a time: request {number} got other tokens: {other[number].token_ids}, and "
                    f"before {answer.token_ids}"
                )


def count_guesses(records: Iterable[Record], spans: Sequence[tuple[float, float]]) -> list[Guesses]:
    """Counts the guesses that were answered within each of the spans of time."""
    counts = [Guesses() for _ in spans]
    planned: dict[int, dict[int, int]] = {}
    for record in records:
        match record:
            case Planned(plan) if plan.drafts:
                planned[plan.step_id] = {draft.sequence_id: len(draft.token_ids) for draft in plan.drafts}
            case Handled(now, StepAnswered(_, result)):
                drafts = planned.pop(result.step_id, None)
                if drafts is None:
                    continue
                right = {each.sequence_id: len(each.token_ids) for each in result.further}
                for guesses, (began_at, ended_at) in zip(counts, spans, strict=True):
                    if began_at <= now <= ended_at:
                        for sequence_id, length in drafts.items():
                            guesses.add(length, right.get(sequence_id, 0))
    return counts


def make_row(work: str, batch: int, prompts: Sequence[Prompt], found: dict[str, list[Round]], guesses: Guesses) -> Row:
    """Sums up the rounds of a work."""
    answers = found["off"][0].answers
    steady = [not answer.loops for answer in answers]
    least = {setting: min(each.seconds(steady) for each in found[setting]) for setting in SETTINGS}
    return Row(
        work,
        batch,
        sum(len(answer.token_ids) for answer in answers),
        {setting: [each.tokens_per_s for each in found[setting]] for setting in SETTINGS},
        {setting: [each.cpu_s for each in found[setting]] for setting in SETTINGS},
        least["off"] / least["auto"] if any(steady) else None,
        1 - sum(steady) / len(steady),
        statistics.fmean(map(_likeness, answers, prompts)) if WORKS[work].copies else None,
        {setting: _gap_ms(found[setting], 50) for setting in SETTINGS},
        {setting: _gap_ms(found[setting], 99) for setting in SETTINGS},
        guesses.steps,
        guesses.tokens_per_step,
        guesses.right_by_depth,
    )


def _likeness(answer: Answer, prompt: Prompt) -> float:
    """Returns how alike an answer's words are to what it should be, as far as it goes."""
    words, wanted = answer.text.split(), prompt.answer.split()
    return SequenceMatcher(None, words, wanted[: len(words)], autojunk=False).ratio()


def _gap_ms(rounds: Iterable[Round], percent: int) -> float:
    """Returns that percentile of the times between tokens, of the round where it is least; 0 if none has any."""
    return min(
        (
            1000 * statistics.quantiles(gaps, n=100, method="inclusive")[percent - 1]
            for each in rounds
            if len(gaps := [b - a for answer in each.answers for a, b in pairwise(answer.token_at)]) > 1
        ),
        default=0.0,
    )


def to_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a table."""
    heads = (
        "work",
        "batch",
        "off",
        "auto",
        "gain",
        "median",
        "CPU",
        "steady",
        "loops",
        "copied",
        "p50 off",
        "auto",
        "p99 off",
        "auto",
        "tokens",
    )
    yield from table([(*heads, "depth 1 to 6"), *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.work,
        str(row.batch),
        *(f"{max(row.tokens_per_s[setting]):.1f}" for setting in SETTINGS),
        f"{row.gain:.2f}",
        f"{row.median_gain:.2f}",
        f"{row.cpu_gain:.2f}",
        "-" if row.steady_gain is None else f"{row.steady_gain:.2f}",
        f"{row.loops:.0%}",
        "-" if row.copied is None else f"{row.copied:.2f}",
        *(f"{gaps[setting]:.1f}" for gaps in (row.p50_ms, row.p99_ms) for setting in SETTINGS),
        f"{row.tokens_per_step:.2f}" if row.steps_with_guesses else "-",
        " ".join(f"{share:.2f}" for share in row.right_by_depth[:_SHOWN_DEPTHS]) or "-",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table to stdout, each line of it to stderr as soon as it is known, and writes JSON where asked."""
    options = _options(arguments)
    settings = options.threads, options.blocks, options.speculation, options.draft_model
    found: dict[tuple[str, int], dict[str, list[Round]]] = {}
    with Pair(resolve_model(options.model), options.format, *settings) as pair:
        for batch in options.batches:
            for name in options.works:
                limits = options.rounds, options.tokens, options.seed, options.requests, options.seconds
                found[name, batch] = measure(pair, name, batch, *limits)
                rows = make_rows(found, pair.records("auto"), options.seed)
                print("\n".join(to_lines(rows[-1:])), file=sys.stderr)
                keep(rows, options.json)
        pair.end("auto")
        rows = make_rows(found, pair.records("auto"), options.seed)
    print("\n".join(to_lines(rows)))
    keep(rows, options.json)
    return 0


def make_rows(found: dict[tuple[str, int], dict[str, list[Round]]], records: Iterable[Record], seed: int) -> list[Row]:
    """Sums up what was found of each work and batch, with the guesses that the records tell of."""
    spans = [(each.began_at, each.ended_at) for rounds in found.values() for each in rounds["auto"]]
    guesses = iter(count_guesses(records, spans))
    return [
        make_row(
            name,
            batch,
            WORKS[name].prompts(seed, len(rounds["off"][0].answers)),
            rounds,
            _sum(islice(guesses, len(rounds["auto"]))),
        )
        for (name, batch), rounds in found.items()
    ]


def _sum(all_guesses: Iterable[Guesses]) -> Guesses:
    total = Guesses()
    for each in all_guesses:
        total.merge(each)
    return total


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="octavo.bench.whole.speculation", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 64], help="requests at a time")
    parser.add_argument("--requests", type=int, help="of a round; as many as at a time by default, and 8 at least")
    parser.add_argument("--rounds", type=int, default=3, help="of each stack, at most")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a cell: later no further round begins")
    parser.add_argument("--tokens", type=int, default=192, help="of each request, at most")
    parser.add_argument("--threads", type=int, help="of each worker; its own choice by default")
    parser.add_argument("--format", type=read_format, default="bf16", help="of the weights: bf16, q8_0, ...")
    parser.add_argument("--speculation", default="auto", help="of the stack that guesses: auto, or so many guesses")
    parser.add_argument("--draft-model", type=Path, help="directory of the draft model of the stack that guesses")
    parser.add_argument("--blocks", type=int, default=4096, help="of 16 tokens, of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
