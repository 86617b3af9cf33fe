"""vllm.grpc.engine.VllmEngine, on the public gRPC port."""

import grpc

from octavo.frontend.generation import Generation


def add_vllm_engine(server: grpc.aio.Server, generation: Generation) -> list[str]:
    """Adds the service where the package of its messages (smg-grpc-proto) is installed; the names of what was added."""
    return []
