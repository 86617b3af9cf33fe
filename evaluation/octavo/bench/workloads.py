"""Defines the cases: their requests, and what is asked of them.

a: one stream, 128 prompt tokens, 128 new ones. b: 64 requests at once, 10,122 prompt and 10,441 output tokens with
lognormal lengths (numpy seed 0, sigma 0.8, prompt mean 160 clipped to 8..512, output mean 170 clipped to 8..384). c: 8
prompts of 1,024 tokens, one new token each. d: 32 requests that share 512 prompt tokens, each with 32 of its own and 32
new ones, none of it cached; d-warm: the same again at once. e: one prompt of 256 tokens, 8 sequences of 64 new ones,
sampled at temperature 1. All others are greedy. EOS is ignored.

Token ids are random: no two prompts begin alike but those of d. Only the standard library is used here, since servers
that Octavo is compared with run in environments of their own.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

NAMES = ("a", "b", "c", "d", "d-warm", "e")
# Bytes of keys and values: enough for any case, and few enough for several servers on one machine.
KV_CACHE_MEMORY = 1 << 30
_LENGTHS = Path(__file__).with_name("workload64.json")
# Ids below are control tokens in many vocabularies.
_FIRST_ID = 17


@dataclass(frozen=True)
class CaseRequest:
    """Describes one request of a case: `num_sequences` of `num_tokens` each; more than one are sampled."""

    prompt_token_ids: list[int]
    num_tokens: int
    num_sequences: int = 1

    @property
    def temperature(self) -> float:
        return 1.0 if self.num_sequences > 1 else 0.0

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens * self.num_sequences


@dataclass(frozen=True)
class Case:
    """Requests that arrive together."""

    name: str
    title: str
    jobs: list[CaseRequest]

    @property
    def num_output_tokens(self) -> int:
        return sum(job.num_output_tokens for job in self.jobs)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(job.prompt_token_ids) for job in self.jobs)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**{**value, "jobs": [CaseRequest(**job) for job in value["jobs"]]})


@dataclass(frozen=True)
class _Drawer:
    """Draws jobs with random token ids of a vocabulary, other ones for every `key`. `quick`: at most 4 jobs, of a
    sixteenth of the prompt and 4 tokens."""

    vocab_size: int
    key: str
    quick: bool = False

    def __post_init__(self) -> None:
        if self.vocab_size <= _FIRST_ID:
            raise ValueError(f"a vocabulary of {self.vocab_size} tokens is too small; the cases need {_FIRST_ID + 1}")

    def jobs(self, lengths: list[tuple[int, int]], num_sequences: int = 1, num_shared: int = 0) -> list[CaseRequest]:
        """Makes one job for each pair of prompt tokens of its own, after the `num_shared` that all have, and new
        tokens."""
        shared = self._token_ids(num_shared, "shared")
        return [
            CaseRequest(
                shared + self._token_ids(num_own, str(index)), min(4, num_new) if self.quick else num_new, num_sequences
            )
            for index, (num_own, num_new) in enumerate(lengths[:4] if self.quick else lengths)
        ]

    def _token_ids(self, count: int, name: str) -> list[int]:
        count = -(-count // 16) if self.quick else count
        return random.Random(f"{self.key} {name}").choices(range(_FIRST_ID, self.vocab_size), k=count)


def make_case(name: str, vocab_size: int, repetition: int = 0, *, quick: bool = False) -> Case:
    """Makes the case called `name`, with other token ids at every `repetition`, so that no repetition finds what an
    earlier one left in a prefix cache. `quick` cuts counts and lengths down to what shows that everything runs.

    Raises `ValueError` on an unknown name and if the vocabulary is too small.
    """
    drawer = _Drawer(vocab_size, f"{repetition} {name.removesuffix('-warm')}", quick)
    match name:
        case "a":
            return Case(name, "one stream, 128 in, 128 out", drawer.jobs([(128, 128)]))
        case "b":
            lengths = [(prompt, new) for prompt, new in json.loads(_LENGTHS.read_bytes())]
            return Case(name, "64 requests, 10,122 in, 10,441 out", drawer.jobs(lengths))
        case "c":
            return Case(name, "8 prompts of 1,024, 1 out", drawer.jobs(8 * [(1024, 1)]))
        case "d" | "d-warm":
            cache = "cold" if name == "d" else "warm"
            title = f"32 requests, 512 of 544 in shared, 32 out, {cache} cache"
            return Case(name, title, drawer.jobs(32 * [(32, 32)], num_shared=512))
        case "e":
            return Case(name, "one prompt of 256, 8 times 64 out", drawer.jobs([(256, 64)], num_sequences=8))
    raise ValueError(f"there is no case {name!r}; there are {', '.join(NAMES)}")


def warm_up(vocab_size: int) -> Case:
    """Makes a little of everything, so that no case pays for first use."""
    return Case("warm-up", "warm-up", _Drawer(vocab_size, "warm-up").jobs([(1, 8), (30, 8), (300, 8)]))


def decoding(num_sequences: int, num_tokens: int, vocab_size: int) -> Case:
    """Makes prompts of 256 tokens that soon decode together."""
    return Case("decoding", "decoding", _Drawer(vocab_size, "decoding").jobs(num_sequences * [(256, num_tokens)]))
