"""Any order of submissions, ends, steps, failures of steps and of sequences, losses, drains and pins, under any
configuration: no block leaks, no token changes, and all that is wanted ends."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.scheduler.core.admission import has_capacity
from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import (
    CacheReset,
    Event,
    LossCause,
    PrefixesNamed,
    PrefixPinned,
    PrefixUnpinned,
    PullAnswered,
    ReplicaHeard,
    StepAnswered,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.testing.cluster import FRONTEND, Cluster, make_request, write_fake_model
from octavo.testing.fakes.drafters import adversary
from octavo.testing.oracles.paged import paged
from octavo.wire.requests import PinRefused, Prefix, RejectReason, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.wire.steps import BlocksPulled

from ..alike import alike
from ..ending import MISFIT_GRACE_S, come_to_an_end, put_away_misfits
from ..expectations import Expectations, assert_worker_agrees
from ..journal import Journal
from ..plain_block_map import assert_block_map_agrees

# Hypothesis makes the machine itself, so no fixture can hand it a directory.
_MODEL = write_fake_model(Path(tempfile.mkdtemp(prefix="octavo-model-")))
atexit.register(shutil.rmtree, _MODEL)
_FEW_EXAMPLES = 50
_EXAMPLES = 200 * int(os.environ.get("OCTAVO_TEST_LONG", "1"))
_WINDOWS = [(0,), (0,), (0, 5), (4,), (3, 6)]
_NAMES = ["north", "south"]

# Nobody tells here how workers died, so suspects wait for as long; less than leases and replicas are given.
DEATH_GRACE_S = 0.5
configs = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(Policy),
        "preemption": st.sampled_from(Preemption),
        "max_steps_in_flight": st.integers(1, 2),
        "max_num_batched_tokens": st.sampled_from([2, 3, 6, 9, 16]),
        "max_num_seqs": st.sampled_from([3, 8, 8]),
        "watermark": st.sampled_from([0.0, 0.0, 0.1, 0.3]),
        "speculation": st.sampled_from(["off", 1, 3, 8]),
        "prefix_caching": st.booleans(),
        "delay_factor": st.sampled_from([0.0, 1.0]),
        "priority_ageing_s": st.sampled_from([0.0, 0.002]),
        "overtaking_s": st.sampled_from([0.0, 1.0]),
        "drain_grace_s": st.sampled_from([0.0, 0.01]),
        "max_pinned_share": st.sampled_from([0.25, 0.5]),
        "misfit_grace_s": st.just(MISFIT_GRACE_S),
        "tenant_weights": st.just({"heavy": 3.0}),
        # No step may fail often enough to be given up: every request is expected to finish.
        "max_failed_steps": st.just(10**6),
        "max_memory_failures": st.just(10**6),
        # Different requests of this test may ask for the same.
        "quarantine_s": st.just(0.0),
        "death_grace_s": st.just(DEATH_GRACE_S),
    }
)
beams = st.builds(
    BeamSearch,
    width=st.integers(2, 3),
    length_penalty=st.sampled_from([0.5, 1.0, -1.0]),
    early_stopping=st.sampled_from(EarlyStopping),
)
ways_to_decode: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"num_sequences": st.integers(2, 3), "temperature": st.sampled_from([0.0, 1.0])}),
    st.fixed_dictionaries({"beam": beams}),
)


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, Any]:
    """What `make_request` is told, and whether a stop token is to end the request half-way."""
    decoding = draw(ways_to_decode)
    prompt = draw(st.sampled_from([1, 4, 5, 9]))
    return {
        "prompt_length": prompt,
        "max_tokens": draw(st.sampled_from([1, 4, 6] if decoding else [1, 5, 10, 15])),
        "shared": min(prompt, draw(st.sampled_from([0, 3, 6, 9]))),
        "stops": draw(st.booleans()),
        "priority": draw(st.integers(-1, 1)),
        "tenant": draw(st.sampled_from(["", "heavy"])),
        "salt": draw(st.sampled_from(["", "", "s"])),
        "logprobs": None if "beam" in decoding else draw(st.sampled_from([None, 1])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
        # Microseconds that it takes.
        "grammar": draw(st.sampled_from(["", "", "60", "2000", "20000"])),
        **decoding,
    }


class SchedulerMachine(RuleBasedStateMachine):
    """One frontend and one or two small replicas; `Cluster` checks the invariants after every event."""

    cluster: Cluster
    make_cluster: type[Cluster] = Cluster

    @initialize(
        config=configs,
        windows=st.sampled_from(_WINDOWS),
        are_read=st.sampled_from([True, True, False]),
        wanted=st.lists(wishes(), min_size=3, max_size=6),
    )
    def start(
        self, config: dict[str, Any], windows: tuple[int, ...], are_read: bool, wanted: list[dict[str, Any]]
    ) -> None:
        self.windows = windows
        # Workers copy each other's blocks.
        self.are_read = are_read
        self.expectations = Expectations(_MODEL, windows)
        self.cluster = self.make_cluster(_MODEL, drafter=adversary(windows), **config)
        self.journal = Journal(self.cluster, self.expectations)
        self.num_replicas = self.num_requests = 0
        self.join(num_blocks=12, block_size=2, num_cpu_blocks=5)
        self.submit(wanted)

    # -- replicas ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.cluster.replicas) < 2)
    @rule(
        num_blocks=st.integers(5, 22),
        block_size=st.sampled_from([1, 2, 2, 3]),
        num_cpu_blocks=st.integers(0, 10),
        hit_rate=st.sampled_from([None, 0.0, 0.7, 1.0]),
    )
    def join(self, num_blocks: int, block_size: int, num_cpu_blocks: int, hit_rate: float | None = 0.7) -> None:
        self.num_replicas += 1
        self.cluster.join(
            self.num_replicas,
            num_blocks=num_blocks * len(self.windows),
            block_size=block_size,
            num_cpu_blocks=min(num_blocks, num_cpu_blocks) * len(self.windows),
            windows=self.windows,
            draft_hit_rate=hit_rate,
            is_read=self.are_read,
        )

    @precondition(lambda self: self.are_read and self.cluster.replicas)
    @rule(longer=st.integers(1, 6), tokens=st.integers(1, 6), salt=st.sampled_from(["", "", "s"]))
    def copy_prefix(self, longer: int, tokens: int, salt: str) -> None:
        """A worker gets a prompt of which another one, which gets nothing new, has computed most."""
        if len(self.cluster.replicas) < 2:
            self.join(num_blocks=18, block_size=2, num_cpu_blocks=12)
        first, second = sorted(self.cluster.replicas)[-2:]
        self.num_requests += 2
        for number, (taker, other) in enumerate([(first, second), (second, first)]):
            self.cluster.handle(WorkerReadmitted(f"worker-{taker}"))
            self.cluster.handle(WorkerCordoned(f"worker-{other}"))
            name, length = f"r{self.num_requests - 1 + number}", 9 + number * longer
            request = make_request(name, length, tokens, shared=9, salt=salt)
            if rejection := self.journal.submit(request):
                self._assert_misfit(request, rejection.reason)
            for _ in range(0 if number else 6):
                self.cluster.step()
        self.schedule()

    @precondition(lambda self: self._pulling())
    @rule(data=st.data(), comes=st.sampled_from([True, True, False]))
    def pull(self, data: st.DataObject, comes: bool) -> None:
        """Blocks of another worker have come, or do not."""
        incarnation = data.draw(st.sampled_from(self._pulling()))
        if comes:
            self.cluster.pull(incarnation)
        else:
            pull = self.cluster.replicas[incarnation].to_pull.popleft()
            answer = BlocksPulled(pull.epoch, incarnation, pull.pull_id, is_complete=False)
            self.cluster.handle(PullAnswered(incarnation, answer))

    def _pulling(self) -> list[int]:
        return sorted(incarnation for incarnation, replica in self.cluster.replicas.items() if replica.may_pull)

    @precondition(lambda self: self.cluster.replicas)
    @rule(data=st.data(), what=st.sampled_from(["cordon", "drain", "move", "end", "readmit", "readmit"]))
    def operate(self, data: st.DataObject, what: str) -> None:
        """A worker gets nothing new, or is let go, or gets requests again."""
        incarnation = data.draw(st.sampled_from(sorted(self.cluster.replicas)))
        worker_id = f"worker-{incarnation}"
        events: dict[str, Event] = {
            "cordon": WorkerCordoned(worker_id),
            "drain": WorkerDrained(worker_id, 0.02),
            "move": WorkerDrained(worker_id, 0.0),
            "end": ReplicaHeard(incarnation, draining=True),
            "readmit": WorkerReadmitted(worker_id),
        }
        self.cluster.handle(events[what])
        if what == "move" and incarnation in self.cluster.replicas:
            self._assert_moves(self.cluster.core.replicas[incarnation])

    def _assert_moves(self, replica: Replica) -> None:
        """What a replica keeps that is to be empty is in a step, or fits nowhere else."""
        if not replica.outstanding:
            homes = [other for other in self.cluster.core.replicas.values() if other.is_ready]
            left = [group for group in replica.requests if group not in replica.moving]
            assert not any(has_capacity(group.request, home) for group in left for home in homes)

    @rule()
    def schedule(self) -> None:
        self.cluster.now += 0.001
        self.cluster.schedule()

    @precondition(lambda self: self._busy())
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "well", "well", "fail", "starve"]))
    def answer(self, data: st.DataObject, how: str) -> None:
        incarnation = data.draw(st.sampled_from(self._busy()))
        result = self.cluster.replicas[incarnation].execute(fail=how == "fail", starve=how == "starve")
        self.cluster.handle(StepAnswered(incarnation, result))

    @rule(data=st.data(), is_kv_sound=st.booleans())
    def spoil(self, data: st.DataObject, is_kv_sound: bool) -> None:
        """A request that is computed in the next answer gets NaN there, or only what comes of it at its end is NaN; it
        alone may end by that."""
        self.schedule()
        held = set(self.cluster.core.groups)
        computed = [(i, group) for i in self._busy() for group in self.cluster.core.replicas[i].outstanding[0].groups]
        if not held.intersection(group for _, group in computed):
            return
        self._spoil(*data.draw(st.sampled_from([pair for pair in computed if pair[1] in held])), is_kv_sound)

    @rule(above=st.integers(1, 4), longer=st.integers(1, 4), is_kv_sound=st.sampled_from([True, True, False]))
    def fail_chunk(self, above: int, longer: int, is_kv_sound: bool) -> None:
        """A prompt fails between two of its chunks, and another may have built on the second already."""
        # In a crowd they would not come to run side by side.
        for _ in range(10):
            if len(self.cluster.groups) > 1:
                self.cluster.step()
        for incarnation in self._busy():
            while incarnation in self.cluster.replicas and self.cluster.replicas[incarnation].plans:
                self.cluster.answer(incarnation)
        length = self.cluster.core.config.token_budget("fake") + above
        self.num_requests += 2
        names = f"r{self.num_requests - 1}", f"r{self.num_requests}"
        for request in alike(names, length, longer, self.num_requests):
            if rejection := self.journal.submit(request):
                self._assert_misfit(request, rejection.reason)
            self.schedule()
        group = self.cluster.groups.get(names[0])
        for incarnation in self._busy():
            if group and group in self.cluster.core.replicas[incarnation].outstanding[0].groups:
                self._spoil(incarnation, group, is_kv_sound)

    def _spoil(self, incarnation: int, group: SequenceGroup, is_kv_sound: bool) -> None:
        spoiled = {each.placement.sequence_id for each in group.live}
        how: dict[str, Any] = {"spoil_output" if is_kv_sound else "spoil": spoiled}
        self.cluster.handle(StepAnswered(incarnation, self.cluster.replicas[incarnation].execute(**how)))
        if rejection := self.cluster.rejected.pop(group.request_id, None):
            assert rejection.reason is RejectReason.NOT_FINITE
            del self.journal.requests[group.request_id]

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.cluster.step()
            self.workers_agree()

    # -- requests ---------------------------------------------------------------------------------------------------

    @rule(wanted=st.lists(wishes(), min_size=1, max_size=4))
    def submit(self, wanted: list[dict[str, Any]]) -> None:
        for wish in wanted:
            self.cluster.now += 0.001
            request = self._request(**wish)
            if rejection := self.journal.submit(request):
                self._assert_misfit(request, rejection.reason)

    def _request(self, *, stops: bool, **wish: Any) -> Request:
        self.num_requests += 1
        request = make_request(f"r{self.num_requests}", **wish)
        if not stops:
            return request
        tokens = self.expectations.outputs(request)[0]
        return make_request(request.request_id, **wish, stop_token_ids=(tokens[len(tokens) // 2],))

    @precondition(lambda self: self.cluster.groups)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.journal.abort(self._draw_held(data))

    @precondition(lambda self: self.cluster.groups)
    @rule(data=st.data(), index=st.integers(0, 2), stale=st.sampled_from([False, False, True]))
    def end_sequence(self, data: st.DataObject, index: int, stale: bool) -> None:
        # Of one that is alone it is much the same as an abort.
        parallel = sorted(name for name, group in self.cluster.groups.items() if len(group.live) > 1)
        request_id = data.draw(st.sampled_from(parallel)) if parallel else self._draw_held(data)
        self.journal.end(request_id, index, stale=stale)

    @rule()
    def renew(self) -> None:
        self.journal.renew()

    @precondition(lambda self: self.cluster.groups)
    @rule(data=st.data(), lost=st.booleans())
    def submit_again(self, data: st.DataObject, lost: bool) -> None:
        """What the frontend only fears lost, or learns that it is."""
        request_id = self._draw_held(data)
        if lost:
            self.cluster.abort(request_id)
            self.journal.renew()
        else:
            self.journal.submit_again(request_id)

    # -- prefixes ---------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(_NAMES), length=st.integers(1, 9), named=st.booleans())
    def pin(self, name: str, length: int, named: bool) -> None:
        prefix = Prefix(name, list(range(length)))
        is_known = self.cluster.core.prefixes.get(name) == prefix
        refusal = self.cluster.core.pin_refusal(prefix)
        if named or refusal:
            self.cluster.handle(PrefixesNamed(FRONTEND, [prefix]))
            assert is_known or isinstance(self.cluster.to_frontend[-1], PinRefused) == bool(refusal)
        else:
            self.cluster.handle(PrefixPinned(prefix))

    @precondition(lambda self: self.cluster.core.prefixes.all)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        names = [prefix.name for prefix in self.cluster.core.prefixes.all]
        self.cluster.handle(PrefixUnpinned(data.draw(st.sampled_from(names))))

    @rule(salt=st.sampled_from([None, None, "s"]))
    def reset_cache(self, salt: str | None) -> None:
        """Nothing from before is found again, which the cluster watches; all that runs goes on with its blocks."""
        found = self.cluster.core.state.count_cached(salt)
        held = {
            group: [paged(replica).block_table(each) for each in group.holders]
            for replica in self.cluster.core.replicas.values()
            for group in replica.requests
        }
        self.cluster.handle(CacheReset(salt))
        assert 0 <= found.num_in_use <= found.num_blocks
        for replica in self.cluster.core.replicas.values():
            for group in replica.requests:
                assert [paged(replica).block_table(each) for each in group.holders] == held[group]

    # -- time and loss ----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        """Replicas that go without work or sign for 1.5 s, or too long with a step, count as lost."""
        self.journal.renew()
        suspects = self._suspects()
        self.cluster.tick(seconds)
        self._put_away(suspects)

    @rule(
        data=st.data(),
        loss=st.sampled_from(["replica", "death", "death", "astray", "lease", "scheduler"]),
        num_blocks=st.sampled_from([6, 9, 14]),
    )
    def lose(self, data: st.DataObject, loss: str, num_blocks: int) -> None:
        """One process at a time; what is wanted goes on all the same, if what comes in its place is large enough."""
        suspects = self._suspects()
        match loss:
            case "replica" if self.cluster.replicas:
                self.cluster.leave(data.draw(st.sampled_from(sorted(self.cluster.replicas))))
            case "death" if self.cluster.replicas:
                self.schedule()
                self.cluster.leave(data.draw(st.sampled_from(sorted(self.cluster.replicas))), LossCause.UNREACHABLE)
            case "astray" if self._busy():
                self._go_astray(data.draw(st.sampled_from(self._busy())))
            case "lease":
                self.cluster.tick(6.0)
                assert not self.cluster.groups
                self.journal.join()
            case "scheduler":
                self._restart_scheduler()
        self._put_away(suspects)
        if not self.cluster.replicas:
            self.join(num_blocks=num_blocks, block_size=2, num_cpu_blocks=5)
        self.journal.renew()

    def _suspects(self) -> set[str]:
        return {group.request_id for group in self.cluster.core.request_table.suspects}

    def _put_away(self, suspects: set[str]) -> None:
        """Only `suspects` end by the death of a worker."""
        rejected = self.cluster.rejected
        guilty = [name for name, each in rejected.items() if each.reason is RejectReason.QUARANTINED]
        assert suspects.issuperset(guilty)
        for name in guilty:
            del rejected[name], self.journal.requests[name]
        put_away_misfits(self.cluster, self.journal)

    def _go_astray(self, incarnation: int) -> None:
        """A replica answers what it was not asked."""
        result = self.cluster.replicas[incarnation].execute()
        wrong = msgspec.structs.replace(result, step_id=result.step_id + 1)
        self.cluster.handle(StepAnswered(incarnation, wrong))
        assert incarnation not in self.cluster.replicas

    def _restart_scheduler(self) -> None:
        core = self.cluster.core
        self.cluster.begin(core.config, core.epoch + 1)
        self.cluster.replicas.clear()
        self.journal.join()
        self.cluster.handle(PrefixesNamed(FRONTEND, core.prefixes.all))

    def _busy(self) -> list[int]:
        return sorted(incarnation for incarnation, replica in self.cluster.replicas.items() if replica.plans)

    def _draw_held(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.cluster.groups)))

    # -- what must be true ------------------------------------------------------------------------------------------

    @invariant()
    def nobody_fails_for_another(self) -> None:
        assert not self.cluster.rejected

    @invariant()
    def workers_agree(self) -> None:
        for incarnation, worker in self.cluster.replicas.items():
            assert_worker_agrees(self.cluster.core.replicas[incarnation], worker)

    @invariant()
    def every_block_is_mapped(self) -> None:
        for replica in self.cluster.core.replicas.values():
            assert_block_map_agrees(replica)

    def _assert_misfit(self, request: Request, reason: RejectReason) -> None:
        core, parallel = self.cluster.core, request.sampling.parallel
        if reason is RejectReason.TOO_MANY_SEQUENCES:
            assert parallel > core.config.max_parallel
            return
        assert reason is RejectReason.NEVER_FITS_KV
        longest = len(request.prompt_token_ids) + request.sampling.max_tokens
        for replica in core.replicas.values():
            pinned = sum(replica.kv.blocks_for(len(prefix.token_ids)) for prefix in core.prefixes.all)
            assert parallel * replica.kv.blocks_for(longest) > replica.kv.num_blocks - pinned

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        core = self.cluster.core
        self.wait(DEATH_GRACE_S)
        homeless = [g for g in core.groups if not any(has_capacity(g.request, r) for r in core.replicas.values())]
        if homeless and (self.num_requests % 2 or not core.replicas):
            # What waits for a large replica that was lost finds one; or else it is told, and all others come.
            self.join(num_blocks=100, block_size=4, num_cpu_blocks=0)
        self._run()
        self.journal.assert_all_came()
        for replica in core.replicas.values():
            assert all(name in replica.kv.pinned for name in replica.prefixes.names)
            assert replica.kv.num_free + replica.kv.num_pinned == replica.kv.num_blocks
            assert replica.kv.num_cpu_free == replica.kv.num_cpu_blocks

    def _run(self) -> None:
        come_to_an_end(self.cluster, self.journal, max_steps=1500)
        for _ in range(100):
            self.cluster.step()
            self.workers_agree()
            replicas = self.cluster.core.replicas.values()
            if not self._busy() and not any(replica.prefixes.to_compute or replica.running for replica in replicas):
                return
        raise AssertionError("a prefix is never computed")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=_FEW_EXAMPLES, stateful_step_count=30, derandomize=True, deadline=None
)


@pytest.mark.deep
def test_many_more_histories() -> None:
    many = settings(max_examples=_EXAMPLES, stateful_step_count=30, derandomize=True, deadline=None)
    run_state_machine_as_test(SchedulerMachine, settings=many)
