"""The cases: which requests, and what is asked of them.

a: one stream, 128 prompt tokens, 128 new ones. b: 64 requests at once, 10,122 prompt and 10,441 output tokens with
lognormal lengths (numpy seed 0, sigma 0.8, prompt mean 160 clipped to 8..512, output mean 170 clipped to 8..384, random
ids 17..49151). Greedy, EOS ignored.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

_WORKLOAD = Path(__file__).with_name("workload64.json")


@dataclass(frozen=True)
class Job:
    """One request of a case."""

    prompt_token_ids: list[int]
    num_tokens: int


@dataclass(frozen=True)
class Case:
    """Requests that arrive together."""

    name: str
    title: str
    jobs: list[Job]

    @property
    def num_output_tokens(self) -> int:
        return sum(job.num_tokens for job in self.jobs)


def all_cases() -> dict[str, Case]:
    """The cases by name."""
    ids = random.Random(0)
    single = Job([ids.randrange(17, 49152) for _ in range(128)], 128)
    many = [Job(entry["prompt"], entry["out"]) for entry in json.loads(_WORKLOAD.read_bytes())]
    return {
        "a": Case("a", "one stream, 128 in, 128 out", [single]),
        "b": Case("b", f"{len(many)} requests at once", many),
    }


def warm_up() -> Case:
    """A little of everything, so that no case pays for first use."""
    return Case("warm-up", "warm-up", [Job(list(range(100, 100 + n)), 8) for n in (1, 30, 300)])
