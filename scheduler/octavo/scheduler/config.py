"""What the scheduler may be told, with the reason for each default."""

import msgspec

from octavo.wire.requests import LEASE_S
from octavo.wire.steps import MAX_STEPS_IN_FLIGHT


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step and of patience. Raises `ValueError` on values that cannot work."""

    # A step computes at most this many tokens. 512 keeps a CPU's decodes under about a quarter of a second apart while
    # a long prompt is prefilled beside them, and already fills its matrix units.
    max_num_batched_tokens: int = 512
    # Sequences running at once on one replica.
    max_num_seqs: int = 256
    # Requests that wait at once; one more is refused, for it would wait longer than its client.
    max_waiting: int = 4096
    # One more plan than results: the worker never waits for the scheduler. 1 plans only on full knowledge.
    max_steps_in_flight: int = MAX_STEPS_IN_FLIGHT
    # Share of blocks that admission leaves free, so that those running can grow a little before one is preempted.
    watermark: float = 0.01
    # Whether blocks of one sequence serve others with the same beginning.
    prefix_caching: bool = True
    # A frontend that has not renewed for this long has lost its requests.
    lease_s: float = LEASE_S
    # An idle worker beats every 0.25 s; six missed beats are no accident.
    idle_timeout_s: float = 1.5
    # A step may take this long, or five times the slowest recent one of its shape, whichever is more.
    step_timeout_s: float = 2.0
    # The first step of a shape may compile, page in weights, or warm caches.
    first_step_timeout_s: float = 60.0
    # A request is given up after this many failed steps with it.
    max_failed_steps: int = 3

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1 or self.max_num_seqs < 1:
            raise ValueError("max_num_batched_tokens and max_num_seqs must be at least 1")
        if not 1 <= self.max_steps_in_flight <= MAX_STEPS_IN_FLIGHT:
            raise ValueError(f"max_steps_in_flight must be 1 to {MAX_STEPS_IN_FLIGHT}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError("watermark must be in [0, 1)")
