"""Metrics as a test looks at them."""

from dataclasses import dataclass, field

from prometheus_client.registry import Collector

from octavo.frontend.scheduler.client import SchedulerAvailability
from octavo.wire.requests import ServiceLoad, ServiceStatus


def told(collector: Collector, *labels: str) -> dict[str, float]:
    """All samples that are not 0, without buckets, by name and the values of such of `labels` as they have."""
    return {
        " ".join([sample.name, *(sample.labels[label] for label in labels if label in sample.labels)]): sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.value and "le" not in sample.labels
    }


@dataclass
class FakeCell:
    """What a frontend's metrics read of the link to a cell."""

    endpoint: str
    service_load: ServiceLoad | None
    availability: SchedulerAvailability = SchedulerAvailability.READY
    live: list[object] = field(default_factory=list)
    work_tokens: int = 0
    status: ServiceStatus | None = None
    status_age_s: float = 0.5


@dataclass
class FakeCells:
    """What a frontend's metrics read of all its cells."""

    links: list[FakeCell]
    handovers: int = 0
