"""Workers for prompts and for what follows: requests leave the ones, and prompts go to the others, where that holds up
less than to stay; and nothing waits for a worker that is not there, or has no room."""

from typing import Any

import pytest

from octavo.scheduler.core.events import WorkerCordoned
from octavo.testing.cluster import Cluster
from octavo.testing.scenarios import plans
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts
from octavo.wire.requests import Request
from octavo.wire.steps import WorkerRole

from ...conftest import MakeCluster
from .test_moves import PROMPT, computed, drain, finish, home, join, pulls, request, tables

# Seconds of each token of a prompt; a binary fraction, so that as many tokens as a move takes take exactly as long.
TOKEN_S = 1 / 64
BUDGET = 16


def costs(moves: int = 0, block_in: int = 0) -> StepCosts:
    """The costs of a worker where moves onto the device, and each block of one, take as long as so many tokens."""
    return StepCosts(PrefillCosts(0.0, TOKEN_S, 0.0), SwapCosts(moves * TOKEN_S, 0.0, block_in * TOKEN_S))


def apart(make_cluster: MakeCluster, config: dict[str, Any] | None = None, **worker: Any) -> Cluster:
    """A cluster of a worker for prompts, 1, and one for what follows, 2."""
    cluster = make_cluster(watermark=0.0, **(config or {}))
    join(cluster, 1, role=WorkerRole.PREFILL, **worker)
    join(cluster, 2, role=WorkerRole.DECODE, **worker)
    return cluster


def home_or_none(cluster: Cluster, name: str) -> int | None:
    places = cluster.core.replicas.items()
    return next((key for key, replica in places if any(each.request_id == name for each in replica.requests)), None)


def run_until_at(cluster: Cluster, incarnation: int, *requests: Request) -> None:
    """Submits these, and lets all run until they are there."""
    cluster.submit(*requests)
    for _ in range(50):
        if all(home_or_none(cluster, each.request_id) == incarnation for each in requests):
            return
        cluster.step()
    raise AssertionError(f"not all of {[each.request_id for each in requests]} are at {incarnation}")


# -- who computes what -----------------------------------------------------------------------------------------------


def test_prompts_are_computed_by_one_worker_and_what_follows_by_another(make_cluster: MakeCluster) -> None:
    cluster = apart(make_cluster)
    wanted = [request("a"), request("b", num_sequences=3, seed=5, temperature=1.0)]
    replicas = [*cluster.replicas.values()]
    cluster.submit(*wanted)
    finish(cluster, *wanted)
    assert len(pulls(cluster)) == 2
    prompts, rest = replicas
    assert all(start.num_computed >= PROMPT for plan in plans(rest) for start in plan.starts)
    # Steps that were outstanding when their first tokens were known have computed some more.
    assert computed(prompts) <= 2 * PROMPT + 4 * 3


def test_a_request_never_moves_to_a_worker_for_prompts(make_cluster: MakeCluster) -> None:
    cluster = apart(make_cluster)
    wanted = request(tokens=40)
    run_until_at(cluster, 2, wanted)
    drain(cluster, 2)
    finish(cluster, wanted)
    assert len([each for each in pulls(cluster) if each.incarnation == 1]) == 0


# -- from a worker for prompts ---------------------------------------------------------------------------------------


def streaming(make_cluster: MakeCluster, tokens: int = 40, num_prefillers: int = 1, **swap: int) -> Cluster:
    """A cluster in which a request, `r`, is at a worker for prompts that has no other to compute, and goes on there."""
    cluster = make_cluster(watermark=0.0, max_num_batched_tokens=BUDGET, max_steps_in_flight=1)
    for incarnation in range(1, num_prefillers + 1):
        join(cluster, incarnation, role=WorkerRole.PREFILL, costs=costs(**swap))
    join(cluster, num_prefillers + 1, role=WorkerRole.DECODE, costs=costs(**swap))
    cluster.submit(request(tokens=tokens))
    for _ in range(4):
        cluster.step()
    assert home(cluster, "r") <= num_prefillers
    assert not pulls(cluster)
    return cluster


