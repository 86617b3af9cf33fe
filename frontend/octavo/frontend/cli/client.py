"""Implements `octavo generate`, `octavo chat` and `octavo health`: gRPC clients without a tokenizer, quick to start."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.client import (
    DEFAULT_ADDRESS,
    BeamSearch,
    Chat,
    Delta,
    Finished,
    Message,
    OctavoError,
    RequestOptions,
    SamplingParams,
    Stream,
)
from octavo.frontend.cli.server_options import Connection, connection_options, read_address
from octavo.runtime.models.directory import cache_directory
from octavo.runtime.transport.no_server import explain_no_server

_MAX_HISTORY: Final = 1000
_HELP: Final = """\
/help           List these commands.
/reset          Forget the conversation; the system prompt stays.
/system [TEXT]  Tell the model TEXT before all else from now on; without TEXT, nothing.
//...           Send a message that begins with one slash.
Ctrl-C stops an answer, Ctrl-D ends the talk."""


@dataclass
class Conversation:
    """Holds the messages of a talk, under a system prompt that may change."""

    system: str = ""
    said: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """Returns all messages for the model, the system prompt first."""
        return [*([Message("system", self.system)] if self.system else []), *self.said]

    def command(self, line: str) -> str:
        """Runs the command in a line that begins with a slash; returns the text to show."""
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                return _HELP
            case "/reset":
                self.said.clear()
                return "the conversation begins anew"
            case "/system":
                self.system = rest.strip()
                return f"system prompt: {self.system or 'none'}"
        return f"there is no command {name[:100]}; /help lists them, and // sends a slash"


def typed_messages(conversation: Conversation) -> Iterator[str]:
    """Yields messages from stdin until it ends. Commands run on the way, and their output goes to stderr."""
    with _edited():
        while (line := _typed_line()) is not None:
            if line.startswith("//"):
                yield line[1:]
            elif line.startswith("/"):
                click.echo(conversation.command(line), err=True)
            elif line.strip():
                yield line


def _typed_line() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None


@contextmanager
def _edited() -> Iterator[None]:
    """Lets lines be edited, and lines of earlier talks be fetched, on a terminal; nothing is kept without one."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        # `input` edits lines once this is loaded; not every Python has it.
        import readline
    except ImportError:
        yield
        return
    history = cache_directory() / "chat_history"
    # There is no history yet, or it cannot be read: the talk goes without.
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_MAX_HISTORY)
    try:
        yield
    finally:
        with suppress(OSError):
            _make_private(history)
            readline.write_history_file(history)
            # Some libraries replace the file.
            history.chmod(0o600)


