"""A real `octavo worker --device fake` process against a scheduler that the test plays itself."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import replace

from octavo.runtime.models.directory import fingerprint
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.fakes.scripted_scheduler import ScriptedScheduler, scripted_scheduler
from octavo.testing.metrics import told
from octavo.testing.oracles.worker_plans import EPOCH, moves, plan, sampling, start, work
from octavo.wire.steps import (
    BlockContent,
    BlockMoves,
    BlocksFetched,
    DiskMoves,
    FromWorker,
    Heartbeat,
    SampledToken,
    StepOutcome,
    StepResult,
    WorkerDismissed,
    WorkerGoodbye,
    WorkerHello,
    WorkerRefused,
    WorkerUnregistered,
    WorkerWelcome,
)
from octavo.worker import loop
from octavo.worker.fake.runner import FakeRunner, FakeVocabulary, expected_tokens
from octavo.worker.health import STEP_DEADLINE_S, Liveness
from octavo.worker.loop import serve
from octavo.worker.metrics import WorkerMetrics
from octavo.worker.process import LastWords
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkItem

pytestmark = pytest.mark.system

COMMAND = "from octavo.worker.cli.worker import worker; worker()"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Place:
    """A directory of its own with a model, a scheduler's address, and the workers started there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = directory / "model"
        self.endpoint = f"ipc://{directory}/workers.sock"
        self.health_address = f"unix:{directory}/w0-health.sock"
        write_byte_model(self.model)

    @contextmanager
    def worker(self, *flags: str) -> Iterator["subprocess.Popen[str]"]:
        arguments = ["--device", "fake", "--worker-id", "w0", "--model", str(self.model), "--num-blocks", "32"]
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments, "--worker-endpoint", self.endpoint, *flags],
            cwd=self.directory,
            env=os.environ | {"OCTAVO_RUNTIME_DIR": str(self.directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def place() -> Iterator[Place]:
    # Not tmp_path: its name may be longer than a unix socket's may.
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        yield Place(Path(name))


def welcome(scheduler: ScriptedScheduler, epoch: int = EPOCH) -> int:
    """Welcomes the worker that says hello; its incarnation."""
    hello = scheduler.wait_for(WorkerHello)
    scheduler.send(WorkerWelcome(epoch))
    return hello.incarnation


def health(place: Place, service: str) -> int:
    with grpc.insecure_channel(place.health_address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=60, wait_for_ready=True).status)


def comes_to(place: Place, service: str, status: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if health(place, service) == status:
            return True
        time.sleep(0.02)
    return False


def wait_to_handle(number: signal.Signals, process: "subprocess.Popen[str]") -> None:
    """Waits until a signal no longer ends the process by itself."""
    deadline = time.monotonic() + 60
    while not _handled(process) >> number - 1 & 1:
        assert time.monotonic() < deadline, f"{number.name} is not handled"
        time.sleep(0.02)


def _handled(process: "subprocess.Popen[str]") -> int:
    """Returns the mask of the signals that a process handles, the first in bit 0."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))


def wait_for_draining(scheduler: ScriptedScheduler) -> Heartbeat:
    while not (beat := scheduler.wait_for(Heartbeat)).draining:
        pass
    return beat


def test_a_worker_registers_computes_survives_garbage_and_says_goodbye(place: Place) -> None:
    with scripted_scheduler(place.endpoint) as scheduler, place.worker() as process:
        hello = scheduler.wait_for(WorkerHello)
        assert scheduler.wait_for(WorkerHello) == hello, "one incarnation until it is welcomed"
        assert (hello.worker_id, hello.device, hello.block_size) == ("w0", "fake", 16)
        assert (hello.num_blocks, hello.num_cpu_blocks) == (32, 8)
        assert hello.model.fingerprint == fingerprint(place.model)
        assert health(place, "") == SERVING
        assert health(place, "octavo.Worker") == NOT_SERVING

        scheduler.send(WorkerWelcome(EPOCH))
        assert scheduler.wait_for(Heartbeat) == Heartbeat(EPOCH, hello.incarnation, 0)
        assert comes_to(place, "octavo.Worker", SERVING)

        scheduler.send_frames(b"\xffgarbage")
        scheduler.send_frames(b"")
        scheduler.send_frames(b"two", b"frames")
        first = plan(1, starts=[start(5, [7, 8, 9])], work=[work(5, 3, [4])], incarnation=hello.incarnation)
        scheduler.send(first)
        scheduler.send(plan(2, work=[work(5, 1)], incarnation=hello.incarnation, answered=0))
        results = [scheduler.wait_for(StepResult), scheduler.wait_for(StepResult)]
        tokens = expected_tokens([7, 8, 9], sampling(), 0, 2, FakeVocabulary.read(place.model))
        assert [result.sampled for result in results] == [[SampledToken(5, token)] for token in tokens]

        process.send_signal(signal.SIGTERM)
        wait_for_draining(scheduler)
        process.send_signal(signal.SIGTERM)
        assert scheduler.wait_for(WorkerGoodbye) == WorkerGoodbye(EPOCH, hello.incarnation)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert "32 blocks (0.00 GiB) and 8 CPU blocks (0.00 GiB) of 16 tokens, 4 KV bytes per token (int32)" in stdout
        assert "dropped a malformed message (1 so far)" in stderr
        assert not Path(place.health_address.removeprefix("unix:")).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_asked_to_end_computes_on_until_it_is_dismissed(place: Place, number: signal.Signals) -> None:
    with scripted_scheduler(place.endpoint) as scheduler, place.worker() as process:
        incarnation = welcome(scheduler)
        assert comes_to(place, "octavo.Worker", SERVING)
        process.send_signal(number)
        assert wait_for_draining(scheduler) == Heartbeat(EPOCH, incarnation, 0, draining=True)
        assert comes_to(place, "octavo.Worker", NOT_SERVING)
        assert health(place, "") == SERVING
        scheduler.send(plan(1, starts=[start(5, [7])], work=[work(5, 1, [4])], incarnation=incarnation))
        assert scheduler.wait_for(StepResult).outcome is StepOutcome.DONE
        assert wait_for_draining(scheduler).last_step_id == 1
        scheduler.send(WorkerDismissed(EPOCH + 1))
        wait_for_draining(scheduler)
        scheduler.send(WorkerDismissed(EPOCH))
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert {type(message) for message in scheduler.rest()} <= {Heartbeat}


def test_a_drained_worker_ends_though_it_was_not_asked_to(place: Place) -> None:
    """An operator drained it."""
    with scripted_scheduler(place.endpoint) as scheduler, place.worker() as process:
        welcome(scheduler)
        scheduler.send(WorkerDismissed(EPOCH))
        assert process.wait(timeout=60) == 0


def test_a_worker_that_nobody_dismisses_says_goodbye_in_the_end(place: Place) -> None:
    with scripted_scheduler(place.endpoint) as scheduler, place.worker("--drain-timeout", "0.1") as process:
        incarnation = welcome(scheduler)
        scheduler.wait_for(Heartbeat)
        process.send_signal(signal.SIGTERM)
        assert scheduler.wait_for(WorkerGoodbye) == WorkerGoodbye(EPOCH, incarnation)
        assert process.wait(timeout=60) == 0


def test_a_worker_that_is_to_end_does_not_register_anew(place: Place) -> None:
    with scripted_scheduler(place.endpoint) as scheduler, place.worker() as process:
        welcome(scheduler)
        scheduler.wait_for(Heartbeat)
        process.send_signal(signal.SIGTERM)
        wait_for_draining(scheduler)
        scheduler.send(WorkerUnregistered(EPOCH))
        assert process.wait(timeout=60) == 0


def test_a_worker_waits_for_its_scheduler_and_outlives_it(place: Place) -> None:
    with place.worker() as process:
        assert comes_to(place, "", SERVING)
        with scripted_scheduler(place.endpoint) as scheduler:
            first = welcome(scheduler)
            scheduler.wait_for(Heartbeat)
        with scripted_scheduler(place.endpoint) as scheduler:
            while not isinstance(hello := scheduler.receive(), WorkerHello):
                scheduler.send(WorkerUnregistered(EPOCH + 1))
            assert hello.incarnation != first
            scheduler.send(WorkerWelcome(EPOCH + 1))
            assert scheduler.wait_for(Heartbeat) == Heartbeat(EPOCH + 1, hello.incarnation, 0)
        assert comes_to(place, "octavo.Worker", NOT_SERVING), "a send that cannot leave means registering anew"
        assert process.poll() is None


def test_an_unregistered_worker_comes_back_empty(place: Place) -> None:
    with scripted_scheduler(place.endpoint) as scheduler, place.worker():
        first = welcome(scheduler)
        scheduler.send(plan(1, starts=[start(5, [7])], work=[work(5, 1, [4])], incarnation=first))
        scheduler.wait_for(StepResult)
        scheduler.send(WorkerUnregistered(EPOCH))
        second = welcome(scheduler)
        assert second != first
        scheduler.send(plan(2, work=[work(5, 1)], incarnation=first))
        scheduler.send(plan(1, starts=[start(5, [7])], work=[work(5, 1, [0])], incarnation=second))
        result = scheduler.wait_for(StepResult)
        assert (result.incarnation, result.step_id, result.outcome) == (second, 1, StepOutcome.DONE)


class SignallingRunner(FakeRunner):
    """A fake model in the middle of whose step, once `all_sent` is set, the process is asked to stop."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, block_size=16, num_blocks=8)
        self.all_sent = threading.Event()

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        assert self.all_sent.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        return super().execute(moves, items)


def test_a_step_under_way_is_answered_before_the_goodbye(place: Place, tmp_path: Path) -> None:
    runner = SignallingRunner(place.model)

    def script() -> list[FromWorker]:
        with scripted_scheduler(place.endpoint) as scheduler:
            incarnation = welcome(scheduler)
            scheduler.send(plan(1, starts=[start(5, [7])], work=[work(5, 1, [4])], incarnation=incarnation))
            scheduler.send(plan(2, work=[work(5, 1)], incarnation=incarnation))
            # A worker that has left cannot be sent anything.
            runner.all_sent.set()
            heard = [scheduler.receive()]
            while not isinstance(heard[-1], WorkerGoodbye):
                heard.append(scheduler.receive())
            return [message for message in heard if not isinstance(message, WorkerHello | Heartbeat)]

    words = LastWords(tmp_path / "words", {})
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(script)
        serve(runner, worker_id="w0", endpoint=place.endpoint, liveness=Liveness(), drain_timeout_s=0.0, words=words)
        result, goodbye = heard.result(timeout=60)
    assert isinstance(result, StepResult)
    assert (result.step_id, result.outcome) == (1, StepOutcome.DONE)
    assert isinstance(goodbye, WorkerGoodbye)


def kept_blocks() -> list[BlockContent]:
    return [BlockContent(bytes([number]) * 32, 0, number) for number in (1, 2)]


def test_a_killed_workers_blocks_are_fetched_by_the_next(place: Place) -> None:
    prompt = list(range(40, 80))
    [token] = expected_tokens(prompt, sampling(), 0, 1, FakeVocabulary.read(place.model))
    flags = ("--kv-disk", str(place.directory / "kv"), "--kv-disk-memory", "64MiB", "--kv-mirror")
    with scripted_scheduler(place.endpoint) as scheduler:
        with place.worker(*flags) as process:
            incarnation = welcome(scheduler)
            filled = plan(1, starts=[start(5, prompt)], work=[work(5, 40, [1, 2, 3])], incarnation=incarnation)
            scheduler.send(filled)
            scheduler.send(replace(plan(2, incarnation=incarnation), disk=DiskMoves(store=kept_blocks())))
            # A fetch tells whether they have been written; until then it finds nothing.
            found, step_id = [False], 2
            while not all(found):
                step_id += 1
                asked = plan(step_id, incarnation=incarnation)
                scheduler.send(replace(asked, disk=DiskMoves(fetch=kept_blocks())))
                result = scheduler.wait_for(StepResult)
                while result.step_id != step_id:
                    result = scheduler.wait_for(StepResult)
                fetched = scheduler.wait_for(BlocksFetched)
                assert fetched.step_id == step_id
                found = fetched.found
            process.kill()
            process.wait(60)
        with place.worker(*flags) as process:
            hello = scheduler.wait_for(WorkerHello)
            while hello.incarnation == incarnation:
                hello = scheduler.wait_for(WorkerHello)
            assert hello.kv_disk is not None
            assert (hello.kv_disk.mirror, hello.kv_disk.block_read_s > 0) == (True, True)
            scheduler.send(WorkerWelcome(EPOCH))
            incarnation = hello.incarnation
            scheduler.send(replace(plan(1, incarnation=incarnation), disk=DiskMoves(fetch=kept_blocks())))
            assert scheduler.wait_for(BlocksFetched).found == [True, True]
            resumed = plan(
                2,
                incarnation=incarnation,
                moves=moves(swap_in=[(1, 10), (2, 11)]),
                starts=[start(5, prompt, num_computed=32)],
                work=[work(5, 8, [10, 11, 12])],
            )
            scheduler.send(resumed)
            assert scheduler.wait_for(StepResult).sampled == [SampledToken(5, token)]
            process.send_signal(signal.SIGTERM)
            scheduler.wait_for(Heartbeat)
            scheduler.send(WorkerDismissed(EPOCH))
            assert process.wait(60) == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (place.directory / "kv").rglob("*"))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--kv-disk", "kv", "--num-cpu-blocks", "0"], "there are none; give --swap-memory more than 0, or drop"),
        (["--kv-disk", "open"], "must be a directory of this user with mode 700, not 755"),
        (["--kv-disk", "kv", "--kv-disk-memory", "1KiB"], "1,024 bytes are too few for KV blocks"),
        (["--kv-mirror"], "name a directory with --kv-disk"),
    ],
)
def test_a_disk_that_cannot_be_used_ends_the_worker_at_its_start_with_the_reason(
    place: Place, flags: list[str], why: str
) -> None:
    (place.directory / "open").mkdir(mode=0o755)
    with place.worker(*flags) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert why in " ".join(said.split())