def leaves(cluster: Cluster, *prompts: int) -> bool:
    """Submits prompts of so many tokens while a step with `r` is under way; tells whether `r` leaves on its answer."""
    others = [request(f"prompt {number}", prompt=prompt, tokens=1) for number, prompt in enumerate(prompts)]
    source = home(cluster, "r")
    cluster.schedule()
    cluster.submit(*others)
    cluster.answer(source)
    group = cluster.groups["r"]
    is_leaving = any(move.group is group for move in cluster.core.state.moves.under_way.values())
    tokens = cluster.groups["r"].request.sampling.max_tokens
    finish(cluster, request(tokens=tokens), *others)
    assert len(pulls(cluster)) == is_leaving
    return is_leaving


def test_a_request_stays_where_no_prompts_are_to_come(make_cluster: MakeCluster) -> None:
    cluster = streaming(make_cluster)
    rest = cluster.replicas[2]
    finish(cluster, request(tokens=40))
    assert computed(rest) == 0


@pytest.mark.parametrize(("prompt", "is_leaving"), [(30, False), (31, True)])
def test_a_request_leaves_if_prompts_hold_it_up_for_longer_than_its_move(
    make_cluster: MakeCluster, prompt: int, is_leaving: bool
) -> None:
    assert leaves(streaming(make_cluster, moves=30), prompt) is is_leaving


@pytest.mark.parametrize(("prompt", "is_leaving"), [(30, False), (31, True)])
def test_what_is_left_of_a_prompt_that_has_begun_counts(
    make_cluster: MakeCluster, prompt: int, is_leaving: bool
) -> None:
    cluster = streaming(make_cluster, moves=30)
    # A step of this prompt and `r` is computed before anybody decides: 15 tokens of it.
    begun = request("begun", prompt=15 + prompt, tokens=1)
    cluster.submit(begun)
    assert leaves(cluster) is is_leaving


@pytest.mark.parametrize(("more", "is_leaving"), [(0, False), (1, True)])
def test_each_block_that_is_moved_counts(make_cluster: MakeCluster, more: int, is_leaving: bool) -> None:
    cluster = streaming(make_cluster, block_in=2)
    # The step that is answered before it is decided adds no block.
    cluster.step()
    (blocks,) = tables(cluster, "r", 1)
    assert leaves(cluster, 2 * len(blocks) + more) is is_leaving


@pytest.mark.parametrize(("seconds", "is_leaving"), [(31 * TOKEN_S, False), (30 * TOKEN_S, True)])
def test_what_copies_have_taken_counts(make_cluster: MakeCluster, seconds: float, is_leaving: bool) -> None:
    cluster = streaming(make_cluster)
    source, target = cluster.core.replicas[1], cluster.core.replicas[2]
    (blocks,) = tables(cluster, "r", 1)
    cluster.core.state.pulls.took(source, target, len(blocks), seconds, cluster.now)
    assert leaves(cluster, 31) is is_leaving


@pytest.mark.parametrize(("moves", "is_leaving"), [(3 * BUDGET, False), (3 * BUDGET - 1, True)])
def test_no_more_is_counted_than_the_steps_that_a_request_is_in(
    make_cluster: MakeCluster, moves: int, is_leaving: bool
) -> None:
    cluster = streaming(make_cluster, tokens=8, moves=moves)
    generated = len(cluster.tokens["r"])
    # On the next answer it has three tokens to come.
    for _ in range(8 - 3 - 1 - generated):
        cluster.step()
    assert leaves(cluster, 90) is is_leaving


@pytest.mark.parametrize(("prompts", "is_leaving"), [((30, 31), False), ((31, 31), True)])
def test_workers_for_prompts_share_those_that_wait(
    make_cluster: MakeCluster, prompts: tuple[int, ...], is_leaving: bool
) -> None:
    assert leaves(streaming(make_cluster, num_prefillers=2, moves=30), *prompts) is is_leaving


