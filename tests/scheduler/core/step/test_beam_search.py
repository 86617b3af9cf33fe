"""Beam search: the choice of beams against plain searches, and its life in blocks, plans and preemptions."""

import itertools
import math
import random
from functools import cache, partial
from typing import Any

import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.step import beam_search
from octavo.scheduler.core.step.beam_search import Beam, Hypothesis
from octavo.testing.cluster import VOCABULARY, Cluster, make_request, reference_tokens
from octavo.wire.requests import FinishReason, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.worker.fake.runner import expected_candidates

from ...conftest import MakeCluster
from ...expectations import assert_worker_agrees
from ...plain_beam_search import Found, Offers, Tokens, plain_search
from ...views import computed, num_held, plans, table

PENALTIES = (0.5, 1.0, 2.0, -1.0)


@cache
def tiny_model(vocab_size: int, seed: int, tokens: Tokens) -> list[tuple[int, float]]:
    """A table of logprobs, all different, drawn anew for every history."""
    weights = [random.Random(f"{seed} {tokens} {token}").random() ** 3 for token in range(vocab_size)]
    logprobs = {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}
    return sorted(logprobs.items(), key=lambda item: -item[1])


def search(
    offers: Offers, params: BeamSearch, max_tokens: int, stops: frozenset[int] = frozenset()
) -> beam_search.BeamSearchState:
    """Runs a search to its end, over the candidates that a worker would send."""
    search = beam_search.BeamSearchState(params, max_tokens, stops)
    beams: list[tuple[Tokens, float]] = [((), 0.0)]
    while beams:
        offered = []
        for tokens, logprob in beams:
            candidates = offers(tokens)[: search.num_candidates]
            offered.append(Beam(tokens, logprob, [token for token, _ in candidates], [lp for _, lp in candidates]))
        beams = [
            ((*beams[chosen.beam][0], chosen.token_id), chosen.cumulative_logprob) for chosen in search.advance(offered)
        ]
    return search


def assert_found(search: beam_search.BeamSearchState, expected: list[Found]) -> None:
    assert [tuple(hypothesis.token_ids) for hypothesis in search.hypotheses] == [found.tokens for found in expected]
    for hypothesis, found in zip(search.hypotheses, expected, strict=True):
        assert hypothesis.cumulative_logprob == pytest.approx(found.logprob)
        assert hypothesis.score == pytest.approx(found.score)


