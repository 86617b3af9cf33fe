"""A long and crowded history of a small cluster, drawn from a seed: much goes on at once, and much goes wrong.

What hypothesis draws is short and can be made shorter; this is dense. Each history has a mood of its own: which kinds
of things happen in it, and how often.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from octavo.scheduler.core.admission import has_capacity
from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import (
    CacheReset,
    Event,
    LossCause,
    PrefixesNamed,
    PrefixPinned,
    PrefixUnpinned,
    ReplicaHeard,
    StepAnswered,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.sequence import RequestGroup, SequenceGroup
from octavo.testing.cluster import FRONTEND, Cluster, make_request
from octavo.testing.fakes.drafters import adversary
from octavo.testing.oracles.mechanisms import MechanismWatch, Meetings
from octavo.wire.requests import Prefix, RejectReason, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping

from .alike import alike
from .ending import MISFIT_GRACE_S, come_to_an_end
from .expectations import Expectations, assert_worker_agrees
from .journal import Journal

_NUM_ACTIONS = 120
_CROWD = 7
_MOST_HALVINGS = 5
# Steps that may pass until fewer are there.
_LULL = 20
_MAX_REPLICAS = 3
_PREFIXES = ["north", "south"]
_SALT = "s"
_MISFITS = {RejectReason.TOO_MANY_SEQUENCES, RejectReason.NEVER_FITS_KV}
# Who is preempted is swapped out, as long as there is room; what is computed again takes many steps.
_TIGHT = {"preemption": Preemption.SWAP, "max_num_batched_tokens": 5, "max_num_seqs": 8, "watermark": 0.0}
# Nobody tells here how workers died, so suspects wait for as long; replicas are not lost yet.
_DEATH_GRACE_S = 0.5
# Everything fits on this one, and what waits for a large replica that was lost may wait for it.
_LARGE = 100


class RandomHistory:
    """`run` it once. Raises whatever shows a fault of the core."""

    def __init__(self, directory: Path, seed: int, meetings: Meetings) -> None:
        self._random = random = Random(seed)
        # Some are all about blocks that lack, some about workers that die while they do.
        self._is_tight = random.random() < 0.4
        deadly = random.choice([0, 1, 3]) if self._is_tight else 1
        self._windows = random.choice([(0,), (0,), (0, 5), (4,)])
        self._expectations = Expectations(directory, self._windows)
        self._watch = MechanismWatch(meetings)
        config = _config(random) | (_TIGHT if self._is_tight else {})
        config["death_grace_s"] = _DEATH_GRACE_S
        if self._is_tight:
            # What is found again need not be computed again.
            config["prefix_caching"] = random.random() < 0.5
        # Drawn apart, so that histories with and without drafts are alike.
        config["speculation"] = Random(f"drafts {seed}").choice(["off", 2, 8, 8])
        drafter = adversary(self._windows, seed)
        self._cluster = Cluster(directory, mechanisms=self._watch, drafter=drafter, **config)
        self._journal = Journal(self._cluster, self._expectations)
        self._num_requests = self._num_replicas = 0
        self._num_actions = _NUM_ACTIONS
        self._actions: dict[Callable[[], None], float] = {
            action: weight * random.choice(mood)
            for action, weight, mood in (
                (self._step, 5, [1]),
                (self._schedule, 4, [1]),
                (self._answer, 3, [1]),
                (self._submit, 5, [1]),
                (self._fail, 1, [0, 0, 1, 2] if deadly else [0]),
                (self._starve, 1, [0, 0, 1, 2] if deadly else [0]),
                (self._spoil, 1, [0, 0, 1, 2]),
                (self._fail_chunk, 0.5, [0, 1, 2]),
                (self._abort, 0.5, [0, 1]),
                (self._end_sequence, 0.5, [0, 1]),
                (self._pin, 0.5, [0, 1, 2]),
                (self._unpin, 0.2, [0, 1]),
                (self._reset_cache, 0.4, [0, 1, 2]),
                (self._operate, 1, [0, 0, 1, 2]),
                (self._join, 0.5 * deadly, [2] if deadly > 1 else [0, 1, 2]),
                (self._leave, 0.3, [0, 0, 1]),
                (self._die, 0.8 * deadly, [1, 2] if deadly > 1 else [0, 0, 1, 2]),
                (self._lose_scheduler, 0.3, [0, 0, 1, 2] if deadly else [0]),
            )
        }
        if self._is_tight and random.random() < 0.5:
            self._squeeze()
        elif self._is_tight and random.random() < 0.5:
            self._squeeze_wide()
        else:
            self._join()

    def run(self) -> None:
        for _ in range(self._num_actions):
            (action,) = self._random.choices(list(self._actions), list(self._actions.values()))
            suspects = {group.request_id for group in self._cluster.core.request_table.suspects}
            self._cluster.now += 0.001
            action()
            self._settle(suspects)
        self._end()

    def _settle(self, suspects: set[str]) -> None:
        """Only suspects end by the death of a worker."""
        rejected = self._cluster.rejected
        for name, rejection in list(rejected.items()):
            assert rejection.reason is RejectReason.QUARANTINED, f"{name}: {rejection}"
            assert name in suspects
            del rejected[name], self._journal.requests[name]
        for incarnation, worker in self._cluster.replicas.items():
            assert_worker_agrees(self._cluster.core.replicas[incarnation], worker)

    def _end(self) -> None:
        """All that is wanted comes, once nothing more goes wrong, or is told that it fits nowhere."""
        cluster = self._cluster
        replicas = cluster.core.replicas.values()
        if not replicas or (
            self._random.random() < 0.5
            and not all(any(has_capacity(group.request, each) for each in replicas) for group in cluster.core.groups)
        ):
            self._add_replica(_LARGE, 4, 0)
        cluster.tick(_DEATH_GRACE_S)
        come_to_an_end(cluster, self._journal, max_steps=3000)
        self._settle(set())
        self._journal.assert_all_came()
        for _ in range(100):
            cluster.step()
            if not any(
                each.prefixes.to_compute or each.running or each.outstanding for each in cluster.core.replicas.values()
            ):
                break
        for replica in cluster.core.replicas.values():
            assert replica.kv.num_free + replica.kv.num_pinned == replica.kv.num_blocks
            assert replica.kv.num_cpu_free == replica.kv.num_cpu_blocks

    # -- steps ------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        for _ in range(self._random.randint(1, 6 if self._is_tight else 3)):
            self._cluster.step()

    def _schedule(self) -> None:
        self._cluster.schedule()

    def _busy(self) -> int | None:
        busy = sorted(incarnation for incarnation, replica in self._cluster.replicas.items() if replica.plans)
        return self._random.choice(busy) if busy else None

    def _answer(self) -> None:
        if incarnation := self._busy():
            self._cluster.answer(incarnation)

    def _fail(self) -> None:
        self._schedule()
        if incarnation := self._busy():
            self._cluster.answer(incarnation, fail=True)

    def _starve(self) -> None:
        """While anybody is swapped out, until steps are as small as they can be."""
        is_swapped = any(replica.swapped for replica in self._cluster.core.replicas.values())
        for _ in range(_MOST_HALVINGS if is_swapped else 1):
            self._schedule()
            if incarnation := self._busy():
                result = self._cluster.replicas[incarnation].execute(starve=True)
                self._cluster.handle(StepAnswered(incarnation, result))

    def _spoil(self) -> None:
        """It alone may end by that."""
        self._schedule()
        cluster = self._cluster
        incarnation = self._busy()
        if incarnation is None:
            return
        groups = cluster.core.replicas[incarnation].outstanding[0].groups
        held = [group for group in groups if isinstance(group, RequestGroup) and not group.is_finished]
        if not held:
            return
        self._spoil_group(incarnation, self._random.choice(held), self._random.choice(["spoil", "spoil_output"]))

    def _spoil_group(self, incarnation: int, group: SequenceGroup, what: str) -> None:
        cluster = self._cluster
        how: dict[str, Any] = {what: {each.placement.sequence_id for each in group.live}}
        cluster.handle(StepAnswered(incarnation, cluster.replicas[incarnation].execute(**how)))
        if rejection := cluster.rejected.pop(group.request_id, None):
            assert rejection.reason is RejectReason.NOT_FINITE
            del self._journal.requests[group.request_id]

    def _fail_chunk(self) -> None:
        """A prompt fails between two of its chunks, and another may have built on the second already."""
        cluster, random = self._cluster, self._random
        # In a crowd they would not come to run side by side.
        for _ in range(_LULL):
            if len(cluster.groups) > 1:
                cluster.step()
        while incarnation := self._busy():
            cluster.answer(incarnation)
        names = f"r{self._num_requests + 1}", f"r{self._num_requests + 2}"
        self._num_requests += 2
        length = cluster.core.config.token_budget("fake") + random.randint(1, 4)
        for request in alike(names, length, random.randint(1, 4), self._num_requests):
            rejection = self._journal.submit(request)
            assert rejection is None or rejection.reason in _MISFITS, rejection
            cluster.schedule()
        group = cluster.groups.get(names[0])
        for incarnation, worker in list(cluster.replicas.items()):
            if group and worker.plans and group in cluster.core.replicas[incarnation].outstanding[0].groups:
                self._spoil_group(incarnation, group, random.choice(["spoil", "spoil_output", "spoil_output"]))

    # -- requests ---------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        for _ in range(self._random.randint(1, 3)):
            if len(self._cluster.groups) < _CROWD:
                rejection = self._journal.submit(self._request())
                assert rejection is None or rejection.reason in _MISFITS, rejection

    def _request(self) -> Request:
        random = self._random
        self._num_requests += 1
        decoding: dict[str, Any] = random.choice(
            [
                *[{}] * (3 if self._is_tight else 1),
                {
                    "num_sequences": random.randint(2, 2 if self._is_tight else 4),
                    "temperature": random.choice([0.0, 1.0]),
                },
                {"beam": BeamSearch(random.randint(2, 3), 1.0, random.choice(list(EarlyStopping)))},
            ]
        )
        prompt = random.choice([1, 4, 9, 12] if self._is_tight else [1, 4, 5, 9, 12])
        lengths = ([4, 12, 20 - prompt], [3, 4]) if self._is_tight else ([1, 5, 10, 15], [1, 4, 6])
        return make_request(
            f"r{self._num_requests}",
            prompt,
            random.choice(lengths[bool(decoding)]),
            shared=min(prompt, random.choice([0, 3, 6, 9, 12, 12])),
            priority=random.choice([-1, 0, 0, 1]),
            tenant=random.choice(["", "", "heavy"]),
            salt=random.choice(["", "", "", _SALT]),
            **decoding,
        )

    def _squeeze(self) -> None:
        """The last to come is preempted, and too large to be swapped out; as soon as another ends it comes back, and is
        soon in the way again."""
        random = self._random
        self._add_replica(random.randint(22, 40), 1, random.randint(2, 6))
        for prompt, count in ((2, 18), (2, 18), (2, random.randint(4, 12)), (random.randint(5, 9), 8)):
            self._num_requests += 1
            rejection = self._journal.submit(make_request(f"r{self._num_requests}", prompt, count))
            assert rejection is None, rejection
        for _ in range(random.randint(6, 30)):
            self._cluster.step()

    def _squeeze_wide(self) -> None:
        """A group of several sequences is swapped out for one that came before it; and perhaps steps are too small for
        all of it when it is to come back."""
        random, num_sequences = self._random, self._random.randint(2, 3)
        self._add_replica(7 * num_sequences + 1, 1, 7 * num_sequences)
        self._num_requests += 2
        first = make_request(f"r{self._num_requests - 1}", 2, 12)
        wide = make_request(f"r{self._num_requests}", 1, 6, num_sequences=num_sequences, temperature=1.0)
        for request in (first, wide):
            rejection = self._journal.submit(request)
            assert rejection is None or rejection.reason in _MISFITS, rejection
        (replica,) = self._cluster.core.replicas.values()
        for _ in range(12):
            if not replica.swapped:
                self._cluster.step()
        if random.random() < 0.7:
            self._starve()
            # What was lost later would hide what never comes back.
            self._num_actions = random.choice([0, 10, _NUM_ACTIONS])

    def _held(self) -> str | None:
        names = sorted(self._cluster.groups)
        return self._random.choice(names) if names else None

    def _abort(self) -> None:
        if name := self._held():
            self._journal.abort(name)

    def _end_sequence(self) -> None:
        parallel = sorted(name for name, group in self._cluster.groups.items() if len(group.live) > 1)
        if parallel:
            self._journal.end(self._random.choice(parallel), self._random.randint(0, 2), stale=False)

    # -- prefixes ---------------------------------------------------------------------------------------------------

    def _pin(self) -> None:
        prefix = Prefix(self._random.choice(_PREFIXES), list(range(self._random.randint(1, 9))))
        if self._cluster.core.pin_refusal(prefix) is None:
            self._cluster.handle(PrefixPinned(prefix))

    def _unpin(self) -> None:
        if prefixes := self._cluster.core.prefixes.all:
            self._cluster.handle(PrefixUnpinned(self._random.choice(prefixes).name))

    def _reset_cache(self) -> None:
        self._cluster.handle(CacheReset(self._random.choice([None, None, _SALT])))

    # -- replicas ---------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        if len(self._cluster.replicas) < _MAX_REPLICAS:
            block_size = self._random.choice([1, 2, 2, 3, 4])
            # Some that come are smaller than whoever was there, and than what was accepted then.
            num_tokens = self._random.randint(8, 20) if self._random.random() < 0.35 else self._random.randint(24, 40)
            self._add_replica(num_tokens // block_size + 1, block_size, self._random.choice([0, 5, 12]))

    def _add_replica(self, num_blocks: int, block_size: int, num_cpu_blocks: int) -> None:
        self._num_replicas += 1
        num_groups = len(self._windows)
        self._cluster.join(
            self._num_replicas,
            num_blocks=num_blocks * num_groups,
            block_size=block_size,
            num_cpu_blocks=min(num_blocks, num_cpu_blocks) * num_groups,
            windows=self._windows,
        )

    def _any_replica(self) -> int | None:
        return self._random.choice(sorted(self._cluster.replicas)) if self._cluster.replicas else None

    def _operate(self) -> None:
        incarnation = self._any_replica()
        if incarnation is None:
            return
        worker_id = f"worker-{incarnation}"
        events: list[Event] = [
            WorkerCordoned(worker_id),
            WorkerCordoned(worker_id),
            WorkerDrained(worker_id, 0.02),
            WorkerDrained(worker_id, 0.0),
            ReplicaHeard(incarnation, draining=True),
            WorkerReadmitted(worker_id),
            WorkerReadmitted(worker_id),
        ]
        self._cluster.handle(self._random.choice(events))

    def _leave(self) -> None:
        if incarnation := self._any_replica():
            self._cluster.leave(incarnation)
            self._replace()

    def _die(self) -> None:
        self._schedule()
        if incarnation := self._any_replica():
            self._cluster.leave(incarnation, LossCause.UNREACHABLE)
            self._replace()

    def _replace(self) -> None:
        if not self._cluster.replicas:
            self._join()

    def _lose_scheduler(self) -> None:
        core = self._cluster.core
        self._watch.scheduler_lost(core)
        self._cluster.begin(core.config, core.epoch + 1)
        self._cluster.replicas.clear()
        self._journal.join()
        self._cluster.handle(PrefixesNamed(FRONTEND, core.prefixes.all))
        self._join()
        self._journal.renew()


def _config(random: Random) -> dict[str, Any]:
    return {
        "policy": random.choice([Policy.CHUNKED, Policy.CHUNKED, Policy.PAPER]),
        "preemption": random.choice(list(Preemption)),
        "max_steps_in_flight": random.choice([1, 2, 2, 2]),
        "max_num_batched_tokens": random.choice([4, 6, 9, 16, 16]),
        "max_num_seqs": random.choice([4, 8, 8]),
        "watermark": random.choice([0.0, 0.0, 0.1]),
        "prefix_caching": random.random() < 0.8,
        "priority_ageing_s": random.choice([0.0, 0.002, 0.002]),
        "overtaking_s": random.choice([0.0, 1.0, 1.0]),
        "drain_grace_s": random.choice([0.0, 0.01]),
        "max_pinned_share": 0.5,
        "tenant_weights": {"heavy": 3.0},
        # Nothing may fail so often that it is given up: all that is wanted is to come.
        "max_failed_steps": 10**6,
        "max_memory_failures": 10**6,
        # Different requests may ask for the same.
        "quarantine_s": 0.0,
        "misfit_grace_s": MISFIT_GRACE_S,
    }