@pytest.mark.parametrize(("measured", "num_moved"), [(costs(), 0), (None, 1)], ids=["measured", "not measured"])
def test_a_worker_without_costs_always_hands_over(
    make_cluster: MakeCluster, measured: StepCosts | None, num_moved: int
) -> None:
    cluster = apart(make_cluster, costs=measured)
    cluster.submit(request())
    finish(cluster, request())
    assert len(pulls(cluster)) == num_moved


# -- prompts at a worker for what follows ----------------------------------------------------------------------------


def goes_to_decoder(
    make_cluster: MakeCluster, prompt: int, lefts: tuple[int, ...], num_streams: int = 0, num_waiting: int = 1
) -> bool:
    """Tells whether the first of so many waiting prompts is begun by the worker for what follows, where so many streams
    are, while there are so many tokens `left` to compute at each worker for prompts."""
    cluster = make_cluster(watermark=0.0, max_num_batched_tokens=BUDGET, max_steps_in_flight=1)
    decoder = len(lefts) + 1
    for incarnation in range(1, decoder):
        join(cluster, incarnation, role=WorkerRole.PREFILL, num_blocks=400)
    join(cluster, decoder, role=WorkerRole.DECODE, num_blocks=400, num_cpu_blocks=400)
    streams = [request(f"stream {number}", tokens=60) for number in range(num_streams)]
    run_until_at(cluster, decoder, *streams)
    begun = [request(f"begun {number}", prompt=BUDGET + left, tokens=1) for number, left in enumerate(lefts)]
    cluster.submit(*begun)
    cluster.schedule()
    assert tuple(cluster.core.replicas[each].load for each in range(1, decoder)) == lefts
    waiting = [request(f"waiting {number}", prompt=prompt, tokens=5) for number in range(num_waiting)]
    cluster.submit(*waiting)
    if num_streams:
        cluster.answer(decoder)
    assert cluster.core.replicas[decoder].num_running_seqs == num_streams
    # The others still compute, so if any begins a prompt now it is that one.
    cluster.schedule()
    place = home_or_none(cluster, "waiting 0")
    assert place in (None, decoder)
    finish(cluster, *streams, *begun, *waiting)
    return place == decoder


@pytest.mark.parametrize(("left", "goes"), [(BUDGET, False), (BUDGET + 1, True)])
def test_a_prompt_waits_for_a_step_at_a_worker_for_prompts(make_cluster: MakeCluster, left: int, goes: bool) -> None:
    assert goes_to_decoder(make_cluster, 20, (left,)) is goes


@pytest.mark.parametrize(("lefts", "goes"), [((17, 16), False), ((16, 17), False), ((17, 17), True)])
def test_a_prompt_waits_if_any_worker_for_prompts_is_soon_done(
    make_cluster: MakeCluster, lefts: tuple[int, ...], goes: bool
) -> None:
    assert goes_to_decoder(make_cluster, 20, lefts) is goes


@pytest.mark.parametrize(("num_waiting", "goes"), [(2, False), (3, True)])
def test_a_prompt_holds_up_no_more_streams_than_prompts_wait(
    make_cluster: MakeCluster, num_waiting: int, goes: bool
) -> None:
    assert goes_to_decoder(make_cluster, 20, (17,), num_streams=3, num_waiting=num_waiting) is goes


@pytest.mark.parametrize(("left", "goes"), [(40, False), (41, True)])
def test_a_prompt_that_would_wait_for_longer_than_it_holds_up_streams_does_not(
    make_cluster: MakeCluster, left: int, goes: bool
) -> None:
    # Two streams more than prompts that wait, for 20 tokens each.
    assert goes_to_decoder(make_cluster, 20, (left,), num_streams=3) is goes


# -- where there is no other, or no room -----------------------------------------------------------------------------


