"""How the terminal shows an answer: one sequence as it grows, several one after another."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click
import grpc

from octavo.client import Delta, Finished, OctavoError, Stream
from octavo.wire.no_server import explain_no_server

_SERVICE: Final = "octavo.v1.GenerationService"


def stream_answer(stream: Stream, server: str, *, ids: bool = False) -> str:
    """Prints the text of the only sequence as it comes (or its token ids), then its logprobs if there are any; gives
    the text. `server` is where it comes from.

    Ctrl-C ends the answer, not the program. Raises `click.ClickException`.
    """
    deltas: list[Delta] = []
    try:
        with _ending_well(stream, server):
            for event in stream:
                if isinstance(event, Delta):
                    deltas.append(event)
                    click.echo(_content(event, ids), nl=False)
    except click.ClickException:
        # What there is of the answer ends with its line; the error has its own.
        if deltas:
            click.echo()
        raise
    click.echo()
    _print_logprobs(deltas)
    return "".join(delta.text for delta in deltas)


def print_sequences(stream: Stream, server: str, *, ids: bool = False) -> None:
    """Prints all sequences of an answer, each under a heading, once it is complete or Ctrl-C ends it.

    Raises `click.ClickException`.
    """
    deltas: defaultdict[int, list[Delta]] = defaultdict(list)
    scores: dict[int, float] = {}
    with _ending_well(stream, server):
        for event in stream:
            if isinstance(event, Delta):
                deltas[event.index].append(event)
            elif isinstance(event, Finished) and event.cumulative_logprob is not None:
                scores[event.index] = event.cumulative_logprob
    for index in sorted(deltas):
        score = f", logprob {scores[index]:.4f}" if index in scores else ""
        click.echo(f"--- sequence {index + 1}{score} ---")
        click.echo("".join(_content(delta, ids) for delta in deltas[index]))
        _print_logprobs(deltas[index])


def describe(error: grpc.RpcError, service: str) -> str:
    """The error of a call to `service`, in one line."""
    assert isinstance(error, grpc.Call)
    code, details = error.code().name, " ".join((error.details() or "no answer").split())
    return f"{explain_no_server(code, details, service) or details} [{code}]"


def _content(delta: Delta, ids: bool) -> str:
    return "".join(f"{token_id} " for token_id in delta.token_ids) if ids else delta.text


def _print_logprobs(deltas: list[Delta]) -> None:
    """A line for each token: its id, logprob and rank, and the likeliest ids with theirs."""
    for token in (token for delta in deltas for token in delta.logprobs):
        top = ", ".join(f"{candidate.token_id} {candidate.logprob:.4f}" for candidate in token.top)
        click.echo(f"{token.token_id:>8} {token.logprob:9.4f}  rank {token.rank:<6} {top}".rstrip())


@contextmanager
def _ending_well(stream: Stream, server: str) -> Iterator[None]:
    try:
        with stream:
            yield
    except KeyboardInterrupt:
        pass
    except OctavoError as error:
        raise click.ClickException(f"{_words(error, server)} [{error.code.name}]") from error


def _words(error: OctavoError, server: str) -> str:
    # With a reason it is a server of ours that speaks.
    found = None if error.reason else explain_no_server(error.code.name, str(error), _SERVICE)
    return f"{server}: {found}" if found else " ".join(str(error).split())
