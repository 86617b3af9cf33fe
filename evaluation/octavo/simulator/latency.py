"""How long a step takes: all that a simulated replica must know of its hardware."""

from typing import Protocol

from octavo.runtime.models.step_times import StepShape


class LatencyModel(Protocol):
    """Seconds of a step by its shape: measured (`octavo.runtime.models.step_times`) or computed
    (`octavo.simulator.roofline`)."""

    def seconds(self, shape: StepShape) -> float: ...
