"""A router beside real processes: it knows what they hold, whoever comes and goes, itself too."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq
from smg_grpc_proto import vllm_engine_pb2_grpc as services  # type: ignore[import-untyped]
from smg_grpc_proto.generated import common_pb2 as common  # type: ignore[import-untyped]

from octavo.testbed.stack import Stack, token_request
from octavo.testing.oracles import vllm_kv_events as vllm

from ..conftest import StartStack

pytestmark = pytest.mark.system

_END = b"\xff" * 8
PROMPT, OTHER = [n % 200 for n in range(40)], [199 - n for n in range(40)]


class Subscriber:
    """A router that asks for a replay where it sees a gap."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", stack: Stack) -> None:
        self.router = vllm.Router()
        self.next_number = 0
        self._sub = context.socket(zmq.SUB)
        self._sub.connect(endpoint(stack))
        self._sub.subscribe(b"")
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.connect(replay_endpoint(stack))

    def look(self) -> vllm.Router:
        """Takes in all that has come."""
        while self._sub.poll(0):
            _, number, payload = self._sub.recv_multipart()
            self._take(int.from_bytes(number, "big"), payload)
        return self.router

    def _take(self, number: int, payload: bytes) -> None:
        if number > self.next_number:
            self.replay()
        elif number == self.next_number:
            self._apply(number, payload)

    def replay(self) -> None:
        """Takes in what it has missed."""
        self._dealer.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while True:
            assert self._dealer.poll(60_000), "no replay"
            _, _, number, payload = self._dealer.recv_multipart()
            if number == _END:
                return
            if self.next_number != int.from_bytes(number, "big"):
                # What lies between is gone.
                assert type(vllm.decode(payload).events[0]) is vllm.AllBlocksCleared
            self._apply(int.from_bytes(number, "big"), payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self.router.follow(vllm.decode(payload))
        self.next_number = number + 1

    def close(self) -> None:
        self._sub.close(linger=0)
        self._dealer.close(linger=0)


def endpoint(stack: Stack) -> str:
    return f"ipc://{stack.directory}/events.sock"


def replay_endpoint(stack: Stack) -> str:
    return f"ipc://{stack.directory}/replay.sock"


@pytest.fixture
def subscribe(stack: Stack) -> Iterator[Callable[[], Subscriber]]:
    with ExitStack() as held:
        context = held.enter_context(zmq.Context())
        yield lambda: held.enter_context(closing(Subscriber(context, stack)))


@pytest.fixture
def stack(new_stack: StartStack) -> Stack:
    """A cell whose workers hold 12 blocks of 8 tokens each."""
    stack = new_stack(OCTAVO_NUM_BLOCKS="12", OCTAVO_BLOCK_SIZE="8")
    stack.environment |= {
        "OCTAVO_KV_EVENTS_ENDPOINT": endpoint(stack),
        "OCTAVO_KV_EVENTS_REPLAY_ENDPOINT": replay_endpoint(stack),
    }
    return stack


def test_a_router_learns_what_is_held_and_what_is_no_longer(stack: Stack, subscribe: Callable[[], Subscriber]) -> None:
    subscriber = subscribe()
    stack.start_all()
    answer = stack.generate(token_request(PROMPT, 10))
    # The last token is chosen, and never computed.
    held = [*PROMPT, *answer.token_ids][:48]
    stack.wait_for(lambda: subscriber.look().num_matched(held) == 48)
    assert subscriber.router.num_matched(OTHER) == 0
    # Their blocks leave no room for the others.
    for start in range(3):
        stack.generate(token_request([start, *OTHER, *OTHER], 4))
    stack.wait_for(lambda: subscriber.look().num_matched([2, *OTHER, *OTHER]) == 80)
    assert subscriber.router.num_matched(held) < 48


def test_what_a_lost_worker_held_is_gone_and_what_another_holds_too_is_not(
    stack: Stack, subscribe: Callable[[], Subscriber]
) -> None:
    subscriber = subscribe()
    stack.start_all()
    stack.generate(token_request(PROMPT, 1))
    stack.wait_for(lambda: subscriber.look().num_matched(PROMPT) == 40)
    stack.start_named("worker-1")
    stack.wait_for(lambda: len(stack.load().workers) == 2)
    stack.kill("worker-0")
    stack.wait_for(lambda: subscriber.look().num_matched(PROMPT) == 0)
    stack.generate(token_request(PROMPT, 1))
    stack.wait_for(lambda: subscriber.look().num_matched(PROMPT) == 40)
    assert subscriber.router.num_cleared == 1


def test_a_router_that_comes_late_or_was_away_is_told_by_a_replay(
    stack: Stack, subscribe: Callable[[], Subscriber]
) -> None:
    gone = subscribe()
    stack.start_all()
    stack.generate(token_request(PROMPT, 1))
    stack.wait_for(lambda: gone.look().num_matched(PROMPT) == 40)
    gone.close()
    stack.generate(token_request(OTHER, 1))
    late = subscribe()

    def is_told() -> bool:
        # What was generated last may not have been told to anybody yet.
        late.replay()
        return late.router.num_matched(PROMPT) == late.router.num_matched(OTHER) == 40

    stack.wait_for(is_told)


def test_a_scheduler_that_starts_anew_takes_back_what_was_told(
    stack: Stack, subscribe: Callable[[], Subscriber]
) -> None:
    subscriber = subscribe()
    stack.start_all()
    stack.generate(token_request(PROMPT, 1))
    stack.wait_for(lambda: subscriber.look().num_matched(PROMPT) == 40)
    stack.kill("scheduler", signal.SIGKILL)
    stack.start("scheduler")
    stack.wait_for(lambda: len(stack.load().workers) == 1)
    # What is published before the subscriber is back it learns with the next batch that it gets.
    prompts = [[first, *OTHER] for first in range(100, 200)]

    def is_back() -> bool:
        stack.generate(token_request(prompts.pop(), 1))
        return subscriber.look().num_cleared == 2

    stack.wait_for(is_back)
    assert subscriber.router.num_matched(PROMPT) == 0
    last = [prompts[-1][0] + 1, *OTHER]
    stack.wait_for(lambda: subscriber.look().num_matched(last) == 40)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"OCTAVO_KV_EVENTS_ENDPOINT": "tcp://*:5557"}, "--insecure-kv-events"),
        ({"OCTAVO_KV_EVENTS_ENDPOINT": "nowhere"}, "is no address; use ipc://"),
        ({"OCTAVO_KV_EVENTS_REPLAY_ENDPOINT": "tcp://127.0.0.1:5558"}, "without --kv-events-endpoint"),
    ],
)
def test_a_scheduler_says_why_it_cannot_publish(
    new_stack: StartStack, variables: dict[str, str], complaint: str
) -> None:
    stack = new_stack()
    assert stack.start("scheduler", **variables).wait(60) == 1
    log = Path(stack.directory / "scheduler.log").read_text()
    assert "the scheduler cannot start" in log
    assert complaint in log
    assert "Traceback" not in log


def test_a_gateway_is_told_by_the_frontend(stack: Stack) -> None:
    stack.environment |= {
        "OCTAVO_SCHEDULER_KV_EVENTS": endpoint(stack),
        "OCTAVO_SCHEDULER_KV_EVENTS_REPLAY": replay_endpoint(stack),
    }
    stack.start_all()
    stack.generate(token_request(PROMPT, 1))
    engine = services.VllmEngineStub(stack.channel)
    tokens: list[int] = []
    for batch in engine.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=60):
        tokens += [token for event in batch.events for block in event.stored.blocks for token in block.token_ids]
        if len(tokens) >= len(PROMPT):
            break
    assert tokens == PROMPT
