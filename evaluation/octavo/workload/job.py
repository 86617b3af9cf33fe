"""Describes one request of an experiment and draws the token ids of its prompt.

The token ids mean nothing, but differ and agree where those of real requests would.
"""

from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Final

# What a message can hold of one sequence; far beyond what models take.
MAX_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """Describes a request that comes `arrival_s` seconds after the start, with a prompt of `prompt_tokens` tokens, of
    which the first `prefix_tokens` are those of the shared prefix `prefix` (""; 0: none).

    It generates exactly `output_tokens` in each of `n` sequences, or of `beam_width` beams (0: it samples). Raises
    `ValueError` on what cannot be.
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

    @property
    def parallel(self) -> int:
        """Returns the number of sequences that run side by side."""
        return self.beam_width or self.n


def prompt_token_ids(job: Job, index: int, vocab_size: int, seed: int) -> list[int]:
    """Returns the prompt of the job that is number `index` of its workload, as ids from 0 to `vocab_size` - 1.

    Jobs whose prefix has the same name begin with the same tokens; all else is drawn for each index. Raises
    `ValueError` if there are no tokens to draw from.
    """
    if vocab_size < 1:
        raise ValueError(f"a vocabulary has at least 1 token, not {vocab_size}")
    own = _drawn(f"{seed}/prompt/{index}", job.prompt_tokens - job.prefix_tokens, vocab_size)
    return [*_prefix(f"{seed}/prefix/{job.prefix}", job.prefix_tokens, vocab_size), *own] if job.prefix else own


@lru_cache(maxsize=1024)
def _prefix(name: str, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(_drawn(name, num_tokens, vocab_size))


def _drawn(name: str, num_tokens: int, vocab_size: int) -> list[int]:
    return Random(name).choices(range(vocab_size), k=num_tokens)
