"""Hundreds of runs of everything together, with faults: nothing is lost, repeated, mixed up or kept."""

from pathlib import Path

import pytest

from octavo.frontend.scheduler_session import LiveRequest, SchedulerSession
from octavo.scheduler.event_log import Began, Record, replay
from octavo.testing.simulation.campaign import Campaign, outcomes, report
from octavo.testing.simulation.faults import FAULTS
from octavo.testing.simulation.run import simulate
from octavo.testing.simulation.watch import Watch
from octavo.wire.requests import FromFrontend

NUM_SEEDS = 500
KINDS = ("greedy", "sampled", "parallel", "best of", "beam search")
# About a third of what these seeds bring: a simulation in which nothing happens would prove nothing.
AT_LEAST = {
    **{f"fault: {fault.__name__}": 40 for fault in FAULTS},
    **{f"served: {kind}": 150 for kind in KINDS},
    **{f"served after a preemption: {kind}": 45 for kind in KINDS},
    **{f"served after a swap: {kind}": 4 for kind in KINDS},
    **{"served with a prefix hit": 160, "served with prompt logprobs": 120, "cancelled": 250},
    **{"preemptions": 100, "swaps": 40, "forks": 2000, "copies": 1500, "remaps": 1500, "windows passed": 180},
    **{"SequenceEnded": 100, "PrefixPinned": 15, "PrefixUnpinned": 15},
    **{"connection lost": 230, "message lost": 45, "message doubled": 45, "message overtaken": 45},
    **{"steps failed": 120, "steps skipped": 45, "replicas lost": 140, "frontends lost": 40},
    **{"resubmissions": 200, "resubmissions with tokens": 80},
    **{"sequences spoiled": 60, "failed: LOGITS_NOT_FINITE": 30},
    **{"told: queued": 1000, "told: preempted": 230, "told: worker_lost": 240, "told: resumed": 1000},
    **{
        "failed: QUEUE_TIMEOUT": 45,
        "failed: STEP_FAILED": 30,
        "failed: QUEUE_FULL": 30,
        "failed: SCHEDULER_UNREACHABLE": 15,
    },
}


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    campaign = Campaign()
    for outcome in outcomes(range(NUM_SEEDS)):
        campaign.add(outcome)
    return campaign


def test_whatever_fails_every_client_is_served_right(campaign: Campaign) -> None:
    assert campaign.num_runs == NUM_SEEDS
    failed = campaign.failed
    assert not failed, f"{report(failed[0])}\nfailed seeds: {[outcome.seed for outcome in failed]}"


def test_everything_has_happened(campaign: Campaign) -> None:
    rare = {what: campaign.counts[what] for what, count in AT_LEAST.items() if campaign.counts[what] < count}
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
    """By the next renewal, which no longer names the request."""

    def forget(session: SchedulerSession, request: LiveRequest) -> list[FromFrontend]:
        session.live.pop(request.journal.request_id, None)
        return []

    monkeypatch.setattr(SchedulerSession, "release", forget)
    cancelled = 0
    for seed in range(24):
        outcome = simulate(seed, directory)
        cancelled += outcome.counts["cancelled"]
        assert outcome.failure is None, report(outcome)
    assert cancelled > 20
