"""How the terminal shows an answer: one sequence as it grows, several one after another."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import click
import grpc

from octavo.client import Delta, Finished, OctavoError, Stream


def stream_answer(stream: Stream, *, ids: bool = False) -> str:
    """Prints the text of the only sequence as it comes (or its token ids), then its logprobs if there are any; gives
    the text.

    Ctrl-C ends the answer, not the program. Raises `click.ClickException`.
    """
    deltas: list[Delta] = []
    with _ending_well(stream):
        for event in stream:
            if isinstance(event, Delta):
                deltas.append(event)
                click.echo(_content(event, ids), nl=False)
    click.echo()
    _print_logprobs(deltas)
    return "".join(delta.text for delta in deltas)


def print_sequences(stream: Stream, *, ids: bool = False) -> None:
    """Prints all sequences of an answer, each under a heading, once it is complete or Ctrl-C ends it.

    Raises `click.ClickException`.
    """
    deltas: defaultdict[int, list[Delta]] = defaultdict(list)
    scores: dict[int, float] = {}
    with _ending_well(stream):
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


def describe(error: grpc.RpcError) -> str:
    """The error in one line."""
    assert isinstance(error, grpc.Call)
    return f"{error.details()} [{error.code().name}]"


def _content(delta: Delta, ids: bool) -> str:
    return "".join(f"{token_id} " for token_id in delta.token_ids) if ids else delta.text


def _print_logprobs(deltas: list[Delta]) -> None:
    """A line for each token: its id, logprob and rank, and the likeliest ids with theirs."""
    for token in (token for delta in deltas for token in delta.logprobs):
        top = ", ".join(f"{candidate.token_id} {candidate.logprob:.4f}" for candidate in token.top)
        click.echo(f"{token.token_id:>8} {token.logprob:9.4f}  rank {token.rank:<6} {top}".rstrip())


@contextmanager
def _ending_well(stream: Stream) -> Iterator[None]:
    try:
        with stream:
            yield
    except KeyboardInterrupt:
        pass
    except OctavoError as error:
        click.echo()
        raise click.ClickException(f"{error} [{error.code.name}]") from error
