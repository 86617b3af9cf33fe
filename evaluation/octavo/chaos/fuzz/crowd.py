"""Clients that ask all the time and do not care for the answers."""

import contextlib
import threading
from collections.abc import Iterator
from random import Random
from typing import Final

import grpc

from octavo.testbed.stack import Stack, token_request

_CLIENTS: Final = 4
_LONGEST_S: Final = 2.0


@contextlib.contextmanager
def impatient_crowd(stack: Stack, rng: Random) -> Iterator[None]:
    """A few that ask inside the block, each one thing after the other."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=_ask, args=(stack, Random(rng.random()), ended), daemon=True) for _ in range(_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _ask(stack: Stack, rng: Random, ended: threading.Event) -> None:
    while not ended.is_set():
        request = token_request(rng.choices(range(200), k=rng.randint(1, 40)), rng.randint(1, 60))
        request.sampling.num_sequences = rng.choice([1, 1, 3])
        if rng.random() < 0.2:
            request.sampling.beam_search.beam_width = 3
            request.sampling.num_sequences = 1
        if rng.random() < 0.3:
            request.response.top_logprobs = request.response.prompt_logprobs = 2
        with contextlib.suppress(grpc.RpcError):
            for _ in stack.stream(request, rng.uniform(0.1, _LONGEST_S)):
                pass
        ended.wait(0.01)