class TestChoice:
    @pytest.mark.parametrize("early_stopping", EarlyStopping)
    @pytest.mark.parametrize("length_penalty", PENALTIES)
    @pytest.mark.parametrize("stops", [frozenset(), frozenset({1}), frozenset({1, 4})], ids=["no end", "one", "two"])
    def test_finds_what_a_plain_search_over_the_whole_vocabulary_finds(
        self, early_stopping: EarlyStopping, length_penalty: float, stops: frozenset[int]
    ) -> None:
        for seed, width, max_tokens in itertools.product(range(10), (1, 2, 3, 5), (1, 2, 6)):
            offers = partial(tiny_model, 7, seed)
            found = search(offers, BeamSearch(width, length_penalty, early_stopping), max_tokens, stops)
            assert_found(found, plain_search(offers, width, length_penalty, early_stopping, max_tokens, stops))

    @pytest.mark.parametrize("length_penalty", PENALTIES)
    def test_that_never_stops_early_misses_nothing_a_search_to_the_last_token_finds(
        self, length_penalty: float
    ) -> None:
        for seed, width in itertools.product(range(20), (1, 2, 4)):
            offers, stops = partial(tiny_model, 6, seed), frozenset({0, 3})
            found = search(offers, BeamSearch(width, length_penalty, EarlyStopping.NEVER), 8, stops)
            assert_found(found, plain_search(offers, width, length_penalty, None, 8, stops))

    @pytest.mark.parametrize("length_penalty", PENALTIES)
    def test_with_enough_beams_finds_the_best_of_all_sequences(self, length_penalty: float) -> None:
        """Token 0 ends a sequence; three others leave at most 3^3 beams and 27 * 4 candidates."""
        for seed in range(10):
            offers = partial(tiny_model, 3, seed)
            every = every_sequence(offers, 3, stop=0)
            best = sorted(every, key=lambda tokens: -every[tokens] / len(tokens) ** length_penalty)
            found = search(offers, BeamSearch(16, length_penalty, EarlyStopping.NEVER), 3, frozenset({0}))
            assert [tuple(hypothesis.token_ids) for hypothesis in found.hypotheses] == best[:16]

    @pytest.mark.parametrize("early_stopping", EarlyStopping)
    def test_a_search_of_width_one_without_an_end_is_greedy(self, early_stopping: EarlyStopping) -> None:
        offers = partial(tiny_model, 9, 1)
        greedy: Tokens = ()
        for _ in range(6):
            greedy = (*greedy, offers(greedy)[0][0])
        (hypothesis,) = search(offers, BeamSearch(1, 1.0, early_stopping), 6).hypotheses
        assert tuple(hypothesis.token_ids) == greedy
        assert hypothesis.finish_reason is FinishReason.LENGTH

    def test_an_end_counts_only_among_the_best_of_a_step(self) -> None:
        """Token 9 ends a sequence, but two other candidates are better and there are two beams."""
        one = beam_search.BeamSearchState(BeamSearch(2, 1.0, EarlyStopping.OFF), 5, frozenset({9}))
        chosen = one.advance([Beam([], 0.0, [1, 2, 9, 3], [-0.1, -0.2, -0.3, -0.4])])
        assert [each.token_id for each in chosen] == [1, 2]
        assert one.hypotheses == []

    def test_an_end_among_the_best_makes_room_for_the_next_candidate(self) -> None:
        one = beam_search.BeamSearchState(BeamSearch(2, 1.0, EarlyStopping.OFF), 5, frozenset({9}))
        chosen = one.advance([Beam([4], -1.0, [1, 9, 2, 3], [-0.1, -0.2, -0.3, -0.4])])
        assert [each.token_id for each in chosen] == [1, 2]
        (hypothesis,) = one.hypotheses
        assert (hypothesis.token_ids, hypothesis.finish_reason) == ([4, 9], FinishReason.STOP)
        assert hypothesis.score == pytest.approx(-1.2 / 2)

    @pytest.mark.parametrize(
        ("early_stopping", "length_penalty", "ends"),
        [
            (EarlyStopping.ON, 1.0, True),
            # The running beam has -1.5 / 2 now, and -1.5 / 10 if nothing more is lost until the last token.
            (EarlyStopping.OFF, 1.0, True),
            (EarlyStopping.NEVER, 1.0, False),
            (EarlyStopping.NEVER, -1.0, True),
        ],
    )
    def test_ends_as_soon_as_its_rule_says(
        self, early_stopping: EarlyStopping, length_penalty: float, ends: bool
    ) -> None:
        one = beam_search.BeamSearchState(BeamSearch(1, length_penalty, early_stopping), 10, frozenset({9}))
        chosen = one.advance([Beam([4], -1.0, [9, 1], [-0.1, -0.5])])
        assert (not chosen) is ends
        assert len(one.hypotheses) == 1

    def test_with_a_negative_penalty_a_beam_scores_best_at_its_present_length(self) -> None:
        """It has -0.6 * 2 now and would have at best -0.6 * 10 at the end; the worst hypothesis has -3."""
        found = [
            Hypothesis([9], -0.1, -0.1, FinishReason.STOP),
            Hypothesis([9], -3.0, -3.0, FinishReason.STOP),
        ]
        one = beam_search.BeamSearchState(BeamSearch(2, -1.0, EarlyStopping.NEVER), 10, frozenset({9}), found)
        assert len(one.advance([Beam([4], -0.5, [1, 2, 3, 5], [-0.1, -0.2, -0.3, -0.4])])) == 2

    def test_looks_at_enough_candidates_to_have_as_many_beams_whatever_ends(self) -> None:
        for stops in (frozenset[int](), frozenset({1}), frozenset({1, 2, 3})):
            one = beam_search.BeamSearchState(BeamSearch(4, 1.0, EarlyStopping.NEVER), 10, stops)
            tokens = sorted(stops) + [100 + i for i in range(one.num_candidates)]
            logprobs = [-0.01 * i for i in range(len(tokens))]
            assert len(one.advance([Beam([], 0.0, tokens, logprobs)])) == 4


