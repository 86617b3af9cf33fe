"""Proposals: a worker's draft model guesses, and its guesses change nothing but when tokens come."""

import io
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.events import StepAnswered
from octavo.scheduler.core.speculation.draft import DraftSource
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.core.speculation.pauses import Pause
from octavo.scheduler.server.event_log import log_file, read_records, recorder, replay
from octavo.testing.cluster import Cluster, FakeReplica, make_request, reference_tokens
from octavo.testing.fakes.drafters import ScriptedDrafter
from octavo.testing.scenarios import drain, outputs, plan_until, plans, references
from octavo.wire.costs import PrefillCosts, RowCost, StepCosts, SwapCosts
from octavo.wire.steps import SequenceDraft, StepPlan

from ...conftest import MakeCluster
from ...views import sequence, table

# A text never helps.
NOTHING = ScriptedDrafter(lambda group, sequence, most: [])


def proposing(replica: FakeReplica) -> list[StepPlan]:
    """All plans with proposals so far."""
    return [plan for plan in plans(replica) if plan.proposals]


def lengths(cluster: Cluster, name: str) -> list[int]:
    return [len(delta.token_ids) for delta in cluster.deltas[name, 0]]


def costs(row_s: float, guess_s: float) -> StepCosts:
    """A step takes a second, each further row and each guess as told."""
    rows = [RowCost(count, 1.0 + (count - 1) * row_s) for count in (1, 4, 16, 64)]
    proposals = [RowCost(count, guess_s) for count in (1, 16)]
    return StepCosts(PrefillCosts(0.0, 0.0, 0.0), SwapCosts(0.0, 0.0, 0.0), rows, proposals)


class TestTokens:
    @pytest.mark.parametrize("hit_rate", [0.0, 0.5, 1.0])
    def test_are_those_of_plain_decoding(self, make_cluster: MakeCluster, hit_rate: float) -> None:
        requests = [
            make_request("plain", 5, 30),
            make_request("drawn", 4, 30, temperature=1.0, seed=3),
            make_request("many", 6, 20, num_sequences=3, temperature=1.0),
            make_request("told", 7, 20, logprobs=2, prompt_logprobs=1),
        ]
        cluster = make_cluster(speculation=5, drafter=NOTHING)
        replica = cluster.join(num_blocks=200, draft_hit_rate=hit_rate)
        cluster.submit(*requests)
        cluster.run()
        assert outputs(cluster, *requests) == references(*requests)
        assert proposing(replica)
        counts = cluster.deltas["plain", 0][-1]
        assert (counts.accepted > 0, counts.accepted == counts.drafted) == (hit_rate > 0, hit_rate == 1)

    def test_come_several_at_a_time(self, make_cluster: MakeCluster) -> None:
        """One comes with the prompt, one with the first guesses, and then as many as are guessed each time."""
        cluster = make_cluster(speculation=4, drafter=NOTHING)
        cluster.join(draft_hit_rate=1.0)
        cluster.submit(make_request("r", 5, 22))
        cluster.run()
        assert lengths(cluster, "r") == [1, 1, 5, 5, 5, 5]

    def test_may_be_copied_from_a_text_as_well(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=4, drafter=Drafter())
        cluster.join(draft_hit_rate=0.6)
        sources: dict[str, int] = {}
        cluster.core.state.observer.drafted = lambda source, guesses, accepted: sources.update({source: guesses})  # type: ignore[method-assign]
        request = make_request("r", 6, 60, allowed_token_ids=[3, 4])
        cluster.submit(request)
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)
        assert {DraftSource.MODEL.value, DraftSource.OUTPUT.value} <= sources.keys()

    def test_are_the_same_where_only_some_workers_have_a_draft_model(self, make_cluster: MakeCluster) -> None:
        requests = [make_request(f"r{i}", 4, 20) for i in range(6)]
        cluster = make_cluster(speculation=4, drafter=NOTHING, max_num_seqs=3)
        with_one, without = cluster.join(1, draft_hit_rate=0.8), cluster.join(2)
        cluster.submit(*requests)
        cluster.run()
        assert outputs(cluster, *requests) == references(*requests)
        assert proposing(with_one)
        assert plans(without)
        assert not proposing(without)


class TestPlans:
    def test_ask_for_nothing_beyond_the_longest_answer(self, make_cluster: MakeCluster) -> None:
        """Nor does anything that a worker writes reach beyond it: the model may hold no more."""
        cluster = make_cluster(speculation=32, drafter=NOTHING)
        replica = cluster.join(draft_hit_rate=1.0)
        cluster.submit(make_request("r", 5, 9))
        cluster.run()
        assert [plan.proposals[0].num_tokens for plan in proposing(replica)] == [6]
        assert lengths(cluster, "r") == [1, 1, 7]

    def test_ask_old_workers_and_those_without_a_draft_model_for_none(self, make_cluster: MakeCluster) -> None:
        for changes in ({"schema_version": 8}, {"draft_model": None}):
            cluster = make_cluster(speculation=8, drafter=NOTHING)
            replica = cluster.join(draft_hit_rate=1.0)
            joined: Any = cluster.core.replicas[1]
            joined.hello = msgspec.structs.replace(replica.hello, **changes)
            cluster.submit(make_request("r", 5, 20))
            cluster.run()
            assert not proposing(replica)

    def test_ask_for_none_for_beams_and_a_prompt_that_others_share(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=4, drafter=NOTHING)
        replica = cluster.join(draft_hit_rate=1.0, num_blocks=200)
        cluster.submit(make_request("many", 5, 10, num_sequences=3, temperature=1.0))
        cluster.run()
        for plan in plans(replica):
            followed = {work.sequence_id for work in plan.work if work.follower_ids}
            assert followed.isdisjoint(each.sequence_id for each in plan.proposals)

    def test_replay_exactly(self, make_cluster: MakeCluster) -> None:
        file = io.BytesIO()
        cluster = make_cluster(record=recorder(log_file(file)), speculation=6)
        replica = cluster.join(num_blocks=200, draft_hit_rate=0.7)
        cluster.submit(*[make_request(f"r{i}", 5, 30) for i in range(4)])
        cluster.run()
        assert proposing(replica)
        file.seek(0)
        result = replay(read_records(file))
        assert result.difference is None
        assert result.plans == len(plans(replica))


