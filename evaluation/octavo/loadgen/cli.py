"""Runs `octavo bench serve`: puts load on a server, and reports what the server makes of it."""

import asyncio
import logging
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import randbits
from typing import Any, TypeVar

import click
import msgspec

from octavo.loadgen.events import TimedCommand
from octavo.loadgen.report import SessionOutcome, make_outcome, outcome_text
from octavo.loadgen.servers import Asking, Secrets, ServerAddress, TargetError
from octavo.loadgen.session import Session, Side
from octavo.workload.job import Job
from octavo.workload.measures import Targets
from octavo.workload.options import read_jobs, workload_options

T = TypeVar("T")
# What a shell says of a command that Ctrl-C ended.
_INTERRUPTED = 130
_OTHER_KEY = "OCTAVO_COMPARE_API_KEY"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _by(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """Returns a callback that reads an option with `parse`."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> T | None:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return read


@click.group()
def bench() -> None:
    """Load a server as many users would, and measure its answers."""


@bench.command(context_settings={"show_default": True})
@click.argument("server", callback=_by(ServerAddress.parse), envvar="OCTAVO_SERVER")
@click.option(
    "--compare", "other", callback=_by(ServerAddress.parse), help="A second server: both are measured in turn."
)
@click.option("--rounds", type=click.IntRange(min=1), default=1, help="How often; with --compare: A B A B ...")
@click.option("--model", default="", help="Default: the first that the server names.")
@click.option("--compare-model", default="", help="That of the second server.")
@click.option(
    "--api", type=click.Choice(["completions", "chat"]), default="completions", help="Of HTTP: what is asked for."
)
@click.option(
    "--prompts",
    type=click.Choice(["ids", "text"]),
    default="ids",
    help="Token ids, or a word for each.",
)
@click.option("--vocab-size", type=click.IntRange(min=1), default=256, help="Token ids of prompts are below this.")
@click.option("--prompt-seed", type=int, help="Of the contents of prompts. Default: never the same, so never cached.")
@click.option("--temperature", type=click.FloatRange(min=0.0), default=1.0)
@click.option(
    "--openai-only", is_flag=True, help="Send nothing that OpenAI's own API does not know; lengths may differ then."
)
@click.option(
    "--count-tokens", is_flag=True, help="Ask an HTTP server for token ids with every chunk: exact, at some cost to it."
)
@click.option("--warm-up", type=click.IntRange(min=0), default=4, help="Requests before each run that do not count.")
@click.option("--timeout", type=click.FloatRange(min=0.0, min_open=True), default=600.0, help="Seconds, by request.")
@click.option(
    "--at",
    "commands",
    nargs=2,
    type=(click.FloatRange(min=0.0), str),
    multiple=True,
    help="Seconds from each run's start, and a shell's command that is run then, such as one that restarts a worker.",
)
@click.option("--scheduler-admin", default="", help="Admin service of the server's scheduler, to tell tiers apart.")
@click.option("--goodput", callback=_by(Targets.parse), help="Limits to be kept, as ttft<1s,itl<50ms.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here too.")
@click.option("--api-key", envvar="OCTAVO_API_KEY", show_default=False, help="Better not on the line.")
@click.option("--compare-api-key", envvar=_OTHER_KEY, show_default=False, help="That of the second server.")
@click.option("--ca-certificate", envvar="OCTAVO_CA_CERTIFICATE", type=_FILE, help="PEM file; else the system's.")
@workload_options
def serve(
    server: ServerAddress,
    other: ServerAddress | None,
    rounds: int,
    model: str,
    compare_model: str,
    warm_up: int,
    timeout: float,
    commands: tuple[tuple[float, str], ...],
    scheduler_admin: str,
    goodput: Targets | None,
    file: Path | None,
    api_key: str | None,
    compare_api_key: str | None,
    ca_certificate: Path | None,
    **settings: Any,
) -> None:
    """Send SERVER requests at the times that the workload says, whatever becomes of earlier ones, and tell how long
    first tokens, tokens and whole answers took.

    SERVER is http://HOST:PORT or https://HOST for OpenAI's API, or HOST:PORT, grpc://, grpcs:// or unix:PATH for
    Octavo's gRPC.
    """
    asking = _asking(settings)
    sides = [Side(server, replace(asking, model=model), _secrets(api_key, ca_certificate, "OCTAVO_API_KEY"))]
    if other is not None:
        secrets = _secrets(compare_api_key, ca_certificate, _OTHER_KEY)
        sides.append(Side(other, replace(asking, model=compare_model), secrets))
    if scheduler_admin and other is not None:
        raise click.UsageError("--scheduler-admin is of one server, so it does not go with --compare")
    jobs = read_jobs(settings)
    _check(jobs, asking, sides, file)
    _prepare_process()
    interrupted, fault = False, None
    try:
        timed = [TimedCommand(*command) for command in commands]
        asyncio.run(Session(jobs, rounds, warm_up, timeout, timed, scheduler_admin).run(sides))
    except KeyboardInterrupt:
        interrupted = True
    except TargetError as error:
        fault = error
    outcome = make_outcome(sides, goodput, asking.seed)
    if outcome.servers:
        _tell(outcome, file)
    if fault is not None:
        raise click.ClickException(str(fault)) from fault
    if interrupted or any(run.interrupted for side in sides for run in side.runs):
        raise SystemExit(_INTERRUPTED)
    if any(measured.report.all_failed for measured in outcome.servers):
        raise SystemExit(1)


def _secrets(api_key: str | None, ca_certificate: Path | None, variable: str) -> Secrets:
    try:
        return Secrets(api_key, ca_certificate, variable)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _asking(settings: dict[str, Any]) -> Asking:
    """Takes its flags out of `settings`."""
    prompt_seed = settings.pop("prompt_seed")
    return Asking(
        chat=settings.pop("api") == "chat",
        as_text=settings.pop("prompts") == "text",
        vocab_size=settings.pop("vocab_size"),
        seed=randbits(48) if prompt_seed is None else prompt_seed,
        temperature=settings.pop("temperature"),
        extensions=not settings.pop("openai_only"),
        counted=settings.pop("count_tokens"),
    )


def _check(jobs: Sequence[Job], asking: Asking, sides: Sequence[Side], file: Path | None) -> None:
    if not jobs:
        raise click.UsageError("the workload has no requests")
    over_http = any(side.target.protocol == "http" for side in sides)
    if over_http and not asking.extensions and any(job.beam_width for job in jobs):
        raise click.UsageError("OpenAI's own API has no beam search; leave out --openai-only or --beam-width")
    hides_ids = over_http and not (asking.chat or asking.as_text or asking.counted)
    if hides_ids and any(job.turn > 1 for job in jobs):
        raise click.UsageError(
            "the next turn of a conversation begins with the token ids of the answer before, which an HTTP server tells"
            " if asked: give --count-tokens, or --prompts text or --api chat"
        )
    try:
        # Better reported now than when there is something to write.
        if file is not None:
            file.touch()
    except OSError as error:
        raise click.UsageError(f"--json: cannot write {file}: {error.strerror}") from error


def _prepare_process() -> None:
    # A line for each request, from one library; lines about refused connections, which the error tells, from another.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # A connection for every request that is under way.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _tell(outcome: SessionOutcome, file: Path | None) -> None:
    """Prints what there is, and writes it."""
    click.echo(outcome_text(outcome))
    if file is None:
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n")
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror or error}; the figures are above") from error
