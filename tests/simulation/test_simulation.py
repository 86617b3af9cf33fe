"""Hundreds of runs of everything together, with faults: nothing is lost, repeated, mixed up or kept."""

from itertools import count, islice
from pathlib import Path

import pytest

from octavo.frontend.scheduler.session import LiveRequest, SchedulerSession
from octavo.scheduler.server.event_log import Began, Record, replay
from octavo.testing.depth import deep
from octavo.testing.simulation.campaign import Campaign, outcomes, report
from octavo.testing.simulation.faults import FAULTS
from octavo.testing.simulation.run import simulate
from octavo.testing.simulation.scenario import draw
from octavo.testing.simulation.watch import Watch
from octavo.wire.requests import FromFrontend

NUM_SEEDS, NUM_SEEDS_DEEP = 50, 200
# How many more a deep campaign plays, at most, until what is rare has happened too.
MORE_SEEDS = 600
KINDS = ("greedy", "sampled", "parallel", "best of", "beam search")
# Beside them: a model that gives outputs of texts.
POOLED = "served: pooled"
# A simulation in which nothing happens would prove nothing. What is rare happens at least once in many seeds only.
FREQUENT = (
    *(f"served: {kind}" for kind in KINDS),
    POOLED,
    *("served with a prefix hit", "served with prompt logprobs", "cancelled", "preemptions", "forks", "copies"),
    *(
        "drafts",
        "drafts that were right",
        "proposals",
        "remaps",
        "windows passed",
        "blocks stored on a disk",
        "blocks found on a disk",
        "blocks not found on a disk",
        "connection lost",
        "replicas lost",
        "resubmissions",
        "told: queued",
    ),
    *("told: preempted", "told: worker_lost", "told: resumed"),
)
RARE = (
    *(f"fault: {fault.__name__}" for fault in FAULTS),
    *(f"served after a preemption: {kind}" for kind in KINDS),
    *(f"served after a swap: {kind}" for kind in KINDS),
    *("aborts lost", "swaps", "SequenceEnded", "PrefixPinned", "PrefixUnpinned", "WorkerCordoned"),
    *("WorkerDrained", "WorkerReadmitted", "replicas dismissed", "message lost", "message doubled", "disks cleared"),
    *(
        "requests copied",
        "copies that failed",
        "message overtaken",
        "steps failed",
        "steps skipped",
        "steps out_of_memory",
    ),
    *("replicas lost: unreachable", "replicas lost: overdue", "replicas lost: broken", "workers died"),
    *("workers hung", "workers refused", "workers left", "workers dismissed", "frontends lost"),
    *("frontends refused", "resubmissions with tokens", "sequences spoiled", "failed: LOGITS_NOT_FINITE"),
    *("failed: QUEUE_TIMEOUT", "failed: STEP_FAILED", "failed: QUEUE_FULL", "failed: SCHEDULER_UNREACHABLE"),
    *("failed: NEVER_FITS_KV", "failed: OUT_OF_MEMORY", "failed: QUARANTINED"),
)


@pytest.fixture(scope="module", params=[NUM_SEEDS, pytest.param(NUM_SEEDS_DEEP, marks=pytest.mark.deep)])
def num_seeds(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def campaign(num_seeds: int) -> Campaign:
    campaign = Campaign()
    for outcome in outcomes(range(num_seeds)):
        campaign.add(outcome)
    if num_seeds == NUM_SEEDS_DEEP:
        for first in range(num_seeds, num_seeds + MORE_SEEDS, NUM_SEEDS):
            if not never(campaign, (*FREQUENT, *RARE)):
                break
            for outcome in outcomes(range(first, first + NUM_SEEDS)):
                campaign.add(outcome)
    return campaign


def never(campaign: Campaign, wanted: tuple[str, ...]) -> list[str]:
    return [what for what in wanted if not campaign.counts[what]]


def test_whatever_fails_every_client_is_served_right(campaign: Campaign, num_seeds: int) -> None:
    assert campaign.num_runs >= num_seeds
    failed = campaign.failed
    assert not failed, f"{report(failed[0])}\nfailed seeds: {[outcome.seed for outcome in failed]}"


def test_everything_has_happened(campaign: Campaign, num_seeds: int) -> None:
    wanted = (*FREQUENT, *RARE) if num_seeds == NUM_SEEDS_DEEP else FREQUENT
    assert not never(campaign, wanted), "these have not happened"


@pytest.mark.parametrize("num_seeds", [4, *deep(8)])
def test_a_seed_always_brings_the_same_run(directory: Path, num_seeds: int) -> None:
    """In other processes too, where strings and objects hash differently."""
    seeds = range(num_seeds)
    here = [simulate(seed, directory, hashing=True).digest for seed in seeds]
    assert here == [outcome.digest for outcome in outcomes(seeds, hashing=True)]
    assert len(set(here)) == len(seeds)


@pytest.mark.parametrize("num_seeds", [6, *deep(12)])
def test_a_recorded_scheduler_plans_the_same_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, num_seeds: int
) -> None:
    lives: list[list[Record]] = []
    record = Watch.record

    def keep(watch: Watch, entry: Record) -> None:
        if isinstance(entry, Began):
            lives.append([])
        lives[-1].append(entry)
        record(watch, entry)

    monkeypatch.setattr(Watch, "record", keep)
    # A log does not say what an adversary would guess; what a hash says next nobody guesses (replays with drafts are
    # compared where tokens are copied).
    for seed in islice((seed for seed in count() if not draw(seed, directory).guesses_wildly), num_seeds):
        assert simulate(seed, directory).failure is None
    replays = [replay(iter(life)) for life in lives]
    assert [each.difference for each in replays] == [None] * len(lives)
    assert sum(each.plans for each in replays) > len(replays)


@pytest.mark.parametrize("num_seeds", [10, *deep(24)])
def test_a_cancellation_that_is_never_said_is_found_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch, num_seeds: int
) -> None:
    """By the next renewal, which no longer names the request: in calm runs within the time of a lease."""

    def forget(session: SchedulerSession, request: LiveRequest) -> list[FromFrontend]:
        session.live.pop(request.journal.request_id, None)
        return []

    monkeypatch.setattr(SchedulerSession, "release", forget)
    cancelled = 0
    for seed in islice((seed for seed in count() if draw(seed, directory).is_calm), num_seeds):
        outcome = simulate(seed, directory)
        cancelled += outcome.counts["cancelled"]
        assert outcome.failure is None, report(outcome)
    assert cancelled > 0
