"""`octavo generate`, `octavo chat`, `octavo health`: plain gRPC clients, without a tokenizer and quick to start."""

import os
from collections.abc import Iterable
from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.frontend.client_output import describe, print_sequences, stream_answer
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
@click.option("--n", "num_sequences", type=click.IntRange(min=1), default=1, help="How many sequences to print.")
@click.option("--best-of", type=click.IntRange(min=1), help="Generate this many, and print the likeliest --n of them.")
@click.option(
    "--beam-width", type=click.IntRange(min=1), help="Search for the likeliest sequences with this many beams."
)
@click.option("--length-penalty", type=float, help="Of the beam search: above 0 favours long sequences. Default: 1.")
@click.option("--logprobs", type=click.IntRange(min=0), help="Print every token's logprob and this many alternatives.")
@click.option("--priority", type=int, help="Higher runs first. Default: 0.")
@click.option("--pinned-prefix", help="Name of the pinned prefix that TEXT continues.")
@click.option("--ids", is_flag=True, help="Print token ids instead of text.")
def generate(
    text: str,
    server: str,
    max_new_tokens: int | None,
    stop: tuple[str, ...],
    ids: bool,
    beam_width: int | None,
    length_penalty: float | None,
    logprobs: int | None,
    priority: int | None,
    pinned_prefix: str | None,
    **sampling: Any,
) -> None:
    """Stream the continuation of TEXT to the terminal, or print several, one after another."""
    streams = sampling["num_sequences"] == 1
    request = pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(beam_search=_beam_search(beam_width, length_penalty), **sampling),
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens, stop_strings=stop),
        response=pb.ResponseOptions(text=not ids, token_ids=ids, top_logprobs=logprobs, incremental=streams),
        scheduling=pb.SchedulingHints(priority=priority),
        cache=pb.CacheOptions(pinned_prefix=pinned_prefix),
    )
    with _connected(server) as channel:
        call = services.GenerationServiceStub(channel).Generate(request)
        stream_answer(call) if streams else print_sequences(call)


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
            answer = stream_answer(stub.Generate(request))
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


def _beam_search(width: int | None, length_penalty: float | None) -> pb.BeamSearch | None:
    if width is None and length_penalty is not None:
        raise click.UsageError("--length-penalty belongs to a beam search; give --beam-width too")
    return pb.BeamSearch(beam_width=width, length_penalty=length_penalty) if width is not None else None


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


def _describe_health(error: grpc.RpcError, service: str, timeout: float) -> str:
    assert isinstance(error, grpc.Call)
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return f"it has no service {service!r} [NOT_FOUND]"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {timeout:g} s [DEADLINE_EXCEEDED]"
    return describe(error)