class HangingRunner(SignallingRunner):
    """One whose step takes longer than it may, by a clock that only it moves."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.all_sent.set()
        self.now = 1000.0
        self.liveness = Liveness(lambda: self.now)
        self.alive: list[bool] = []

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        for seconds in (STEP_DEADLINE_S, 1.0):
            self.now += seconds
            self.alive.append(self.liveness.alive)
        return super().execute(moves, items)


def test_a_worker_whose_step_hangs_does_not_look_alive_and_counts_it_when_it_is_done(
    place: Place, tmp_path: Path
) -> None:
    def script() -> None:
        with scripted_scheduler(place.endpoint) as scheduler:
            incarnation = welcome(scheduler)
            scheduler.send(plan(1, starts=[start(5, [7, 8])], work=[work(5, 2, [4])], incarnation=incarnation))
            scheduler.wait_for(WorkerGoodbye)

    runner, metrics = HangingRunner(place.model), WorkerMetrics(lambda: 0.0)
    words = LastWords(tmp_path / "words", {})
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(script)
        serve(
            runner,
            worker_id="w0",
            endpoint=place.endpoint,
            liveness=runner.liveness,
            metrics=metrics,
            drain_timeout_s=0.0,
            words=words,
        )
        done.result(timeout=60)
    assert runner.alive == [True, False]
    assert runner.liveness.alive, "it has come back"
    found = told(metrics)
    assert (found["octavo_worker_tokens_total"], found["octavo_worker_sequences"]) == (2, 1)
    assert found["octavo_worker_step_seconds_count"] == 1


def test_a_hello_that_found_no_connection_goes_out_with_the_first(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beaten, left = threading.Event(), threading.Event()

    def script() -> None:
        assert beaten.wait(60)
        with scripted_scheduler(place.endpoint) as scheduler:
            welcome(scheduler)
            scheduler.send(WorkerDismissed(EPOCH))
            assert left.wait(60)

    monkeypatch.setattr(loop, "HEARTBEAT_INTERVAL_S", 3600.0)
    runner = FakeRunner(place.model, block_size=16, num_blocks=8)
    words = LastWords(tmp_path / "words", {})
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(script)
        serve(
            runner,
            worker_id="w0",
            endpoint=place.endpoint,
            liveness=Liveness(),
            on_beat=beaten.set,
            words=words,
        )
        left.set()
        done.result(timeout=60)


def test_an_impossible_address_ends_the_worker_with_one_line(place: Place) -> None:
    with place.worker("--worker-endpoint", "tcp://127.0.0.1:port") as process:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "'tcp://127.0.0.1:port' is no address" in stderr
        assert "Traceback" not in stderr


def test_a_refused_worker_exits_with_the_reason(place: Place) -> None:
    with scripted_scheduler(place.endpoint) as scheduler, place.worker() as process:
        scheduler.wait_for(WorkerHello)
        scheduler.send(WorkerRefused("this scheduler serves another model"))
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "refused this worker: this scheduler serves another model" in stderr
        assert "Traceback" not in stderr


def test_an_idle_worker_without_a_scheduler_stops_at_once(place: Place) -> None:
    with place.worker() as process:
        assert comes_to(place, "", SERVING)
        assert process.stdout is not None
        assert "on fake" in process.stdout.readline()
        wait_to_handle(signal.SIGTERM, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
