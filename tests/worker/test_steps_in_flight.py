"""Steps launched before the results of those before them are known: the answers are the same, in the same order."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from octavo.runtime.models.grammar import load_vocabulary
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.fakes.deferred import DeferredRunner
from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.testing.oracles.worker_plans import EPOCH, INCARNATION, beam_sampling, plan, sampling, start, work
from octavo.testing.small.constraints import DIGITS, compiled
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import (
    FailureReason,
    SequenceFork,
    StepOutcome,
    StepPlan,
    StepResult,
    WorkerUnregistered,
    WorkerWelcome,
)
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens
from octavo.worker.protocol import WorkerProtocol

PENALISED = sampling(repetition_penalty=1.5)
PARAMS = [sampling(), sampling(0.8, seed=3), PENALISED, sampling(frequency_penalty=0.5, temperature=1.0, seed=9)]


@pytest.fixture
def runner(tmp_path: Path) -> DeferredRunner:
    write_byte_model(tmp_path)
    return DeferredRunner(tmp_path, block_size=4, num_blocks=64)


@pytest.fixture
def protocol(runner: DeferredRunner) -> WorkerProtocol:
    return welcomed(runner)


def welcomed(runner: SpoilableRunner) -> WorkerProtocol:
    protocol = WorkerProtocol("w0", runner, count(INCARNATION).__next__)
    protocol.receive(WorkerWelcome(EPOCH))
    return protocol


def answers(protocol: WorkerProtocol, plans: list[StepPlan], ahead: int) -> Iterator[StepResult]:
    """Each plan is sent once all but `ahead` of those before it are answered."""
    for sent, step in enumerate(plans):
        if sent >= ahead:
            yield protocol.answer()
        protocol.receive(step)
    while protocol.busy:
        yield protocol.answer()


def decoding(params: list[SamplingParams], steps: int, ahead: int) -> list[StepPlan]:
    """Prompts of three tokens, a chunk of two and a chunk of one, then one token after the other."""
    ids = range(1, len(params) + 1)
    starts = [start(each, [each, 7, 8], params=param) for each, param in zip(ids, params, strict=True)]
    plans = [
        plan(1, starts=starts, work=[work(each, 2, [each]) for each in ids]),
        plan(2, work=[work(each, 1) for each in ids], answered=max(0, 2 - ahead)),
    ]
    for step in range(3, steps + 1):
        grown = [(each, [[each + 8 * (step // 4)]] if step % 4 == 0 else []) for each in ids]
        plans.append(plan(step, work=[work(each, 1, *new) for each, new in grown], answered=max(0, step - ahead)))
    return plans


@pytest.mark.parametrize("params", [PARAMS[:2], PARAMS], ids=["by position", "by tokens too"])
def test_two_in_flight_are_answered_like_one_after_the_other(
    protocol: WorkerProtocol, tmp_path: Path, params: list[SamplingParams]
) -> None:
    found = list(answers(protocol, decoding(params, 12, ahead=2), ahead=2))
    assert [result.step_id for result in found] == list(range(1, 13))
    vocabulary = FakeVocabulary.read(tmp_path)
    for index, param in enumerate(params):
        tokens = [result.sampled[index].token_id for result in found[1:]]
        assert tokens == expected_tokens([index + 1, 7, 8], param, 0, 11, vocabulary)


def test_a_runner_that_is_done_at_once_meets_no_pending_token(tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    found = answers(welcomed(SpoilableRunner(tmp_path, block_size=4, num_blocks=64)), decoding(PARAMS[:1], 6, 2), 2)
    tokens = [token.token_id for result in found for token in result.sampled]
    assert tokens == expected_tokens([1, 7, 8], PARAMS[0], 0, 5, FakeVocabulary.read(tmp_path))


def test_a_launch_does_not_wait_for_the_step_before(protocol: WorkerProtocol, runner: DeferredRunner) -> None:
    first, second, third = decoding(PARAMS[:2], 3, ahead=2)
    protocol.receive(first)
    protocol.receive(second)
    assert len(runner.launched) == 2
    assert not protocol.ready()
    runner.launched[0].is_ready = True
    assert protocol.ready()
    assert protocol.answer().step_id == 1
    assert not protocol.ready()
    protocol.receive(third)
    assert len(runner.launched) == 3


def test_a_penalised_one_waits_for_nothing(protocol: WorkerProtocol, runner: DeferredRunner) -> None:
    for step in decoding([PENALISED], 3, ahead=2):
        protocol.receive(step)
    assert not protocol.ready()
    assert len(runner.launched) == 3


def test_one_with_a_grammar_has_the_steps_before_it_answered_while_it_is_launched(
    protocol: WorkerProtocol, runner: DeferredRunner, tmp_path: Path
) -> None:
    prefill, first, second = decoding([constrained(tmp_path)], 3, ahead=2)
    for step in (prefill, first):
        protocol.receive(step)
    assert not protocol.ready()
    protocol.receive(second)
    assert [protocol.answer().step_id for _ in range(2)] == [1, 2]
    assert not protocol.ready()
    assert len(protocol.answer().sampled) == 1


def constrained(directory: Path) -> SamplingParams:
    return sampling(grammar=compiled(DIGITS, load_vocabulary(directory)))


def test_one_with_a_grammar_is_skipped_if_the_step_before_turns_out_to_have_failed(
    protocol: WorkerProtocol, runner: DeferredRunner, tmp_path: Path
) -> None:
    prefill, first, second = decoding([constrained(tmp_path), sampling()], 3, ahead=2)
    protocol.receive(prefill)
    runner.fails = True
    protocol.receive(first)
    protocol.receive(second)
    outcomes = [protocol.answer().outcome for _ in range(3)]
    assert outcomes == [StepOutcome.DONE, StepOutcome.FAILED, StepOutcome.SKIPPED]
    assert runner.holds == set()


def test_one_with_a_grammar_that_turns_out_to_have_failed_fails_alone(
    protocol: WorkerProtocol, runner: DeferredRunner, tmp_path: Path
) -> None:
    prefill, first, second = decoding([constrained(tmp_path), sampling()], 3, ahead=2)
    protocol.receive(prefill)
    runner.to_spoil = (1,)
    protocol.receive(first)
    runner.to_spoil = ()
    protocol.receive(second)
    _, *found = [protocol.answer() for _ in range(3)]
    for result in found:
        assert [each.sequence_id for each in result.failed] == [1]
        assert [each.sequence_id for each in result.sampled] == [2]


def test_a_fork_copies_tokens_that_are_known(protocol: WorkerProtocol, tmp_path: Path) -> None:
    prefill, first, second = decoding([sampling()], 3, ahead=2)
    forked = plan(3, forks=[SequenceFork(1, 2, 1)], work=[*second.work, work(2, 1, [40])], answered=1)
    found = list(answers(protocol, [prefill, first, forked], ahead=2))
    assert found[-1].outcome is StepOutcome.DONE
    assert [token.token_id for token in found[-1].sampled][:1] == expected_tokens(
        [1, 7, 8], sampling(), 0, 2, FakeVocabulary.read(tmp_path)
    )[1:]


def test_what_a_sequence_gets_after_it_has_failed_is_not_told(protocol: WorkerProtocol, runner: DeferredRunner) -> None:
    plans = decoding(PARAMS[:2], 5, ahead=2)
    runner.to_spoil = (1,)
    found = []
    for result in answers(protocol, plans, ahead=2):
        runner.to_spoil = ()
        found.append(result)
    for result in found:
        assert [(each.sequence_id, each.reason) for each in result.failed] == [(1, FailureReason.NOT_FINITE)]
        assert 1 not in [each.sequence_id for each in result.sampled]
    assert [[each.sequence_id for each in result.sampled] for result in found] == [[], [2], [2], [2], [2]]


def test_a_failure_is_told_though_the_sequence_was_forgotten_meanwhile(
    protocol: WorkerProtocol, runner: DeferredRunner
) -> None:
    first, second, third = decoding(PARAMS[:2], 3, ahead=2)
    runner.to_spoil = (1,)
    protocol.receive(first)
    protocol.receive(second)
    assert [each.sequence_id for each in protocol.answer().failed] == [1]
    runner.to_spoil = ()
    protocol.receive(plan(3, forget=[1], work=third.work[1:], answered=1))
    assert [each.sequence_id for each in protocol.answer().failed] == [1]
    last = protocol.answer()
    assert last.failed == []
    assert [each.sequence_id for each in last.sampled] == [2]


def test_after_a_step_that_fails_late_those_under_way_are_skipped(
    protocol: WorkerProtocol, runner: DeferredRunner, tmp_path: Path
) -> None:
    plans = decoding(PARAMS[:2], 4, ahead=2)
    runner.fails = True
    protocol.receive(plans[0])
    protocol.receive(plans[1])
    assert [protocol.answer().outcome for _ in range(2)] == [StepOutcome.FAILED, StepOutcome.SKIPPED]
    again = plan(3, starts=plans[0].starts, work=plans[0].work, answered=2)
    protocol.receive(again)
    protocol.receive(plan(4, work=plans[1].work, answered=2))
    assert protocol.answer().outcome is StepOutcome.DONE
    assert [each.token_id for each in protocol.answer().sampled] == [
        expected_tokens([index, 7, 8], param, 0, 1, FakeVocabulary.read(tmp_path))[0]
        for index, param in enumerate(PARAMS[:2], 1)
    ]


def test_a_plan_that_knows_of_a_failure_may_start_anew_what_was_to_be_skipped(
    protocol: WorkerProtocol, runner: DeferredRunner
) -> None:
    first, *_ = decoding(PARAMS[:2], 3, ahead=2)
    runner.fails = True
    protocol.receive(first)
    protocol.receive(plan(2, starts=[start(7, [5])], work=[work(7, 1, [50])], answered=0))
    assert protocol.answer().outcome is StepOutcome.FAILED
    protocol.receive(plan(3, starts=[start(7, [6])], work=[work(7, 1, [51])], answered=1))
    assert protocol.answer().outcome is StepOutcome.SKIPPED
    protocol.receive(plan(4, work=[work(7, 1)], answered=2))
    assert [protocol.answer().outcome for _ in range(2)] == [StepOutcome.DONE, StepOutcome.DONE]


def test_the_failure_of_a_sequence_is_not_that_of_the_next_with_its_id(
    protocol: WorkerProtocol, runner: DeferredRunner
) -> None:
    runner.to_spoil = (1,)
    protocol.receive(plan(1, starts=[start(1, [5])], work=[work(1, 1, [3])]))
    runner.to_spoil = ()
    protocol.receive(plan(2, forget=[1], starts=[start(1, [6])], work=[work(1, 1, [4])], answered=0))
    assert len(protocol.answer().failed) == 1
    protocol.receive(plan(3, work=[work(1, 1)], answered=1))
    assert [len(protocol.answer().sampled) for _ in range(2)] == [1, 1]


def test_a_plan_that_cannot_be_launched_is_answered_after_those_before_it(protocol: WorkerProtocol) -> None:
    first, second, _ = decoding([sampling()], 3, ahead=2)
    protocol.receive(first)
    protocol.receive(second)
    protocol.receive(plan(3, work=[work(99, 1)], answered=1))
    assert [protocol.answer().outcome for _ in range(3)] == [StepOutcome.DONE, StepOutcome.DONE, StepOutcome.FAILED]


def test_beams_are_never_pending(protocol: WorkerProtocol) -> None:
    protocol.receive(plan(1, starts=[start(1, [5, 6], params=beam_sampling())], work=[work(1, 2, [3])]))
    protocol.receive(plan(2, work=[work(1, 1, input_token_id=9)]))
    assert [protocol.answer().outcome for _ in range(2)] == [StepOutcome.DONE, StepOutcome.DONE]


def test_a_new_incarnation_hears_nothing_of_steps_under_way(protocol: WorkerProtocol, runner: DeferredRunner) -> None:
    protocol.receive(decoding(PARAMS[:2], 2, ahead=2)[0])
    protocol.receive(WorkerUnregistered(EPOCH))
    assert not protocol.busy


def test_forgotten_sequences_are_told_to_the_runner(
    protocol: WorkerProtocol, runner: DeferredRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[int] = []
    protocol._table._on_forget = forgotten.extend
    protocol.receive(decoding(PARAMS[:3], 2, ahead=2)[0])
    protocol.receive(plan(2, forget=[2]))
    assert forgotten == [2]
    runner.fails = True
    protocol.receive(plan(3, work=[work(1, 1)], answered=0))
    assert [protocol.answer().outcome for _ in range(3)][-1] is StepOutcome.FAILED
    assert forgotten == [2, 1]
    protocol.receive(WorkerUnregistered(EPOCH))
    assert forgotten == [2, 1, 3]
