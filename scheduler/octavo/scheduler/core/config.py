"""Holds the settings of the scheduler, each with its option and the reason for its default."""

import enum
import math
from typing import Annotated, Literal

import msgspec

from octavo.runtime.options.option import Option, Parsed, Real, Several, Whole
from octavo.wire.requests import LEASE_S
from octavo.wire.steps import MAX_DRAFT_TOKENS, MAX_STEPS_IN_FLIGHT


class Policy(enum.StrEnum):
    """Says how a step is filled: prefill chunks beside decodes, or, as in the paper, prompts and decodes in turns."""

    CHUNKED = "chunked"
    PAPER = "paper"


class Preemption(enum.StrEnum):
    """Says what becomes of the KV of a preempted group: it is recomputed, swapped to CPU memory, (auto) swapped where
    several sequences would have to be recomputed, or (measured) whichever takes less time by the worker's measurements.
    """

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"
    MEASURED = "measured"


# Tokens of a step by device. 512 keeps a CPU's decodes under about a quarter of a second apart while a long prompt is
# prefilled beside them, and already fills its matrix units; a GPU's take 8,192.
TOKEN_BUDGETS = {"cpu": 512, "cuda": 8192}


def parse_weights(texts: tuple[str, ...]) -> dict[str, float]:
    """Returns the shares of tenants by their names from texts such as `research=2`. Raises `ValueError` on others."""
    return dict(_parse_weight(text) for text in texts)


def _parse_weight(text: str) -> tuple[str, float]:
    tenant, _, weight = text.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        number = 0.0
    if not (tenant and 0.0 < number < math.inf):
        raise ValueError(f"{text!r} is not NAME=WEIGHT with a weight above 0, such as research=2")
    return tenant, number


# Drafts that are worth their time, none, or up to so many guesses wherever there are any.
Speculate = Literal["auto", "off"] | int


def parse_speculation(text: str) -> Speculate:
    """Reads `auto`, `off` or the number of guesses of a draft. Raises `ValueError` on anything else."""
    match text:
        case "auto" | "off":
            return text
    if text.isdecimal() and 1 <= int(text) <= MAX_DRAFT_TOKENS:
        return int(text)
    raise ValueError(f"{text!r} is neither auto nor off nor a number of guesses from 1 to {MAX_DRAFT_TOKENS}")


