"""The table of preemption's costs, and what it is made of."""

import pytest

from octavo.bench.parts import preemption_costs
from octavo.bench.parts.preemption_costs import ReplicaSpeed, ReplicaWork, WaitingRequests
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves, SequenceFork, SequenceStart, SequenceWork, StepPlan


def plan(step_id: int, **parts: object) -> StepPlan:
    empty = {"forget": [], "moves": BlockMoves(), "starts": [], "forks": [], "remaps": [], "work": []}
    return StepPlan(epoch=1, incarnation=1, step_id=step_id, answered_step_id=0, **{**empty, **parts})  # type: ignore[arg-type]


def test_work_is_counted_over_all_plans() -> None:
    work = ReplicaWork()
    start = SequenceStart(1, 0, [7] * 10, [], 4, SamplingParams(max_tokens=9))
    work.add(plan(1, starts=[start], forks=[SequenceFork(1, 2, 1)], work=[SequenceWork(1, 6, follower_ids=[2])]))
    work.add(plan(2, work=[SequenceWork(1, 1), SequenceWork(2, 1)]))
    work.add(plan(3, moves=BlockMoves(swap_out=[BlockMove(0, 0), BlockMove(1, 1)])))
    work.add(plan(4, moves=BlockMoves(swap_in=[BlockMove(0, 0)]), work=[SequenceWork(1, 1)]))
    assert (work.steps, work.tokens, work.pairs) == (3, 9, (5 + 6 + 7 + 8 + 9 + 10) + 2 * 11 + 12)
    assert (work.moving_steps, work.blocks_out, work.blocks_in) == (2, 2, 1)


def test_a_run_takes_the_time_of_its_steps_tokens_pairs_and_moves() -> None:
    work = ReplicaWork(steps=3, tokens=1000, pairs=16384.0, moving_steps=2, blocks_out=4, blocks_in=2)
    costs = ReplicaSpeed("any", prefill_rate=1000, step_s=0.5).costs(transfer_rate=1.0)
    assert work.seconds(costs) == pytest.approx(3 * 0.5 + 1.0 + 0.001 + 6 * 16 * 131072 / 1e9 + 2 * 2e-5)


def test_the_table_has_a_row_for_each_cell_and_says_how_the_worst_compares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = WaitingRequests("tiny", 6, 20, prompt=(10, 40), output=(30, 60))
    monkeypatch.setattr(preemption_costs, "WORKLOADS", (workload,))
    assert preemption_costs.main() == 0
    head, *rows, verdict = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["prefill", "transfers"]
    assert len(rows) == 6
    assert all(row.startswith("tiny") for row in rows)
    assert verdict.startswith("measured takes at most ")
    monkeypatch.setattr(preemption_costs, "GOAL", 0.9)
    assert preemption_costs.main() == 1
