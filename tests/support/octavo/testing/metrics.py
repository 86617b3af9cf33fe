"""Metrics as a test looks at them."""

from prometheus_client.registry import Collector


def told(collector: Collector, *labels: str) -> dict[str, float]:
    """All samples that are not 0, without buckets, by name and the values of such of `labels` as they have."""
    return {
        " ".join([sample.name, *(sample.labels[label] for label in labels if label in sample.labels)]): sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.value and "le" not in sample.labels
    }