class TestPrices:
    def asked(self, make_cluster: MakeCluster, told: StepCosts, hit_rate: float, num_tokens: int = 200) -> list[int]:
        """How many guesses each plan asks for."""
        cluster = make_cluster(drafter=NOTHING)
        replica = cluster.join(costs=told, draft_hit_rate=hit_rate, num_blocks=600)
        cluster.submit(make_request("r", 5, num_tokens))
        cluster.run()
        return [sum(each.num_tokens for each in plan.proposals) for plan in plans(replica)]

    def test_of_guesses_that_cost_little_and_come_true_are_paid(self, make_cluster: MakeCluster) -> None:
        asked = self.asked(make_cluster, costs(0.01, 0.01), 1.0)
        assert max(asked) == 8
        assert len(asked) < 60

    def test_of_guesses_that_cost_as_much_as_tokens_are_not(self, make_cluster: MakeCluster) -> None:
        asked = self.asked(make_cluster, costs(0.01, 1.0), 1.0)
        assert sum(asked) == 0

    def test_are_not_paid_for_guesses_that_do_not_come_true_but_to_try_again(self, make_cluster: MakeCluster) -> None:
        asked = self.asked(make_cluster, costs(0.1, 0.1), 0.0, num_tokens=700)
        first = next(place for place, count in enumerate(asked) if not any(asked[place : place + 200]))
        assert first < 20
        assert 0 < sum(asked[first:]) <= 14

    def test_are_paid_to_try_what_does_not_pay_after_twice_as_many_steps_each_time(
        self, make_cluster: MakeCluster
    ) -> None:
        """Of two requests at a time, of which the draft model may have to catch up with the shorter one."""
        cluster = make_cluster(drafter=NOTHING, max_num_seqs=2)
        replica = cluster.join(costs=costs(0.1, 1.0), draft_hit_rate=0.0, num_blocks=400)
        assert cluster.core.replicas[1].asking.trials == Pause(256, 16_384)
        cluster.core.replicas[1].asking.trials = Pause(16, 1024)
        cluster.submit(*(make_request(f"r{number}", 5 + 40 * (number % 2), 30) for number in range(8)))
        cluster.run()
        tried = [plan.step_id for plan in proposing(replica)]
        # Steps of prompts are none of these; and what is tried waits for its last answer.
        pauses = [place - before for before, place in pairwise([0, *tried])]
        assert [length // 16 for length in pauses] == [1, 2, 4]
        lengths = {start.sequence_id: len(start.prompt_token_ids) for plan in plans(replica) for start in plan.starts}
        assert {lengths[each.sequence_id] for plan in proposing(replica) for each in plan.proposals} == {5}


class TestBlocks:
    def test_are_those_of_plain_decoding_after_every_answer(self, make_cluster: MakeCluster) -> None:
        for hit_rate in (0.0, 0.5, 1.0):
            cluster = make_cluster(speculation=9, drafter=NOTHING)
            cluster.join(block_size=2, draft_hit_rate=hit_rate)
            cluster.submit(make_request("r", 5, 24))
            while cluster.core.groups:
                cluster.step()
                drain(cluster)
                if cluster.core.groups:
                    computed = sequence(cluster, "r").placement.num_computed
                    assert len(table(cluster, "r")) == -(-computed // 2)


class TestAnswers:
    @pytest.mark.parametrize("wrong", ["another sequence", "too many", "twice"])
    def test_that_propose_what_was_not_asked_lose_the_worker(self, make_cluster: MakeCluster, wrong: str) -> None:
        cluster = make_cluster(speculation=2, drafter=NOTHING)
        replica = cluster.join(draft_hit_rate=1.0)
        cluster.submit(make_request("r", 5, 20))
        plan = plan_until(cluster, lambda plan: bool(plan.proposals))
        while replica.plans[0] is not plan:
            cluster.answer(1)
        result = replica.execute()
        (right,) = result.proposed
        proposed = {
            "another sequence": [SequenceDraft(right.sequence_id + 1, right.token_ids)],
            "too many": [SequenceDraft(right.sequence_id, [*right.token_ids, 1])],
            "twice": [right, right],
        }[wrong]
        cluster.handle(StepAnswered(1, msgspec.structs.replace(result, proposed=proposed)))
        assert not cluster.core.replicas

    def test_may_propose_less_than_was_asked(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(speculation=2, drafter=NOTHING)
        replica = cluster.join(draft_hit_rate=1.0)
        request = make_request("r", 5, 20)
        cluster.submit(request)
        while cluster.core.groups:
            cluster.schedule()
            result = replica.execute()
            cluster.handle(StepAnswered(1, msgspec.structs.replace(result, proposed=[])))
        assert cluster.tokens["r"] == reference_tokens(request)
