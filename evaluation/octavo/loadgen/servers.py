"""Defines how a run reaches a server, whatever protocol it speaks: its address as its user writes it, the secrets of
its connections, what it is asked, and how that fails, for one request or for the whole run."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from octavo.workload.job import Job, prompt_token_ids
from octavo.workload.measures import Gaps, Served

# -- failures ---------------------------------------------------------------------------------------------------------


_MAX_DETAIL: Final = 300


class Failure(Exception):
    """Says that a request failed. `kind` is short and the same for all that failed so; `detail` is one line of what the
    server or the system said."""

    def __init__(self, kind: str, detail: str = "") -> None:
        self.kind = kind
        self.detail = one_line(detail)
        super().__init__(f"{kind}: {self.detail}" if self.detail else kind)


class TargetError(Exception):
    """Says why the server cannot be measured at all, and what to do."""


def one_line(text: str) -> str:
    """Returns the text as it may be printed: one line, no control characters, not too long."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= _MAX_DETAIL else line[: _MAX_DETAIL - 1] + "…"


# -- addresses --------------------------------------------------------------------------------------------------------


ServerProtocol = Literal["http", "grpc"]
_FORMS: Final = (
    "write http://HOST:PORT or https://HOST for a server of OpenAI's API, grpc://HOST:PORT, grpcs://HOST:PORT or"
    " HOST:PORT for Octavo's gRPC, and http+unix:PATH or unix:PATH for their unix sockets"
)


