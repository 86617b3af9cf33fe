"""Adds vllm.grpc.engine.VllmEngine to the public gRPC port, where the package of its messages is installed."""

import importlib.util
import logging

import grpc

from octavo.frontend.config import FrontendConfig
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.stream.generation import Generation

_log = logging.getLogger(__name__)


def add_vllm_engine(
    server: grpc.aio.Server, generation: Generation, scheduler: SchedulerPool, config: FrontendConfig
) -> list[str]:
    """Adds the service if its package is installed. Returns the full names of the services that were added."""
    if importlib.util.find_spec("smg_grpc_proto") is None:
        _log.debug("no VllmEngine service: smg-grpc-proto is not installed (pip install '.[vllm-engine]')")
        return []
    from smg_grpc_proto import vllm_engine_pb2 as pb  # type: ignore[import-untyped]
    from smg_grpc_proto import vllm_engine_pb2_grpc as services

    from octavo.frontend.vllm_engine.servicer import VllmEngine

    services.add_VllmEngineServicer_to_server(VllmEngine(generation, scheduler, config), server)
    return [str(pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name)]
