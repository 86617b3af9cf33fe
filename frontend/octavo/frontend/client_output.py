"""How the terminal shows an answer: one sequence as it grows, several one after another."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import grpc

from octavo.v1 import generation_pb2 as pb


def stream_answer(call: Any) -> str:
    """Prints the deltas of the only sequence as they come, then its logprobs if there are any; gives the text.

    Ctrl-C ends the answer, not the program. Raises `click.ClickException`.
    """
    deltas: list[pb.TokenDelta] = []
    with _ending_well(call):
        for response in call:
            deltas.append(response.delta)
            click.echo(_content(response.delta), nl=False)
    click.echo()
    _print_logprobs(deltas)
    return "".join(delta.text for delta in deltas)


def print_sequences(call: Any) -> None:
    """Prints all sequences of an answer, each under a heading, once it is complete or Ctrl-C ends it.

    Raises `click.ClickException`.
    """
    deltas: defaultdict[int, list[pb.TokenDelta]] = defaultdict(list)
    scores: dict[int, float] = {}
    with _ending_well(call):
        for response in call:
            if response.WhichOneof("event") == "delta":
                deltas[response.delta.index].append(response.delta)
            if response.finished.HasField("cumulative_logprob"):
                scores[response.finished.index] = response.finished.cumulative_logprob
    for index in sorted(deltas):
        score = f", logprob {scores[index]:.4f}" if index in scores else ""
        click.echo(f"--- sequence {index + 1}{score} ---")
        click.echo("".join(map(_content, deltas[index])))
        _print_logprobs(deltas[index])


def describe(error: grpc.RpcError) -> str:
    """The error in one line."""
    assert isinstance(error, grpc.Call)
    return f"{error.details()} [{error.code().name}]"


def _content(delta: pb.TokenDelta) -> str:
    return delta.text or "".join(f"{token_id} " for token_id in delta.token_ids)


def _print_logprobs(deltas: list[pb.TokenDelta]) -> None:
    """A line for each token: its id, logprob and rank, and the likeliest ids with theirs."""
    for token in (token for delta in deltas for token in delta.logprobs):
        top = ", ".join(f"{candidate.id} {candidate.logprob:.4f}" for candidate in token.top)
        click.echo(f"{token.id:>8} {token.logprob:9.4f}  rank {token.rank:<6} {top}".rstrip())


@contextmanager
def _ending_well(call: Any) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        call.cancel()
    except grpc.RpcError as error:
        click.echo()
        raise click.ClickException(describe(error)) from error
