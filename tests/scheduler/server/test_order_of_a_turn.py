"""What a turn of the shell sends, and in which order: plans, and behind them what frontends are told."""

from collections import deque
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import PrefixPinned
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.loop import SchedulerShell
from octavo.testing.cluster import FakeReplica, make_request, reference_tokens, write_fake_model
from octavo.wire.base import SCHEMA_VERSION, Message
from octavo.wire.codec import decode_to_frontend, decode_to_worker, encode
from octavo.wire.requests import Deltas, FrontendHello, Prefix, PrefixesChanged, Submit
from octavo.wire.steps import StepPlan
from octavo.worker.fake.runner import FakeRunner

EPOCH = 4711


class Router:
    """A ROUTER socket in memory with one peer. What is sent goes to `sent`, which routers may share."""

    def __init__(self, sent: list[Message], decode: Any) -> None:
        self._arrived: deque[zmq.Frame] = deque()
        self._sent = sent
        self._decode = decode

    def arrives(self, message: Message) -> None:
        first = zmq.Frame(b"peer")
        first.more = True
        self._arrived += first, zmq.Frame(encode(message))

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN if self._arrived else 0

    def recv(self, flags: int, *, copy: bool) -> zmq.Frame:
        return self._arrived.popleft()

    def send(self, frame: bytes, flags: int) -> None:
        if flags & zmq.SNDMORE:
            assert frame == b"peer"
        else:
            self._sent.append(self._decode(frame))


class Served:
    """A shell with one frontend and one replica, which speak when the test says so."""

    def __init__(self, directory: Path) -> None:
        self.sent: list[Message] = []
        self.frontends, self.workers = Router(self.sent, decode_to_frontend), Router(self.sent, decode_to_worker)
        core = Scheduler(SchedulerConfig(), EPOCH)
        self.shell = SchedulerShell(core, cast(Any, self.frontends), cast(Any, self.workers), clock=lambda: 1.0)
        model = write_fake_model(directory / "model")
        self.replica = FakeReplica(FakeRunner(model, block_size=4, num_blocks=64, num_cpu_blocks=0), 5)
        self.frontends.arrives(FrontendHello(SCHEMA_VERSION, 1))
        self.workers.arrives(self.replica.hello)
        self.turn()

    def turn(self) -> list[Message]:
        """Takes a turn, and returns what it sends. The replica takes the plans."""
        self.sent.clear()
        self.shell.turn()
        for message in self.sent:
            if isinstance(message, StepPlan):
                self.replica.take(message)
        return list(self.sent)

    def answers(self) -> None:
        """The replica answers its oldest plan."""
        self.workers.arrives(msgspec.structs.replace(self.replica.execute(), epoch=EPOCH))


def test_a_plan_leaves_before_the_tokens_of_the_same_turn_and_none_is_kept_back(tmp_path: Path) -> None:
    served = Served(tmp_path)
    request = make_request("r", 6, max_tokens=9)
    served.frontends.arrives(Submit(EPOCH, request))
    served.turn()
    tokens: list[int] = []
    turns: list[list[type[Message]]] = []
    while len(tokens) < 9:
        served.answers()
        sent = served.turn()
        turns.append([type(message) for message in sent if isinstance(message, StepPlan | Deltas)])
        tokens += [
            token for each in sent if isinstance(each, Deltas) for delta in each.deltas for token in delta.token_ids
        ]
    assert tokens == reference_tokens(request)
    assert [StepPlan, Deltas] in turns
    assert all(kinds[-1:] == [Deltas] for kinds in turns)


def test_what_does_not_come_through_a_socket_is_told_without_waiting_for_a_turn(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.sent.clear()
    prefix = Prefix("name", [1, 2, 3])
    served.shell.handle(PrefixPinned(prefix))
    assert PrefixesChanged(EPOCH, [prefix]) in served.sent
