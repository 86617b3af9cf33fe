"""Prompts as token ids, which mean nothing but differ and agree where those of real requests would."""

from functools import lru_cache
from random import Random

from octavo.workload.job import Job


def prompt_token_ids(job: Job, index: int, vocab_size: int, seed: int) -> list[int]:
    """The prompt of the job that is number `index` of its workload, as ids from 0 to `vocab_size` - 1. Jobs whose
    prefix has the same name begin with the same tokens; all else is drawn for each index. Raises `ValueError` if there
    are no tokens to draw from."""
    if vocab_size < 1:
        raise ValueError(f"a vocabulary has at least 1 token, not {vocab_size}")
    own = _drawn(f"{seed}/prompt/{index}", job.prompt_tokens - job.prefix_tokens, vocab_size)
    return [*_prefix(f"{seed}/prefix/{job.prefix}", job.prefix_tokens, vocab_size), *own] if job.prefix else own


@lru_cache(maxsize=1024)
def _prefix(name: str, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(_drawn(name, num_tokens, vocab_size))


def _drawn(name: str, num_tokens: int, vocab_size: int) -> list[int]:
    return Random(name).choices(range(vocab_size), k=num_tokens)
