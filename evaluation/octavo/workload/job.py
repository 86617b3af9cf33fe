"""Describes one request of an experiment, draws the token ids of its prompt, and reads and writes jobs as CSV.

The token ids mean nothing, but differ and agree where those of real requests would. A CSV file has a row for each job,
a column for each field of `Job` that it needs.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Final

# What a message can hold of one sequence; far beyond what models take.
MAX_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Transcript:
    """Holds what was said in a request that was served before, as token ids: its prompt, its `outputs` by the index of
    their sequences, as far as they are known, and what its client predicted. Only those with the same `salt` share the
    KV of tokens behind the first `salted_from`."""

    prompt_token_ids: list[int]
    outputs: list[list[int]]
    predicted_token_ids: list[int]
    salt: str = ""
    salted_from: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """Describes a request that comes `arrival_s` seconds after the start, with a prompt of `prompt_tokens` tokens, of
    which the first `prefix_tokens` are those of the shared prefix `prefix` (""; 0: none).

    It generates exactly `output_tokens` in each of `n` sequences, or of `beam_width` beams (0: it samples). With a
    `transcript` it says what that says, as far as that goes.

    It may be the `turn` number so and so, from 1 on, of a `conversation` (0 and "": of none). Behind the first, its
    prompt begins with `history_tokens` tokens, the prompt of the turn before and what that has generated, and it comes
    `think_s` seconds after the end of that turn, whenever that is, but not before its arrival.

    Raises `ValueError` on what cannot be.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    n: int = 1
    beam_width: int = 0
    prefix: str = ""
    prefix_tokens: int = 0
    priority: int = 0
    tenant: str = ""
    conversation: str = ""
    turn: int = 0
    history_tokens: int = 0
    think_s: float = 0.0
    transcript: Transcript | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.arrival_s < float("inf"):
            raise ValueError(f"arrival_s must be 0 or later, not {self.arrival_s}")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"lengths must be at least 1 token, not {self.prompt_tokens} and {self.output_tokens}")
        if self.prompt_tokens + self.output_tokens > MAX_TOKENS:
            raise ValueError(
                f"prompt and output have at most {MAX_TOKENS} tokens, not {self.prompt_tokens} and {self.output_tokens}"
            )
        if self.n < 1 or self.beam_width < 0 or (self.beam_width and self.n > self.beam_width):
            raise ValueError(
                f"n = {self.n} sequences of {self.beam_width} beams: n is at least 1, and at most the beams"
            )
        if not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise ValueError(
                f"prefix_tokens must be from 0 to the prompt's {self.prompt_tokens}, not {self.prefix_tokens}"
            )
        if bool(self.prefix) != bool(self.prefix_tokens):
            raise ValueError("a shared prefix needs both a name and a length in prefix_tokens")
        self._check_turn()

    def _check_turn(self) -> None:
        if self.turn < 0 or bool(self.conversation) != bool(self.turn):
            raise ValueError(f"turn {self.turn} of conversation {self.conversation!r}: a turn has both, from 1 on")
        if not 0.0 <= self.think_s < float("inf"):
            raise ValueError(f"think_s must be 0 or more seconds, not {self.think_s}")
        if self.turn > 1:
            if not 0 < self.history_tokens < self.prompt_tokens:
                raise ValueError(
                    f"history_tokens of turn {self.turn} must be from 1 to less than the prompt's {self.prompt_tokens},"
                    f" not {self.history_tokens}"
                )
            if self.n > 1 or self.beam_width or self.prefix:
                raise ValueError("a later turn goes on from one answer, and from the prefix of the first")
        elif self.history_tokens or self.think_s:
            raise ValueError("history_tokens and think_s are for turns after the first")

    @property
    def parallel(self) -> int:
        """Returns the number of sequences that run side by side."""
        return self.beam_width or self.n


