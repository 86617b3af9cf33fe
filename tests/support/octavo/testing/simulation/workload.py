"""Draws what clients ask for, at random."""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Self

from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.worker.fake.faults import FakeFault
from octavo.worker.fake.runner import FakeVocabulary

_ENDLESS_TOKENS = 400
# The last tokens of the vocabulary are in no other prompt.
MAX_POISONS = 2
# What poison may do to the worker that computes it.
_POISONS = ("die", "die", "hang", "nan")


@dataclass(frozen=True)
class Model:
    """Describes the model that every worker of a run computes. `window` is that of its widest KV group, 0 if one sees
    all; with a `pooling` other than `none` it gives outputs of texts."""

    directory: Path
    vocabulary: FakeVocabulary
    window: int
    pooling: str = "none"


@dataclass(frozen=True)
class ClientPlan:
    """One client: when it comes, to which frontend, what it wants, when it loses patience (seconds after it came), and
    for how long it would have its request wait in the queue.

    `stop_token_id` stands for a stop string: only its frontend looks for it.
    """

    request_id: str
    frontend: int
    at: float
    cancel_after: float | None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    num_results: int
    incremental: bool
    stop_token_id: int | None
    priority: int
    tenant: str
    salt: str
    max_queue_s: float | None
    # The model's output of the prompt is wanted, and no token.
    pools: bool = False
    # It has been turned away before.
    insists: bool = False

    def is_hurt_by(self, fault: FakeFault) -> bool:
        """Tells whether the request brings the fault about, sooner or later."""
        return set(fault.tokens) <= set(self.prompt_token_ids)

    def blocks(self, block_size: int, num_windows: int) -> int:
        """KV blocks that it needs at most."""
        longest = len(self.prompt_token_ids) + (0 if self.pools else self.sampling.max_tokens)
        return self.sampling.parallel * -(-longest // block_size) * num_windows

    @property
    def kind(self) -> str:
        """Names the way in which the request's tokens are chosen, in a word or two, or that none are."""
        if self.pools:
            return "pooled"
        if self.sampling.beam:
            return "beam search"
        if self.sampling.num_sequences == 1:
            return "sampled" if self.sampling.temperature else "greedy"
        return "best of" if self.is_ranked else "parallel"

    def pooled(self) -> Self:
        """Returns the client as one who wants the model's output of the prompt."""
        sampling = SamplingParams(max_tokens=1, seed=self.sampling.seed)
        return replace(self, pools=True, sampling=sampling, num_results=1, stop_token_id=None)

    @property
    def is_ranked(self) -> bool:
        """Tells whether the results are chosen among more, or searched for."""
        return self.sampling.beam is not None or self.num_results < self.sampling.num_sequences


class Workload:
    """Draws clients, who come before `until`. Some of their prompts begin alike, some with one of
    the `prefixes` that are to be pinned."""

    def __init__(self, random: Random, model: Model, num_frontends: int, until: float) -> None:
        self._random = random
        self._model = model
        self._num_tokens = model.vocabulary.size - MAX_POISONS
        self._num_frontends = num_frontends
        self.prefixes = [self._tokens(random.randint(1, 14)) for _ in range(random.choice((0, 0, 1, 2)))]
        self._beginnings = [*self.prefixes, self._tokens(6), self._tokens(18)]
        # Several at once, so that they are in each other's way.
        self.rushes = [random.uniform(0.1, until) for _ in range(random.randint(1, 2))]
        self._max_parallel = random.choice((1, 2, 4))
        self._max_tokens = random.choice((6, 24, 40))

    def clients(self, count: int, *, impatient: float) -> list[ClientPlan]:
        """`count` clients, of whom the share `impatient` may leave early."""
        return [self._client(f"request-{number}", impatient) for number in range(count)]

    def endless(self) -> ClientPlan:
        """One who asks for so much that it must be noticed if work for it goes on once it has left."""
        sampling = SamplingParams(max_tokens=_ENDLESS_TOKENS, seed=1, temperature=1.0)
        cancel_after = self._random.uniform(0.1, 3.0)
        return replace(self._client("endless", 1.0), sampling=sampling, num_results=1, cancel_after=cancel_after)

    def poison(self, number: int) -> tuple[ClientPlan, FakeFault]:
        """One whose prompt, with a token that no other has, is the end of a worker once it has generated some."""
        token, random = self._num_tokens + number, self._random
        plan = self._client(f"poison-{number}", 0.0)
        prompt = [*plan.prompt_token_ids, token]
        fault = FakeFault(random.choice(_POISONS), (token,), generated=random.choice((0, 0, 1, 4)))
        return replace(plan, prompt_token_ids=prompt, max_queue_s=None), fault

    def _client(self, request_id: str, impatient: float) -> ClientPlan:
        random = self._random
        sampling, num_results = self._sampling()
        return ClientPlan(
            request_id=request_id,
            frontend=random.randrange(self._num_frontends),
            at=random.choice(self.rushes) + random.uniform(0.0, 0.3),
            cancel_after=random.expovariate(0.5) if random.random() < impatient else None,
            prompt_token_ids=self._prompt(),
            sampling=sampling,
            num_results=num_results,
            incremental=random.random() < 0.8,
            stop_token_id=self._token() if random.random() < 0.4 else None,
            priority=random.choice((0, 0, 0, 2, -1)),
            tenant=random.choice(("", "", "acme", "zenith")),
            salt=random.choice(("", "", "", "salt")),
            max_queue_s=random.choice((0.1, 1.0, 5.0)) if random.random() < 0.15 else None,
        )

    def _prompt(self) -> list[int]:
        random = self._random
        own = self._tokens(random.randint(1, 8))
        if random.random() < 0.5:
            return own
        beginning = random.choice(self._beginnings)
        return beginning[: random.randint(1, len(beginning))] + own if random.random() < 0.3 else beginning + own

    def _sampling(self) -> tuple[SamplingParams, int]:
        """The parameters, and how many of the sequences the client wants."""
        random = self._random
        fields: dict[str, Any] = {
            "max_tokens": random.choice((random.randint(1, self._max_tokens), self._max_tokens)),
            "seed": random.getrandbits(32),
            "prompt_logprobs": 1 if random.random() < 0.1 else None,
        }
        if random.random() < 0.5:
            fields["stop_token_ids"] = [*self._model.vocabulary.eos_token_ids, self._token()]
        if random.random() < 0.2:
            fields["min_tokens"] = random.randint(0, fields["max_tokens"])
        kind = random.choice((self._greedy, self._sampled, self._sampled, self._best, self._beams))
        return kind(fields)

    def _greedy(self, fields: dict[str, Any]) -> tuple[SamplingParams, int]:
        return SamplingParams(**fields, logprobs=self._random.choice((None, None, 2))), 1

    def _sampled(self, fields: dict[str, Any]) -> tuple[SamplingParams, int]:
        random = self._random
        count = random.choice((1, self._max_parallel))
        fields |= {"temperature": 1.0, "logprobs": random.choice((None, None, 0, 1)), "num_sequences": count}
        return SamplingParams(**fields, presence_penalty=random.choice((0.0, 0.5))), count

    def _best(self, fields: dict[str, Any]) -> tuple[SamplingParams, int]:
        count = max(2, self._max_parallel)
        # Without logprobs nothing could be ranked.
        sampling = SamplingParams(**fields, temperature=1.0, num_sequences=count, logprobs=0)
        return sampling, self._random.randint(1, count - 1)

    def _beams(self, fields: dict[str, Any]) -> tuple[SamplingParams, int]:
        random = self._random
        width = random.choice((2, self._max_parallel))
        beam = BeamSearch(width, random.choice((0.0, 1.0, 2.0)), random.choice(list(EarlyStopping)))
        count = random.randint(1, width)
        fields["max_tokens"] = min(fields["max_tokens"], 10)
        fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
        return SamplingParams(**fields, num_sequences=count, beam=beam), count

    def _token(self) -> int:
        return self._random.randrange(self._num_tokens)

    def _tokens(self, count: int) -> list[int]:
        return [self._token() for _ in range(count)]
