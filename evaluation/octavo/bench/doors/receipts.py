"""What a load is, and what it tells: when how many tokens came.

A load is a process: it prints one line of JSON, a list of `Receipts` by stream, once all its streams have ended.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

# The time of each piece of an answer, and the number of its tokens.
Receipts = list[tuple[float, int]]

# All tokens of the answers have as many characters, so that the tokens of a text can be counted.
TOKEN_CHARACTERS = 4


@dataclass(frozen=True)
class Load:
    """So many streams of so many tokens. `api` is of HTTP's: completions or chat."""

    port: int
    streams: int
    tokens: int
    prompt: str
    connections: int = 1
    api: str = ""
    host: str = "127.0.0.1"


def run(load: Callable[[Load], list[Receipts]]) -> None:
    """The process's main. Raises `RuntimeError` for a stream with another number of tokens."""
    asked = Load(**json.loads(sys.argv[1]))
    receipts = load(asked)
    for one in receipts:
        if (came := sum(count for _, count in one)) != asked.tokens:
            raise RuntimeError(f"{came} tokens came where {asked.tokens} were asked for")
    if len(receipts) != asked.streams:
        raise RuntimeError(f"{len(receipts)} streams came of {asked.streams}")
    print(json.dumps(receipts), flush=True)
