"""Requests with guesses in flight are moved, mirrored, copied from and lost: tokens are those of plain decoding, others
find what was right and nothing else, and no block leaks."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import (
    LossCause,
    PullAnswered,
    StepAnswered,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.sequence import Sequence, SequenceGroup
from octavo.testing.cluster import VOCABULARY, Cluster, FakeDisk, FakeReplica, make_request
from octavo.testing.depth import deep
from octavo.testing.fakes.drafters import Foresight, ScriptedDrafter
from octavo.testing.scenarios import outputs, plans, references
from octavo.wire.requests import Request
from octavo.wire.steps import BlocksPulled, PullBlocks, StepPlan

from ...conftest import MakeCluster
from ...views import cached_tokens, kv_of

FORESIGHT = Foresight(VOCABULARY)
PROMPT, TOKENS = 13, 30
# Guesses of which the first are right: none, some, all.
NUM_RIGHT = pytest.mark.parametrize("num_right", [3, *deep(0, 7)])
MANY: dict[str, Any] = {"num_sequences": 3, "temperature": 1.0, "seed": 5}


def seven(num_right: int, windows: tuple[int, ...] = (0,), only: str = "") -> ScriptedDrafter:
    """Guesses seven tokens, of which so many are right, for all requests or those whose ids begin so."""
    foresight = Foresight(VOCABULARY, 0 if 0 in windows else max(windows))

    def guess(group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
        known = foresight(group, sequence, min(most, 7)) if group.request_id.startswith(only) else []
        return known[:num_right] + [token_id ^ 1 for token_id in known[num_right:]]

    return ScriptedDrafter(guess)


def request(name: str = "r", **sampling: Any) -> Request:
    return make_request(name, PROMPT, TOKENS, **sampling)


def join(cluster: Cluster, incarnation: int, **worker: Any) -> FakeReplica:
    sizes = {"num_blocks": 200, "block_size": 2, "num_cpu_blocks": 200, "is_read": True}
    return cluster.join(incarnation, **{**sizes, **worker})


def drafting(make_cluster: MakeCluster, num_right: int, *, windows: tuple[int, ...] = (0,), only: str = "") -> Cluster:
    return make_cluster(watermark=0.0, speculation=7, drafter=seven(num_right, windows, only))


def in_flight(cluster: Cluster, *incarnations: int, wanted: Callable[[StepPlan], bool] = lambda _: True) -> int:
    """Runs on until one of these replicas has a `wanted` plan with guesses that is not answered; returns which."""
    for _ in range(100):
        for _ in range(cluster.core.config.max_steps_in_flight):
            cluster.schedule()
        cluster.now += 0.01
        for incarnation in incarnations:
            replica = cluster.replicas[incarnation]
            if any((plan.drafts or plan.proposals) and wanted(plan) for plan in replica.plans):
                return incarnation
            if replica.plans:
                cluster.answer(incarnation)
            if replica.to_read and cluster.disks_answer:
                cluster.read(incarnation)
            if replica.may_pull and cluster.pulls_answer:
                cluster.pull(incarnation)
    raise AssertionError("no such guesses in 100 steps")


def drain(cluster: Cluster, incarnation: int) -> None:
    cluster.handle(WorkerDrained(f"worker-{incarnation}", 0.0))


def pulls(cluster: Cluster) -> list[PullBlocks]:
    return [each for replica in cluster.replicas.values() for each in replica.received if isinstance(each, PullBlocks)]


def computed(*replicas: FakeReplica) -> int:
    """Counts the tokens that were computed, and are no guesses."""
    return sum(work.num_tokens for replica in replicas for plan in plans(replica) for work in plan.work)


def finish(cluster: Cluster, *requests: Request) -> None:
    """Runs to the end; the tokens are right and no block is held."""
    cluster.run()
    for _ in range(8):
        cluster.step()
    assert outputs(cluster, *requests) == references(*requests)
    for replica in cluster.core.replicas.values():
        assert replica.kv.num_cpu_free == replica.kv.num_cpu_blocks
        assert replica.kv.num_free == replica.kv.num_blocks
    assert not cluster.core.state.moves.under_way
    assert not cluster.core.state.prefix_copies.under_way


class TestMoves:
    @NUM_RIGHT
    @pytest.mark.parametrize("sampling", [{}, MANY, {"logprobs": 1, "prompt_logprobs": 1}], ids=["one", "n", "told"])
    def test_begin_once_the_guesses_are_answered_and_nothing_is_computed_again(
        self, make_cluster: MakeCluster, num_right: int, sampling: dict[str, Any]
    ) -> None:
        cluster = drafting(make_cluster, num_right)
        replicas = [join(cluster, incarnation) for incarnation in (1, 2)]
        wanted = request(**sampling)
        cluster.submit(wanted)
        source = in_flight(cluster, 1, 2)
        drain(cluster, source)
        cluster.schedule()
        assert not pulls(cluster)
        while cluster.replicas[source].plans:
            cluster.answer(source)
        (pull,) = pulls(cluster)
        # Blocks that wrong guesses were written to are no part of it.
        kv = kv_of(cluster, source)
        held = {block for each in cluster.groups["r"].holders for blocks in kv.block_table(each) for block in blocks}
        assert {move.source for move in pull.moves} == held
        finish(cluster, wanted)
        assert source not in cluster.core.replicas
        steps = [plan for replica in replicas for plan in plans(replica)]
        guessed = sum(deltas[-1].accepted for deltas in cluster.deltas.values())
        rows = sum(1 for plan in steps for work in plan.work for _ in (0, *work.follower_ids) if not plan.starts)
        assert rows + guessed <= wanted.sampling.num_sequences * (TOKENS + 1)

    @NUM_RIGHT
    @pytest.mark.parametrize("windows", [(4,), (0, 4)])
    def test_leave_behind_what_windows_have_passed_with_guesses(
        self, make_cluster: MakeCluster, num_right: int, windows: tuple[int, ...]
    ) -> None:
        plain = make_cluster(watermark=0.0, speculation="off")
        join(plain, 1, windows=windows)
        plain.submit(request())
        plain.run()
        cluster = drafting(make_cluster, num_right, windows=windows)
        replicas = [join(cluster, incarnation, windows=windows) for incarnation in (1, 2)]
        cluster.submit(request())
        source = in_flight(cluster, 1, 2)
        drain(cluster, source)
        finish(cluster)
        assert cluster.tokens == plain.tokens
        assert len(pulls(cluster)) == 1 or source not in cluster.core.replicas
        assert computed(*replicas) <= PROMPT + TOKENS

    @pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
    def test_take_a_draft_models_memory_along(self, make_cluster: MakeCluster, hit_rate: float) -> None:
        """The fake one fails where its own keys and values are not those of the tokens."""
        cluster = make_cluster(watermark=0.0, speculation=7, drafter=ScriptedDrafter(lambda *_: []))
        replicas = [join(cluster, incarnation, draft_hit_rate=hit_rate) for incarnation in (1, 2)]
        cluster.submit(request(), request("s", temperature=1.0))
        source = in_flight(cluster, 1, 2)
        drain(cluster, source)
        while source in cluster.core.replicas:
            cluster.step()
        in_flight(cluster, 3 - source)
        finish(cluster, request(), request("s", temperature=1.0))
        assert computed(*replicas) <= 2 * (PROMPT + TOKENS)

    def test_to_a_worker_that_checks_no_guesses_are_plain_from_there_on(self, make_cluster: MakeCluster) -> None:
        cluster = drafting(make_cluster, 3)
        join(cluster, 1)
        cluster.submit(request())
        in_flight(cluster, 1)
        target = join(cluster, 2)
        old: Any = cluster.core.replicas[2]
        old.hello = msgspec.structs.replace(target.hello, schema_version=8)
        drain(cluster, 1)
        finish(cluster, request())
        assert len(pulls(cluster)) == 1
        assert not any(plan.drafts for plan in plans(target))

    @NUM_RIGHT
    @pytest.mark.parametrize("how", ["fail", "starve", "spoil"])
    def test_end_where_the_step_with_the_guesses_fails(
        self, make_cluster: MakeCluster, num_right: int, how: str
    ) -> None:
        cluster = drafting(make_cluster, num_right)
        for incarnation in (1, 2):
            join(cluster, incarnation)
        cluster.submit(request())
        source = in_flight(cluster, 1, 2)
        drain(cluster, source)
        replica = cluster.replicas[source]
        spoil = [each.placement.sequence_id for each in cluster.groups["r"].live] if how == "spoil" else []
        while replica.plans:
            last = len(replica.plans) == 1
            result = replica.execute(fail=last and how == "fail", starve=last and how == "starve", spoil=spoil)
            cluster.handle(StepAnswered(source, result))
        assert not pulls(cluster)
        finish(cluster, request())

    @pytest.mark.parametrize("what", ["abort", "source", "target", "copy", "readmit"])
    def test_that_come_to_nothing_leave_nothing(self, make_cluster: MakeCluster, what: str) -> None:
        cluster = drafting(make_cluster, 3)
        cluster.pulls_answer = False
        for incarnation in (1, 2):
            join(cluster, incarnation)
        cluster.submit(request())
        source = in_flight(cluster, 1, 2)
        target = 3 - source
        drain(cluster, source)
        for _ in range(3):
            cluster.step()
        assert len(pulls(cluster)) == 1
        match what:
            case "abort":
                cluster.abort("r")
            case "source":
                cluster.leave(source, LossCause.UNREACHABLE)
                cluster.replicas[source] = FakeReplica(cluster.replicas[target].runner, source)
            case "target":
                cluster.leave(target, LossCause.UNREACHABLE)
            case "copy":
                pull = cluster.replicas[target].to_pull.popleft()
                answer = BlocksPulled(pull.epoch, target, pull.pull_id, is_complete=False)
                cluster.handle(PullAnswered(target, answer))
            case "readmit":
                cluster.handle(WorkerReadmitted(f"worker-{source}"))
        cluster.pulls_answer = True
        if what == "source":
            cluster.pull(target)
        finish(cluster, *([request()] if what != "abort" else []))

    def test_of_a_swapped_request_follow_its_answer(self, make_cluster: MakeCluster) -> None:
        """What has guessed is swapped out when blocks run out, goes elsewhere, and guesses there."""
        cluster = make_cluster(
            watermark=0.0, preemption=Preemption.SWAP, max_steps_in_flight=1, speculation=7, drafter=seven(3)
        )
        join(cluster, 1, num_blocks=30)
        wanted = [request(name) for name in ("first", "second")]
        cluster.submit(*wanted)
        in_flight(cluster, 1)
        while not cluster.core.replicas[1].swapped:
            cluster.step()
        target = join(cluster, 2)
        cluster.tick(0.1)
        cluster.step()
        (pull,) = pulls(cluster)
        assert pull.from_cpu
        finish(cluster, *wanted)
        assert any(plan.drafts for plan in plans(target))


class TestMirrors:
    @NUM_RIGHT
    @pytest.mark.parametrize("sampling", [{}, MANY], ids=["one", "n"])
    def test_hold_what_was_right_and_the_next_worker_goes_on_from_there(
        self, make_cluster: MakeCluster, num_right: int, sampling: dict[str, Any]
    ) -> None:
        disk, wanted = FakeDisk(), request(**sampling)
        cluster = drafting(make_cluster, num_right)
        first = join(cluster, 1, disk=disk, mirror=True)
        cluster.submit(wanted)
        while min(map(len, [*cluster.outputs("r"), range(99)])) < 12:
            cluster.step()
        in_flight(cluster, 1)
        before = computed(first)
        cluster.leave(1, LossCause.UNREACHABLE)
        second = join(cluster, 2, disk=disk, mirror=True)
        finish(cluster, wanted)
        # Full blocks of what was known are on the disk: the prompt is not computed again.
        assert before >= PROMPT
        assert not any(start.num_computed < PROMPT - 2 for plan in plans(second) for start in plan.starts)
        assert computed(second) < PROMPT + wanted.sampling.num_sequences * TOKENS

    @NUM_RIGHT
    def test_never_hold_what_was_wrong(self, make_cluster: MakeCluster, num_right: int) -> None:
        """There are as many blocks on the disk as without guesses, by the same names, with the same content."""
        kept: list[Any] = []
        for guesses in (7, num_right):
            disk = FakeDisk()
            cluster = make_cluster(watermark=0.0, speculation="off" if not kept else 7, drafter=seven(guesses))
            join(cluster, 1, disk=disk, mirror=True)
            cluster.submit(request())
            finish(cluster, request())
            kept.append(dict(disk))
        # Where the last token fills no block and was guessed, its slot may hold that.
        assert kept[0] == kept[1]

    @NUM_RIGHT
    def test_are_read_beside_guesses_in_flight(self, make_cluster: MakeCluster, num_right: int) -> None:
        disk, old = FakeDisk(), make_request("old", 16, 3)
        cluster = drafting(make_cluster, num_right, only="r")
        join(cluster, 1, disk=disk, mirror=True)
        cluster.submit(old)
        cluster.run()
        cluster.leave(1)
        replica = join(cluster, 2, disk=disk, mirror=True)
        again = msgspec.structs.replace(old, request_id="again")
        cluster.submit(request())
        in_flight(cluster, 2)
        cluster.disks_answer = False
        cluster.submit(again)
        while not replica.to_read:
            in_flight(cluster, 2)
            cluster.answer(2)
        in_flight(cluster, 2)
        cluster.read(2)
        cluster.disks_answer = True
        finish(cluster, request(), again)
        assert cached_tokens(cluster)["again"] == 14


class TestCopies:
    def served(self, make_cluster: MakeCluster, num_right: int, **worker: Any) -> tuple[Cluster, Request]:
        """Two workers, of which the first has guesses of "r" in flight and takes nothing new; and a request that begins
        as that does with its answer so far, the guesses included."""
        cluster = drafting(make_cluster, num_right, only="r")
        join(cluster, 1, **worker)
        cluster.submit(request())
        while len(cluster.tokens["r"]) < 9:
            cluster.step()
        in_flight(cluster, 1)
        cluster.handle(WorkerCordoned("worker-1"))
        join(cluster, 2, **worker)
        answer = references(request())["r"][0]
        return cluster, msgspec.structs.replace(
            make_request("again", 1, 5), prompt_token_ids=[*request().prompt_token_ids, *answer[:22]]
        )

    @NUM_RIGHT
    def test_of_a_prefix_bring_what_was_known_and_no_guess(self, make_cluster: MakeCluster, num_right: int) -> None:
        cluster, again = self.served(make_cluster, num_right)
        known = PROMPT + len(cluster.tokens["r"])
        cluster.submit(again)
        cluster.schedule()
        (pull,) = pulls(cluster)
        assert len(pull.moves) <= known // 2
        finish(cluster, request(), again)
        assert 0 < cached_tokens(cluster)["again"] <= known

    @NUM_RIGHT
    def test_keep_what_they_read_while_guesses_are_given_back(self, make_cluster: MakeCluster, num_right: int) -> None:
        cluster, again = self.served(make_cluster, num_right)
        cluster.pulls_answer = False
        cluster.submit(again)
        cluster.schedule()
        peers = kv_of(cluster).peers
        assert peers is not None
        lent = set(peers.lent)
        assert lent
        while "r" in cluster.groups:
            cluster.step()
            assert lent == set(peers.lent)
        cluster.pulls_answer = True
        finish(cluster, request(), again)

    @pytest.mark.parametrize("how", ["fail", "lost"])
    def test_end_with_the_step_that_checks_guesses(self, make_cluster: MakeCluster, how: str) -> None:
        cluster, again = self.served(make_cluster, 3)
        cluster.pulls_answer = False
        cluster.submit(again)
        cluster.schedule()
        assert pulls(cluster)
        if how == "lost":
            cluster.leave(1, LossCause.UNREACHABLE)
        else:
            cluster.handle(WorkerReadmitted("worker-1"))
            while cluster.replicas[1].plans:
                cluster.answer(1, fail=True)
        cluster.pulls_answer = True
        finish(cluster, request(), again)

    @NUM_RIGHT
    def test_are_gone_on_from_with_guesses(self, make_cluster: MakeCluster, num_right: int) -> None:
        """Who was copied to writes its guesses behind what was copied."""
        cluster = drafting(make_cluster, num_right)
        join(cluster, 1)
        cluster.submit(request())
        cluster.run()
        for _ in range(4):
            cluster.step()
        cluster.handle(WorkerCordoned("worker-1"))
        target = join(cluster, 2)
        again = msgspec.structs.replace(request(), request_id="again")
        cluster.submit(again)
        in_flight(cluster, 2)
        assert len(pulls(cluster)) == 1
        finish(cluster)
        assert cluster.tokens["again"] == cluster.tokens["r"] == references(request())["r"][0]
        assert any(plan.drafts for plan in plans(target))


class TestFailures:
    REQUESTS = (request("a"), request("b", temperature=1.0, seed=3), request("c", **MANY), request("d", logprobs=1))

    @NUM_RIGHT
    @pytest.mark.parametrize("how", ["fail", "starve", "lost"])
    def test_of_every_step_with_guesses_cost_no_token(
        self, make_cluster: MakeCluster, num_right: int, how: str
    ) -> None:
        """Step by step: one plan after the other with guesses fails, is halved, or is lost with its worker."""
        cluster = make_cluster(
            watermark=0.0, speculation=7, drafter=seven(num_right), max_failed_steps=99, max_memory_failures=99
        )
        incarnation = 1
        join(cluster, incarnation)
        cluster.submit(*self.REQUESTS)
        for _ in range(5):
            in_flight(cluster, incarnation)
            if how == "lost":
                cluster.leave(incarnation)
                incarnation += 1
                join(cluster, incarnation)
                continue
            replica = cluster.replicas[incarnation]
            result = replica.execute(fail=how == "fail", starve=how == "starve")
            cluster.handle(StepAnswered(incarnation, result))
        if how == "starve":
            size = cluster.core.replicas[incarnation].size
            assert size.tokens < size.max_tokens
        finish(cluster, *self.REQUESTS)

    @NUM_RIGHT
    def test_of_the_step_before_skip_the_guesses(self, make_cluster: MakeCluster, num_right: int) -> None:
        """Of two steps in flight the first fails; the second checks guesses and is skipped."""
        cluster = make_cluster(watermark=0.0, speculation=7, drafter=seven(num_right, only="r"), max_failed_steps=99)
        replica = join(cluster, 1)
        plain = request("plain")
        cluster.submit(request(), plain)
        in_flight(cluster, 1, wanted=lambda plan: replica.plans[0] is not plan)
        cluster.answer(1, fail=True)
        finish(cluster, request(), plain)