def every_sequence(offers: Offers, max_tokens: int, stop: int) -> dict[Tokens, float]:
    """All finished sequences and their logprobs."""
    finished: dict[Tokens, float] = {}
    running: dict[Tokens, float] = {(): 0.0}
    while running:
        tokens, total = running.popitem()
        for token, logprob in offers(tokens):
            longer = (*tokens, token)
            target = finished if token == stop or len(longer) == max_tokens else running
            target[longer] = total + logprob
    return finished


# -- through the scheduler ------------------------------------------------------------------------------------------


def beam_request(
    name: str,
    prompt_length: int,
    max_tokens: int,
    width: int,
    *,
    penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.NEVER,
    count: int | None = None,
    **sampling: Any,
) -> Request:
    """All hypotheses are wanted unless `count` says how many."""
    beam = BeamSearch(width, penalty, early_stopping)
    return make_request(name, prompt_length, max_tokens, num_sequences=count or width, beam=beam, **sampling)


def expected(request: Request) -> list[Found]:
    """What a plain search over the fake model finds."""
    sampling = request.sampling
    assert sampling.beam is not None
    found = plain_search(
        lambda tokens: expected_candidates(request.prompt_token_ids, tokens, sampling, VOCABULARY),
        sampling.beam.width,
        sampling.beam.length_penalty,
        sampling.beam.early_stopping,
        sampling.max_tokens,
        frozenset(sampling.stop_token_ids),
    )
    return found[: sampling.num_sequences]


def stopping(request: Request, *places: int) -> tuple[int, ...]:
    """Tokens that stand at these places of what is found when nothing stops a sequence."""
    found = expected(request)
    return tuple({each.tokens[place] for each in found for place in places})


def assert_answered(cluster: Cluster, *requests: Request) -> None:
    for request in requests:
        found = expected(request)
        assert cluster.outputs(request.request_id) == [list(each.tokens) for each in found]
        for index, each in enumerate(found):
            (delta,) = cluster.deltas[request.request_id, index]
            assert delta.cumulative_logprob == pytest.approx(each.logprob)
            stopped = each.tokens[-1] in request.sampling.stop_token_ids
            assert delta.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


