"""Drafts: tokens come sooner and stay the same, whatever is guessed and whatever happens to the step that checks it."""

import io
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.config import Preemption, Speculate
from octavo.scheduler.core.events import LossCause, PrefixPinned, ReplicaJoined, SchedulerObserver, StepAnswered
from octavo.scheduler.core.sequence import Sequence, SequenceGroup
from octavo.scheduler.core.speculation.draft import DraftSource
from octavo.scheduler.server.event_log import log_file, read_records, recorder, replay
from octavo.testing.cluster import VOCABULARY, Cluster, FakeReplica, make_request, reference_tokens
from octavo.testing.fakes.drafters import Foresight, Guess, ScriptedDrafter
from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.testing.scenarios import answer, beams, drain, end_sequence, outputs, plan_until, plans, references
from octavo.wire.costs import PrefillCosts, RowCost, StepCosts, SwapCosts
from octavo.wire.requests import FinishReason, Prefix, Request
from octavo.wire.steps import BlockMoves, StepPlan, StepResult, StepTimes
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkItem

from ...conftest import MakeCluster
from ...views import cached_tokens, kv_of, sequence, table

FORESIGHT = Foresight(VOCABULARY)


def right(num_right: int = 100, num_wrong: int = 0) -> ScriptedDrafter:
    """Guesses so many tokens right, and then so many wrong."""

    def guess(group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
        known = FORESIGHT(group, sequence, min(most, num_right + num_wrong))
        return known[:num_right] + [token_id ^ 1 for token_id in known[num_right:]]

    return ScriptedDrafter(guess)


def only(names: Iterable[str], guess: Guess = FORESIGHT) -> ScriptedDrafter:
    """Guesses for these requests alone."""
    wanted = set(names)
    return ScriptedDrafter(
        lambda group, sequence, most: guess(group, sequence, most) if group.request_id in wanted else []
    )


def drafts(replica: FakeReplica) -> list[StepPlan]:
    """All plans with drafts so far."""
    return [plan for plan in plans(replica) if plan.drafts]


def checking(cluster: Cluster) -> StepPlan:
    """Runs on until the last plan that replica 1 got has drafts."""
    return plan_until(cluster, lambda plan: bool(plan.drafts))


class TestTokens:
    @pytest.mark.parametrize("num_right", [0, 1, 2, 5, 100])
    @pytest.mark.parametrize("num_wrong", [0, 1, 40])
    def test_are_those_of_plain_decoding(self, make_cluster: MakeCluster, num_right: int, num_wrong: int) -> None:
        requests = [
            make_request("plain", 5, 30),
            make_request("drawn", 4, 30, temperature=1.0, seed=3),
            make_request("many", 6, 20, num_sequences=3, temperature=1.0),
            make_request("told", 7, 20, logprobs=2, prompt_logprobs=1),
        ]
        cluster = make_cluster(speculation=32, drafter=right(num_right, num_wrong))
        replica = cluster.join(num_blocks=200)
        cluster.submit(*requests)
        cluster.run()
        assert outputs(cluster, *requests) == references(*requests)
        # With a token in flight the first guess is for that: for one alone nobody waits.
        assert bool(drafts(replica)) == (num_right + num_wrong > 1)
        told = [entry for delta in cluster.deltas["told", 0] for entry in delta.logprobs]
        assert len(told) == 20

    def test_come_several_at_a_time(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=4, drafter=right())
        cluster.join()
        cluster.submit(make_request("r", 5, 21))
        cluster.run()
        # One comes with the prompt, and the guesses are those of a number that fits between it and the end.
        assert [len(delta.token_ids) for delta in cluster.deltas["r", 0]] == [1, 5, 5, 5, 5]

    def test_after_a_stop_token_are_not_delivered(self, make_cluster: MakeCluster) -> None:
        free = reference_tokens(make_request("r", 5, 30))
        request = make_request("r", 5, 30, stop_token_ids=(free[7],))
        cluster = make_cluster(speculation=32, drafter=right())
        cluster.join()
        cluster.submit(request)
        cluster.run()
        assert cluster.tokens["r"] == free[:8]
        assert cluster.finished["r"] is FinishReason.STOP
        assert [len(delta.token_ids) for delta in cluster.deltas["r", 0]] == [1, 7]
        assert cluster.deltas["r", 0][-1].accepted == 7
        assert cluster.deltas["r", 0][-1].drafted == 28

    def test_that_no_vocabulary_holds_are_never_guessed(self, make_cluster: MakeCluster) -> None:
        def guess(group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
            return [*FORESIGHT(group, sequence, 2), VOCABULARY.size, -1]

        cluster = make_cluster(speculation=8, drafter=ScriptedDrafter(guess))
        replica = cluster.join()
        cluster.submit(request := make_request("r", 5, 20))
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)
        assert {len(draft.token_ids) for plan in drafts(replica) for draft in plan.drafts} == {2}

    def test_do_not_reach_beyond_the_longest_answer(self, make_cluster: MakeCluster) -> None:
        """Nor does anything that a worker writes: the model may hold no more."""
        cluster = make_cluster(speculation=32, drafter=right())
        replica = cluster.join()
        cluster.submit(make_request("r", 5, 6))
        cluster.run()
        (plan,) = drafts(replica)
        assert len(plan.drafts[0].token_ids) == 4


class TestPlans:
    def test_leave_out_who_waits_for_an_answer_and_plan_others_ahead(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=4, drafter=only(["guessed"]))
        replica = cluster.join()
        cluster.submit(make_request("guessed", 4, 30), make_request("plain", 4, 30))
        plan = checking(cluster)
        (draft,) = plan.drafts
        while replica.plans[0] is not plan:
            answer(cluster)
        cluster.schedule()
        assert len(replica.plans) == 2
        assert draft.sequence_id not in {work.sequence_id for work in replica.plans[-1].work}
        cluster.run()
        plain = sequence_ids(replica, "plain")
        guessed = {each.sequence_id for plan in drafts(replica) for each in plan.drafts}
        assert plain.isdisjoint(guessed)
        assert any(plan.answered_step_id < plan.step_id - 1 for plan in plans(replica))

    def test_guess_nothing_where_it_is_off(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation="off", drafter=right())
        replica = cluster.join()
        cluster.submit(make_request("r", 5, 20))
        cluster.run()
        assert not drafts(replica)

    def test_guess_nothing_where_nothing_was_measured(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(drafter=right())
        replica = cluster.join()
        cluster.submit(make_request("r", 5, 20))
        cluster.run()
        assert not drafts(replica)

    def test_guess_nothing_for_workers_that_would_not_know(self, make_cluster: MakeCluster) -> None:
        """A worker of the schema before keeps the blocks of a draft that is cut off its plan."""
        cluster = make_cluster(speculation=8, drafter=right())
        replica = cluster.join()
        cluster.leave(1)
        replica.hello = msgspec.structs.replace(replica.hello, schema_version=8, incarnation=2)
        cluster.replicas[2] = replica
        cluster.handle(ReplicaJoined(replica.hello))
        cluster.submit(request := make_request("r", 5, 20))
        cluster.run()
        assert not drafts(replica)
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_guess_nothing_of_beams_and_of_those_that_others_follow(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=8, drafter=right())
        replica = cluster.join(num_blocks=200)
        many = make_request("many", 5, 12, num_sequences=3, temperature=1.0)
        cluster.submit(many, make_request("beam", 5, 12, beam=beams(2)))
        cluster.run()
        assert cluster.outputs("many") == references(many)["many"]
        for plan in drafts(replica):
            followed = {work.sequence_id for work in plan.work if work.follower_ids}
            assert followed.isdisjoint(draft.sequence_id for draft in plan.drafts)
            assert not sequence_ids(replica, "beam") & {draft.sequence_id for draft in plan.drafts}
        assert drafts(replica)

    def test_keep_to_the_budget(self, make_cluster: MakeCluster) -> None:
        """The cluster asserts it of every plan."""
        cluster = make_cluster(speculation=32, drafter=right(), max_num_batched_tokens=8)
        replica = cluster.join(num_blocks=200)
        cluster.submit(*(make_request(f"r{i}", 9, 20) for i in range(5)))
        cluster.run()
        assert max(len(plan.work) + sum(len(d.token_ids) for d in plan.drafts) for plan in drafts(replica)) == 8

    def test_leave_half_of_the_rest_to_prompts_that_wait(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=32, drafter=right(), max_num_batched_tokens=9)
        replica = cluster.join(num_blocks=200)
        cluster.submit(make_request("r", 5, 30))
        for _ in range(2):
            cluster.step()
        drain(cluster)
        cluster.submit(make_request("late", 40, 5))
        cluster.schedule()
        plan = plans(replica)[-1]
        assert [len(draft.token_ids) for draft in plan.drafts] == [4]
        assert [work.num_tokens for work in plan.work] == [1, 4]

    def test_replay_exactly(self, make_cluster: MakeCluster) -> None:
        """With the drafter that production has: a log holds no other."""
        file = io.BytesIO()
        cluster = make_cluster(record=recorder(log_file(file)), speculation=6)
        replica = cluster.join(num_blocks=200)
        for i in range(5):
            request = make_request(f"r{i}", 1, 12)
            cluster.submit(msgspec.structs.replace(request, prompt_token_ids=[5, 6, 7, 8] * 4 + [5, 6]))
        cluster.submit(make_request("only", 6, 40, allowed_token_ids=[3, 4]))
        cluster.run()
        assert drafts(replica)
        file.seek(0)
        result = replay(read_records(file))
        assert result.difference is None
        assert result.plans == len(plans(replica))


def sequence_ids(replica: FakeReplica, request_id: str) -> set[int]:
    """What the worker was told to call the sequences of a request, which differs from others by its prompt."""
    prompt = {
        name: make_request(name, length, 1).prompt_token_ids
        for name, length in {"guessed": 4, "plain": 4, "many": 5, "beam": 5}.items()
    }[request_id]
    starts = {start.sequence_id for plan in plans(replica) for start in plan.starts if start.prompt_token_ids == prompt}
    forks = [fork for plan in plans(replica) for fork in plan.forks]
    for fork in forks:
        starts |= {fork.sequence_id} if fork.parent_id in starts else set()
    return starts


class TestBlocks:
    def test_are_those_of_plain_decoding_after_every_answer(self, make_cluster: MakeCluster) -> None:
        """A guess that was wrong keeps nothing."""
        request = make_request("r", 5, 24)
        for num_right in range(4):
            cluster = make_cluster(speculation=9, drafter=right(num_right, 6))
            cluster.join(block_size=2)
            cluster.submit(request)
            while cluster.core.groups:
                cluster.step()
                drain(cluster)
                if cluster.core.groups:
                    computed = sequence(cluster, "r").placement.num_computed
                    assert len(table(cluster, "r")) == -(-computed // 2)

    def test_of_guesses_are_found_once_they_are_confirmed(self, make_cluster: MakeCluster) -> None:
        """Whoever comes before the answer finds only what was known; whoever comes after it all that was right."""
        first = make_request("first", 5, 20)
        tokens = first.prompt_token_ids + reference_tokens(first)
        cluster = make_cluster(speculation=32, drafter=only(["first"]))
        cluster.join(block_size=2, num_blocks=100)
        cluster.submit(first)
        plan = checking(cluster)
        assert len(plan.drafts[0].token_ids) == 18
        early = msgspec.structs.replace(make_request("early", 1, 2), prompt_token_ids=tokens[:12])
        cluster.submit(early)
        cluster.schedule()
        answer(cluster)
        late = msgspec.structs.replace(make_request("late", 1, 2), prompt_token_ids=tokens[:24])
        cluster.submit(late)
        cluster.run()
        assert cached_tokens(cluster)["early"] == 6
        assert cached_tokens(cluster)["late"] == 22

    def test_that_hold_what_an_older_one_holds_are_given_up_for_it(self, make_cluster: MakeCluster) -> None:
        """The worker is told with the next plan, and goes on in the older block."""
        first, second = make_request("first", 6, 30), make_request("second", 6, 30)
        second = msgspec.structs.replace(second, prompt_token_ids=first.prompt_token_ids)
        cluster = make_cluster(speculation=8, drafter=only(["second"]))
        replica = cluster.join(block_size=2, num_blocks=100)
        cluster.submit(first)
        while len(cluster.tokens["first"]) < 20:
            cluster.step()
        cluster.submit(second)
        cluster.run()
        assert any(plan.remaps for plan in plans(replica))
        assert cluster.tokens["second"] == cluster.tokens["first"] == reference_tokens(first)

    @pytest.mark.parametrize("windows", [(4,), (0, 5)])
    def test_that_windows_pass_are_given_up_with_the_answer(
        self, make_cluster: MakeCluster, windows: tuple[int, ...]
    ) -> None:
        window = 0 if 0 in windows else max(windows)
        foresight = Foresight(VOCABULARY, window)
        cluster = make_cluster(speculation=12, drafter=ScriptedDrafter(foresight))
        cluster.join(block_size=2, num_blocks=100, windows=windows)
        cluster.submit(make_request("r", 5, 40))
        plan = checking(cluster)
        held = num_present(cluster, windows)
        answer(cluster)
        assert len(plan.drafts[0].token_ids) == 12
        passed = max(windows)
        assert num_present(cluster, windows) <= -(-passed // 2) + 1 < held
        cluster.run()
        assert len(cluster.tokens["r"]) == 40

    def test_are_not_taken_from_those_that_decode_or_wait(self, make_cluster: MakeCluster) -> None:
        """Nothing is preempted that would not have been without drafts."""
        requests = [make_request(f"r{i}", 4, 24) for i in range(4)]
        found = []
        for speculation in ("off", 32):
            cluster = make_cluster(speculation=speculation, drafter=right(1, 20), watermark=0.0)
            cluster.join(block_size=1, num_blocks=4 * 28)
            cluster.submit(*requests)
            cluster.run()
            assert outputs(cluster, *requests) == references(*requests)
            found.append(cluster.core.preemptions)
        assert found == [0, 0]

    @pytest.mark.parametrize("by", ["a drafter", "a draft model"])
    def test_that_are_not_there_for_guesses_are_waited_for_by_nobody(self, make_cluster: MakeCluster, by: str) -> None:
        """All free ones are kept for a prompt that needs more than that: what is guessed would find no room, so it is
        no reason to leave a step out."""
        requests = [make_request("guessed", 4, 30), make_request("plain", 4, 30)]
        hit_rate = 1.0 if by == "a draft model" else None
        cluster = make_cluster(speculation=4, drafter=only(["guessed"] if hit_rate is None else []))
        replica = cluster.join(block_size=1, num_blocks=100, draft_hit_rate=hit_rate)
        cluster.submit(*requests, make_request("late", 95, 4))
        while "guessed" in cluster.groups:
            cluster.step()
        assert cluster.tokens["guessed"] == reference_tokens(requests[0])
        assert not any(plan.drafts or plan.proposals for plan in plans(replica))
        guessed = sequence_ids(replica, "guessed")
        steps = [plan.step_id for plan in plans(replica) for work in plan.work if work.sequence_id in guessed]
        assert steps == list(range(steps[0], steps[0] + 30))

    def test_are_copied_before_a_guess_is_written_to_them(self, make_cluster: MakeCluster) -> None:
        """The first block of a fork is shared: guesses are written there too."""
        request = make_request("r", 5, 24, num_sequences=3, temperature=1.0)
        cluster = make_cluster(speculation=9, drafter=right(3, 6))
        replica = cluster.join(block_size=8, num_blocks=100)
        cluster.submit(request)
        cluster.run()
        assert any(plan.moves.copy and plan.drafts for plan in plans(replica))
        assert cluster.outputs("r") == references(request)["r"]


def num_present(cluster: Cluster, windows: tuple[int, ...]) -> int:
    """Blocks of a request in the KV group with the widest window."""
    group = windows.index(max(windows))
    return sum(block_id >= 0 for block_id in table(cluster, "r", kv_group=group))


class TestWhoWaits:
    def test_swapped_groups_come_back_as_if_there_were_no_drafts(self, make_cluster: MakeCluster) -> None:
        requests = [make_request(f"r{i}", 4, 20) for i in range(3)]
        cluster = make_cluster(speculation=16, drafter=right(1, 15), preemption=Preemption.SWAP, watermark=0.0)
        replica = cluster.join(block_size=1, num_blocks=40, num_cpu_blocks=40)
        cluster.submit(*requests)
        while cluster.core.groups:
            swapped = list(cluster.core.replicas[1].swapped)
            num_plans = len(plans(replica))
            cluster.schedule()
            if swapped and cluster.core.replicas[1].swapped:
                assert not any(plan.drafts for plan in plans(replica)[num_plans:])
            if replica.plans:
                answer(cluster)
        assert cluster.core.swaps
        assert outputs(cluster, *requests) == references(*requests)

    def test_a_suspect_is_computed_without_drafts(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=8, drafter=right())
        cluster.join(1)
        request = make_request("r", 5, 60)
        cluster.submit(request)
        for incarnation in (1, 2):
            cluster.step()
            cluster.schedule()
            cluster.leave(incarnation, LossCause.UNREACHABLE)
            replica = cluster.join(incarnation + 1)
        for _ in range(3):
            cluster.schedule()
            assert cluster.core.replicas[3].isolates
            answer(cluster, 3)
        assert not drafts(replica)
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_a_prefix_that_is_to_be_pinned_comes_first(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=8, drafter=right(), max_num_seqs=1)
        replica = cluster.join()
        cluster.submit(make_request("r", 5, 30))
        cluster.step()
        cluster.handle(PrefixPinned(Prefix("p", [1, 2, 3])))
        for _ in range(5):
            cluster.step()
        assert not drafts(replica)
        cluster.run()

    def test_a_prompt_finds_the_blocks_that_were_free_for_it(self, make_cluster: MakeCluster) -> None:
        """Guesses take none of them while it waits for another reason: each takes a block here."""
        cluster = make_cluster(speculation=16, drafter=right(0, 16), max_num_seqs=2, prefix_caching=False)
        replica = cluster.join(block_size=1, num_blocks=76)
        cluster.submit(make_request("r", 5, 30), make_request("s", 5, 8))
        cluster.step()
        cluster.submit(make_request("head", 50, 4))
        (head,) = cluster.core.waiting
        guessed = []
        while head in cluster.core.waiting:
            left = kv_of(cluster).num_free - kv_of(cluster).num_needed(head)
            num_plans = len(plans(replica))
            cluster.schedule()
            told = plans(replica)[num_plans:] if head in cluster.core.waiting else []
            guessed += [sum(len(draft.token_ids) for draft in plan.drafts) for plan in told]
            assert all(number <= max(0, left) for number in guessed[-len(told) :])
            if replica.plans:
                answer(cluster)
        assert 0 in guessed
        assert any(guessed)
        cluster.run()


def costs(seconds: list[tuple[int, float]]) -> StepCosts:
    """What steps of so many rows cost."""
    rows = [RowCost(number, each) for number, each in seconds]
    return StepCosts(PrefillCosts(0.0, 1e-6, 0.0), SwapCosts(0.0, 1e-6, 1e-6), rows)


class TestPrices:
    FLAT = costs([(1, 0.1), (64, 0.101)])
    STEEP = costs([(1, 0.1), (64, 6.4)])

    def test_let_the_next_plan_wait_where_that_pays(self, make_cluster: MakeCluster) -> None:
        four = ScriptedDrafter(lambda group, sequence, most: FORESIGHT(group, sequence, min(4, most)), chance=0.9)
        cluster = make_cluster(drafter=four)
        replica = cluster.join(num_blocks=200, costs=self.FLAT)
        requests = [make_request(f"r{i}", 5, 40) for i in range(3)]
        cluster.submit(*requests)
        cluster.run()
        assert outputs(cluster, *requests) == references(*requests)
        told = plans(replica)
        drafted = [(plan, after) for plan, after in pairwise(told) if plan.drafts]
        assert len(drafted) >= 3
        assert all(after.answered_step_id == plan.step_id for plan, after in drafted)
        assert len(told) < 15

    def test_let_none_be_guessed_where_rows_cost_as_much_as_steps(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(drafter=ScriptedDrafter(FORESIGHT, chance=0.9))
        replica = cluster.join(num_blocks=200, costs=self.STEEP)
        cluster.submit(make_request("r", 5, 40))
        cluster.run()
        assert not drafts(replica)

    @pytest.mark.parametrize(("setting", "turns"), [("auto", 1), (32, 16)])
    def test_ask_sequences_that_repeat_nothing_less_and_less_often_until_one_does(
        self, make_cluster: MakeCluster, setting: Speculate, turns: int
    ) -> None:
        asked: list[str] = []
        begun: set[str] = set()

        def guess(group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
            asked.append(group.request_id)
            return FORESIGHT(group, sequence, most) if group.request_id in begun else []

        cluster = make_cluster(drafter=ScriptedDrafter(guess, chance=0.9), speculation=setting, max_num_seqs=16)
        replica = cluster.join(num_blocks=800, costs=self.FLAT)
        requests = [make_request(f"r{i}", 2, 80) for i in range(16)]
        cluster.submit(*requests)
        plan_until(cluster, lambda plan: plan.step_id == 32)
        asked.clear()
        plan_until(cluster, lambda plan: plan.step_id == 48)
        assert sorted(asked) == sorted([request.request_id for request in requests] * turns)
        assert not drafts(replica)
        begun.update(f"r{i}" for i in range(0, 16, 2))
        # One of four turns is used at last; then those that are asked wait for the steps under way.
        assert checking(cluster).step_id <= 48 + 16 + 2
        cluster.run()
        assert outputs(cluster, *requests) == references(*requests)

    @pytest.mark.parametrize(("count", "least"), [(16, 3), (4, 0)])
    def test_ask_each_of_many_as_soon_as_it_has_tokens_to_repeat(
        self, make_cluster: MakeCluster, count: int, least: int
    ) -> None:
        """Asked earlier, it would have its next turn long after; few have theirs in every step, and a prediction may be
        followed from the first token on."""
        asked: dict[str, list[int]] = defaultdict(list)

        def guess(group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
            asked[group.request_id].append(sequence.num_generated)
            return []

        cluster = make_cluster(drafter=ScriptedDrafter(guess), max_num_seqs=count)
        cluster.join(num_blocks=800, costs=self.FLAT)
        requests = [make_request(f"r{i}", 2, 20) for i in range(count)]
        predicted = msgspec.structs.replace(requests[0], predicted_token_ids=[1, 2, 3])
        cluster.submit(predicted, *requests[1:])
        cluster.run()
        assert asked.pop("r0")[0] == 0
        assert [each[0] for each in asked.values()] == [least] * (count - 1)

    def test_ask_few_sequences_in_each_step(self, make_cluster: MakeCluster) -> None:
        asked: list[str] = []

        def guess(group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
            asked.append(group.request_id)
            return []

        cluster = make_cluster(drafter=ScriptedDrafter(guess))
        cluster.join(num_blocks=200, costs=self.FLAT)
        cluster.submit(*(make_request(f"r{i}", 2, 40) for i in range(4)))
        plan_until(cluster, lambda plan: plan.step_id == 20)
        asked.clear()
        plan_until(cluster, lambda plan: plan.step_id == 30)
        assert len(asked) == 40

    def test_learn_what_waiting_costs_from_steps_that_were_alone(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join(num_blocks=200, costs=self.FLAT)
        cluster.submit(make_request("r", 5, 40))
        for _ in range(5):
            cluster.step()
        # A step of the cluster takes 10 ms, of which its worker says nothing.
        assert cluster.core.replicas[1].prices.gap_s == pytest.approx(0.01)

    def test_learn_what_sequences_and_guesses_take_from_the_steps_that_decode_them(
        self, make_cluster: MakeCluster
    ) -> None:
        drafter = ScriptedDrafter(FORESIGHT, chance=0.9)
        cluster = make_cluster(drafter=drafter)
        told = cluster.join(num_blocks=200, costs=self.FLAT)
        prices = cluster.core.replicas[1].prices
        cluster.submit(make_request("r", 5, 200))
        cluster.schedule()
        decoded = set()
        while told.plans:
            plan = told.plans[0]
            prefills, guesses = bool(plan.starts), bool(plan.drafts)
            before = prices.seconds(1), prices.row_factor
            result = told.execute()
            # A sequence takes half as long again as its worker measured, and guesses far longer.
            took = 150_000 + 400_000 * guesses + 800_000 * prefills
            result = msgspec.structs.replace(result, times=StepTimes(0, took, 0))
            cluster.handle(StepAnswered(1, result))
            after = prices.seconds(1), prices.row_factor
            assert (after != before) == (not prefills)
            if not prefills:
                decoded.add(guesses)
                assert after[guesses] > before[guesses]
            cluster.schedule()
        assert True in decoded


class LazyRunner(SpoilableRunner):
    """Chooses a token for each sequence, whatever was guessed."""

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        return replace(super().execute(moves, items), further=[])


class TestAnswers:
    @pytest.mark.parametrize(
        "change",
        [
            lambda further, draft: [msgspec.structs.replace(further, token_ids=[*further.token_ids, 1])],
            lambda further, draft: [
                msgspec.structs.replace(further, token_ids=[further.token_ids[0] ^ 1, *further.token_ids[1:]])
            ],
            lambda further, draft: [msgspec.structs.replace(further, sequence_id=further.sequence_id + 77)],
            lambda further, draft: [further, further],
            lambda further, draft: [msgspec.structs.replace(further, logprobs=[])],
        ],
        ids=["more-than-asked", "not-the-guess", "of-another", "twice", "without-logprobs"],
    )
    def test_that_contradict_the_draft_make_a_replica_confused(self, make_cluster: MakeCluster, change: Any) -> None:
        cluster = make_cluster(speculation=4, drafter=right())
        replica = cluster.join()
        cluster.submit(request := make_request("r", 5, 30, logprobs=0))
        plan = checking(cluster)
        heard = list(cluster.tokens["r"])
        result = wait_for(cluster, replica, plan)
        (further,) = result.further
        spoilt = msgspec.structs.replace(result, further=change(further, plan.drafts[0]))
        cluster.handle(StepAnswered(1, spoilt))
        assert not cluster.core.replicas
        assert cluster.tokens["r"] == heard
        cluster.join(2)
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_of_one_token_are_enough(self, make_cluster: MakeCluster) -> None:
        """A worker need not look at guesses, as long as it drops their blocks."""
        cluster = make_cluster(speculation=4, drafter=right())
        replica = cluster.join(runner=LazyRunner(cluster._directory, block_size=2, num_blocks=64))
        cluster.submit(request := make_request("r", 5, 12))
        cluster.run()
        assert drafts(replica)
        assert cluster.tokens["r"] == reference_tokens(request)
        assert cluster.deltas["r", 0][-1].accepted == 0

    @pytest.mark.parametrize("how", ["fail", "starve"])
    def test_of_a_step_that_failed_bring_nothing_and_keep_nothing(self, make_cluster: MakeCluster, how: str) -> None:
        requests = [make_request("guessed", 5, 30), make_request("plain", 5, 30)]
        cluster = make_cluster(speculation=4, drafter=only(["guessed"]))
        replica = cluster.join()
        cluster.submit(*requests)
        checking(cluster)
        cluster.handle(StepAnswered(1, replica.execute(fail=how == "fail", starve=how == "starve")))
        cluster.run()
        assert outputs(cluster, *requests) == references(*requests)

    def test_of_a_sequence_that_failed_end_it_alone(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=4, drafter=right())
        cluster.join()
        cluster.submit(make_request("bad", 5, 30), good := make_request("good", 6, 30))
        checking(cluster)
        cluster.answer(1, spoil_output="bad")
        cluster.run()
        assert list(cluster.rejected) == ["bad"]
        assert cluster.tokens["good"] == reference_tokens(good)

    def test_to_a_request_that_was_aborted_are_dropped(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=4, drafter=right())
        cluster.join()
        cluster.submit(make_request("r", 5, 30))
        checking(cluster)
        heard = list(cluster.tokens["r"])
        cluster.abort("r")
        assert kv_of(cluster).num_parked == -(-(5 + len(heard) + 4) // 4)
        drain(cluster)
        assert cluster.tokens["r"] == heard
        assert kv_of(cluster).num_free == 64

    def test_to_a_sequence_that_was_ended_are_dropped(self, make_cluster: MakeCluster) -> None:
        request = make_request("r", 5, 30, num_sequences=2, temperature=1.0)
        cluster = make_cluster(speculation=4, drafter=right())
        cluster.join()
        cluster.submit(request)
        checking(cluster)
        heard = len(cluster.streams["r", 0])
        end_sequence(cluster, "r", 0)
        cluster.run()
        assert cluster.outputs("r") == [reference_tokens(request)[:heard], reference_tokens(request, 1)]


def wait_for(cluster: Cluster, replica: FakeReplica, plan: StepPlan) -> StepResult:
    """Answers what was sent before `plan`, and returns the result of that."""
    while replica.plans[0] is not plan:
        answer(cluster)
    return replica.execute()


class CountingObserver(SchedulerObserver):
    """Writes down what it is told of drafts."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def drafted(self, source: str, guesses: int, accepted: int) -> None:
        self.told.append((source, guesses, accepted))


class TestCounts:
    @pytest.mark.parametrize("source", [DraftSource.PREDICTION, DraftSource.OUTPUT])
    def test_are_told_with_every_delta(self, make_cluster: MakeCluster, source: DraftSource) -> None:
        def guess(group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
            known = FORESIGHT(group, sequence, 3)
            return [*known[:2], known[2] ^ 1]

        observer = CountingObserver()
        cluster = make_cluster(speculation=3, drafter=ScriptedDrafter(guess, source), observer=observer)
        cluster.join()
        cluster.submit(make_request("r", 5, 12))
        cluster.run()
        told = [(delta.drafted, delta.accepted) for delta in cluster.deltas["r", 0]]
        assert told == [(0, 0), (3, 2), (6, 4), (9, 6), (10, 7)]
        last = cluster.deltas["r", 0][-1]
        predicted = (7, 3) if source is DraftSource.PREDICTION else (0, 0)
        assert (last.accepted_predictions, last.rejected_predictions) == predicted
        stats = cluster.core.replicas[1].stats
        assert (stats.drafted, stats.accepted) == ([4, 3, 3], [4, 3, 0])
        assert stats.tokens_sampled == 12
        assert observer.told == [(source.value, 3, 2)] * 3 + [(source.value, 1, 1)]

    def test_go_on_in_deltas_without_a_draft(self, make_cluster: MakeCluster) -> None:
        def guess(group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
            return FORESIGHT(group, sequence, 2) if sequence.num_generated in (1, 2) else []

        cluster = make_cluster(speculation=3, drafter=ScriptedDrafter(guess))
        cluster.join()
        cluster.submit(make_request("r", 5, 8))
        cluster.run()
        assert [delta.drafted for delta in cluster.deltas["r", 0]] == [0, 0, 2, 2, 2, 2]

    def test_of_rows_are_charged_to_the_tenant(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=4, drafter=right(0, 4))
        cluster.join(num_blocks=200)
        cluster.submit(make_request("a", 5, 60, tenant="a"), make_request("b", 6, 60, tenant="b"))
        checking(cluster)
        drain(cluster)
        before = {tenant.name: tenant.virtual_time for tenant in cluster.core.waiting.tenants}
        cluster.schedule()
        after = {tenant.name: tenant.virtual_time for tenant in cluster.core.waiting.tenants}
        assert {name: after[name] - before[name] for name in after} == {"a": 5.0, "b": 5.0}

    def test_of_rows_share_a_grammars_time(self, make_cluster: MakeCluster) -> None:
        """The fake worker tells of 300 us for each choice of a token; guesses are as many as fit 5 ms."""
        cluster = make_cluster(speculation=32, drafter=right(0, 32))
        replica = cluster.join(num_blocks=200)
        cluster.submit(make_request("r", 5, 60, grammar="300"))
        for _ in range(4):
            cluster.step()
            drain(cluster)
        assert {len(draft.token_ids) for plan in drafts(replica)[1:] for draft in plan.drafts} == {15}


def test_requests_of_every_kind_keep_their_tokens_when_a_worker_is_lost(make_cluster: MakeCluster) -> None:
    requests: list[Request] = [
        make_request("plain", 5, 30),
        make_request("drawn", 4, 30, temperature=1.0, seed=3),
        make_request("many", 6, 20, num_sequences=3, temperature=1.0),
    ]
    cluster = make_cluster(speculation=6, drafter=right(3, 3))
    cluster.join(1, num_blocks=200)
    cluster.submit(*requests)
    for incarnation in range(1, 6):
        checking_of(cluster, incarnation)
        cluster.leave(incarnation)
        cluster.join(incarnation + 1, num_blocks=200)
    cluster.run()
    assert outputs(cluster, *requests) == references(*requests)


def checking_of(cluster: Cluster, incarnation: int) -> None:
    """Runs on until drafts are in flight on the replica."""
    replica = cluster.replicas[incarnation]
    for _ in range(100):
        cluster.schedule()
        if any(plan.drafts for plan in replica.plans):
            return
        answer(cluster, incarnation)
    raise AssertionError("no drafts in 100 steps")
