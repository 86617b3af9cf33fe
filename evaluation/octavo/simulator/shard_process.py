"""A shard in a process of its own."""

import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from octavo.scheduler.server.gc_tuning import collect_seldom
from octavo.simulator.cell import SimulationError
from octavo.simulator.shard import Arrival, CellOutcome, Cluster, Shard, Standing


class ShardProcess:
    """Computes a window while this process does something else: `begin_run` and then `end_run`. Raises
    `SimulationError` like a `Shard`, and if the process ends."""

    def __init__(self, cluster: Cluster, numbers: Sequence[int], *, seed: int, sample_every_s: float) -> None:
        # Spawned: a fork would inherit threads and whatever else is there.
        context = get_context("spawn")
        self._connection, its_end = context.Pipe()
        arguments = (its_end, cluster, list(numbers), seed, sample_every_s)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        its_end.close()

    def end_start(self) -> list[Standing]:
        """Waits until the cells are there."""
        standings: list[Standing] = self._receive()
        return standings

    def begin_run(self, arrivals: Sequence[Arrival], until: float) -> None:
        self._send((arrivals, until))

    def end_run(self) -> list[Standing]:
        standings: list[Standing] = self._receive()
        return standings

    def finish(self, end: float) -> list[CellOutcome]:
        """The last that may be asked; the process ends."""
        self._send(end)
        outcomes: list[CellOutcome] = self._receive()
        self.close()
        return outcomes

    def close(self) -> None:
        """Whatever the process does, it ends."""
        self._connection.close()
        self.process.terminate()
        self.process.join()

    def _send(self, message: object) -> None:
        # Why it is not there is what it said last, if anything.
        with suppress(OSError):
            self._connection.send(message)

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise SimulationError(
                f"a process of the simulation has ended (exit status {self.process.exitcode}): is there memory enough?"
            ) from error
        if isinstance(answer, SimulationError):
            raise answer
        return answer


def _serve(connection: Connection, cluster: Cluster, numbers: Sequence[int], seed: int, sample_every_s: float) -> None:
    # Ctrl-C is meant for the process that asks, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect_seldom()
    try:
        shard = Shard(cluster, numbers, seed=seed, sample_every_s=sample_every_s, probe=None)
        connection.send(shard.standings())
        while isinstance(message := connection.recv(), tuple):
            connection.send(shard.run(*message))
        connection.send(shard.finish(message))
    except SimulationError as error:
        connection.send(error)
    except (EOFError, OSError):
        # Nobody asks any more.
        return
