"""The protocol's messages, of the package smg-grpc-proto, which has no types."""

from smg_grpc_proto import vllm_engine_pb2 as pb  # type: ignore[import-untyped]
from smg_grpc_proto import vllm_engine_pb2_grpc as services
from smg_grpc_proto.generated import common_pb2 as common  # type: ignore[import-untyped]

__all__ = ["common", "pb", "services"]
