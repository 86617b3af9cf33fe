"""Real models with guesses in flight lose their worker, their scheduler, their blocks: streams go on with the tokens of
plain decoding, and nothing stays behind.

A process that is stopped answers nothing. So that a draft is in flight when something happens is no luck: the worker
is stopped, and let go on for a moment, until the scheduler's own record says that one is.
"""

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import grpc
import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration

from octavo.bench.whole.speculation import make_request
from octavo.bench.whole.speculation_works import WORKS
from octavo.scheduler.core.events import ReplicaJoined, StepAnswered, Tick
from octavo.scheduler.server.event_log import Handled, Planned, Record
from octavo.testbed.stack import FinishedStream, Stack, collect, token_request
from octavo.testing.depth import deep
from octavo.v1 import admin_pb2
from octavo.v1 import generation_pb2 as pb
from octavo.wire.steps import StepPlan

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SETTINGS = {
    **{"OCTAVO_DEVICE": "cpu", "OCTAVO_THREADS": "1", "OCTAVO_NUM_BLOCKS": "512", "OCTAVO_SPECULATION": "2"},
    # On a busy machine a process takes its time to start.
    **{"OCTAVO_SCHEDULER_GRACE": "300", "OCTAVO_WORKER_GRACE": "300"},
}
NUM_TOKENS = 600
PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(4)]
# A prediction is wrong in each of so many tokens.
WRONG_EVERY = 11


@dataclass
class StepWatch:
    """Reads what a scheduler records of its steps, as it happens, until that scheduler is gone."""

    stack: Stack
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(Record)
        with suppress(grpc.RpcError):
            for response in self.stack.admin.WatchSteps(admin_pb2.WatchStepsRequest(from_step=1), wait_for_ready=True):
                assert not response.missed
                self.records.append(decoder.decode(response.record))

    def join(self) -> None:
        """Waits until all has been read that the scheduler, which has ended, has told."""
        self._thread.join(60)

    @property
    def plans(self) -> list[StepPlan]:
        return [record.plan for record in list(self.records) if isinstance(record, Planned)]

    def see_ticks(self, count: int) -> None:
        """Waits until the scheduler has told of so many further ticks, a tenth of a second each."""

        def seen() -> int:
            return sum(isinstance(record, Handled) and isinstance(record.event, Tick) for record in list(self.records))

        enough = seen() + count
        self.stack.wait_for(lambda: seen() >= enough)

    def outstanding(self, name: str) -> list[StepPlan]:
        """The plans that the latest worker of this name was sent and has not answered."""
        incarnation, plans = 0, dict[int, StepPlan]()
        for record in list(self.records):
            match record:
                case Handled(_, ReplicaJoined(hello)) if hello.worker_id == name:
                    incarnation, plans = hello.incarnation, {}
                case Planned(plan) if plan.incarnation == incarnation:
                    plans[plan.step_id] = plan
                case Handled(_, StepAnswered(replica_id, result)) if replica_id == incarnation:
                    plans.pop(result.step_id, None)
        return list(plans.values())

    def has_draft_in_flight(self, name: str) -> bool:
        return any(plan.drafts for plan in self.outstanding(name))


def stop_in_a_draft(stack: Stack, watch: StepWatch, *names: str) -> str:
    """Stops a worker while the scheduler waits for its answer to a draft, and says which. It has two seconds until it
    counts as lost."""
    stopped: list[str] = []

    def is_stopped_in_one() -> bool:
        for name in names:
            if watch.has_draft_in_flight(name):
                stack.processes[name].send_signal(signal.SIGSTOP)
                # What it had answered before is with the scheduler by then, and what follows from that with us.
                watch.see_ticks(3)
                if watch.has_draft_in_flight(name):
                    stopped.append(name)
                    return True
                stack.processes[name].send_signal(signal.SIGCONT)
        return False

    stack.wait_for(is_stopped_in_one)
    return stopped[0]


@dataclass
class Case:
    """A model, and `requests` that copy, made of what was `told` of them without guesses."""

    model: Path
    plain: list[pb.GenerateRequest]
    requests: Callable[[Sequence[FinishedStream]], list[pb.GenerateRequest]]
    settings: dict[str, str]


def tiny_case(model: Path, dtype: str) -> Case:
    """Requests whose clients have predicted nearly all."""
    return Case(
        model,
        [token_request(prompt, NUM_TOKENS) for prompt in PROMPTS],
        lambda told: [
            token_request(prompt, NUM_TOKENS, prediction=pb.Prediction(token_ids=pb.TokenIds(ids=spoiled(each))))
            for prompt, each in zip(PROMPTS, told, strict=True)
        ],
        {"OCTAVO_DTYPE": dtype},
    )


def spoiled(answer: FinishedStream) -> list[int]:
    return [token ^ (place % WRONG_EVERY == WRONG_EVERY - 1) for place, token in enumerate(answer.token_ids)]


def bundled_case(model: Path) -> Case:
    """Edits of functions, as `octavo.bench.whole.speculation` asks for them."""
    edits = [
        make_request(WORKS["edit"], prompt, number, f"tenant-{number}", 96)
        for number, prompt in enumerate(WORKS["edit"].prompts(0, 4))
    ]
    return Case(model, edits, lambda told: edits, {"OCTAVO_DTYPE": "bfloat16"})


