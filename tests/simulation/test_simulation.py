"""Hundreds of runs of everything together, with faults: nothing is lost, repeated, mixed up or kept."""

from itertools import count, islice
from pathlib import Path

import pytest

from octavo.frontend.scheduler.session import LiveRequest, SchedulerSession
from octavo.scheduler.server.event_log import Began, Record, replay
from octavo.testing.simulation.campaign import Campaign, outcomes, report
from octavo.testing.simulation.faults import FAULTS
from octavo.testing.simulation.run import simulate
from octavo.testing.simulation.scenario import draw
from octavo.testing.simulation.watch import Watch
from octavo.wire.requests import FromFrontend

NUM_SEEDS, NUM_SEEDS_DEEP = 50, 200
_FREQUENT = 100
KINDS = ("greedy", "sampled", "parallel", "best of", "beam search")
# About a third of what 500 seeds bring: a simulation in which nothing happens would prove nothing. Fewer seeds need
# bring their share of what is frequent only.
AT_LEAST = {
    **{f"fault: {fault.__name__}": 15 for fault in FAULTS},
    **{f"served: {kind}": 130 for kind in KINDS},
    **{f"served after a preemption: {kind}": 35 for kind in KINDS},
    **{f"served after a swap: {kind}": 2 for kind in KINDS},
    **{"served with a prefix hit": 140, "served with prompt logprobs": 110, "cancelled": 250, "aborts lost": 70},
    **{"preemptions": 100, "swaps": 25, "forks": 1800, "copies": 1300, "remaps": 1300, "windows passed": 130},
    **{"SequenceEnded": 70, "PrefixPinned": 12, "PrefixUnpinned": 12},
    **{"WorkerCordoned": 35, "WorkerDrained": 45, "WorkerReadmitted": 40, "replicas dismissed": 40},
    **{"connection lost": 230, "message lost": 45, "message doubled": 45, "message overtaken": 45},
    **{"steps failed": 40, "steps skipped": 40, "steps out_of_memory": 50},
    **{
        "replicas lost": 140,
        "replicas lost: unreachable": 50,
        "replicas lost: overdue": 50,
        "replicas lost: broken": 1,
    },
    **{"workers died": 40, "workers hung": 30, "workers refused": 18, "workers left": 12, "workers dismissed": 40},
    **{"frontends lost": 30, "frontends refused": 13},
    **{"resubmissions": 130, "resubmissions with tokens": 60},
    **{"sequences spoiled": 70, "failed: LOGITS_NOT_FINITE": 25},
    **{"told: queued": 1000, "told: preempted": 230, "told: worker_lost": 240, "told: resumed": 1000},
    **{
        "failed: QUEUE_TIMEOUT": 45,
        "failed: STEP_FAILED": 14,
        "failed: QUEUE_FULL": 45,
        "failed: SCHEDULER_UNREACHABLE": 8,
        "failed: NEVER_FITS_KV": 8,
        "failed: OUT_OF_MEMORY": 5,
        "failed: QUARANTINED": 50,
    },
}


@pytest.fixture(scope="module", params=[NUM_SEEDS, pytest.param(NUM_SEEDS_DEEP, marks=pytest.mark.deep)])
def num_seeds(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def campaign(num_seeds: int) -> Campaign:
    campaign = Campaign()
    for outcome in outcomes(range(num_seeds)):
        campaign.add(outcome)
    return campaign


def test_whatever_fails_every_client_is_served_right(campaign: Campaign, num_seeds: int) -> None:
    assert campaign.num_runs == num_seeds
    failed = campaign.failed
    assert not failed, f"{report(failed[0])}\nfailed seeds: {[outcome.seed for outcome in failed]}"


def test_everything_has_happened(campaign: Campaign, num_seeds: int) -> None:
    share, least = num_seeds / 500, 1 if num_seeds == NUM_SEEDS_DEEP else _FREQUENT
    wanted = {what: count * share for what, count in AT_LEAST.items() if count >= least}
    rare = {what: found for what, count in wanted.items() if (found := campaign.counts[what]) < count}
    assert not rare, "these happened too seldom for the simulation to say anything of them"


def test_a_seed_always_brings_the_same_run(directory: Path) -> None:
    """In other processes too, where strings and objects hash differently."""
    seeds = range(8)
    here = [simulate(seed, directory, hashing=True).digest for seed in seeds]
    assert here == [outcome.digest for outcome in outcomes(seeds, hashing=True)]
    assert len(set(here)) == len(seeds)


def test_a_recorded_scheduler_plans_the_same_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[list[Record]] = []
    record = Watch.record

    def keep(watch: Watch, entry: Record) -> None:
        if isinstance(entry, Began):
            lives.append([])
        lives[-1].append(entry)
        record(watch, entry)

    monkeypatch.setattr(Watch, "record", keep)
    for seed in range(12):
        assert simulate(seed, directory).failure is None
    replays = [replay(iter(life)) for life in lives]
    assert [each.difference for each in replays] == [None] * len(lives)
    assert sum(each.plans for each in replays) > 500


def test_a_cancellation_that_is_never_said_is_found_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next renewal, which no longer names the request: in calm runs within the time of a lease."""

    def forget(session: SchedulerSession, request: LiveRequest) -> list[FromFrontend]:
        session.live.pop(request.journal.request_id, None)
        return []

    monkeypatch.setattr(SchedulerSession, "release", forget)
    cancelled = 0
    for seed in islice((seed for seed in count() if draw(seed, directory).is_calm), 24):
        outcome = simulate(seed, directory)
        cancelled += outcome.counts["cancelled"]
        assert outcome.failure is None, report(outcome)
    assert cancelled > 20
