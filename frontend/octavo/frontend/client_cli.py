"""`octavo generate`, `octavo chat`, `octavo health`: plain gRPC clients, without a tokenizer and quick to start."""

import os
from collections.abc import Iterable
from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_DEFAULT_SERVER = "127.0.0.1:50051"

_server_option = click.option(
    "--server", envvar="OCTAVO_SERVER", default=_DEFAULT_SERVER, help="gRPC address of a frontend."
)


@click.command()
@click.argument("text")
@_server_option
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Default: as many as fit.")
@click.option("--temperature", type=float, help="0 is greedy. Default: the model's.")
@click.option("--top-p", type=float, help="Default: the model's.")
@click.option("--top-k", type=click.IntRange(min=0), help="Default: the model's.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Default: drawn by the server.")
@click.option("--stop", multiple=True, help="Text to stop at; may be given more than once.")
@click.option("--ids", is_flag=True, help="Print token ids instead of text.")
def generate(
    text: str, server: str, max_new_tokens: int | None, stop: tuple[str, ...], ids: bool, **sampling: Any
) -> None:
    """Stream the continuation of TEXT to the terminal."""
    request = pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(**sampling),
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens, stop_strings=stop),
        response=pb.ResponseOptions(text=not ids, token_ids=ids),
    )
    with _connected(server) as channel:
        _print_answer(services.GenerationServiceStub(channel).Generate(request))


@click.command()
@click.argument("message", required=False)
@_server_option
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Per answer. Default: as many as fit.")
@click.option("--system", help="What the model is told before the conversation.")
def chat(message: str | None, server: str, max_new_tokens: int | None, system: str | None) -> None:
    """Talk with the model, or send it one MESSAGE. End of input ends the talk; Ctrl-C stops an answer."""
    conversation = [pb.ChatMessage(role="system", content=system)] if system else []
    with _connected(server) as channel:
        stub = services.GenerationServiceStub(channel)
        for content in [message] if message is not None else _typed_lines():
            conversation.append(pb.ChatMessage(role="user", content=content))
            request = pb.GenerateRequest(
                chat=pb.ChatPrompt(messages=conversation),
                stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens),
                response=pb.ResponseOptions(token_ids=False),
            )
            answer = _print_answer(stub.Generate(request))
            conversation.append(pb.ChatMessage(role="assistant", content=answer))


@click.command()
@click.argument("address", envvar="OCTAVO_SERVER", default=_DEFAULT_SERVER)
@click.option(
    "--service", default="", help="A service's name asks whether it is ready; empty, whether the process lives."
)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=3.0, help="Seconds.")
def health(address: str, service: str, timeout: float) -> None:
    """Probe the gRPC health of the process at ADDRESS (host:port or unix:path); exit status 0 if it serves."""
    with _connected(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise click.ClickException(f"{address}: {_describe_health(error, service, timeout)}") from error
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    click.echo(f"{address}: {status}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise SystemExit(1)


def _connected(address: str) -> grpc.Channel:
    # Silences the library's own lines about a refused connection; the error says it already.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", 32 << 20)])


def _typed_lines() -> Iterable[str]:
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if line.strip():
            yield line


def _print_answer(call: Any) -> str:
    """Prints deltas as they come; gives the text. Ctrl-C ends the answer, not the program."""
    parts: list[str] = []
    try:
        for response in call:
            delta = response.delta
            parts.append(delta.text)
            click.echo(delta.text or "".join(f"{token_id} " for token_id in delta.token_ids), nl=False)
    except KeyboardInterrupt:
        call.cancel()
    except grpc.RpcError as error:
        click.echo()
        raise click.ClickException(_describe(error)) from error
    click.echo()
    return "".join(parts)


def _describe_health(error: grpc.RpcError, service: str, timeout: float) -> str:
    assert isinstance(error, grpc.Call)
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return f"it has no service {service!r} [NOT_FOUND]"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {timeout:g} s [DEADLINE_EXCEEDED]"
    return _describe(error)


def _describe(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    return f"{error.details()} [{error.code().name}]"