@pytest.mark.parametrize("measured", [costs(), None], ids=["measured", "not measured"])
def test_workers_for_prompts_go_on_alone(make_cluster: MakeCluster, measured: StepCosts | None) -> None:
    cluster = apart(make_cluster, {"max_num_batched_tokens": BUDGET}, costs=measured)
    cluster.leave(2)
    wanted = [request(f"r{number}", prompt=20) for number in range(4)]
    cluster.submit(*wanted)
    finish(cluster, *wanted)
    assert not pulls(cluster)


@pytest.mark.parametrize("lack", ["gone", "cordoned", "too small"])
def test_a_worker_for_what_follows_takes_prompts_that_no_other_can(make_cluster: MakeCluster, lack: str) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1, role=WorkerRole.PREFILL, num_blocks=8 if lack == "too small" else 64)
    rest = join(cluster, 2, role=WorkerRole.DECODE)
    if lack == "gone":
        cluster.leave(1)
    elif lack == "cordoned":
        cluster.handle(WorkerCordoned("worker-1"))
    cluster.submit(request())
    finish(cluster, request())
    assert computed(rest) >= PROMPT + 11


@pytest.mark.parametrize("measured", [costs(), None], ids=["measured", "not measured"])
def test_a_request_that_nobody_can_take_over_goes_on_where_its_prompt_was_computed(
    make_cluster: MakeCluster, measured: StepCosts | None
) -> None:
    cluster = apart(make_cluster, {"max_num_batched_tokens": BUDGET}, num_cpu_blocks=2, costs=measured)
    rest, wanted = cluster.replicas[2], request()
    run_until_at(cluster, 1, wanted)
    later = request("later", prompt=BUDGET)
    cluster.submit(later)
    finish(cluster, wanted, later)
    assert not pulls(cluster)
    assert computed(rest) == 0


@pytest.mark.parametrize("lack", ["slots", "blocks"])
def test_a_prompt_does_not_wait_for_the_end_of_what_stays_with_it(make_cluster: MakeCluster, lack: str) -> None:
    cluster = make_cluster(watermark=0.0, max_num_seqs=2 if lack == "slots" else 8)
    join(cluster, 1, role=WorkerRole.PREFILL, num_blocks=44 if lack == "blocks" else 100, costs=costs(moves=1000))
    join(cluster, 2, role=WorkerRole.DECODE, num_blocks=100, costs=costs(moves=1000))
    streams = [request(f"stream {number}", tokens=60) for number in range(2)]
    run_until_at(cluster, 1, *streams)
    for _ in range(4):
        cluster.step()
    assert not pulls(cluster)
    later = request("later", prompt=60, tokens=2)
    cluster.submit(later)
    for _ in range(12):
        cluster.step()
    assert "later" in cluster.finished
    assert not cluster.finished.keys() & {each.request_id for each in streams}
    assert {home(cluster, each.request_id) for each in streams} == {2}
    finish(cluster, *streams, later)


@pytest.mark.parametrize(("prompt", "num_moved"), [(80, 2), (200, 0)])
def test_a_prompt_that_fits_no_worker_for_prompts_drives_nobody_out(
    make_cluster: MakeCluster, prompt: int, num_moved: int
) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1, role=WorkerRole.PREFILL, num_blocks=50, costs=costs(moves=1000))
    join(cluster, 2, role=WorkerRole.DECODE, num_blocks=200, costs=costs(moves=1000))
    streams = [request(f"stream {number}", tokens=30) for number in range(2)]
    run_until_at(cluster, 1, *streams)
    later = request("later", prompt=prompt, tokens=2)
    cluster.submit(later)
    # Before it is planned anywhere.
    cluster.answer(1)
    finish(cluster, *streams, later)
    assert len(pulls(cluster)) == num_moved


def test_a_prompt_waits_where_all_are_full_and_is_computed_once_there_is_room(make_cluster: MakeCluster) -> None:
    cluster = apart(make_cluster, {"max_num_seqs": 2, "max_num_batched_tokens": BUDGET})
    wanted = [request(f"r{number}", tokens=10 + number) for number in range(9)]
    cluster.submit(*wanted)
    finish(cluster, *wanted)
