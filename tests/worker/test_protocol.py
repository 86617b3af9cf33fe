"""The worker's answers to its scheduler, with a real fake model and no socket."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.testing.oracles.worker_plans import EPOCH, INCARNATION, beam_sampling, moves, plan, sampling, start, work
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.codec import WireError
from octavo.wire.steps import (
    BlockMoves,
    Heartbeat,
    KVGroup,
    Remap,
    SampledToken,
    SequenceFork,
    StepOutcome,
    StepPlan,
    StepResult,
    WorkerDismissed,
    WorkerGoodbye,
    WorkerHello,
    WorkerRefused,
    WorkerUnregistered,
    WorkerWelcome,
)
from octavo.worker.fake.runner import (
    FakeVocabulary,
    expected_candidates,
    expected_logprobs,
    expected_tokens,
)
from octavo.worker.protocol import RefusedError, WorkerProtocol
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkItem
from octavo.worker.step.failures import no_token_left, not_finite


class BreakableRunner(SpoilableRunner):
    """A fake model whose next steps raise what is put into `errors`."""

    errors: list[Exception]

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        if self.errors:
            raise self.errors.pop(0)
        return super().execute(moves, items)


@pytest.fixture
def runner(tmp_path: Path) -> BreakableRunner:
    write_byte_model(tmp_path)
    runner = BreakableRunner(tmp_path, block_size=4, num_blocks=16)
    runner.errors = []
    return runner


@pytest.fixture
def protocol(runner: BreakableRunner) -> WorkerProtocol:
    return WorkerProtocol("w0", runner, count(INCARNATION).__next__)


@pytest.fixture
def serving(protocol: WorkerProtocol) -> WorkerProtocol:
    protocol.receive(WorkerWelcome(EPOCH))
    return protocol


def ask(protocol: WorkerProtocol, step: StepPlan) -> StepResult:
    protocol.receive(step)
    result = protocol.answer()
    assert not protocol.busy
    assert (result.epoch, result.incarnation, result.step_id) == (step.epoch, step.incarnation, step.step_id)
    return result


def test_hello_is_repeated_with_one_incarnation_until_welcomed(
    protocol: WorkerProtocol, runner: BreakableRunner
) -> None:
    hello = protocol.beat()
    assert hello == protocol.beat()
    assert hello == WorkerHello(
        SCHEMA_VERSION,
        "w0",
        INCARNATION,
        INCARNATION,
        runner.model,
        "fake",
        world_size=1,
        num_blocks=16,
        num_cpu_blocks=4,
        block_size=4,
        kv_bytes_per_token=4,
        kv_groups=[KVGroup(0)],
    )
    protocol.receive(WorkerWelcome(EPOCH))
    assert not protocol.busy
    assert protocol.beat() == Heartbeat(EPOCH, INCARNATION, 0)


def test_a_second_welcome_into_the_same_epoch_changes_nothing(serving: WorkerProtocol) -> None:
    ask(serving, plan(1, starts=[start(1, [5])], work=[work(1, 1, [0])]))
    serving.receive(WorkerWelcome(EPOCH))
    assert serving.beat() == Heartbeat(EPOCH, INCARNATION, 1)


def test_a_welcome_into_another_epoch_means_registering_anew(serving: WorkerProtocol) -> None:
    serving.receive(WorkerWelcome(EPOCH + 1))
    hello = serving.beat()
    assert isinstance(hello, WorkerHello)
    assert hello.incarnation == INCARNATION + 1


def test_a_refusal_ends_the_worker_with_its_reason(protocol: WorkerProtocol) -> None:
    with pytest.raises(RefusedError, match="another model"):
        protocol.receive(WorkerRefused("another model"))


def test_plans_are_computed_in_order_without_knowing_the_results(serving: WorkerProtocol, tmp_path: Path) -> None:
    results = [
        ask(serving, plan(1, starts=[start(9, [5, 6, 7])], work=[work(9, 2, [3])])),
        ask(serving, plan(2, work=[work(9, 1)], answered=0)),
        ask(serving, plan(3, work=[work(9, 1)], answered=1)),
        ask(serving, plan(4, work=[work(9, 1, [8])], answered=2)),
    ]
    assert {result.outcome for result in results} == {StepOutcome.DONE}
    expected = expected_tokens([5, 6, 7], sampling(), 0, 3, FakeVocabulary.read(tmp_path))
    assert [result.sampled for result in results] == [[], *([SampledToken(9, token)] for token in expected)]
    assert serving.beat() == Heartbeat(EPOCH, INCARNATION, 4)


def test_a_plan_that_only_forgets_is_answered_without_the_model(
    serving: WorkerProtocol, runner: BreakableRunner
) -> None:
    runner.errors = [RuntimeError("no work, no call")]
    result = ask(serving, plan(1, forget=[4]))
    assert (result.outcome, result.sampled) == (StepOutcome.DONE, [])


def test_a_plan_that_only_moves_blocks_is_executed(serving: WorkerProtocol, tmp_path: Path) -> None:
    ask(serving, plan(1, starts=[start(9, [5, 6, 7])], work=[work(9, 3, [3])]))
    ask(serving, plan(2, moves=moves(swap_out=[(3, 1)])))
    ask(serving, plan(3, starts=[start(8, [1, 1])], work=[work(8, 2, [3])]))
    ask(serving, plan(4, moves=moves(swap_in=[(1, 6)]), remaps=[Remap(9, 0, 0, 6)]))
    result = ask(serving, plan(5, work=[work(9, 1)]))
    expected = expected_tokens([5, 6, 7], sampling(), 0, 2, FakeVocabulary.read(tmp_path))
    assert result.sampled == [SampledToken(9, expected[1])]


def test_a_plan_with_impossible_moves_fails_before_the_model(serving: WorkerProtocol, runner: BreakableRunner) -> None:
    runner.errors = [RuntimeError("never raised")]
    result = ask(serving, plan(1, moves=moves(swap_out=[(3, 4)])))
    assert result.outcome is StepOutcome.FAILED
    assert result.detail == "PlanError: swap_out moves block 3 to 4; there are 16 to move from and 4 to move to"


def test_beams_are_answered_with_candidates_and_go_on_with_the_token_chosen(
    serving: WorkerProtocol, tmp_path: Path
) -> None:
    vocabulary, params = FakeVocabulary.read(tmp_path), beam_sampling(width=2)
    first = ask(serving, plan(1, starts=[start(9, [5, 6, 7], params=params)], work=[work(9, 3, [3])]))
    (offered,) = first.candidates
    assert first.sampled == []
    assert list(zip(offered.token_ids, offered.logprobs, strict=True)) == expected_candidates(
        [5, 6, 7], [], params, vocabulary
    )
    chosen = offered.token_ids[:2]
    branched = plan(
        2,
        moves=moves(copy=[(3, 4)]),
        forks=[SequenceFork(9, 10, 1)],
        remaps=[Remap(10, 0, 0, 4)],
        work=[work(9, 1, input_token_id=chosen[0]), work(10, 1, input_token_id=chosen[1])],
    )
    second = ask(serving, branched)
    assert [beam.sequence_id for beam in second.candidates] == [9, 10]
    for beam, token in zip(second.candidates, chosen, strict=True):
        expected = expected_candidates([5, 6, 7], [token], params, vocabulary)
        assert list(zip(beam.token_ids, beam.logprobs, strict=True)) == expected


def test_parallel_samples_of_one_prompt_are_answered_a_leader_before_its_followers(
    serving: WorkerProtocol, tmp_path: Path
) -> None:
    params = sampling(temperature=1.0, seed=5)
    forks = [SequenceFork(9, 10, 1), SequenceFork(9, 11, 2)]
    prompt = start(9, [5, 6, 7], params=params)
    result = ask(serving, plan(1, starts=[prompt], forks=forks, work=[work(9, 3, [3], followers=[10, 11])]))
    vocabulary = FakeVocabulary.read(tmp_path)
    references = [expected_tokens([5, 6, 7], params, index, 1, vocabulary) for index in range(3)]
    assert result.sampled == [SampledToken(9 + index, tokens[0]) for index, tokens in enumerate(references)]


def test_logprobs_of_prompt_and_tokens_are_part_of_the_answer(serving: WorkerProtocol, tmp_path: Path) -> None:
    params = sampling(logprobs=1, prompt_logprobs=2)
    result = ask(serving, plan(1, starts=[start(9, [5, 6, 7], params=params)], work=[work(9, 3, [3])]))
    vocabulary = FakeVocabulary.read(tmp_path)
    (sampled,), (prompt,) = result.sampled, result.prompt_logprobs
    assert (prompt.sequence_id, prompt.start) == (9, 1)
    assert prompt.logprobs == expected_logprobs([5, 6, 7], 2, vocabulary)
    assert sampled.logprobs == expected_logprobs([5, 6, 7, sampled.token_id], 1, vocabulary)[-1]


def test_a_sequence_that_is_not_finite_fails_alone_and_again_until_it_is_forgotten(
    serving: WorkerProtocol, runner: BreakableRunner, tmp_path: Path
) -> None:
    expected = expected_tokens([7, 8], sampling(), 0, 3, FakeVocabulary.read(tmp_path))
    runner.to_spoil = [9]
    both = [start(9, [5, 6]), start(4, [7, 8])]
    first = ask(serving, plan(1, starts=both, work=[work(9, 2, [3]), work(4, 2, [5])]))
    runner.to_spoil = []
    # A fork, new blocks, a changed entry: all was planned without knowing.
    grown = plan(
        2,
        forks=[SequenceFork(9, 10, 1)],
        remaps=[Remap(9, 0, 0, 6)],
        work=[work(9, 1), work(10, 1, [7]), work(4, 1)],
        answered=0,
    )
    second = ask(serving, grown)
    third = ask(serving, plan(3, forget=[9, 10], work=[work(4, 1)]))
    assert [first.failed, second.failed, third.failed] == [[not_finite(9)], [not_finite(9), not_finite(10)], []]
    assert [result.outcome for result in (first, second, third)] == [StepOutcome.DONE] * 3
    assert [result.sampled for result in (first, second, third)] == [[SampledToken(4, token)] for token in expected]
    assert not serving._table._failed


def test_a_prompt_that_is_not_finite_fails_before_anything_is_chosen(
    serving: WorkerProtocol, runner: BreakableRunner
) -> None:
    runner.to_spoil = [9]
    result = ask(serving, plan(1, starts=[start(9, [5, 6, 7])], work=[work(9, 2, [3])]))
    assert (result.sampled, result.failed) == ([], [not_finite(9)])


def test_those_that_exclude_every_token_fail_and_others_of_the_step_do_not(
    serving: WorkerProtocol, tmp_path: Path
) -> None:
    nothing: dict[str, Any] = {"allowed_token_ids": [3], "banned_token_ids": [3]}
    starts = [
        start(1, [5], params=sampling(**nothing)),
        start(2, [5]),
        start(3, [5], params=beam_sampling(**nothing)),
        start(4, [5], params=sampling(temperature=1.0, **nothing)),
    ]
    items = [work(1, 1, [0]), work(2, 1, [1]), work(3, 1, [2]), work(4, 1, [3], followers=[5])]
    result = ask(serving, plan(1, starts=starts, forks=[SequenceFork(4, 5, 1)], work=items))
    assert result.failed == [no_token_left(sequence_id) for sequence_id in (1, 3, 4, 5)]
    expected = expected_tokens([5], sampling(), 0, 1, FakeVocabulary.read(tmp_path))
    assert (result.sampled, result.candidates) == ([SampledToken(2, expected[0])], [])


def test_an_error_in_the_model_fails_the_step_with_its_text(serving: WorkerProtocol, runner: BreakableRunner) -> None:
    runner.errors = [ArithmeticError("too many logits")]
    result = ask(serving, plan(1, starts=[start(1, [5])], work=[work(1, 1, [0])]))
    assert result.outcome is StepOutcome.FAILED
    assert result.detail == "ArithmeticError: too many logits"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."),
    ],
)
def test_a_step_that_runs_out_of_memory_says_so_and_the_worker_goes_on(
    serving: WorkerProtocol, runner: BreakableRunner, error: Exception
) -> None:
    runner.errors = [error]
    failed = ask(serving, plan(1, starts=[start(1, [5])], work=[work(1, 1, [0])]))
    assert failed.outcome is StepOutcome.OUT_OF_MEMORY
    assert failed.detail == f"{type(error).__name__}: {error}"
    again = plan(2, starts=[start(1, [5])], work=[work(1, 1, [0])], answered=1)
    assert ask(serving, again).outcome is StepOutcome.DONE


def test_a_contradictory_plan_fails_instead_of_ending_the_worker(serving: WorkerProtocol) -> None:
    result = ask(serving, plan(1, work=[work(77, 1)]))
    assert result.outcome is StepOutcome.FAILED
    assert "PlanError" in result.detail
    assert ask(serving, plan(2)).outcome is StepOutcome.DONE


def test_a_long_error_is_cut_to_what_a_message_may_hold(serving: WorkerProtocol, runner: BreakableRunner) -> None:
    runner.errors = [RuntimeError("x" * 10_000)]
    result = ask(serving, plan(1, starts=[start(1, [5])], work=[work(1, 1, [0])]))
    assert len(result.detail) == 4096


def test_plans_made_before_the_failure_was_known_are_skipped(serving: WorkerProtocol, runner: BreakableRunner) -> None:
    ask(serving, plan(1, starts=[start(1, [5]), start(2, [6])], work=[work(1, 1, [0]), work(2, 1, [1])]))
    runner.errors = [RuntimeError("once")]
    assert ask(serving, plan(2, work=[work(1, 1)], answered=1)).outcome is StepOutcome.FAILED
    skipped = ask(serving, plan(3, work=[work(2, 1)], answered=1))
    assert (skipped.outcome, skipped.sampled) == (StepOutcome.SKIPPED, [])
    assert ask(serving, plan(4, starts=[start(3, [6])], work=[work(3, 1, [2])], answered=1)).outcome == "skipped"
    assert ask(serving, plan(5, answered=2)).outcome is StepOutcome.DONE


def test_sequences_of_failed_and_skipped_plans_can_be_started_again(
    serving: WorkerProtocol, runner: BreakableRunner
) -> None:
    ask(serving, plan(1, starts=[start(1, [5]), start(2, [6])], work=[work(1, 1, [0]), work(2, 1, [1])]))
    runner.errors = [RuntimeError("once")]
    ask(serving, plan(2, work=[work(1, 1)], answered=1))
    ask(serving, plan(3, work=[work(2, 1)], starts=[start(3, [7])], answered=1))
    again = plan(
        4,
        starts=[start(i, [4 + i]) for i in (1, 2, 3)],
        work=[work(i, 1, [i]) for i in (1, 2, 3)],
        answered=3,
    )
    assert ask(serving, again).outcome is StepOutcome.DONE


def test_sequences_outside_a_failed_step_live_on(serving: WorkerProtocol, runner: BreakableRunner) -> None:
    ask(serving, plan(1, starts=[start(1, [5]), start(2, [6])], work=[work(1, 1, [0]), work(2, 1, [1])]))
    runner.errors = [RuntimeError("once")]
    ask(serving, plan(2, work=[work(1, 1)]))
    assert ask(serving, plan(3, work=[work(2, 1)])).outcome is StepOutcome.DONE


def test_forks_and_followers_of_a_failed_step_can_be_started_again(
    serving: WorkerProtocol, runner: BreakableRunner
) -> None:
    runner.errors = [RuntimeError("once")]
    starts, forks, shares = [start(1, [5])], [SequenceFork(1, 2, 1)], [work(1, 1, [0], followers=[2])]
    assert ask(serving, plan(1, starts=starts, forks=forks, work=shares)).outcome is StepOutcome.FAILED
    assert ask(serving, plan(2, starts=starts, forks=forks, work=shares)).outcome is StepOutcome.DONE


@pytest.mark.parametrize(
    "stale",
    [
        plan(6, epoch=EPOCH + 1),
        plan(6, incarnation=INCARNATION + 1),
        plan(5),
        plan(4),
    ],
    ids=["another epoch", "another incarnation", "the same step", "an earlier step"],
)
def test_a_stale_plan_is_dropped_and_counted(serving: WorkerProtocol, stale: StepPlan) -> None:
    ask(serving, plan(5))
    serving.receive(stale)
    assert not serving.busy
    assert serving.dropped == 1
    assert ask(serving, plan(6)).outcome is StepOutcome.DONE


def test_a_plan_before_the_welcome_is_dropped(protocol: WorkerProtocol) -> None:
    protocol.receive(plan(1))
    assert not protocol.busy
    assert protocol.dropped == 1


def test_an_unregistered_worker_comes_back_empty_under_a_new_incarnation(
    serving: WorkerProtocol, runner: BreakableRunner
) -> None:
    runner.errors = [RuntimeError("once")]
    ask(serving, plan(8, starts=[start(1, [5])], work=[work(1, 1, [0])]))
    ask(serving, plan(9, starts=[start(2, [5])], work=[work(2, 1, [0])], answered=8))
    serving.receive(WorkerUnregistered(EPOCH + 1))
    hello = serving.beat()
    assert isinstance(hello, WorkerHello)
    assert hello.incarnation == INCARNATION + 1
    serving.receive(WorkerWelcome(EPOCH + 1))
    fresh = plan(
        1,
        starts=[start(2, [5])],
        work=[work(2, 1, [0])],
        epoch=EPOCH + 1,
        incarnation=INCARNATION + 1,
    )
    assert ask(serving, fresh).outcome is StepOutcome.DONE


def test_a_late_unregistered_does_not_cost_another_incarnation(protocol: WorkerProtocol) -> None:
    before = protocol.beat()
    protocol.receive(WorkerUnregistered(EPOCH))
    assert protocol.beat() == before


def test_one_that_is_to_end_says_so_until_its_own_scheduler_dismisses_it(serving: WorkerProtocol) -> None:
    serving.draining = True
    assert serving.beat() == Heartbeat(EPOCH, INCARNATION, serving.last_step_id, draining=True)
    serving.receive(WorkerDismissed(EPOCH + 1))
    assert not serving.dismissed
    serving.receive(WorkerDismissed(EPOCH))
    assert serving.dismissed
    assert serving.goodbye() is None


def test_goodbye_is_said_only_where_it_is_understood(protocol: WorkerProtocol) -> None:
    assert protocol.goodbye() is None
    protocol.receive(WorkerWelcome(EPOCH))
    assert protocol.goodbye() == WorkerGoodbye(EPOCH, INCARNATION)


def test_a_worker_that_no_hello_can_describe_is_found_out_at_once(runner: BreakableRunner) -> None:
    runner.num_blocks = 2**31
    with pytest.raises(WireError, match="2147483647"):
        WorkerProtocol("w0", runner, lambda: 1)
