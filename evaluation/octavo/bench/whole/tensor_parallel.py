"""Measures what sharing a model among ranks on one machine costs: ranks of one thread beside one rank of as many
threads.

python -m octavo.bench.whole.tensor_parallel

Both compute the same steps, in turns, so that a busy machine slows both; the ratio is that of the medians. A rank's
time for sums holds its wait for the slowest rank. `--over-sockets` lets the ranks add up over loopback with gloo, as
those of several machines do.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from torch import Tensor

from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.testbed.models import NO_MOVES, new_sequences, next_item
from octavo.testbed.stack import free_address
from octavo.worker.health import Liveness
from octavo.worker.model_settings import ModelSettings
from octavo.worker.runner import Runner
from octavo.worker.sequences import WorkerSequence
from octavo.worker.step.model_runner import ModelRunner
from octavo.worker.tensor_parallel.distributed import DistributedGroup
from octavo.worker.tensor_parallel.follower import Follower
from octavo.worker.tensor_parallel.leader import Leader
from octavo.worker.tensor_parallel.ranks import LocalRanks
from octavo.worker.tensor_parallel.rendezvous import connect

_PATIENCE_S = 300.0
_BLOCK_SIZE = 16
_CONTEXT = 128
_PREFILL = 512


class TimedGroup(DistributedGroup):
    """Counts the seconds that each kind of collective has taken since the counts were last cleared."""

    def __init__(self, group: DistributedGroup) -> None:
        self.__dict__ = group.__dict__
        self.seconds: dict[str, float] = defaultdict(float)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._timed("sums"):
            return super().all_reduce(tensor)

    def gather_columns(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        with self._timed("logits gathered"):
            return super().gather_columns(part, sizes)

    def send_frame(self, frame: bytes) -> None:
        with self._timed("steps sent"):
            super().send_frame(frame)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - began


@dataclass
class TimedRanks:
    """Holds one way to compute the model: `runner` with `threads` in this process, and milliseconds of its steps by
    kind."""

    runner: Runner
    threads: int
    group: TimedGroup | None = None
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    parts: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))

    def step(self, kind: str, sequences: list[WorkerSequence], num_tokens: int) -> None:
        """Computes the next `num_tokens` of each, again and again the same, so that every step is as long."""
        torch.set_num_threads(self.threads)
        if self.group:
            self.group.seconds.clear()
        began = time.perf_counter()
        output = self.runner.execute(NO_MOVES, [next_item(sequence, num_tokens) for sequence in sequences])
        self.times[kind].append(1000 * (time.perf_counter() - began))
        waits = self.group.seconds if self.group else {}
        parts = {"sampling": output.times.sample_us / 1e3, **{name: 1e3 * wait for name, wait in waits.items()}}
        self.parts[kind].append(parts)

    def report(self, kind: str) -> str:
        """Formats the median, and how the mean is made up."""
        # The first warmed up.
        times, all_parts = self.times[kind][1:], self.parts[kind][1:]
        mean = statistics.mean(times)
        parts = {name: statistics.mean(each[name] for each in all_parts) for name in all_parts[0]}
        shares = {"model": mean - sum(parts.values()), **parts}
        return f"{statistics.median(times):8.1f} ms  " + ", ".join(
            f"{name} {part:.1f} ({part / mean:.0%})" for name, part in shares.items()
        )


def measure(sides: list[TimedRanks], batches: Sequence[int], rounds: int) -> Iterator[str]:
    """Yields a line per side and kind of step, and one with their ratio."""
    prompts = [[(7 * i + j) % 1000 for j in range(_CONTEXT)] for i in range(max(batches))]
    works = [(f"decode, batch {batch}", prompts[:batch], _CONTEXT - 1, 1) for batch in batches]
    works.append((f"prefill, {_PREFILL} tokens", [[j % 1000 for j in range(_PREFILL)]], 0, _PREFILL))
    for kind, texts, computed, num_tokens in works:
        made = [new_sequences(side.runner, texts, 0) for side in sides]
        for sequence in (each for sequences in made for each in sequences):
            # Keys and values cost as much whatever they are.
            sequence.num_computed = computed
        for _ in range(rounds + 1):
            for side, sequences in zip(sides, made, strict=True):
                side.step(kind, sequences, num_tokens)
        for side in sides:
            yield f"{kind:22} {side.runner.world_size} ranks x {side.threads} threads {side.report(kind)}"
        one, several = (statistics.median(side.times[kind][1:]) for side in sides)
        yield f"{kind:22} several ranks take {several / one:.2f} times as long as one"


def make_runner(dtype: str, ranks: int, threads: int, group: DistributedGroup | None = None) -> ModelRunner:
    """Loads the bundled model, whole or this rank's share, with room for what is measured."""
    torch.set_num_threads(threads)
    directory = resolve_model(BUNDLED_MODEL, "auto")
    settings = ModelSettings(dtype=dtype, block_size=_BLOCK_SIZE, num_blocks=2048, num_cpu_blocks=0)
    if group is None:
        return ModelRunner(directory, settings)
    return ModelRunner(directory, settings, group=group, followers=Leader(group))


def follow(rendezvous: str, rank: int, ranks: int, dtype: str) -> None:
    """Runs one of the other ranks until the leader ends it."""
    group = connect(rendezvous, rank, ranks, patience_s=_PATIENCE_S)
    Follower(make_runner(dtype, ranks, 1, group).paged_model, group).run(Liveness())
    group.close()


@click.command()
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Steps of each kind.")
@click.option("--over-sockets", is_flag=True, help="Add up over loopback, as between machines.")
@click.option("--rank", type=click.IntRange(1), envvar="OCTAVO_TP_RANK", hidden=True)
@click.option("--rendezvous", envvar="OCTAVO_TP_RENDEZVOUS", hidden=True)
@click.option("--address", hidden=True)
def main(
    ranks: int,
    dtype: str,
    rounds: int,
    over_sockets: bool,
    rank: int | None,
    rendezvous: str | None,
    address: str | None,
) -> None:
    """Measures decode steps of 1, 16 and 64 sequences, and a prefill."""
    if rank is not None and rendezvous is not None:
        follow(address or rendezvous, rank, ranks, dtype)
        return
    command = [sys.executable, "-m", "octavo.bench.whole.tensor_parallel", *sys.argv[1:]]
    if over_sockets:
        address = free_address()
        command += ["--address", address]
    with tempfile.TemporaryDirectory() as directory, LocalRanks(ranks, Path(directory), command=command) as local:
        group = TimedGroup(connect(address or local.rendezvous, 0, ranks, patience_s=_PATIENCE_S))
        several = TimedRanks(make_runner(dtype, ranks, 1, group), 1, group)
        one = TimedRanks(make_runner(dtype, 1, ranks), ranks)
        for line in measure([one, several], (1, 16, 64), rounds):
            click.echo(line)
        local.expect_end()
        Leader(group).end()
        group.close()


if __name__ == "__main__":
    main()
