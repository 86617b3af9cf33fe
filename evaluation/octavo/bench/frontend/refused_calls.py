"""Makes calls that are refused, one after the other: `python -m octavo.bench.frontend.refused_calls SETUP`.

After the first it prints its outcome, and waits for a line on stdin to make the others; then it prints `done`.
"""

import http.client
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import grpc

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services


@dataclass(frozen=True)
class Calls:
    """Describes the calls. `temperature` is wrong where the calls are refused for a bad field."""

    interface: str
    port: int
    count: int
    prompt: str
    authorization: str = ""
    temperature: float = 1.0


def over_grpc(asked: Calls) -> Callable[[], str]:
    stub = services.GenerationServiceStub(grpc.insecure_channel(f"127.0.0.1:{asked.port}"))
    sampling = pb.SamplingParams(temperature=asked.temperature)
    request = pb.GenerateRequest(text=asked.prompt, sampling=sampling, stopping=pb.StoppingCriteria(max_new_tokens=1))
    metadata = (("authorization", asked.authorization),) if asked.authorization else ()

    def call() -> str:
        try:
            list(stub.Generate(request, metadata=metadata))
        except grpc.RpcError as error:
            return cast(grpc.Call, error).code().name
        return "OK"

    return call


def over_http(asked: Calls) -> Callable[[], str]:
    connection = http.client.HTTPConnection("127.0.0.1", asked.port)
    body = json.dumps({"prompt": asked.prompt, "max_tokens": 1, "temperature": asked.temperature})
    headers = {"content-type": "application/json", "authorization": asked.authorization}

    def call() -> str:
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)

    return call


def main() -> None:
    """Raises `RuntimeError` if not all calls end in the same way."""
    asked = Calls(**json.loads(sys.argv[1]))
    call = over_grpc(asked) if asked.interface == "grpc" else over_http(asked)
    outcome = call()
    print(outcome, flush=True)
    sys.stdin.readline()
    if (outcomes := {call() for _ in range(asked.count)}) != {outcome}:
        raise RuntimeError(f"outcomes differ: {outcomes}, at first {outcome}")
    print("done", flush=True)


if __name__ == "__main__":
    main()
