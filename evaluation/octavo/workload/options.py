"""Reads a workload from flags of a command."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from octavo.workload.job import Job, TraceError, read_csv
from octavo.workload.synthetic import (
    DATASETS,
    Arrivals,
    AtOnce,
    Chatbot,
    Dataset,
    Fixed,
    Lengths,
    LogNormal,
    Poisson,
    Regular,
    Workload,
)

MAX_REQUESTS: Final = 10_000_000
_Command = TypeVar("_Command", bound=Callable[..., Any])
_POSITIVE: Final = click.FloatRange(min=0.0, min_open=True)
_TOKENS: Final = click.IntRange(min=1)

# A flag that is not given is None, so that it is known which of them a trace contradicts.
_SYNTHETIC: Final[dict[str, Callable[[_Command], _Command]]] = {
    "dataset": click.option(
        "--dataset",
        type=click.Choice(list(DATASETS)),
        show_default="sharegpt",
        help="What requests are like: questions and long answers, instructions and short ones, or long conversations.",
    ),
    "input_mean": click.option("--input-mean", type=_POSITIVE, help="Another mean of the prompts' tokens."),
    "input_sigma": click.option(
        "--input-sigma", type=click.FloatRange(min=0.0), help="Another spread of them: sigma of a lognormal; 0: none."
    ),
    "input_max": click.option("--input-max", type=_TOKENS, help="Another limit of them."),
    "output_mean": click.option("--output-mean", type=_POSITIVE, help="Another mean of the outputs' tokens."),
    "output_sigma": click.option(
        "--output-sigma", type=click.FloatRange(min=0.0), help="Another spread of them; 0: none."
    ),
    "output_max": click.option("--output-max", type=_TOKENS, help="Another limit of them."),
    "total_max": click.option(
        "--total-max", type=click.IntRange(min=2), help="Another limit of prompt and output together."
    ),
    "arrivals": click.option(
        "--arrivals",
        type=click.Choice(["poisson", "regular", "at-once"]),
        show_default="poisson",
        help="Independent of each other, at equal distances, or all at the start.",
    ),
    "rate": click.option("--rate", type=_POSITIVE, help="Requests per second."),
    "seconds": click.option("--seconds", type=_POSITIVE, help="For how long requests come."),
    "requests": click.option("--requests", type=click.IntRange(1, MAX_REQUESTS), help="How many come at most."),
    "n": click.option("--n", type=click.IntRange(min=1), show_default="1", help="Samples of each request."),
    "beam_width": click.option("--beam-width", type=click.IntRange(min=1), help="Beams of each; without: it samples."),
    "prefix_tokens": click.option(
        "--prefix-tokens", type=_TOKENS, help="Tokens of a shared prefix before each prompt."
    ),
    "turns": click.option(
        "--turns",
        type=_TOKENS,
        show_default="1",
        help="Of each conversation: every prompt has all that was said before in it. --rate and --requests are then of"
        " conversations, and --total-max ends those that become too long.",
    ),
    "think_time": click.option(
        "--think-time",
        type=click.FloatRange(min=0.0),
        show_default="0",
        help="Mean seconds between an answer and the next turn; exponential.",
    ),
    "prefixes": click.option("--prefixes", type=_TOKENS, show_default="1", help="How many such prefixes there are."),
}
_OPTIONS: Final = [
    *_SYNTHETIC.values(),
    click.option(
        "--trace",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="CSV file with a request in each line, instead of all these: arrival_s, prompt_tokens, output_tokens, ...",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="The same seed, the same requests."),
]


def workload_options(command: _Command) -> _Command:
    """Adds the flags of a workload; the command gives what it gets of them to `read_jobs`."""
    return reduce(lambda wrapped, option: option(wrapped), reversed(_OPTIONS), command)


def read_jobs(settings: Mapping[str, Any]) -> list[Job]:
    """Returns the jobs that the flags of `workload_options` describe. Raises `click.UsageError`."""
    given = {name: settings[name] for name in _SYNTHETIC if settings[name] is not None}
    try:
        return _from_trace(settings["trace"], given) if settings["trace"] else _drawn(given, settings["seed"])
    except (ValueError, TraceError, OSError) as error:
        raise click.UsageError(str(error)) from error


def flags_given(settings: Mapping[str, Any]) -> str:
    """Returns the flags by which the jobs would be read, but for the seed; "" if there are none."""
    return _flags({name: settings[name] for name in (*_SYNTHETIC, "trace") if settings[name] is not None})


def _from_trace(path: Path, given: Mapping[str, Any]) -> list[Job]:
    if given:
        raise click.UsageError(f"--trace says all of the requests, so it does not go with {_flags(given)}")
    return read_csv(path)


def _drawn(given: Mapping[str, Any], seed: int) -> list[Job]:
    if "prefixes" in given and "prefix_tokens" not in given:
        raise click.UsageError("--prefixes needs --prefix-tokens, to say how long they are")
    arrivals = _arrivals(given.get("arrivals", "poisson"), given.get("rate"))
    seconds, requests = given.get("seconds", inf), given.get("requests", inf)
    if requests == inf and seconds * arrivals.rate == inf:
        raise click.UsageError("say when requests end: with --requests, or with --rate and --seconds")
    if min(requests, seconds * arrivals.rate) * given.get("turns", 1) > MAX_REQUESTS:
        raise click.UsageError(f"more than {MAX_REQUESTS} requests; lower --rate or --seconds, or say --requests")
    if "think_time" in given and given.get("turns", 1) == 1:
        raise click.UsageError("--think-time is between the turns of a conversation; say with --turns how many it has")
    return Workload(
        dataset=_dataset(given),
        arrivals=arrivals,
        seconds=given.get("seconds"),
        num_requests=given.get("requests"),
        n=given.get("n", 1),
        beam_width=given.get("beam_width", 0),
        prefix_tokens=given.get("prefix_tokens", 0),
        num_prefixes=given.get("prefixes", 1),
        turns=given.get("turns", 1),
        think_s=given.get("think_time", 0.0),
    ).jobs(seed)


def _arrivals(kind: str, rate: float | None) -> Arrivals:
    if kind == "at-once":
        if rate is not None:
            raise click.UsageError("--arrivals at-once has no --rate")
        return AtOnce()
    if rate is None:
        raise click.UsageError("say how many requests come in a second, with --rate; or --arrivals at-once")
    return Poisson(rate) if kind == "poisson" else Regular(rate)


def _dataset(given: Mapping[str, Any]) -> Dataset | Chatbot:
    dataset = DATASETS[given.get("dataset", "sharegpt")]
    changes = {name: value for name, value in given.items() if name.startswith(("input_", "output_", "total_"))}
    if not changes:
        return dataset
    if isinstance(dataset, Chatbot):
        raise click.UsageError(f"--dataset {dataset.name} does not go with other lengths: {_flags(changes)}")
    return Dataset(
        dataset.name,
        _lengths("input", dataset.inputs, changes),
        _lengths("output", dataset.outputs, changes),
        changes.get("total_max", dataset.max_total),
    )


def _lengths(side: str, default: Lengths, changes: Mapping[str, Any]) -> Lengths:
    """Returns the default with the changes of its side."""
    assert isinstance(default, LogNormal)
    mine = {
        field: changes[f"{side}_{flag}"]
        for field, flag in (("mean", "mean"), ("sigma", "sigma"), ("high", "max"))
        if f"{side}_{flag}" in changes
    }
    if mine.get("sigma") == 0 and "high" in mine:
        raise click.UsageError(f"--{side}-sigma 0 makes all lengths the mean, so it does not go with --{side}-max")
    if mine.get("sigma") == 0:
        return Fixed(round(mine.get("mean", default.mean)))
    try:
        return replace(default, **mine)
    except ValueError as error:
        raise click.UsageError(f"--{side}-mean and its like: {error}") from error


def _flags(names: Mapping[str, Any]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