def prompt_token_ids(job: Job, index: int, vocab_size: int, seed: int, said: Iterable[int] = ()) -> list[int]:
    """Returns the prompt of the job that is number `index` of its workload, as ids from 0 to `vocab_size` - 1.

    Without a transcript, jobs whose prefix has the same name begin with the same tokens; all else is drawn for each
    index. A later turn of a conversation goes on from what was `said`, which is as long as it really became. Raises
    `ValueError` if there are no tokens to draw from.
    """
    if vocab_size < 1:
        raise ValueError(f"a vocabulary has at least 1 token, not {vocab_size}")
    if job.transcript is not None:
        return [token_id % vocab_size for token_id in job.transcript.prompt_token_ids]
    num_new = job.prompt_tokens - job.prefix_tokens - job.history_tokens
    own = _drawn(f"{seed}/prompt/{index}", num_new, vocab_size)
    if job.history_tokens:
        return [*said, *own]
    return [*_prefix(f"{seed}/prefix/{job.prefix}", job.prefix_tokens, vocab_size), *own] if job.prefix else own


@lru_cache(maxsize=1024)
def _prefix(name: str, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(_drawn(name, num_tokens, vocab_size))


def _drawn(name: str, num_tokens: int, vocab_size: int) -> list[int]:
    return Random(name).choices(range(vocab_size), k=num_tokens)


# -- CSV --------------------------------------------------------------------------------------------------------------


_FIELDS: Final = {each.name: each for each in fields(Job) if each.name != "transcript"}
_REQUIRED: Final = [name for name, each in _FIELDS.items() if each.default is MISSING]
_Cell = str | int | float


class TraceError(Exception):
    """Says that a file is no trace, with the line and the column that show it."""


def write_csv(path: Path, jobs: Iterable[Job]) -> None:
    """Raises `OSError`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: getattr(job, name) for name in _FIELDS} for job in jobs)


def read_csv(path: Path) -> list[Job]:
    """Returns the jobs of a trace in order of arrival. An empty cell is the field's default, as a column that is not
    there. Raises `TraceError` and `OSError`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            columns = _columns(next(reader, []), path)
            jobs = [_read_job(columns, row, f"{path}, line {reader.line_num}") for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise TraceError(f"{path}, line {reader.line_num + 1}: this is no CSV file in UTF-8: {error}") from error
    if not jobs:
        raise TraceError(f"{path} has no requests; it needs a line for each below its header")
    return sorted(jobs, key=lambda job: job.arrival_s)


def _columns(header: list[str], path: Path) -> list[str]:
    columns = [name.strip() for name in header]
    if missing := [name for name in _REQUIRED if name not in columns]:
        raise TraceError(f"{path}, line 1: no column {' and no column '.join(missing)}; found {columns}")
    if unknown := [name for name in columns if name not in _FIELDS]:
        raise TraceError(f"{path}, line 1: column {unknown[0]!r} is unknown; there are {', '.join(_FIELDS)}")
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise TraceError(f"{path}, line 1: column {twice[0]} is there twice")
    return columns


def _read_job(columns: list[str], row: list[str], where: str) -> Job:
    if len(row) != len(columns):
        raise TraceError(f"{where}: {len(row)} cells, where the header has {len(columns)} columns")
    cells = zip(columns, (cell.strip() for cell in row), strict=True)
    values = dict(_values(((name, cell) for name, cell in cells if cell), where))
    if missing := [name for name in _REQUIRED if name not in values]:
        raise TraceError(f"{where}, column {missing[0]}: it is empty, and has no default")
    try:
        return Job(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise TraceError(f"{where}: {error}") from error


def _values(cells: Iterable[tuple[str, str]], where: str) -> Iterator[tuple[str, _Cell]]:
    for name, cell in cells:
        kind = _FIELDS[name].type
        assert isinstance(kind, type)
        try:
            yield name, kind(cell)
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise TraceError(f"{where}, column {name}: {cell!r} is not {what}") from error