class TestThroughTheScheduler:
    @pytest.mark.parametrize("early_stopping", EarlyStopping)
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("policy", Policy)
    def test_answers_what_a_plain_search_finds(
        self, make_cluster: MakeCluster, early_stopping: EarlyStopping, in_flight: int, policy: Policy
    ) -> None:
        requests = []
        for number, (width, penalty) in enumerate(itertools.product((1, 2, 4), PENALTIES)):
            request = beam_request(f"r{number}", 3 + number, 7, width, penalty=penalty, early_stopping=early_stopping)
            stops = stopping(request, 3)[: number % 3]
            requests.append(
                beam_request(
                    f"r{number}",
                    3 + number,
                    7,
                    width,
                    penalty=penalty,
                    early_stopping=early_stopping,
                    count=max(1, width - number % 2),
                    stop_token_ids=stops,
                )
            )
        cluster = make_cluster(max_steps_in_flight=in_flight, max_num_batched_tokens=32, policy=policy)
        cluster.join(num_blocks=512, block_size=4)
        cluster.submit(*requests)
        cluster.run()
        assert_answered(cluster, *requests)
        assert set(cluster.ended.values()) == set(FinishReason)
        assert num_held(cluster) == 0

    def test_forks_and_frees_in_every_step_and_copies_only_partly_filled_blocks(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(num_blocks=128, block_size=4)
        request = beam_request("r", 8, 12, 4)
        cluster.submit(request)
        steps = 0
        while cluster.groups:
            cluster.step()
            steps += 1
            if cluster.groups:
                assert_tree_is_shared(cluster, request, computed_tokens=7 + steps)
        prompt, first, *others = plans(replica)
        assert (len(prompt.work), len(prompt.forks), len(first.forks)) == (1, 0, 3)
        assert all(len(plan.work) == 4 for plan in (first, *others))
        assert any(plan.forks for plan in others)
        assert any(plan.forget for plan in others)
        for position, plan in enumerate((first, *others), 8):
            # At a border of blocks there is nothing to copy; elsewhere a block that several beams were about to write.
            assert len(plan.moves.copy) <= (3 if position % 4 else 0)
            assert {remap.logical_index for remap in plan.remaps} <= {position // 4}
        assert_answered(cluster, request)

    def test_a_search_that_fills_a_block_a_second_time_forks_with_the_block_that_was_there(
        self, make_cluster: MakeCluster
    ) -> None:
        """Two equal searches, one a step behind: its remaps must reach the beams that fork before they are told."""
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(num_blocks=128, block_size=2)
        early, late = (beam_request(name, 5, 10, 4, shared=5) for name in ("early", "late"))
        cluster.submit(early)
        cluster.step()
        cluster.submit(late)
        for _ in range(30):
            cluster.step()
            assert_worker_agrees(cluster.core.replicas[1], replica)
        assert_answered(cluster, early, late)
        told_while_forking = [plan for plan in plans(replica) if plan.remaps and plan.forks]
        assert told_while_forking

    def test_the_chosen_token_comes_with_the_work_that_computes_it(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join()
        cluster.submit(beam_request("r", 5, 6, 2))
        cluster.step()
        cluster.schedule()
        chosen = [each.generated_token_ids[-1] for each in cluster.groups["r"].sequences]
        assert [work.input_token_id for work in plans(replica)[-1].work] == chosen
        assert [work.input_token_id for work in plans(replica)[0].work] == [None]

    def test_beams_wait_for_their_result_and_others_run_ahead(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=2)
        replica = cluster.join(num_blocks=128)
        beams, other = beam_request("beams", 5, 8, 3), make_request("other", 5, 16)
        cluster.submit(beams, other)
        cluster.run()
        assert_answered(cluster, beams)
        assert cluster.tokens["other"] == reference_tokens(other)
        with_beams = [plan for plan in plans(replica) if any(work.input_token_id is not None for work in plan.work)]
        assert len(with_beams) == 7
        for plan, later in itertools.pairwise(with_beams):
            assert later.answered_step_id >= plan.step_id
        # The other's next token is asked for before the beams' result is back.
        assert any(plan.answered_step_id < plan.step_id - 1 for plan in plans(replica))

    def test_the_answer_comes_whole_and_once(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        request = beam_request("r", 5, 6, 3, count=2)
        cluster.submit(request)
        for _ in range(3):
            cluster.step()
        assert not any(cluster.deltas.values())
        cluster.run()
        assert [len(deltas) for deltas in cluster.deltas.values()] == [1, 1]
        assert_answered(cluster, request)

    def test_one_token_takes_one_step(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        replica = cluster.join()
        request = beam_request("r", 6, 1, 4)
        cluster.submit(request)
        cluster.run()
        assert computed(replica) == [6]
        assert_answered(cluster, request)

    def test_no_candidate_ends_a_sequence_before_min_tokens(self, make_cluster: MakeCluster) -> None:
        stops = stopping(beam_request("r", 5, 8, 3), 1, 2)
        request = beam_request("r", 5, 8, 3, stop_token_ids=stops, min_tokens=4)
        cluster = make_cluster()
        cluster.join()
        cluster.submit(request)
        cluster.run()
        assert_answered(cluster, request)
        assert all(len(tokens) > 4 for tokens in cluster.outputs("r"))


def assert_tree_is_shared(cluster: Cluster, request: Request, computed_tokens: int) -> None:
    """Beams have a block in common exactly where they have all tokens up to its end in common and it is full."""
    beams = cluster.groups[request.request_id].sequences
    tables = [table(cluster, request.request_id, beam.index) for beam in beams]
    for (left, blocks), (right, others) in itertools.combinations(zip(beams, tables, strict=True), 2):
        for logical in range(computed_tokens // 4):
            end = 4 * (logical + 1)
            same = list(left.known_tokens(0, end)) == list(right.known_tokens(0, end))
            assert (blocks[logical] == others[logical]) is same


class TestPreempted:
    """A search goes on after it has lost its blocks as if nothing had happened."""

    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE, Preemption.AUTO])
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_finds_the_same(
        self, make_cluster: MakeCluster, preemption: Preemption, in_flight: int, prefix_caching: bool
    ) -> None:
        cluster = make_cluster(
            max_steps_in_flight=in_flight,
            max_num_batched_tokens=16,
            preemption=preemption,
            prefix_caching=prefix_caching,
            watermark=0.0,
        )
        cluster.join(num_blocks=36, block_size=2, num_cpu_blocks=36)
        others = [make_request(f"o{i}", 4 + i, 24) for i in range(2)]
        beams = [beam_request(f"b{i}", 5 + i, 9, 4 - i) for i in range(3)]
        cluster.submit(others[0], *beams, others[1])
        cluster.run()
        assert cluster.core.preemptions > 0
        assert (cluster.core.swaps > 0) is (preemption is not Preemption.RECOMPUTE)
        assert_answered(cluster, *beams)
        assert [cluster.tokens[other.request_id] for other in others] == [reference_tokens(other) for other in others]

    @pytest.mark.parametrize("step", range(8))
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_by_a_failed_step_it_finds_the_same(self, make_cluster: MakeCluster, step: int, in_flight: int) -> None:
        cluster = make_cluster(max_steps_in_flight=in_flight, max_num_batched_tokens=16)
        cluster.join(num_blocks=64, block_size=2)
        beams, other = beam_request("beams", 20, 7, 3), make_request("other", 5, 20)
        cluster.submit(beams, other)
        for number in range(step + 1):
            cluster.step(fail=number == step)
        cluster.run()
        assert_answered(cluster, beams)
        assert cluster.tokens["other"] == reference_tokens(other)

    @pytest.mark.parametrize("steps", range(1, 7))
    def test_by_the_loss_of_its_replica_it_finds_the_same(self, make_cluster: MakeCluster, steps: int) -> None:
        cluster = make_cluster(max_num_batched_tokens=8)
        cluster.join(1)
        request = beam_request("r", 14, 6, 3)
        cluster.submit(request)
        for _ in range(steps):
            cluster.step()
        cluster.leave(1)
        cluster.join(2)
        cluster.run()
        assert_answered(cluster, request)

    def test_recomputed_beams_share_what_they_shared(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1, prefix_caching=False)
        replica = cluster.join(num_blocks=128, block_size=4)
        request = beam_request("r", 30, 8, 4)
        cluster.submit(request)
        for _ in range(4):
            cluster.step()
        cluster.schedule()
        held = num_held(cluster)
        cluster.step(fail=True)
        cluster.schedule()
        assert num_held(cluster) == held
        assert sum(work.num_tokens for work in plans(replica)[-1].work) <= 33 + 3 * 5
        cluster.run()
        assert_answered(cluster, request)
