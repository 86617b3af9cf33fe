"""`buf curl`: it learns the services by reflection, under both of its names, and streams an answer."""

import json
import subprocess
from typing import Any

from .checks import Service, main

_GENERATION = "octavo.v1.GenerationService"
_REQUEST: dict[str, Any] = {
    "text": "The capital of France is",
    "sampling": {"temperature": 0, "seed": "7"},
    "stopping": {"maxNewTokens": 8},
}


def curl(service: Service, path: str, *options: str, key: str | None = None) -> "subprocess.CompletedProcess[str]":
    authorization = f"authorization: Bearer {service.key if key is None else key}"
    command = [service.executable("buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *options]
    command += ["--header", authorization, "--reflect-header", f"authorization: Bearer {service.key}"]
    return subprocess.run(
        [*command, f"http://{service.grpc}{path}"], capture_output=True, text=True, timeout=120, check=False
    )


def messages(process: "subprocess.CompletedProcess[str]") -> list[Any]:
    """The messages that it prints one after another."""
    assert process.returncode == 0, process.stderr
    decoder, found, rest = json.JSONDecoder(), [], process.stdout.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        found.append(message)
        rest = rest[end:].strip()
    return found


def listed(service: Service, protocol: str) -> str:
    process = curl(service, "", "--list-services", "--reflect-protocol", protocol)
    assert process.returncode == 0, process.stderr
    found = process.stdout.split()
    assert {_GENERATION, "grpc.health.v1.Health"} <= set(found), found
    return ", ".join(found)


def generated(service: Service, protocol: str) -> str:
    data = json.dumps(_REQUEST)
    events = messages(curl(service, f"/{_GENERATION}/Generate", "--reflect-protocol", protocol, "--data", data))
    kinds = [kind for event in events for kind in ("started", "delta", "finished", "usage") if kind in event]
    assert kinds == ["started", *["delta"] * (len(kinds) - 3), "finished", "usage"], kinds
    assert events[0]["started"]["seed"] == "7"
    return repr("".join(event["delta"].get("text", "") for event in events if "delta" in event))


def list_by_v1(service: Service) -> str:
    return listed(service, "grpc-v1")


def list_by_v1alpha(service: Service) -> str:
    return listed(service, "grpc-v1alpha")


def generate_by_v1(service: Service) -> str:
    return generated(service, "grpc-v1")


def generate_by_v1alpha(service: Service) -> str:
    return generated(service, "grpc-v1alpha")


def tokenize_and_back(service: Service) -> str:
    data = json.dumps({"text": "hello world"})
    (tokens,) = messages(curl(service, f"/{_GENERATION}/Tokenize", "--data", data))
    ids = json.dumps({"ids": tokens["ids"]})
    (text,) = messages(curl(service, f"/{_GENERATION}/Detokenize", "--data", ids))
    assert text["text"] == "hello world"
    return f"{tokens['ids']}"


def refusals(service: Service) -> str:
    """What went wrong is told with its details."""
    bad = json.dumps({**_REQUEST, "sampling": {"temperature": -1}})
    refused = curl(service, f"/{_GENERATION}/Generate", "--data", bad)
    assert refused.returncode != 0
    assert "invalid_argument" in refused.stderr, refused.stderr
    assert "google.rpc.ErrorInfo" in refused.stderr, refused.stderr
    stranger = curl(service, f"/{_GENERATION}/ListModels", key="sk-not-one-of-them-00")
    assert "unauthenticated" in stranger.stderr, stranger.stderr
    return refused.stderr


if __name__ == "__main__":
    main(
        list_by_v1,
        list_by_v1alpha,
        generate_by_v1,
        generate_by_v1alpha,
        tokenize_and_back,
        refusals,
    )
