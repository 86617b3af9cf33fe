"""Useful shares of KV memory and batch sizes that lengths alone decide, against the paper's figures 2 and 13 (a)."""

import pytest

from octavo.paper.accounting import MemoryProbe
from octavo.paper.systems import run
from octavo.runtime.models.step_times import StepShape
from octavo.simulator.device import ReplicaSpec
from octavo.workload.synthetic import DATASETS, Poisson, Workload


class ConstantTime:
    """What requests wait for is memory alone."""

    def seconds(self, shape: StepShape) -> float:
        return 0.03


# OPT-13B on one A100 of 40 GB: 15.7K slots.
SPEC = ReplicaSpec(981, 16, ConstantTime(), max_model_len=2048)


@pytest.mark.parametrize(
    ("name", "tokens", "batched"),
    [
        ("Orca (Max)", 0.204, 7.00),
        pytest.param("Orca (Pow2)", 0.268, 9.81, marks=pytest.mark.deep),
        pytest.param("Orca (Oracle)", 0.382, 13.62, marks=pytest.mark.deep),
    ],
)
def test_contiguous_memory_holds_as_little_as_in_the_paper(name: str, tokens: float, batched: float) -> None:
    """Five minutes are few requests of very different lengths: by the seed alone batches differ by 7 %."""
    probe = MemoryProbe(skip_s=60.0)
    jobs = Workload(DATASETS["sharegpt"], Poisson(4.0), seconds=300.0).jobs(0)
    outcome = run(name, SPEC, jobs, sample_every_s=1.0, probe=probe, horizon_s=300.0)
    running = [sample.running for sample in outcome.samples if sample.time >= 60.0]
    assert probe.saturated is not None
    assert probe.saturated.tokens == pytest.approx(tokens, rel=0.1)
    assert sum(running) / len(running) == pytest.approx(batched, rel=0.15)


def test_paged_memory_is_used_almost_whole() -> None:
    probe = MemoryProbe(skip_s=40.0)
    jobs = Workload(DATASETS["sharegpt"], Poisson(8.0), seconds=100.0).jobs(0)
    run("vLLM", SPEC, jobs, sample_every_s=1.0, probe=probe, horizon_s=100.0)
    assert probe.saturated is not None
    assert probe.saturated.tokens == pytest.approx(0.963, rel=0.02)
    assert probe.saturated.internal < 0.01