@pytest.fixture(params=["tiny, bf16", *deep("tiny, fp32", "bundled, bf16")])
def case(request: pytest.FixtureRequest) -> Case:
    name, _, dtype = request.param.partition(", ")
    if name == "bundled":
        return bundled_case(request.getfixturevalue("bundled_model"))
    return tiny_case(request.getfixturevalue("tiny_model"), {"bf16": "bfloat16", "fp32": "float32"}[dtype])


@pytest.fixture
def new_stack(case: Case) -> Iterator[Callable[..., Stack]]:
    with ExitStack() as cleanup:

        def make(**settings: str) -> Stack:
            directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
            return cleanup.enter_context(Stack(case.model, directory, {**SETTINGS, **case.settings, **settings}))

        yield make


def tell_plainly(stack: Stack, case: Case, workers: int = 1) -> list[FinishedStream]:
    """What workers say without guesses. All is there after that, and the scheduler is a new one, which guesses."""
    stack.start_named("scheduler", OCTAVO_SPECULATION="off")
    stack.start_named("frontend", OCTAVO_LISTEN=stack.address)
    for number in range(workers):
        stack.start_named(f"worker-{number}")
    stack.wait_ready()
    stack.wait_for(lambda: len(stack.load().workers) == workers)
    told = stack.generate_all(case.plain)
    assert not any(answer.usage.drafted_tokens for answer in told)
    stack.kill("scheduler")
    stack.start_named("scheduler")
    stack.wait_for(lambda: len(stack.load().workers) == workers)
    return told


def assert_undisturbed(told: Sequence[FinishedStream], found: Sequence[FinishedStream]) -> None:
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in told]
    assert sum(answer.usage.accepted_tokens for answer in found) > 0
    assert sum(answer.usage.drafted_tokens for answer in found) > sum(answer.usage.accepted_tokens for answer in found)


def test_whoever_is_lost_in_mid_speculation(case: Case, new_stack: Callable[..., Stack]) -> None:
    """A worker is killed, then the scheduler, and then a worker is drained, each with a draft in flight."""
    stack = new_stack()
    told = tell_plainly(stack, case, workers=3)
    for spare in ("worker-1", "worker-2"):
        stack.admin.CordonWorker(admin_pb2.CordonWorkerRequest(worker_id=spare))
    watch = StepWatch(stack)
    stack.wait_for(lambda: bool(watch.records))
    streams = [stack.stream(request) for request in case.requests(told)]

    stop_in_a_draft(stack, watch, "worker-0")
    stack.kill("worker-0")
    stack.wait_for(lambda: len(stack.load().workers) == 2)
    assert watch.has_draft_in_flight("worker-0"), "it had answered"
    stack.admin.ReadmitWorker(admin_pb2.ReadmitWorkerRequest(worker_id="worker-1"))

    stop_in_a_draft(stack, watch, "worker-1")
    stack.processes["worker-2"].send_signal(signal.SIGSTOP)
    stack.kill("scheduler")
    watch.join()
    assert watch.has_draft_in_flight("worker-1"), "it had answered"
    stack.start_named("scheduler")
    # Nothing goes on before it is watched.
    watch = StepWatch(stack)
    stack.wait_for(lambda: bool(watch.records))
    for name in ("worker-1", "worker-2"):
        stack.processes[name].send_signal(signal.SIGCONT)

    drained = stop_in_a_draft(stack, watch, "worker-1", "worker-2")
    stack.admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=drained, grace=Duration()))
    assert watch.has_draft_in_flight(drained), "it had answered"
    stack.processes[drained].send_signal(signal.SIGCONT)
    assert stack.processes[drained].wait(60) == 0

    assert_undisturbed(told, [collect(stream) for stream in streams])
    stack.wait_idle()
    assert [each.id for each in stack.load().workers] == [f"worker-{1 + (drained == 'worker-1')}"]


@pytest.mark.parametrize("case", ["tiny, bf16", *deep("tiny, fp32")], indirect=True)
def test_a_pool_that_is_too_small_in_mid_speculation(case: Case, new_stack: Callable[..., Stack]) -> None:
    """Groups are swapped out and in between steps with drafts."""
    longest = max(len(prompt) for prompt in PROMPTS) + NUM_TOKENS
    blocks = str(longest // 16 + 12)
    stack = new_stack(OCTAVO_NUM_BLOCKS=blocks, OCTAVO_NUM_CPU_BLOCKS=blocks, OCTAVO_PREEMPTION="swap")
    told = tell_plainly(stack, case)
    watch = StepWatch(stack)
    found = [collect(stream) for stream in [stack.stream(request) for request in case.requests(told)]]
    assert_undisturbed(told, found)
    assert sum(answer.usage.preemptions for answer in found) > 0
    stack.wait_idle()
    plans = watch.plans
    drafted = [place for place, plan in enumerate(plans) if plan.drafts]
    out = [place for place, plan in enumerate(plans) if plan.moves.swap_out]
    back = [place for place, plan in enumerate(plans) if plan.moves.swap_in]
    assert drafted[0] < out[0], "nothing was guessed before"
    assert drafted[-1] > back[-1], "nothing was guessed after"
