"""The scheduler's limits and policies as flags; the reasons for the defaults are with `SchedulerConfig`."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from octavo.scheduler.core.config import TOKEN_BUDGETS, Policy, Preemption, SchedulerConfig
from octavo.wire.steps import MAX_STEPS_IN_FLIGHT

_DEFAULTS = SchedulerConfig()
_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Number(click.FloatRange):
    """A number from 0 on, where comparing it makes sense: neither infinite nor NaN."""

    def __init__(self, *, below: float | None = None) -> None:
        super().__init__(min=0.0, max=below, max_open=below is not None)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def _read_weights(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    return dict(_read_weight(value) for value in values)


def _read_weight(value: str) -> tuple[str, float]:
    tenant, _, weight = value.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        number = 0.0
    if not (tenant and 0.0 < number < math.inf):
        raise click.BadParameter(f"{value!r} is not NAME=WEIGHT with a weight above 0, such as research=2")
    return tenant, number


_OPTIONS = [
    click.option(
        "--max-num-batched-tokens",
        envvar="OCTAVO_MAX_NUM_BATCHED_TOKENS",
        type=click.IntRange(min=1),
        show_default=", ".join(f"{budget} on {device}" for device, budget in TOKEN_BUDGETS.items()),
        help="Tokens a step computes at most.",
    ),
    click.option(
        "--max-num-seqs",
        envvar="OCTAVO_MAX_NUM_SEQS",
        type=click.IntRange(min=1, max=4096),
        default=_DEFAULTS.max_num_seqs,
        help="Sequences that run at once on one replica.",
    ),
    click.option(
        "--max-waiting",
        envvar="OCTAVO_MAX_WAITING",
        type=click.IntRange(min=1),
        default=_DEFAULTS.max_waiting,
        help="Requests that wait at once; more are refused.",
    ),
    click.option(
        "--max-steps-in-flight",
        envvar="OCTAVO_MAX_STEPS_IN_FLIGHT",
        type=click.IntRange(1, MAX_STEPS_IN_FLIGHT),
        default=_DEFAULTS.max_steps_in_flight,
        help="Plans sent ahead of their results.",
    ),
    click.option(
        "--prefix-cache/--no-prefix-cache",
        "prefix_caching",
        envvar="OCTAVO_PREFIX_CACHE",
        default=_DEFAULTS.prefix_caching,
        help="Whether requests with the same beginning share its KV blocks.",
    ),
    click.option(
        "--policy",
        envvar="OCTAVO_POLICY",
        type=click.Choice([policy.value for policy in Policy]),
        default=_DEFAULTS.policy.value,
        help="chunked: pieces of prompts are prefilled beside decodes. paper: a step is all prefill or all decode.",
    ),
    click.option(
        "--preemption",
        envvar="OCTAVO_PREEMPTION",
        type=click.Choice([preemption.value for preemption in Preemption]),
        default=_DEFAULTS.preemption.value,
        help="What becomes of the KV of a request that must give its blocks up: auto swaps those of several sequences,"
        " measured does what takes less time by the worker's measurements.",
    ),
    click.option(
        "--delay-factor",
        envvar="OCTAVO_DELAY_FACTOR",
        type=_Number(),
        default=_DEFAULTS.delay_factor,
        help="Paper policy: prompts gather for this many times the last prefill's time while others run.",
    ),
    click.option(
        "--priority-ageing",
        "priority_ageing_s",
        envvar="OCTAVO_PRIORITY_AGEING",
        type=_Number(),
        default=_DEFAULTS.priority_ageing_s,
        help="Seconds of waiting that make up for a level of priority; 0 ignores priorities.",
    ),
    click.option(
        "--tenant-weight",
        "tenant_weights",
        envvar="OCTAVO_TENANT_WEIGHT",
        metavar="NAME=WEIGHT",
        multiple=True,
        callback=_read_weights,
        help="A tenant's share against those of others, which have 1. May be given more than once.",
    ),
    click.option(
        "--overtaking",
        "overtaking_s",
        envvar="OCTAVO_OVERTAKING",
        type=_Number(),
        default=_DEFAULTS.overtaking_s,
        help="Seconds of waiting until which a request that does not fit may be overtaken.",
    ),
    click.option(
        "--watermark",
        envvar="OCTAVO_WATERMARK",
        type=_Number(below=1.0),
        default=_DEFAULTS.watermark,
        help="Share of blocks that admission leaves free for those running.",
    ),
    click.option(
        "--max-pinned-share",
        envvar="OCTAVO_MAX_PINNED_SHARE",
        type=_Number(below=1.0),
        default=_DEFAULTS.max_pinned_share,
        help="Share of blocks that pinned prefixes may take.",
    ),
    click.option(
        "--drain-grace",
        "drain_grace_s",
        envvar="OCTAVO_DRAIN_GRACE",
        type=_Number(),
        default=_DEFAULTS.drain_grace_s,
        help="Seconds that requests may go on at a worker that is drained before they are moved to others.",
    ),
    click.option(
        "--misfit-grace",
        "misfit_grace_s",
        envvar="OCTAVO_MISFIT_GRACE",
        type=_Number(),
        default=_DEFAULTS.misfit_grace_s,
        help="Seconds that an accepted request waits for a worker that can hold it where none of those there can.",
    ),
    click.option(
        "--death-grace",
        "death_grace_s",
        envvar="OCTAVO_DEATH_GRACE",
        type=_Number(),
        default=_DEFAULTS.death_grace_s,
        help="Seconds in which the next worker of a name may tell how the one before it has died.",
    ),
    click.option(
        "--watchdog",
        "watchdog_s",
        envvar="OCTAVO_WATCHDOG",
        type=_Number(),
        default=_DEFAULTS.watchdog_s,
        help="Seconds without an answered step until a worker that has work counts as standing still.",
    ),
    click.option(
        "--quarantine",
        "quarantine_s",
        envvar="OCTAVO_QUARANTINE",
        type=_Number(),
        default=_DEFAULTS.quarantine_s,
        help="Seconds for which a request that has ended workers is refused.",
    ),
]


def config_flags(command: _Command) -> _Command:
    """Gives a command a flag for each setting, under the name of its field."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_config(settings: dict[str, Any]) -> SchedulerConfig:
    """The configuration that the flags say."""
    policy, preemption = Policy(settings.pop("policy")), Preemption(settings.pop("preemption"))
    return SchedulerConfig(policy=policy, preemption=preemption, **settings)