_COUNT = Whole(at_least=1)
_SECONDS = Real(at_least=0.0, finite=True)
_SHARE = Real(at_least=0.0, below=1.0, finite=True)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits steps, and how long the scheduler waits for what. Raises `ValueError` on values that cannot work."""

    # A step computes at most this many tokens. None: what suits the replica's device (`TOKEN_BUDGETS`).
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "--max-num-batched-tokens",
            "Tokens a step computes at most.",
            _COUNT,
            shown_default=", ".join(f"{budget} on {device}" for device, budget in TOKEN_BUDGETS.items()),
        ),
    ] = None
    # Sequences running at once on one replica.
    max_num_seqs: Annotated[
        int, Option("--max-num-seqs", "Sequences that run at once on one replica.", Whole(at_least=1, at_most=4096))
    ] = 256
    # Requests that wait at once; one more is refused, for it would wait longer than its client.
    max_waiting: Annotated[int, Option("--max-waiting", "Requests that wait at once; more are refused.", _COUNT)] = 4096
    # One more plan than results: the worker never waits for the scheduler. 1 plans only on full knowledge.
    max_steps_in_flight: Annotated[
        int,
        Option(
            "--max-steps-in-flight",
            "Plans sent ahead of their results.",
            Whole(at_least=1, at_most=MAX_STEPS_IN_FLIGHT),
        ),
    ] = MAX_STEPS_IN_FLIGHT
    # Whether steps check guesses of what sequences go on with: tokens stay the same, and may come sooner. auto spends
    # only what pays by a worker's measurements; a number is for trials.
    speculation: Annotated[
        Speculate,
        Option(
            "--speculation",
            "Whether steps check guesses of next tokens: auto where that is faster, off, or so many at a time wherever"
            " there are any.",
            Parsed(parse_speculation, "auto|off|N"),
        ),
    ] = "auto"
    # Whether blocks of one sequence serve others with the same beginning.
    prefix_caching: Annotated[
        bool,
        Option("--prefix-cache/--no-prefix-cache", "Whether requests with the same beginning share its KV blocks."),
    ] = True
    policy: Annotated[
        Policy,
        Option(
            "--policy",
            "chunked: pieces of prompts are prefilled beside decodes. paper: a step is all prefill or all decode.",
        ),
    ] = Policy.CHUNKED
    preemption: Annotated[
        Preemption,
        Option(
            "--preemption",
            "What becomes of the KV of a request that must give its blocks up: auto swaps those of several sequences,"
            " measured does what takes less time by the worker's measurements.",
        ),
    ] = Preemption.AUTO
    # The paper policy looks at the waiting queue only once its head has waited this many times as long as the last
    # prefill step took (or nothing runs), so that prompts come in batches. 0: at once.
    delay_factor: Annotated[
        float,
        Option(
            "--delay-factor",
            "Paper policy: prompts gather for this many times the last prefill's time while others run.",
            Real(at_least=0.0, finite=True),
        ),
    ] = 0.0
    # A level of priority counts as having come this many seconds earlier; a request can be held up by higher
    # priorities for no longer than that times their lead. 0: first come, first served, whatever the priority.
    priority_ageing_s: Annotated[
        float,
        Option(
            "--priority-ageing",
            "Seconds of waiting that make up for a level of priority; 0 ignores priorities.",
            _SECONDS,
        ),
    ] = 10.0
    # Shares of tenants that are not 1.
    tenant_weights: Annotated[
        dict[str, float],
        Option(
            "--tenant-weight",
            "A tenant's share against those of others, which have 1. May be given more than once.",
            Several("NAME=WEIGHT", read=parse_weights),
        ),
    ] = {}
    # The head of the queue may be overtaken where it does not fit, until it has waited this long.
    overtaking_s: Annotated[
        float,
        Option(
            "--overtaking", "Seconds of waiting until which a request that does not fit may be overtaken.", _SECONDS
        ),
    ] = 1.0
    # Share of blocks that admission leaves free, so that those running can grow a little before one is preempted.
    watermark: Annotated[
        float, Option("--watermark", "Share of blocks that admission leaves free for those running.", _SHARE)
    ] = 0.01
    # Share of a replica's blocks that pinned prefixes may take.
    max_pinned_share: Annotated[
        float, Option("--max-pinned-share", "Share of blocks that pinned prefixes may take.", _SHARE)
    ] = 0.5
    # A frontend that has not renewed for this long has lost its requests.
    lease_s: float = LEASE_S
    # An idle worker beats every 0.25 s; six missed beats are no accident.
    idle_timeout_s: float = 1.5
    # A step may take this long, or five times the slowest recent one of its shape, whichever is more.
    step_timeout_s: float = 2.0
    # The first step of a shape may compile, page in weights, or warm caches.
    first_step_timeout_s: float = 60.0
    # Most requests end of themselves within this; those that run on at a worker that is drained are moved then.
    drain_grace_s: Annotated[
        float,
        Option(
            "--drain-grace",
            "Seconds that requests may go on at a worker that is drained before they are moved to others.",
            _SECONDS,
        ),
    ] = 10.0
    # A request is given up after this many failed steps with it.
    max_failed_steps: int = 3
    # And after this many that could not be smaller, and for which its worker had no memory.
    max_memory_failures: int = 2
    # An accepted request that none of the workers there can hold waits this long for one that can: a worker that was
    # lost takes its time to start and to load its model.
    misfit_grace_s: Annotated[
        float,
        Option(
            "--misfit-grace",
            "Seconds that an accepted request waits for a worker that can hold it where none of those there can.",
            _SECONDS,
        ),
    ] = 60.0
    # A suspect that was alone when a worker died waits this long for a word on how, which the next worker of that name
    # has: for most that is the time to start and to load a model.
    death_grace_s: Annotated[
        float,
        Option(
            "--death-grace",
            "Seconds in which the next worker of a name may tell how the one before it has died.",
            _SECONDS,
        ),
    ] = 60.0
    # A worker that has work and answers no step for this long stands still: a thousand times what planning takes, so
    # that it is no accident, and soon enough for others to take over before clients give up.
    watchdog_s: Annotated[
        float,
        Option(
            "--watchdog",
            "Seconds without an answered step until a worker that has work counts as standing still.",
            _SECONDS,
        ),
    ] = 30.0
    # What workers have died over is refused for this long: enough to find out why, or to roll a fix out.
    quarantine_s: Annotated[
        float,
        Option("--quarantine", "Seconds for which a request that has ended workers is refused.", _SECONDS),
    ] = 600.0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or (self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1):
            raise ValueError("max_num_batched_tokens and max_num_seqs must be at least 1")
        if not 1 <= self.max_steps_in_flight <= MAX_STEPS_IN_FLIGHT:
            raise ValueError(f"max_steps_in_flight must be 1 to {MAX_STEPS_IN_FLIGHT}")
        if isinstance(self.speculation, int) and not 1 <= self.speculation <= MAX_DRAFT_TOKENS:
            raise ValueError(f"speculation must be auto, off, or 1 to {MAX_DRAFT_TOKENS} guesses")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError("watermark must be in [0, 1)")
        if not 0.0 <= self.max_pinned_share < 1.0:
            raise ValueError("max_pinned_share must be in [0, 1)")
        for name in (
            *("delay_factor", "priority_ageing_s", "overtaking_s"),
            *("drain_grace_s", "misfit_grace_s", "death_grace_s", "quarantine_s", "watchdog_s"),
        ):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} must not be negative")
        if any(weight <= 0.0 for weight in self.tenant_weights.values()):
            raise ValueError("tenant weights must be above 0")

    def token_budget(self, device: str) -> int:
        """Returns the tokens that a step on this device (`cpu`, `cuda:1`, `fake`, ...) computes at most."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return TOKEN_BUDGETS.get(device.partition(":")[0], TOKEN_BUDGETS["cpu"])

    def max_parallel_on(self, device: str) -> int:
        """Returns how many sequences may run at once on a replica with this device: each may take a token of a step."""
        return min(self.max_num_seqs, self.token_budget(device))

    @property
    def max_parallel(self) -> int:
        """Returns how many sequences one request may have side by side, whatever the device."""
        return min(self.max_num_seqs, self.max_num_batched_tokens or TOKEN_BUDGETS["cpu"])
