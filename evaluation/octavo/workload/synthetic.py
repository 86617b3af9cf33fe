"""Draws jobs at random: when they come, and how long their prompts and outputs are, in tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice, repeat, takewhile
from math import inf, isfinite
from random import Random
from typing import Final, Protocol, Self

from octavo.workload.job import Job

# -- arrivals ---------------------------------------------------------------------------------------------------------


class Arrivals(Protocol):
    """Times at which requests come, without an end."""

    @property
    def rate(self) -> float:
        """Requests per second; infinite if all come at once."""
        ...

    def times(self, random: Random) -> Iterator[float]:
        """Yields seconds after the start, in rising order."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Draws independent times, `rate` per second on average."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, random: Random) -> Iterator[float]:
        time = 0.0
        while True:
            time += random.expovariate(1.0) / self.rate
            yield time


@dataclass(frozen=True)
class Regular:
    """Spaces `rate` times per second at equal distances, the first at once."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, random: Random) -> Iterator[float]:
        return (place / self.rate for place in count())


@dataclass(frozen=True)
class AtOnce:
    """Lets all requests come at the start."""

    @property
    def rate(self) -> float:
        return inf

    def times(self, random: Random) -> Iterator[float]:
        return repeat(0.0)


def _check_rate(rate: float) -> None:
    if not (isfinite(rate) and rate > 0.0):
        raise ValueError(f"a rate must be above 0 requests per second, and finite, not {rate}")


# -- lengths ----------------------------------------------------------------------------------------------------------


_MAX_SIGMA: Final = 5.0


class Lengths(Protocol):
    """Draws lengths in tokens from a distribution, and knows its mean."""

    @property
    def mean(self) -> float: ...

    def draw(self, random: Random) -> int: ...


@dataclass(frozen=True)
class Fixed:
    """Always draws `length` tokens."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a length must be at least 1 token, not {self.length}")

    @property
    def mean(self) -> float:
        return float(self.length)

    def draw(self, random: Random) -> int:
        return self.length


