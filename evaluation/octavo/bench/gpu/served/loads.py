"""What is asked of whole systems: requests by their lengths, with random token ids."""

import random
from dataclasses import dataclass

from octavo.bench.workloads import Job

# Ids below are control tokens in many vocabularies.
_FIRST_ID, _LAST_ID = 17, 10_000


@dataclass(frozen=True)
class Load:
    """Requests that arrive together."""

    title: str
    jobs: list[Job]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Prompt and output tokens of each."""
        return [(len(job.prompt_token_ids), job.num_tokens) for job in self.jobs]

    @property
    def num_output_tokens(self) -> int:
        return sum(job.num_tokens for job in self.jobs)


def equal_load(count: int, num_prompt: int, num_output: int, key: str) -> Load:
    """All of one length; other token ids for every `key`."""
    rng = random.Random(key)
    jobs = [Job(rng.choices(range(_FIRST_ID, _LAST_ID), k=num_prompt), num_output) for _ in range(count)]
    return Load(f"{count} x {num_prompt}/{num_output}", jobs)


def mixed_load(count: int = 256, least: int = 100, most: int = 1024) -> Load:
    """Prompts and outputs of `least` to `most` tokens, drawn from Python's generator of seed 0 as the throughput script
    of nano-vllm draws them: 142,827 tokens in and 133,966 out."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, _LAST_ID) for _ in range(rng.randint(least, most))] for _ in range(count)]
    jobs = [Job(prompt, rng.randint(least, most)) for prompt in prompts]
    return Load("mixed lengths", jobs)


def warm_up_load() -> Load:
    """A little of everything, so that no case pays for first use."""
    rng = random.Random("warm-up")
    lengths = [(1, 8), (30, 40), (300, 24), (1000, 8), *[(500, 24)] * 16]
    return Load("warm-up", [Job(rng.choices(range(_FIRST_ID, _LAST_ID), k=num), new) for num, new in lengths])
