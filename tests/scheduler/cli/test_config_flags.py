"""Flags and environment variables become the scheduler's configuration, or a clear refusal."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from octavo.runtime.options.flags import config_of, options_of
from octavo.scheduler.core.config import Policy, Preemption, SchedulerConfig


def configured(*arguments: str, **environment: str) -> SchedulerConfig:
    found: list[SchedulerConfig] = []

    @click.command()
    @options_of(SchedulerConfig)
    def command(**settings: Any) -> None:
        found.append(config_of(SchedulerConfig, settings))

    result = CliRunner(env=environment).invoke(command, arguments)
    if result.exit_code:
        raise click.UsageError(result.output)
    return found[0]


def test_without_flags_the_defaults_hold() -> None:
    assert configured() == SchedulerConfig()


def test_every_flag_sets_its_field() -> None:
    arguments = (
        "--max-num-batched-tokens 99 --max-num-seqs 7 --max-waiting 5 --max-steps-in-flight 1 --no-prefix-cache"
        " --policy paper --preemption swap --delay-factor 0.5 --priority-ageing 3 --tenant-weight a=2"
        " --tenant-weight b=c=0.25 --overtaking 4 --watermark 0.2 --max-pinned-share 0.3"
    )
    assert configured(*arguments.split()) == SchedulerConfig(
        max_num_batched_tokens=99,
        max_num_seqs=7,
        max_waiting=5,
        max_steps_in_flight=1,
        prefix_caching=False,
        policy=Policy.PAPER,
        preemption=Preemption.SWAP,
        delay_factor=0.5,
        priority_ageing_s=3.0,
        tenant_weights={"a": 2.0, "b=c": 0.25},
        overtaking_s=4.0,
        watermark=0.2,
        max_pinned_share=0.3,
    )


def test_every_flag_has_a_variable() -> None:
    config = configured(
        OCTAVO_POLICY="paper",
        OCTAVO_PREEMPTION="recompute",
        OCTAVO_DELAY_FACTOR="0.5",
        OCTAVO_PRIORITY_AGEING="0",
        OCTAVO_TENANT_WEIGHT="a=2 b=3",
        OCTAVO_OVERTAKING="0",
        OCTAVO_WATERMARK="0",
        OCTAVO_MAX_PINNED_SHARE="0",
    )
    assert config == SchedulerConfig(
        policy=Policy.PAPER,
        preemption=Preemption.RECOMPUTE,
        delay_factor=0.5,
        priority_ageing_s=0.0,
        tenant_weights={"a": 2.0, "b": 3.0},
        overtaking_s=0.0,
        watermark=0.0,
        max_pinned_share=0.0,
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--policy", "fifo"),
        ("--preemption", "abort"),
        *(("--delay-factor", value) for value in ("-1", "nan", "inf")),
        *(("--priority-ageing", value) for value in ("-1", "nan")),
        *(("--overtaking", value) for value in ("-0.1", "inf")),
        *(("--watermark", value) for value in ("1", "-0.1", "nan")),
        *(("--max-pinned-share", value) for value in ("1", "-0.1", "nan")),
        *(("--tenant-weight", value) for value in ("a", "a=", "=1", "a=0", "a=-1", "a=nan", "a=inf", "a=b")),
    ],
)
def test_what_cannot_work_is_refused_by_name(flag: str, value: str) -> None:
    with pytest.raises(click.UsageError, match=f"Invalid value for '{flag}'"):
        configured(flag, value)
