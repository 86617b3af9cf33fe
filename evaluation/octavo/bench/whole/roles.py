"""Measures workers apart for prompts and for what follows: `python -m octavo.bench.whole.roles [--seconds N]`.

Real processes and the bundled model, on two workers: some streams go on all the time, while long prompts come one after
the other, each for a few tokens. Printed are the times between the streams' tokens, and those until a long prompt's
first token: with both workers for everything (`both`), and with one for prompts and one for what follows (`apart`).
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc

from octavo.bench.table import keep
from octavo.bench.whole.drain import MODEL, WORKERS
from octavo.bench.whole.failover import Case, Round, TimeSpread, streaming
from octavo.testbed.stack import Stack, token_request
from octavo.v1 import generation_pb2_grpc as services
from octavo.worker.loading.prepare import prepare_bundled_model

_CASES: Final = {"both": ("both", "both"), "apart": ("prefill", "decode")}
_LONG_TOKENS: Final = 8
# All ids are below those of the model's vocabulary.
_NUM_IDS: Final = 250


@dataclass(frozen=True)
class RolesRow:
    """Holds the figures of one case, in milliseconds: between tokens of the streams, and until the first token of a
    long prompt; and how many tokens came of the streams, and long prompts, in a second."""

    case: str
    between: TimeSpread
    first: TimeSpread
    tokens_a_second: float
    prompts_a_second: float

    def to_text(self) -> str:
        return (
            f"{self.case}: between tokens {_figures(self.between)}, first of a long prompt {_figures(self.first)}"
            f" (ms, p50 / p99 / longest); {self.tokens_a_second:.0f} tokens and {self.prompts_a_second:.2f} long"
            " prompts a second"
        )


def _figures(spread: TimeSpread) -> str:
    return f"{spread.p50:.0f} / {spread.p99:.0f} / {spread.longest:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each case, and writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="octavo.bench.whole.roles", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--long", type=int, default=2048, help="tokens of a long prompt")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for case in [*_CASES] * options.rounds:
        rows.append(measure(case, options.seconds, options.streams, options.long))
        print(rows[-1].to_text(), flush=True)
    keep(rows, options.json)
    return 0


def measure(name: str, seconds: float, streams: int, long: int) -> RolesRow:
    """Runs one case on processes of its own."""
    case = Case(MODEL, is_real=True, streams=streams, prompt_tokens=64)
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as parent,
        Stack(prepare_bundled_model(), Path(parent) / "run", case.environment) as stack,
    ):
        for process in ("scheduler", "frontend"):
            stack.start_named(process)
        for worker, role in zip(WORKERS, _CASES[name], strict=True):
            stack.start_named(worker, OCTAVO_ROLE=role)
        stack.wait_for(lambda: len(stack.load().workers) == len(WORKERS))
        stack.wait_ready()
        found, firsts, began = asyncio.run(_load(stack, case, seconds, long))
    times = [[at for at in each if at >= began] for each in found.token_at.values()]
    between = [after - before for each in times for before, after in pairwise(each)]
    return RolesRow(
        case=name,
        between=TimeSpread.of(between),
        first=TimeSpread.of(firsts),
        tokens_a_second=sum(map(len, times)) / seconds,
        prompts_a_second=len(firsts) / seconds,
    )


async def _load(stack: Stack, case: Case, seconds: float, long: int) -> tuple[Round, list[float], float]:
    """Has streams and long prompts served; returns the streams' times, those until a prompt's first token, and when the
    first of these came."""
    random, found, firsts = Random(0), Round(), list[float]()
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stub: Any = services.GenerationServiceStub(channel)
        async with streaming(stub, found, 0, case, random):
            # Until streams are where they belong.
            await asyncio.sleep(2.0)
            began = time.monotonic()
            while time.monotonic() < began + seconds:
                firsts.append(await _first(stub, random.choices(range(_NUM_IDS), k=long)))
    return found, firsts, began


async def _first(stub: Any, prompt: list[int]) -> float:
    """Returns the seconds until the first token of a prompt, once all of its tokens have come."""
    began = time.monotonic()
    first = 0.0
    async for response in stub.Generate(token_request(prompt, _LONG_TOKENS)):
        if response.HasField("delta") and not first:
            first = time.monotonic() - began
    return first


if __name__ == "__main__":
    sys.exit(main())
