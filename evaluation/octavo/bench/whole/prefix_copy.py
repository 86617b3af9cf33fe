"""Measures what it is worth to copy a prefix from another worker: `python -m octavo.bench.whole.prefix_copy`.

Real processes and the bundled model: one of two workers serves a prompt, and then the other one, which alone takes new
requests by then, gets it twice. Printed are the seconds until its first token each time, of prompts of several lengths:
with blocks copied from the first worker, and with `none` computed again, for nothing is read there.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from octavo.bench.table import keep
from octavo.bench.whole.drain import CASES, MODEL, WORKERS
from octavo.bench.whole.kv_disk import first_token
from octavo.testbed.stack import Stack
from octavo.v1 import admin_pb2 as pb
from octavo.worker.loading.prepare import prepare_bundled_model

# All ids are below those of the model's vocabulary.
_NUM_IDS: Final = 250


@dataclass(frozen=True)
class CopyRow:
    """Holds seconds until the first token of a prompt of so many tokens, medians of the rounds: at the worker that gets
    it first, at the other one, and there once more; and the fewest tokens that were found at the other one."""

    case: str
    prompt_tokens: int
    first_s: float
    other_s: float
    again_s: float
    found: int

    @property
    def token_us(self) -> float:
        """Returns microseconds for each token that the other worker did not find on its device: of a copy, or of
        computing."""
        return 1e6 * (self.other_s - self.again_s) / self.prompt_tokens

    def to_text(self) -> str:
        return (
            f"{self.case}, {self.prompt_tokens} tokens: first token {1000 * self.first_s:.0f} ms where it came first,"
            f" {1000 * self.other_s:.0f} ms at the other worker ({self.found} tokens found;"
            f" {100 * self.other_s / self.first_s:.1f} %), {1000 * self.again_s:.0f} ms there once more: "
            f"{self.token_us:.1f} us a token"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each case and length, and writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="octavo.bench.whole.prefix_copy", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for case in options.cases:
        for row in measure(case, options.prompt_tokens, options.rounds):
            rows.append(row)
            print(row.to_text(), flush=True)
    keep(rows, options.json)
    return 0


def measure(case: str, lengths: Sequence[int], rounds: int) -> Iterator[CopyRow]:
    """Runs one case on processes of its own."""
    prompts = random.Random(0)
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as parent,
        Stack(prepare_bundled_model(), Path(parent) / "run", {**MODEL, **CASES[case]}) as stack,
    ):
        stack.start_all(len(WORKERS))
        stack.wait_for(lambda: len(stack.load().workers) == len(WORKERS), 60.0)
        for worker in WORKERS:
            stack.admin.CordonWorker(pb.CordonWorkerRequest(worker_id=worker))
        for worker in WORKERS:
            # What comes first has more to do.
            with _alone(stack, worker):
                first_token(stack, prompts.choices(range(_NUM_IDS), k=64))
        for length in lengths:
            yield _measured(stack, case, length, rounds, prompts)


def _measured(stack: Stack, case: str, length: int, rounds: int, prompts: random.Random) -> CopyRow:
    first, other, again, found = list[float](), list[float](), list[float](), list[int]()
    for number in range(rounds):
        prompt = prompts.choices(range(_NUM_IDS), k=length)
        # Each way in turn.
        source, target = WORKERS[number % 2], WORKERS[1 - number % 2]
        with _alone(stack, source):
            first.append(first_token(stack, prompt)[0])
        with _alone(stack, target):
            seconds, num_found = first_token(stack, prompt)
            other.append(seconds)
            found.append(num_found)
            again.append(first_token(stack, prompt)[0])
    return CopyRow(case, length, median(first), median(other), median(again), min(found))


@contextmanager
def _alone(stack: Stack, worker_id: str) -> Iterator[None]:
    """Lets one of the workers take new requests, until all is done."""
    stack.admin.ReadmitWorker(pb.ReadmitWorkerRequest(worker_id=worker_id))
    yield
    stack.wait_idle()
    stack.admin.CordonWorker(pb.CordonWorkerRequest(worker_id=worker_id))


if __name__ == "__main__":
    sys.exit(main())
