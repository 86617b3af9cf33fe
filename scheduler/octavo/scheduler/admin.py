"""The scheduler's gRPC side: health and the Admin service, answered from the core's own books."""

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from octavo.scheduler.replica import Replica
from octavo.scheduler.shell import SchedulerShell
from octavo.v1 import admin_pb2, admin_pb2_grpc

SERVICE = "octavo.v1.AdminService"


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Runs in the shell's event loop, so what it reads is never half changed."""

    def __init__(self, shell: SchedulerShell) -> None:
        self._shell = shell

    async def GetLoad(
        self,
        request: admin_pb2.GetLoadRequest,
        context: "grpc.aio.ServicerContext[admin_pb2.GetLoadRequest, admin_pb2.GetLoadResponse]",
    ) -> admin_pb2.GetLoadResponse:
        core = self._shell.core
        return admin_pb2.GetLoadResponse(
            waiting=len(core.waiting),
            running=sum(len(replica.running) for replica in core.replicas.values()),
            frontends=core.num_frontends,
            workers=[_worker(replica) for replica in core.replicas.values()],
            preemptions=core.preemptions,
            dropped_messages=self._shell.dropped_messages,
        )


def _worker(replica: Replica) -> admin_pb2.Worker:
    hello, stats = replica.hello, replica.stats
    return admin_pb2.Worker(
        id=hello.worker_id,
        device=hello.device,
        model=hello.model.name,
        running=len(replica.running),
        blocks_total=replica.kv.num_blocks,
        blocks_free=replica.kv.num_free,
        blocks_cached=replica.kv.num_cached,
        block_size=hello.block_size,
        steps=stats.steps,
        tokens_computed=stats.tokens_computed,
        tokens_sampled=stats.tokens_sampled,
        times=admin_pb2.StageTimes(prepare_us=stats.prepare_us, model_us=stats.model_us, sample_us=stats.sample_us),
    )


async def start_admin_server(shell: SchedulerShell, address: str) -> grpc.aio.Server:
    """Serves health and Admin on `address` (host:port or unix:path). Raises `RuntimeError` if it cannot be bound."""
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(shell), server)
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing from the stubs
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for service in ("", SERVICE):
        await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(address)
    await server.start()
    return server
