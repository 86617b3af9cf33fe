"""What a worker measures at its start: right where time is exact, short where it is not, and nothing is left behind."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from octavo.testbed.tiny_model import write_byte_model
from octavo.wire.codec import decode_from_worker, encode
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts, attended_pairs
from octavo.wire.steps import BlockMoves, WorkerHello
from octavo.worker.calibrate import calibrate as calibration
from octavo.worker.calibrate import timed_steps
from octavo.worker.calibrate.calibrate import calibrate
from octavo.worker.fake.runner import FakeRunner
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkItem

COSTS = StepCosts(PrefillCosts(0.004, 2e-5, 3e-9), SwapCosts(2e-5, 4e-5, 6e-5))


@dataclass
class Watch:
    """A clock that only steps move."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Steps:
    """What was asked of a runner: (context, tokens) of each chunk, blocks of each move, and who was forgotten."""

    chunks: list[tuple[int, int]] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)


class TimedRunner(FakeRunner):
    """Takes as long as `costs` say, by its own clock; `first_s` more for whatever it has not done before."""

    def __init__(
        self,
        directory: Path,
        costs: StepCosts = COSTS,
        *,
        num_blocks: int = 4096,
        num_cpu_blocks: int = 1024,
        windows: tuple[int, ...] = (0,),
        max_model_len: int | None = None,
        first_s: float = 0.0,
    ) -> None:
        super().__init__(
            directory,
            block_size=16,
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            windows=windows,
            max_model_len=max_model_len,
        )
        self.clock = Watch()
        self.steps = Steps()
        self._costs = costs
        self._first_s = first_s

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        prefill, swap, steps = self._costs.prefill, self._costs.swap, self.steps
        for item in items:
            chunk = (item.start, item.num_tokens)
            self.clock.now += 0.0 if chunk in steps.chunks else self._first_s
            steps.chunks.append(chunk)
            pairs = attended_pairs(*chunk, [group.window for group in self.kv_groups])
            self.clock.now += prefill.step_s + prefill.token_s * item.num_tokens + prefill.pair_s * pairs
        if moves:
            steps.moves.append((len(moves.swap_out), len(moves.swap_in)))
            self.clock.now += swap.moves_s
            self.clock.now += swap.block_out_s * len(moves.swap_out) + swap.block_in_s * len(moves.swap_in)
        return super().execute(moves, items)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self.steps.forgotten += sequence_ids


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory, max_model_len=32768)
    return directory


def measured(runner: TimedRunner) -> StepCosts:
    return calibrate(runner, runner.clock)


def assert_close(found: StepCosts, expected: StepCosts) -> None:
    for mine, theirs in ((found.prefill, expected.prefill), (found.swap, expected.swap)):
        for name in theirs.__struct_fields__:
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-3, abs=1e-12), name


@pytest.mark.parametrize("windows", [(0,), (100,), (0, 64, 0)])
def test_where_time_is_exact_so_is_what_is_measured(directory: Path, windows: tuple[int, ...]) -> None:
    assert_close(measured(TimedRunner(directory, windows=windows)), COSTS)


def test_what_only_the_first_step_of_a_kind_takes_is_not_counted(directory: Path) -> None:
    assert_close(measured(TimedRunner(directory, first_s=30.0)), COSTS)


@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0, 100.0])
def test_it_takes_about_as_long_as_it_may_however_fast_the_device(directory: Path, speed: float) -> None:
    """A hundredth to ten times 50,000 tokens a second."""
    costs = StepCosts(
        PrefillCosts(0.004 * speed, 2e-5 * speed, 3e-9 * speed), SwapCosts(2e-5, 4e-5 * speed, 6e-5 * speed)
    )
    runner = TimedRunner(directory, costs)
    measured(runner)
    budgets = calibration.PREFILL_BUDGET_S + calibration.SWAP_BUDGET_S + calibration.ROWS_BUDGET_S
    assert runner.clock.now < 2.5 * budgets + 16 * speed * 0.006
    assert len(set(runner.steps.chunks)) >= 4
    assert len(set(runner.steps.moves)) >= 4


