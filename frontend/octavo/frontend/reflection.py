"""gRPC reflection under both of its names; the library knows only the older one."""

from collections.abc import Sequence
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import _async, reflection_pb2, reflection_pb2_grpc

V1ALPHA: Final[str] = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
# Its messages are those of v1alpha under another package name, so the bytes are the same.
V1: Final = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serves grpc.reflection.v1 and v1alpha, listing `service_names` and v1alpha (v1 has no descriptor here)."""
    servicer: Any = _async.ReflectionServicer((*service_names, V1ALPHA))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": handler}),))
