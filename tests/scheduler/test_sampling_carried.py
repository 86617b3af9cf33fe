"""What a request says about sampling reaches the worker, every time; what is reported comes once and whole."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import SequenceEnded
from octavo.testing.cluster import FRONTEND, VOCABULARY, Cluster, FakeReplica, make_request, resubmitted
from octavo.testing.scenarios import answer, beams, outputs, plans, references, step_until
from octavo.wire.requests import Request
from octavo.wire.sampling import Logprobs
from octavo.wire.steps import SequenceStart
from octavo.worker.fake.runner import expected_logprobs

from .conftest import MakeCluster

EVERYTHING: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.02,
    "seed": 2**63 + 5,
    "min_tokens": 3,
    "stop_token_ids": (11, 12),
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": [(3, 1.5)],
    "banned_token_ids": [4],
    "logprobs": 2,
}


def starts(replica: FakeReplica, request: Request) -> list[SequenceStart]:
    """All that the worker was told to start for `request`."""
    prompt = request.prompt_token_ids
    return [start for plan in plans(replica) for start in plan.starts if start.prompt_token_ids == prompt]


class TestSettings:
    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
    @pytest.mark.parametrize("num_sequences", [1, 3])
    def test_are_those_of_the_request_at_every_start(
        self, make_cluster: MakeCluster, num_sequences: int, preemption: Preemption
    ) -> None:
        cluster = make_cluster(watermark=0.0, preemption=preemption, prefix_caching=False)
        replica = cluster.join(num_blocks=30, block_size=2, num_cpu_blocks=30)
        request = make_request("r", 6, 9, num_sequences=num_sequences, **EVERYTHING)
        cluster.submit(make_request("old", 42, 16), request)
        cluster.run()
        found = starts(replica, request)
        assert cluster.deltas["r", 0][-1].preemptions > 0
        assert len(found) > num_sequences
        assert all(start.sampling == request.sampling for start in found)
        assert {start.sequence_index for start in found} == set(range(num_sequences))
        assert outputs(cluster, request) == references(request)

    def test_are_those_of_the_request_on_another_replica(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(1)
        request = make_request("r", 6, 9, num_sequences=2, **EVERYTHING)
        cluster.submit(request)
        step_until(cluster, lambda: len(cluster.tokens["r"]) == 3)
        cluster.leave(1)
        second = cluster.join(2)
        cluster.run()
        assert [start.sampling for start in starts(second, request)] == [request.sampling] * 2
        assert outputs(cluster, request) == references(request)

    def test_carry_the_grammar_and_the_trace_to_every_replica(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        request = make_request("r", 6, 9, num_sequences=2, temperature=1.0, grammar="start: /[ab]+/")
        for incarnation in (1, 2):
            replica = cluster.join(incarnation)
            cluster.submit(msgspec.structs.replace(request, attempt=incarnation, traceparent=trace))
            cluster.schedule()
            # Equal tokens: the second is forked from the first.
            [start] = starts(replica, request)
            assert (start.sampling.grammar, start.traceparent) == ("start: /[ab]+/", trace)
            assert plans(replica)[0].forks
            cluster.leave(incarnation)

    def test_keep_prompt_and_generated_tokens_apart(self, make_cluster: MakeCluster) -> None:
        """Penalties, `min_tokens` and the random numbers depend on the border between them."""
        cluster = make_cluster(watermark=0.0, preemption=Preemption.RECOMPUTE, prefix_caching=False)
        replica = cluster.join(num_blocks=30, block_size=2)
        request = make_request("r", 6, 9, **EVERYTHING)
        cluster.submit(make_request("old", 42, 16), request)
        cluster.run()
        (tokens,) = references(request)["r"]
        first, *others = starts(replica, request)
        assert first.generated_token_ids == []
        assert others
        for start in others:
            assert 0 < len(start.generated_token_ids) < 9
            assert start.generated_token_ids == tokens[: len(start.generated_token_ids)]


def all_logprobs(cluster: Cluster, index: int = 0) -> list[Logprobs]:
    return [entry for delta in cluster.deltas["r", index] for entry in delta.logprobs]


def expected(request: Request, tokens: list[int], top: int) -> list[Logprobs]:
    return expected_logprobs(request.prompt_token_ids + tokens, top, VOCABULARY)[-len(tokens) :]


def assert_prompt_logprobs_came_once(cluster: Cluster, request: Request) -> None:
    """Whole, with the first token of sequence 0, and with nothing else."""
    top = request.sampling.prompt_logprobs
    assert top is not None
    first, *later = cluster.deltas["r", 0]
    assert first.prompt_logprobs == expected_logprobs(request.prompt_token_ids, top, VOCABULARY)
    others = [delta for (_, index), deltas in cluster.deltas.items() for delta in deltas if index]
    assert not any(delta.prompt_logprobs for delta in (*later, *others))


class TestLogprobs:
    @pytest.mark.parametrize("top", [0, 3])
    @pytest.mark.parametrize("preemption", list(Preemption))
    def test_come_once_for_every_token_of_every_sequence(
        self, make_cluster: MakeCluster, preemption: Preemption, top: int
    ) -> None:
        cluster = make_cluster(watermark=0.0, preemption=preemption)
        cluster.join(num_blocks=30, block_size=2, num_cpu_blocks=30)
        request = make_request("r", 6, 9, num_sequences=3, temperature=1.0, logprobs=top)
        cluster.submit(make_request("old", 42, 16), request)
        cluster.run()
        assert cluster.deltas["r", 0][-1].preemptions > 0
        for index, tokens in enumerate(references(request)["r"]):
            assert all_logprobs(cluster, index) == expected(request, tokens, top)

    def test_do_not_come_unasked(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        cluster.submit(make_request("r", 6, 9))
        cluster.run()
        assert all_logprobs(cluster) == []

    def test_go_on_where_a_resubmitted_request_goes_on(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        request = make_request("r", 6, 9, logprobs=1)
        (tokens,) = references(request)["r"]
        cluster.submit(resubmitted(request, tokens[:4]))
        cluster.run()
        assert all_logprobs(cluster) == expected(request, tokens, 1)[4:]


class TestPromptLogprobs:
    REQUEST = make_request("r", 23, 4, prompt_logprobs=2)

    @pytest.mark.parametrize("budget", [1, 4, 7, 64])
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_come_whole_however_the_prompt_is_cut(self, make_cluster: MakeCluster, budget: int, in_flight: int) -> None:
        cluster = make_cluster(max_num_batched_tokens=budget, max_steps_in_flight=in_flight)
        cluster.join()
        cluster.submit(self.REQUEST)
        cluster.run()
        assert_prompt_logprobs_came_once(cluster, self.REQUEST)

    @pytest.mark.parametrize("num_sequences", [1, 3])
    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
    def test_come_whole_when_the_prompt_is_preempted_in_the_middle(
        self, make_cluster: MakeCluster, preemption: Preemption, num_sequences: int
    ) -> None:
        """`old` decodes and needs a block when 8 or 12 of the 23 tokens are computed."""
        cluster = make_cluster(watermark=0.0, preemption=preemption, max_num_batched_tokens=5, max_steps_in_flight=1)
        cluster.join(num_blocks=24, block_size=4, num_cpu_blocks=24)
        request = make_request("r", 23, 4, prompt_logprobs=2, num_sequences=num_sequences)
        cluster.submit(make_request("old", 70, 16))
        step_until(cluster, lambda: bool(cluster.tokens["old"]))
        cluster.submit(request)
        group = cluster.groups["r"]
        step_until(cluster, lambda: group.preemptions > 0)
        assert 0 < len(group.prompt_logprobs) < 22
        assert (group.swaps > 0) == (preemption is Preemption.SWAP)
        cluster.run()
        assert_prompt_logprobs_came_once(cluster, request)

    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("failing", range(4))
    def test_come_whole_when_a_chunk_fails(self, make_cluster: MakeCluster, failing: int, in_flight: int) -> None:
        cluster = make_cluster(max_num_batched_tokens=6, max_steps_in_flight=in_flight)
        cluster.join()
        cluster.submit(self.REQUEST)
        for index in range(failing + 1):
            cluster.step(fail=index == failing)
        cluster.run()
        assert_prompt_logprobs_came_once(cluster, self.REQUEST)

    def test_come_whole_when_the_replica_is_lost_in_the_middle(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=6)
        cluster.join(1)
        cluster.submit(self.REQUEST)
        cluster.schedule()
        answer(cluster)
        cluster.leave(1)
        cluster.join(2)
        cluster.run()
        assert_prompt_logprobs_came_once(cluster, self.REQUEST)

    def test_come_with_the_first_hypothesis_of_a_beam_search(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=6)
        cluster.join()
        request = make_request("r", 23, 4, prompt_logprobs=2, beam=beams(3), num_sequences=3)
        cluster.submit(request)
        cluster.run()
        assert len(cluster.outputs("r")) == 3
        assert_prompt_logprobs_came_once(cluster, request)

    def test_of_one_token_are_none(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        cluster.submit(make_request("r", 1, 3, prompt_logprobs=2))
        cluster.run()
        assert cluster.deltas["r", 0][0].prompt_logprobs == []

    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
    def test_are_asked_of_the_worker_only_until_they_are_delivered(
        self, make_cluster: MakeCluster, preemption: Preemption
    ) -> None:
        """After that, prefix hits count again too."""
        cluster = make_cluster(watermark=0.0, preemption=preemption)
        replica = cluster.join(num_blocks=30, block_size=2, num_cpu_blocks=30)
        request = make_request("r", 6, 12, prompt_logprobs=2, logprobs=1)
        cluster.submit(make_request("old", 36, 20), request)
        cluster.run()
        first, *others = starts(replica, request)
        assert first.sampling == request.sampling
        assert others
        without = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
        assert all(start.sampling == without for start in others)
        assert all(start.num_computed > 0 for start in others)
        assert_prompt_logprobs_came_once(cluster, request)

    def test_are_not_asked_for_again_by_a_resubmitted_request_that_has_tokens(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        replica = cluster.join()
        (tokens,) = references(self.REQUEST)["r"]
        cluster.submit(resubmitted(self.REQUEST, tokens[:1]))
        cluster.run()
        assert [start.sampling.prompt_logprobs for start in starts(replica, self.REQUEST)] == [None]
        assert not any(delta.prompt_logprobs for delta in cluster.deltas["r", 0])

    def test_are_asked_for_again_by_one_that_has_none(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        cluster.submit(resubmitted(self.REQUEST, []))
        cluster.run()
        assert_prompt_logprobs_came_once(cluster, self.REQUEST)

    def test_hold_up_no_others_of_the_request_when_the_first_has_ended(self, make_cluster: MakeCluster) -> None:
        """A stop string in the first sequence, before the prompt is through, is nonsense but must do no harm."""
        cluster = make_cluster(max_num_batched_tokens=6)
        cluster.join()
        request = make_request("r", 23, 4, prompt_logprobs=2, num_sequences=2, temperature=1.0)
        cluster.submit(request)
        cluster.step()
        cluster.handle(SequenceEnded(FRONTEND, "r", 1, 0))
        cluster.run()
        assert cluster.outputs("r")[1] == references(request)["r"][1]