def _make_private(path: Path) -> None:
    """Makes an empty file for its owner alone, before anything is written to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.chmod(0o600)


_SERVICE: Final = "octavo.v1.GenerationService"


def stream_answer(stream: Stream, server: str, *, ids: bool = False) -> str:
    """Prints the text of the only sequence as it comes (or its token ids), then its logprobs if any; returns the text.

    What the model thinks goes to stderr. `server` is the address that errors name. Ctrl-C ends the answer, not the
    program. Raises `click.ClickException`.
    """
    deltas: list[Delta] = []
    try:
        with _ending_well(stream, server):
            for event in stream:
                if isinstance(event, Delta):
                    if event.reasoning and not ids:
                        click.secho(event.reasoning, nl=False, err=True, dim=True)
                    elif event.text and deltas and deltas[-1].reasoning:
                        click.echo(err=True)
                    deltas.append(event)
                    click.echo(_content(event, ids), nl=False)
    except click.ClickException:
        # The part of the answer that came ends with a line break; the error has its own line.
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
    """Returns the error of a call to `service`, in one line."""
    assert isinstance(error, grpc.Call)
    code, details = error.code().name, " ".join((error.details() or "no answer").split())
    return f"{explain_no_server(code, details, service) or details} [{code}]"


def _content(delta: Delta, ids: bool) -> str:
    return "".join(f"{token_id} " for token_id in delta.token_ids) if ids else delta.text


def _print_logprobs(deltas: list[Delta]) -> None:
    """Prints a line for each token: its id, logprob and rank, and the top ids with theirs."""
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
    # An error with a reason comes from an Octavo server.
    found = None if error.reason else explain_no_server(error.code.name, str(error), _SERVICE)
    return f"{server}: {found}" if found else " ".join(str(error).split())


_HEALTH: Final = "grpc.health.v1.Health"
# Seconds; the answer is there already.
_LOOK_S: Final = 0.5

_server_option = click.option(
    "--server",
    envvar="OCTAVO_SERVER",
    callback=read_address,
    default=DEFAULT_ADDRESS,
    help="gRPC address of a frontend.",
)


@click.command()
@click.argument("text", required=False)
@_server_option
@click.option("--max-new-tokens", "max_tokens", type=click.IntRange(min=1), help="Default: as many as fit.")
@click.option("--temperature", type=float, help="0 is greedy. Default: the model's.")
@click.option("--top-p", type=float, help="Default: the model's.")
@click.option("--top-k", type=click.IntRange(min=0), help="Default: the model's.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Default: drawn by the server.")
@click.option("--stop", multiple=True, help="Text to stop at; may be given more than once.")
@click.option("--n", type=click.IntRange(min=1), default=1, help="How many sequences to print.")
@click.option("--best-of", type=click.IntRange(min=1), help="Generate this many, and print the likeliest --n of them.")
@click.option(
    "--beam-width", type=click.IntRange(min=1), help="Search for the likeliest sequences with this many beams."
)
@click.option("--length-penalty", type=float, help="Of the beam search: above 0 favours long sequences. Default: 1.")
@click.option("--logprobs", type=click.IntRange(min=0), help="Print every token's logprob and this many alternatives.")
@click.option("--priority", type=int, help="Higher runs first. Default: 0.")
@click.option("--pinned-prefix", help="Name of the pinned prefix that TEXT continues.")
@click.option(
    "--prediction",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the text that the answer is expected to be, which may make it faster.",
)
@click.option("--ids", is_flag=True, help="Print token ids instead of text.")
@connection_options
def generate(
    text: str | None,
    server: str,
    connection: Connection,
    ids: bool,
    beam_width: int | None,
    length_penalty: float | None,
    priority: int | None,
    pinned_prefix: str | None,
    prediction: Path | None,
    **sampling: Any,
) -> None:
    """Stream the continuation of TEXT to the terminal, or print several, one after another.

    Without TEXT, or with - for it, the prompt is what stdin says, less one newline at its end.
    """
    prompt = _piped_text() if text in (None, "-") else text
    params = SamplingParams(beam_search=_beam_search(beam_width, length_penalty), **sampling)
    expected = "" if prediction is None else _file_text(prediction)
    options = RequestOptions(priority=priority, pinned_prefix=pinned_prefix or "", prediction=expected)
    with connection.client(server) as client:
        show = stream_answer if params.n == 1 else print_sequences
        show(client.stream(prompt, params, options), server, ids=ids)


@click.command()
@click.argument("message", required=False)
@_server_option
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Per answer. Default: as many as fit.")
@click.option("--system", help="What the model is told before the conversation.")
@connection_options
def chat(
    message: str | None, server: str, connection: Connection, max_new_tokens: int | None, system: str | None
) -> None:
    """Talk with the model, or send it one MESSAGE. End of input ends the talk; Ctrl-C stops an answer; /help lists
    what else may be typed."""
    conversation = Conversation(system or "")
    params = SamplingParams(max_tokens=max_new_tokens)
    with connection.client(server) as client:
        for content in [message] if message is not None else typed_messages(conversation):
            conversation.said.append(Message("user", content))
            try:
                answer = stream_answer(client.stream(Chat(conversation.messages), params), server)
            except click.ClickException as error:
                # The user may type the message again, and keeps the conversation so far.
                if message is not None or not sys.stdin.isatty():
                    raise
                error.show()
                conversation.said.pop()
            else:
                conversation.said.append(Message("assistant", answer))


@click.command()
@click.argument("address", envvar="OCTAVO_SERVER", callback=read_address, default=DEFAULT_ADDRESS)
@click.option(
    "--service", default="", help="A service's name asks whether it is ready; empty, whether the process lives."
)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=3.0, help="Seconds.")
@connection_options
def health(address: str, service: str, timeout: float, connection: Connection) -> None:
    """Probe the gRPC health of the process at ADDRESS (host:port or unix:path); exit status 0 if it serves."""
    request = health_pb2.HealthCheckRequest(service=service)
    with connection.open(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                request, timeout=timeout, wait_for_ready=True, metadata=connection.metadata
            )
        except grpc.RpcError as error:
            raise click.ClickException(f"{address}: {_describe_health(error, channel, service, timeout)}") from error
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    click.echo(f"{address}: {status}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise SystemExit(1)


def _beam_search(width: int | None, length_penalty: float | None) -> BeamSearch | None:
    if width is None and length_penalty is not None:
        raise click.UsageError("--length-penalty belongs to a beam search; give --beam-width too")
    return BeamSearch(width, length_penalty) if width is not None else None


def _piped_text() -> str:
    """Reads the prompt from stdin. Raises `click.UsageError` if that is empty, no UTF-8 text, or a terminal."""
    if sys.stdin.isatty():
        raise click.UsageError("give TEXT, or pipe it in")
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"what stdin says is no UTF-8 text: {error}") from error
    if not text:
        raise click.UsageError("give TEXT, or pipe it in; stdin says nothing")
    return text


def _file_text(path: Path) -> str:
    """Reads a file. Raises `click.UsageError` if it cannot be read, or is no UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _describe_health(error: grpc.RpcError, channel: grpc.Channel, service: str, timeout: float) -> str:
    assert isinstance(error, grpc.Call)
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return f"it has no service {service!r} [NOT_FOUND]"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{_why_silent(channel) or f'no answer within {timeout:g} s'} [DEADLINE_EXCEEDED]"
    return describe(error, _HEALTH)


def _why_silent(channel: grpc.Channel) -> str | None:
    """Returns why the last attempt to connect failed, which a call that waits for a connection does not tell."""
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_LOOK_S)
    except grpc.RpcError as error:
        failed: Any = error
        return explain_no_server(failed.code().name, failed.details() or "", _HEALTH)
    return None