@dataclass(frozen=True)
class Uniform:
    """Draws from `low` to `high` tokens, both included, all with the same probability."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


@dataclass(frozen=True)
class LogNormal:
    """Draws from a lognormal distribution with `sigma` (that of the logarithm), where what lies below `low` or above
    `high` tokens is moved to that bound. `mean` is the mean of what comes out. Raises `ValueError` if nothing has that
    mean."""

    mean: float
    sigma: float
    low: int = 4
    high: int = 1024

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)
        if not 0.0 < self.sigma <= _MAX_SIGMA:
            raise ValueError(f"sigma must be above 0 and at most {_MAX_SIGMA:g}, not {self.sigma:g}")
        if not self.low < self.mean < self.high:
            raise ValueError(f"a mean of {self.mean:g} tokens must be between low = {self.low} and high = {self.high}")

    def draw(self, random: Random) -> int:
        mu = _mu(self.mean, self.sigma, self.low, self.high)
        return round(min(max(random.lognormvariate(mu, self.sigma), self.low), self.high))


def _check_bounds(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ValueError(f"lengths from {low} to {high} tokens: the lower is at least 1 and at most the higher")


@lru_cache(maxsize=256)
def _mu(mean: float, sigma: float, low: int, high: int) -> float:
    """Returns the mean of the logarithm before the bounds apply, by which the mean after them is `mean`."""
    least, most = math.log(low) - 10 * sigma, math.log(high) + 10 * sigma
    for _ in range(100):
        middle = (least + most) / 2
        if _bounded_mean(middle, sigma, low, high) < mean:
            least = middle
        else:
            most = middle
    return (least + most) / 2


def _bounded_mean(mu: float, sigma: float, low: int, high: int) -> float:
    from_low, to_high = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    between = math.exp(mu + sigma**2 / 2) * (_normal_cdf(to_high - sigma) - _normal_cdf(from_low - sigma))
    return low * _normal_cdf(from_low) + between + high * _normal_cdf(-to_high)


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


@dataclass(frozen=True)
class Dataset:
    """Draws the lengths of single questions and answers. Prompt and output have at most `max_total` tokens together:
    the output is cut first, and the prompt leaves it one."""

    name: str
    inputs: Lengths
    outputs: Lengths
    max_total: int = 2048

    def draw(self, random: Random, prefix_tokens: int = 0) -> tuple[int, int]:
        """Returns the tokens of a request's prompt, which begins with a prefix of so many more, and of its output.
        Raises `ValueError` if the prefix leaves no room."""
        room = self.max_total - prefix_tokens
        if room < 2:
            raise ValueError(f"a prefix of {prefix_tokens} tokens leaves no room in {self.max_total} tokens")
        prompt = min(self.inputs.draw(random), room - 1)
        return prompt, min(self.outputs.draw(random), room - prompt)

    def scaled_sigma(self, factor: float) -> Self:
        """Returns the same means with another spread. Raises `ValueError` for lengths that have no sigma."""
        return replace(self, inputs=_scaled(self.inputs, factor), outputs=_scaled(self.outputs, factor))


def _scaled(lengths: Lengths, factor: float) -> Lengths:
    if not isinstance(lengths, LogNormal):
        raise ValueError(f"{lengths} has no sigma that could be scaled")
    return replace(lengths, sigma=lengths.sigma * factor)


@dataclass(frozen=True)
class Chatbot:
    """Draws the lengths of a conversation's questions: each request is the last of `rounds` rounds of `turns`, so its
    prompt is the last `max_prompt` tokens of what was said before and the new question. No answer is above
    `max_output`."""

    name: str
    turns: Dataset
    rounds: Lengths
    max_prompt: int = 1024
    max_output: int = 1024

    def draw(self, random: Random, prefix_tokens: int = 0) -> tuple[int, int]:
        """Returns the tokens of a request's prompt and of its output, as a dataset's `draw` does. The prefix comes
        before the conversation, and is not cut."""
        history = sum(sum(self.turns.draw(random)) for _ in range(self.rounds.draw(random) - 1))
        question, answer = self.turns.draw(random)
        return min(history + question, self.max_prompt), min(answer, self.max_output)

    def scaled_sigma(self, factor: float) -> Self:
        return replace(self, turns=self.turns.scaled_sigma(factor))


# The means are those of the paper; the spread, which it does not give, and the number of rounds are assumed.
_SHAREGPT: Final = Dataset("sharegpt", LogNormal(161.31, 1.12), LogNormal(337.99, 1.02))
_ALPACA: Final = Dataset("alpaca", LogNormal(19.31, 0.72), LogNormal(58.45, 0.88))
_CHATBOT: Final = Chatbot("chatbot", _SHAREGPT, Uniform(1, 8))
DATASETS: Final[dict[str, Dataset | Chatbot]] = {each.name: each for each in (_SHAREGPT, _ALPACA, _CHATBOT)}


# -- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Requests that come for `seconds`, or until there are `num_requests`, whichever is first (None: no such end).

    Each has `n` samples, or beams, and its drawn prompt comes behind one of `num_prefixes` prefixes of `prefix_tokens`
    (0: no prefix). With several `turns` each is the first of a conversation, whose later turns go on from its answer:
    each with a message and an answer of lengths of their own, after a pause that is drawn from an exponential
    distribution with mean `think_s`, as long as all fits the dataset's limit.

    Raises `ValueError` on what has no end or cannot be.
    """

    dataset: Dataset | Chatbot
    arrivals: Arrivals
    seconds: float | None = None
    num_requests: int | None = None
    n: int = 1
    beam_width: int = 0
    prefix_tokens: int = 0
    num_prefixes: int = 1
    turns: int = 1
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.turns < 1 or not 0.0 <= self.think_s < inf:
            raise ValueError(f"{self.turns} turns, {self.think_s} s apart, cannot be")
        if self.turns > 1 and (self.n > 1 or self.beam_width):
            raise ValueError("a conversation goes on from one answer, so its requests have one sequence each")
        if self.turns > 1 and isinstance(self.dataset, Chatbot):
            raise ValueError(f"{self.dataset.name} draws the last turns of conversations; take another for all of them")
        if self.num_requests is None and (self.seconds is None or self.arrivals.rate == inf):
            raise ValueError("requests without an end: give a number of requests, or a rate and a time in seconds")
        if (self.num_requests or 0) < 0 or not 0.0 <= (self.seconds or 0.0) < inf:
            raise ValueError(f"{self.num_requests} requests in {self.seconds} s: neither can be negative or infinite")
        if self.prefix_tokens < 0 or self.num_prefixes < 1:
            raise ValueError(f"{self.num_prefixes} prefixes of {self.prefix_tokens} tokens cannot be")

    def jobs(self, seed: int) -> list[Job]:
        """Returns the jobs in order of arrival, later turns behind the first of their conversation. Times, lengths and
        prefixes are drawn apart: to change one changes none of the others."""
        lengths, prefixes = _stream(seed, "lengths"), _stream(seed, "prefixes")
        if self.turns == 1:
            return [self._job(arrival_s, lengths, prefixes) for arrival_s in self._times(seed)]
        pauses = _stream(seed, "pauses")
        return [
            turn
            for number, arrival_s in enumerate(self._times(seed))
            for turn in self._conversation(f"conversation-{number}", arrival_s, lengths, prefixes, pauses)
        ]

    def _conversation(
        self, name: str, arrival_s: float, lengths: Random, prefixes: Random, pauses: Random
    ) -> Iterator[Job]:
        assert isinstance(self.dataset, Dataset)
        job = replace(self._job(arrival_s, lengths, prefixes), conversation=name, turn=1)
        yield job
        for turn in range(2, self.turns + 1):
            message, answer = self.dataset.draw(lengths)
            pause = pauses.expovariate(1 / self.think_s) if self.think_s else 0.0
            history = job.prompt_tokens + job.output_tokens
            if history + message + answer > self.dataset.max_total:
                return
            job = replace(
                job,
                prompt_tokens=history + message,
                output_tokens=answer,
                prefix="",
                prefix_tokens=0,
                turn=turn,
                history_tokens=history,
                think_s=pause,
            )
            yield job

    def _times(self, seed: int) -> Iterator[float]:
        end = inf if self.seconds is None else self.seconds
        times = islice(self.arrivals.times(_stream(seed, "arrivals")), self.num_requests)
        return takewhile(lambda time: time < end, times)

    def _job(self, arrival_s: float, lengths: Random, prefixes: Random) -> Job:
        prompt, output = self.dataset.draw(lengths, self.prefix_tokens)
        prefix = f"prefix-{prefixes.randrange(self.num_prefixes)}" if self.prefix_tokens else ""
        return Job(
            arrival_s=arrival_s,
            prompt_tokens=self.prefix_tokens + prompt,
            output_tokens=output,
            n=self.n,
            beam_width=self.beam_width,
            prefix=prefix,
            prefix_tokens=self.prefix_tokens,
        )


def _stream(seed: int, name: str) -> Random:
    return Random(f"{seed}/{name}")
