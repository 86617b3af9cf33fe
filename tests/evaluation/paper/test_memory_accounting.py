"""Where slots go, by hand."""

from collections.abc import Callable

import pytest

from octavo.paper.accounting import MemoryProbe, Shares, shares_of
from octavo.paper.systems import run
from octavo.runtime.models.step_times import StepShape
from octavo.scheduler.core.scheduler import Scheduler
from octavo.simulator.device import ReplicaSpec
from octavo.workload.job import Job

SLOTS = 256


class OneSecond:
    """For each step."""

    def seconds(self, shape: StepShape) -> float:
        return 1.0


SPEC = ReplicaSpec(SLOTS // 16, 16, OneSecond(), max_model_len=128)


def seen_at(time: float, name: str, jobs: list[Job]) -> Shares:
    """Where the slots of a system's replica are then, just before what happens then."""
    found: list[Shares] = []

    def look(now: float, core: Scheduler) -> None:
        if now == time:
            found.extend(shares_of(replica) for replica in core.replicas.values())

    run(name, SPEC, jobs, sample_every_s=0.5, probe=look)
    return found[0]


def slots(tokens: int, reserved: int, internal: int) -> Callable[[Shares], bool]:
    external = SLOTS - tokens - reserved - internal
    expected = [part / SLOTS for part in (tokens, reserved, internal, external)]
    return lambda shares: [shares.tokens, shares.reserved, shares.internal, shares.external] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "internal"),
    [("Orca (Oracle)", 0), ("Orca (Pow2)", 16 - 12), ("Orca (Max)", 128 - 42), ("FasterTransformer", 128 - 42)],
)
def test_a_prompt_of_30_and_an_output_of_12_in_contiguous_memory(name: str, internal: int) -> None:
    """In its third step two of the generated tokens are computed."""
    assert slots(32, 10, internal)(seen_at(2.5, name, [Job(0.0, 30, 12)]))


def test_the_same_in_blocks() -> None:
    """Two blocks are full of them; a third is taken with the next, of which ten slots fill."""
    assert slots(32, 0, 0)(seen_at(2.5, "vLLM", [Job(0.0, 30, 12)]))
    assert slots(33, 9, 6)(seen_at(3.5, "vLLM", [Job(0.0, 30, 12)]))


def test_what_samples_share_counts_once() -> None:
    """A prompt of two blocks and, for each of three samples, a block with one of its two tokens that are computed."""
    assert slots(32 + 3, 3 * 1, 3 * 14)(seen_at(1.5, "vLLM", [Job(0.0, 32, 2, n=3)]))
    assert slots(3 * 33, 3, 0)(seen_at(1.5, "Orca (Oracle)", [Job(0.0, 32, 2, n=3)]))


def test_chunks_of_beams_that_are_not_there_yet_are_reserved() -> None:
    assert slots(32, 3 * 36 - 32, 0)(seen_at(0.5, "Orca (Oracle)", [Job(0.0, 32, 4, beam_width=3)]))


def test_means_are_over_the_samples_at_which_requests_waited_or_over_all() -> None:
    probe = MemoryProbe(skip_s=0.4)
    assert probe.all is None
    assert probe.saturated is None
    # The third has to wait for both others.
    jobs = [Job(0.0, 100, 20), Job(0.0, 100, 20), Job(0.0, 4, 4)]
    run("Orca (Max)", SPEC, jobs, sample_every_s=1.0, probe=probe)
    assert probe.all is not None
    assert probe.saturated is not None
    assert probe.saturated.tokens > probe.all.tokens > 0
    assert probe.saturated.external == 0.0