def test_a_fast_device_is_measured_on_large_chunks_and_many_blocks(directory: Path) -> None:
    runner = TimedRunner(directory, StepCosts(PrefillCosts(0.0, 1e-6, 0.0), SwapCosts(0.0, 1e-7, 1e-7)))
    measured(runner)
    assert max(num_tokens for _, num_tokens in runner.steps.chunks) == 4096
    assert max(out for out, _ in runner.steps.moves) == 1024


def test_moves_take_no_more_memory_than_a_little(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_steps, "_MOST_MOVED_BYTES", 640)
    runner = TimedRunner(directory)
    measured(runner)
    assert set(runner.steps.moves) == {(1, 0), (0, 1), (4, 0), (0, 4), (10, 0), (0, 10)}


@pytest.mark.parametrize(
    ("num_blocks", "num_cpu_blocks", "max_model_len", "windows"),
    [
        (1, 1, None, (0,)),
        (2, 1, None, (0, 8)),
        (3, 3, 7, (0,)),
        (5, 2, None, (4,)),
        (1, 1, None, (0, 8)),
        (64, 64, 1, (0,)),
    ],
)
def test_whatever_there_is_room_for_is_enough(
    directory: Path, num_blocks: int, num_cpu_blocks: int, max_model_len: int | None, windows: tuple[int, ...]
) -> None:
    """Even if that is too little for any sequence."""
    runner = TimedRunner(
        directory,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        max_model_len=max_model_len,
        windows=windows,
    )
    costs = measured(runner)
    assert [cost.rows for cost in costs.rows] == sorted(cost.rows for cost in costs.rows)
    room = min(num_blocks // len(windows) * 16, max_model_len or 1 << 20)
    assert all(context + num_tokens <= room for context, num_tokens in runner.steps.chunks)
    assert min(costs.swap.block_out_s, costs.swap.block_in_s) >= 0.0


def test_without_cpu_blocks_moves_cost_nothing_and_all_else_is_measured(directory: Path) -> None:
    runner = TimedRunner(directory, num_cpu_blocks=0)
    assert_close(measured(runner), StepCosts(COSTS.prefill, SwapCosts(0.0, 0.0, 0.0)))
    assert runner.steps.moves == []


def test_rows_cost_what_a_sequence_takes_with_so_many_that_choose(directory: Path) -> None:
    runner = TimedRunner(directory)
    prefill, found = COSTS.prefill, measured(runner).rows
    assert [cost.rows for cost in found] == [1, 2, 4, 8, 16, 32, 64]
    for cost in found:
        pairs = attended_pairs(0, cost.rows, [0])
        expected = prefill.step_s + prefill.token_s * cost.rows + prefill.pair_s * pairs
        assert cost.seconds == pytest.approx(expected, rel=1e-6)


def test_a_slow_device_is_timed_with_few_rows(directory: Path) -> None:
    runner = TimedRunner(directory, StepCosts(PrefillCosts(2.0, 0.0, 0.0), COSTS.swap))
    assert [cost.rows for cost in measured(runner).rows] == [1, 4, 16]
    assert runner.clock.now < 40.0


def test_no_step_of_more_rows_takes_less(directory: Path) -> None:
    class Bumpy(TimedRunner):
        def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
            self.clock.now += 0.01 * any(len(item.draft) == 3 for item in items)
            return super().execute(moves, items)

    seconds = {cost.rows: cost.seconds for cost in measured(Bumpy(directory)).rows}
    assert seconds[2] < seconds[4] == seconds[8] == seconds[64]


def test_a_runner_that_checks_no_drafts_has_no_costs_of_them(directory: Path) -> None:
    class Unchecking(TimedRunner):
        def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
            return super().execute(moves, [item.without_draft() for item in items])

    assert measured(Unchecking(directory)).rows == []
    assert measured(TimedRunner(directory)).rows != []


def test_the_runner_keeps_no_sequence(directory: Path) -> None:
    runner = TimedRunner(directory)
    measured(runner)
    assert len(runner.steps.forgotten) == len(runner.steps.chunks)


def test_a_real_clock_gives_what_the_wire_takes(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=16, num_blocks=64)
    hello = WorkerProtocol("w", runner, lambda: 1, calibrate(runner)).beat()
    assert isinstance(hello, WorkerHello)
    assert hello.costs is not None
    assert decode_from_worker(encode(hello)) == hello
