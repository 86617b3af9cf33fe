"""Records a request while it runs, and what it comes to."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.loadgen.failures import Failure
from octavo.workload.job import Job
from octavo.workload.measures import Gaps, Served

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
        )

    def _real_job(self) -> Job:
        job = self.job
        prompt_tokens = self.prompt_tokens or job.prompt_tokens
        # Of a request that was cut off, nobody knows how long it would have become.
        output_tokens = max(1, round(self.num_tokens / job.n)) if self.finished_s is not None else job.output_tokens
        prefix_tokens = min(job.prefix_tokens, prompt_tokens)
        if (prompt_tokens, output_tokens, prefix_tokens) == (job.prompt_tokens, job.output_tokens, job.prefix_tokens):
            return job
        return replace(job, prompt_tokens=prompt_tokens, output_tokens=output_tokens, prefix_tokens=prefix_tokens)


class Answer:
    """Takes from a transport what comes of one answer, as it comes. The pauses between what a sequence brings go to
    `gaps`: tokens that come together have one."""

    __slots__ = ("_clock", "_gaps", "_last", "record")

    def __init__(self, record: Record, gaps: Gaps, clock: Clock) -> None:
        self.record = record
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
