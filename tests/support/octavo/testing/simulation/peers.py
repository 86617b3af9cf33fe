"""The ways between simulated workers, over which they copy each other's blocks in virtual time."""

from collections.abc import Sequence
from functools import partial

from octavo.testing.simulation.clock import Process
from octavo.testing.simulation.network import Network
from octavo.wire.peers import BlocksRead, ReadBlocks
from octavo.worker.block_pulls import Answer, Peek, answer_to
from octavo.worker.kv_store.loan import Payload

# The longest time of a read or its answer, and how often one comes to nothing.
_DELAY_S, _LOSS = 0.02, 0.03


class SimulatedExchange:
    """Is an `octavo.worker.block_pulls.Exchange` of the process at a place; who works or stands still answers all the
    same, and who is dead or cut off from the network does not."""

    def __init__(
        self, network: Network, exchanges: "dict[str, SimulatedExchange]", process: Process, peek: Peek
    ) -> None:
        self.incarnation = 0
        self.endpoint = process.name
        self._network, self._exchanges, self._process, self._peek = network, exchanges, process, peek
        self._answers: list[Answer] = []
        exchanges[process.name] = self

    def ask(self, endpoint: str, read: ReadBlocks) -> None:
        self._later(partial(self._arrive, endpoint, read))

    def answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def fileno(self) -> int:
        """Returns no descriptor: nobody polls."""
        return -1

    @property
    def _is_reached(self) -> bool:
        return self._process.alive and not self._network.link(self._process.name).is_cut

    def _later(self, action: "partial[None]") -> None:
        if not self._network.happens("reads of blocks lost", _LOSS):
            self._network.clock.after(self._network.random.uniform(0.0, _DELAY_S), action)

    def _arrive(self, endpoint: str, read: ReadBlocks) -> None:
        other = self._exchanges.get(endpoint)
        if other is not None and other._is_reached and self._is_reached:
            header, payloads = answer_to(read, other.incarnation, other._peek)
            self._later(partial(self._take, header, [bytes(each) for each in payloads]))

    def _take(self, header: BlocksRead, payloads: Sequence[Payload]) -> None:
        if self._is_reached:
            self._answers.append((header, payloads))
            self._process.wake()
