"""The steps that are timed, and what is learned from them: all of it, where time is exact."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from octavo.runtime.models.step_times import StepShape, StepTimeModel, TokenTime
from octavo.testbed.tiny_model import write_byte_model
from octavo.wire.costs import attended_pairs
from octavo.wire.steps import BlockMoves
from octavo.worker.calibrate.fit import errors, fitted, typical_error
from octavo.worker.calibrate.timed_steps import Largest, TimedStep, measured
from octavo.worker.fake.runner import FakeRunner
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkItem

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PLANTED = StepTimeModel(
    token_times=[TokenTime(size, 0.010 + 0.0004 * size**0.9) for size in SIZES],
    sampling_s=0.002,
    sampled_s=0.0003,
    context_token_s=2e-6,
    pair_s=3e-9,
    moves_s=2e-5,
    block_out_s=4e-5,
    block_in_s=6e-5,
    copy_s=1e-5,
)
LARGEST = Largest(num_seqs=64, num_tokens=1024)


class TimedRunner(FakeRunner):
    """Takes as long as `PLANTED` says, by its own clock."""

    def __init__(self, directory: Path, *, num_blocks: int = 8192, max_model_len: int | None = None) -> None:
        super().__init__(directory, block_size=16, num_blocks=num_blocks, max_model_len=max_model_len)
        self.now = 0.0
        self.shapes: list[StepShape] = []
        self.forgotten = 0

    def clock(self) -> float:
        return self.now

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        decodes = [item.end for item in items if item.num_tokens == 1]
        prompts = [(item.start, item.num_tokens) for item in items if item.num_tokens > 1]
        self.shapes.append(
            StepShape(
                sum(item.num_tokens for item in items),
                sum(len(item.choosers) for item in items),
                sum(decodes),
                sum(attended_pairs(*each, [0]) for each in prompts),
                len(moves.swap_out),
                len(moves.swap_in),
                len(moves.copy),
            )
        )
        self.now += PLANTED.seconds(self.shapes[-1])
        return super().execute(moves, items)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self.forgotten += len(list(sequence_ids))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory, max_model_len=4096)
    return directory


def samples_of(runner: TimedRunner, budget_s: float = 60.0) -> dict[str, list[TimedStep]]:
    return measured(runner, LARGEST, clock=runner.clock, budget_s=budget_s)


def test_where_time_is_exact_all_that_it_depends_on_is_learned(directory: Path) -> None:
    families = samples_of(TimedRunner(directory))
    model = fitted([sample for samples in families.values() for sample in samples])
    for name in StepTimeModel.__struct_fields__[1:]:
        assert getattr(model, name) == pytest.approx(getattr(PLANTED, name), rel=1e-3), name
    assert [each.num_tokens for each in model.token_times] == list(SIZES)
    for found, planted in zip(model.token_times, PLANTED.token_times, strict=True):
        assert found.seconds == pytest.approx(planted.seconds, rel=1e-3)
    assert typical_error(errors(model, families)) < 1e-6


def test_every_family_is_timed_in_the_shapes_it_is_told_in(directory: Path) -> None:
    runner = TimedRunner(directory)
    families = samples_of(runner)
    assert list(families) == ["decode", "prefill", "mixed", "swap", "copy"]
    assert {sample.shape for samples in families.values() for sample in samples} == set(runner.shapes)
    for samples in families.values():
        for sample in samples:
            assert sample.seconds == pytest.approx(PLANTED.seconds(sample.shape))


def test_there_are_large_steps_and_small_ones_with_tokens_chosen_and_without(directory: Path) -> None:
    families = samples_of(TimedRunner(directory))
    decodes = [sample.shape for sample in families["decode"]]
    assert {shape.num_tokens for shape in decodes} == {1, 2, 4, 8, 16, 32, 64}
    assert {shape.num_sampled == 0 for shape in decodes} == {True, False}
    assert max(shape.context_tokens // shape.num_tokens for shape in decodes) > 2000
    chunks = [sample.shape for sample in families["prefill"]]
    assert {shape.num_tokens for shape in chunks} == {16, 32, 64, 128, 256, 512, 1024}
    assert {shape.num_sampled for shape in chunks} == {0, 1}
    assert all(shape.num_tokens <= 1024 for samples in families.values() for shape in [s.shape for s in samples])


def test_no_sequence_is_kept(directory: Path) -> None:
    runner = TimedRunner(directory)
    samples_of(runner)
    sequences = sum(max(shape.num_sampled, 1) for shape in runner.shapes if shape.num_tokens)
    assert runner.forgotten >= sequences


def test_a_slow_device_is_timed_on_few_sizes(directory: Path) -> None:
    families = samples_of(TimedRunner(directory), budget_s=0.01)
    assert {sample.shape.num_tokens for sample in families["decode"]} == {1, 2, 4}
    assert {sample.shape.num_tokens for sample in families["prefill"]} == {16, 32, 64}
    model = fitted([sample for samples in families.values() for sample in samples])
    assert typical_error(errors(model, families)) < 1e-3


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(1, 2048), (2, 2048), (3, 7), (64, 1), (5, 20)])
def test_whatever_there_is_room_for_is_enough(directory: Path, num_blocks: int, max_model_len: int) -> None:
    runner = TimedRunner(directory, num_blocks=num_blocks, max_model_len=max_model_len)
    families = samples_of(runner)
    model = fitted([sample for samples in families.values() for sample in samples])
    assert typical_error(errors(model, families)) < 0.05


def test_times_that_fall_are_told_as_if_they_did_not(directory: Path) -> None:
    """What is noise must not make a large step take less than a small one."""
    samples = [TimedStep(StepShape(size), 0.02 - 0.0001 * size) for size in (1, 16, 32, 64)]
    times = [each.seconds for each in fitted(samples).token_times]
    assert times == sorted(times)
    assert times[0] == pytest.approx(0.0172, abs=0.003)


def test_a_last_size_close_to_a_power_of_two_makes_no_steep_end() -> None:
    seconds = {16: 0.02, 32: 0.03, 64: 0.05, 65: 0.07}
    samples = [TimedStep(StepShape(size), seconds[size]) for size in seconds]
    assert fitted(samples).seconds(StepShape(128)) < 0.15


def test_errors_are_told_by_family_with_their_sign() -> None:
    model = StepTimeModel([TokenTime(1, 1.0)], *8 * [0.0])
    families = {
        "decode": [TimedStep(StepShape(1), 0.8), TimedStep(StepShape(2), 1.0)],
        "swap": [TimedStep(StepShape(1), 2.0)],
    }
    assert errors(model, families) == {"decode": [pytest.approx(0.25), 0.0], "swap": [-0.5]}
    assert typical_error(errors(model, families)) == pytest.approx(0.25)