@dataclass(frozen=True)
class ServerAddress:
    """Names a server. `address` is a base URL of HTTP without its /v1, or an address of gRPC. `socket` is the path of
    the unix socket that HTTP goes over."""

    protocol: ServerProtocol
    address: str
    tls: bool = False
    socket: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError` for what is no address."""
        scheme, separator, rest = text.strip().partition(":")
        if scheme in ("http", "https"):
            return cls("http", _base_url(text.strip()), scheme == "https")
        if scheme == "http+unix" and rest:
            return cls("http", "http://localhost", socket=rest.removeprefix("//"))
        if scheme in ("grpc", "grpcs") and rest.startswith("//") and (address := rest[2:].rstrip("/")):
            return cls("grpc", address, scheme == "grpcs")
        if separator and rest and "//" not in text:
            return cls("grpc", text.strip())
        raise ValueError(f"{text!r} is no address of a server; {_FORMS}")

    def __str__(self) -> str:
        if self.socket is not None:
            return f"http+unix:{self.socket}"
        return self.address if self.protocol == "http" else f"{'grpcs' if self.tls else 'grpc'}://{self.address}"


def _base_url(text: str) -> str:
    parts = urlsplit(text)
    if not parts.hostname:
        raise ValueError(f"{text!r} names no host; {_FORMS}")
    if parts.port == 0:
        raise ValueError(f"{text!r}: port 0 is none; {_FORMS}")
    if parts.username or parts.query or parts.fragment:
        # They would be shown in reports.
        raise ValueError("the address must hold no user, query or fragment; give a key by OCTAVO_API_KEY")
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


@dataclass(frozen=True, repr=False)
class Secrets:
    """Holds the secrets of a connection. `api_key` is shown nowhere, which is why there is no repr of it; it is from
    the environment's `variable`. `ca_certificate` is a PEM file. Raises `ValueError` for a key that cannot be sent."""

    api_key: str | None = None
    ca_certificate: Path | None = None
    variable: str = "OCTAVO_API_KEY"

    def __post_init__(self) -> None:
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError(f"the key of {self.variable} has characters that no header can hold, such as a line's end")

    @property
    def advice(self) -> str:
        """Says what a server does that does not let in, and what to do."""
        if self.api_key:
            return f"does not take this API key; check {self.variable}"
        return f"asks for an API key; set {self.variable}"


# -- requests ---------------------------------------------------------------------------------------------------------


# Each is one token of most vocabularies, with the space before it.
_TEXT: Final = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my "
    "now over such our man me even most made after also did many off before must well back through years much "
    "where your way down should because long each just state those people too mr how little good world make "
    "very year still see own work men day get here old life both between being under three never know same "
    "last another while us might great go come since against right came take used himself few house use place "
    "during high without again home around small however found part school thought went say general once upon "
    "war every left country number public water less far put think head city"
)
WORDS: Final = tuple(_TEXT.split())


@dataclass(slots=True)
class Answer:
    """Holds what an answer says: as text, and as token ids where the server tells them."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Said:
    """Holds what was said in a conversation, in the form in which its prompts are sent: as `token_ids`, as `text`, or
    as the `messages` of a chat."""

    token_ids: Sequence[int] = ()
    text: str = ""
    messages: Sequence[dict[str, str]] = ()


NOTHING_SAID: Final = Said()


@dataclass(frozen=True)
class Asking:
    """Makes requests. Token ids are drawn below `vocab_size`, contents by `seed`. Without `extensions` a body holds
    nothing that OpenAI's own API does not have; `counted` asks for the ids of the tokens in every chunk."""

    model: str = ""
    chat: bool = False
    as_text: bool = False
    vocab_size: int = 256
    seed: int = 0
    temperature: float = 1.0
    extensions: bool = True
    counted: bool = False

    def token_ids(self, job: Job, index: int, said: Said = NOTHING_SAID) -> list[int]:
        """Returns the token ids of the prompt of job number `index`, behind what was `said` before it."""
        return prompt_token_ids(job, index, self.vocab_size, self.seed, said.token_ids)

    def text(self, job: Job, index: int, said: Said = NOTHING_SAID) -> str:
        """Returns a word for every token of the prompt, behind what was said before it."""
        words = " ".join(WORDS[i] for i in prompt_token_ids(job, index, len(WORDS), self.seed))
        return f"{said.text} {words}" if said.text else words

    def messages(self, job: Job, index: int, said: Said = NOTHING_SAID) -> list[dict[str, str]]:
        """Returns the messages of a chat, of which the prompt is the last."""
        return [*said.messages, {"role": "user", "content": self.text(job, index)}]

    def prompt(self, job: Job, index: int, said: Said = NOTHING_SAID) -> str | list[int]:
        """Returns the prompt in the form that the server takes."""
        return self.text(job, index, said) if self.as_text else self.token_ids(job, index, said)

    def said_after(self, job: Job, index: int, said: Said, answer: Answer) -> Said:
        """Returns what was said once the job's prompt, behind what was `said` before it, has this answer."""
        if self.chat:
            answered = {"role": "assistant", "content": answer.text}
            return Said(messages=[*self.messages(job, index, said), answered])
        if self.as_text:
            return Said(text=self.text(job, index, said) + answer.text)
        return Said(token_ids=[*self.token_ids(job, index, said), *answer.token_ids])

    def body(self, job: Job, index: int, said: Said = NOTHING_SAID) -> dict[str, Any]:
        """Returns the body for POST /v1/completions, or /v1/chat/completions, behind what was said before it."""
        body: dict[str, Any] = {
            "model": self.model,
            # OpenAI's newer models know the other name only, and other servers may know the older one only.
            "max_completion_tokens" if self.chat and not self.extensions else "max_tokens": job.output_tokens,
            "n": job.n,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = self.messages(job, index, said)
        else:
            body["prompt"] = self.prompt(job, index, said)
        if not job.beam_width:
            body["temperature"] = self.temperature
        return body | self._extensions(job) if self.extensions else body

    def _extensions(self, job: Job) -> dict[str, Any]:
        fields: dict[str, Any] = {"ignore_eos": True, "min_tokens": job.output_tokens}
        if job.beam_width:
            fields |= {"use_beam_search": True, "best_of": job.beam_width}
        if job.priority:
            # There, lower is earlier.
            fields["priority"] = -job.priority
        if self.counted:
            fields["return_token_ids"] = True
        return fields


# -- records ----------------------------------------------------------------------------------------------------------


# Seconds since the start of the run.
Clock = Callable[[], float]


@dataclass(slots=True)
class Record:
    """Records one request. Times are in seconds since the start of the run; None: the request did not come to that.

    `num_tokens` came in all sequences, in so many `deliveries`; `prompt_tokens` are those that the server counted (0:
    it did not say), and `cached_tokens` those of them that it had computed before.
    """

    job: Job
    sent_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_tokens: int = 0
    deliveries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    failure: Failure | None = None

    @property
    def lag_s(self) -> float | None:
        """Returns by how many seconds the request was sent too late."""
        return None if self.sent_s is None else max(0.0, self.sent_s - self.job.arrival_s)

    @property
    def is_short(self) -> bool:
        """Returns whether the request ended well, but with fewer tokens than the job says."""
        return (
            self.finished_s is not None and not self.failure and self.num_tokens < self.job.output_tokens * self.job.n
        )

    def served(self) -> Served:
        """Returns the job with the lengths that it really had, which a server may choose differently."""
        return Served(
            job=self._real_job(),
            first_token_s=self.first_token_s,
            finished_s=self.finished_s,
            num_tokens=self.num_tokens,
            preemptions=self.preemptions,
            error=self.failure.kind if self.failure else "",
            cached_tokens=self.cached_tokens,
        )

    def _real_job(self) -> Job:
        job = self.job
        prompt_tokens = self.prompt_tokens or job.prompt_tokens
        # Of a request that was cut off, nobody knows how long it would have become.
        output_tokens = max(1, round(self.num_tokens / job.n)) if self.finished_s is not None else job.output_tokens
        prefix_tokens, history_tokens = (
            min(job.prefix_tokens, prompt_tokens),
            min(job.history_tokens, prompt_tokens - 1),
        )
        if (prompt_tokens, output_tokens, prefix_tokens) == (job.prompt_tokens, job.output_tokens, job.prefix_tokens):
            return job
        return replace(
            job,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefix_tokens=prefix_tokens,
            history_tokens=history_tokens,
        )


class AnswerRecorder:
    """Takes from a transport what comes of one answer, as it comes. The pauses between what a sequence brings go to
    `gaps`: tokens that come together have one. Of a conversation's turn it keeps the `answer`."""

    __slots__ = ("_clock", "_gaps", "_last", "answer", "record")

    def __init__(self, record: Record, gaps: Gaps, clock: Clock) -> None:
        self.record = record
        self.answer = Answer() if record.job.turn else None
        self._gaps = gaps
        self._clock = clock
        self._last: dict[int, float] = {}

    def tokens(self, sequence: int, count: int) -> None:
        """Records that `count` new tokens of the sequence of that index have come just now."""
        now, record = self._clock(), self.record
        if record.first_token_s is None:
            record.first_token_s = now
        elif (last := self._last.get(sequence)) is not None:
            self._gaps.add(now - last)
        self._last[sequence] = now
        record.num_tokens += count
        record.deliveries += 1

    def says(self, text: str, token_ids: Iterable[int]) -> None:
        """Keeps what new tokens say, if somebody will go on from it."""
        if self.answer is not None:
            self.answer.text += text
            self.answer.token_ids += token_ids

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, preemptions: int = 0) -> None:
        """Takes the server's own counts, which are exact."""
        record = self.record
        record.prompt_tokens, record.num_tokens = prompt_tokens, completion_tokens
        record.cached_tokens, record.preemptions = cached_tokens, preemptions

    def end(self) -> None:
        """Completes the answer. Raises `Failure` where nothing was in it."""
        record = self.record
        if record.num_tokens < 1:
            raise Failure("empty answer", "the server ended the answer well, without a token in it")
        record.finished_s = self._clock()
        if record.first_token_s is None:
            # Its tokens have no text of their own, so nothing came before its end.
            record.first_token_s = record.finished_s


# -- transports -------------------------------------------------------------------------------------------------------


T = TypeVar("T")
# Sends one request and tells what comes of it. Raises `Failure`.
Call = Callable[[AnswerRecorder], Awaitable[None]]


class Transport(Protocol):
    """Connects to a server."""

    async def open(self) -> str:
        """Returns the name of the model that is asked. Raises `TargetError` if the server cannot be asked at all."""
        ...

    def prepare(self, job: Job, index: int, said: Said = NOTHING_SAID) -> Call:
        """Does all of the work for a request that can be done before it is due; `said` is what was said before it."""
        ...

    async def aclose(self) -> None:
        """Ends all connections."""
        ...


class Lot(Generic[T]):
    """Makes connections, each for `size` requests at a time: more are made as more are under way, so that no request
    waits for another's."""

    def __init__(self, make: Callable[[], T], size: int) -> None:
        self._make = make
        self._size = size
        self.members: list[T] = []
        # A number for every request that there is room for; those given back last are warm.
        self._free: list[int] = []

    def take(self) -> int:
        """Returns the number of a member with room; the caller gives it back."""
        if not self._free:
            self._free = [len(self.members)] * self._size
            self.members.append(self._make())
        return self._free.pop()

    def give_back(self, number: int) -> None:
        """Gives back a member that was taken."""
        self._free.append(number)
