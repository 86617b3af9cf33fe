"""The rendezvous of a replica's ranks: through a file on one machine, else at an address of the first rank's machine.

On one machine they connect over loopback. Between machines each listens on the address from which it reaches the first
one, and nowhere else; their traffic is neither encrypted nor authenticated.
"""

import ipaddress
import logging
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from octavo.runtime.transport.endpoints import EndpointError
from octavo.worker.model_settings import LOCAL_SCHEME
from octavo.worker.tensor_parallel.distributed import DistributedGroup
from octavo.worker.tensor_parallel.links import Backend, GlooLink, HostLink, NcclLink, SharedMemory

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


class RendezvousError(EndpointError):
    """Raised if the ranks did not meet; the text says what to check."""


def connect(
    rendezvous: str, rank: int, size: int, *, patience_s: float, gpu: torch.device | None = None
) -> DistributedGroup:
    """Connects the group of all ranks, and returns it once all are there.

    `rendezvous` is `file:` and a private directory of this machine, or HOST:PORT where HOST is an address of rank 0's
    machine. `gpu` is this rank's own, if ranks are on GPUs. Raises `RendezvousError`.
    """
    try:
        return _connect(rendezvous, rank, size, timedelta(seconds=patience_s), gpu)
    except (OSError, RuntimeError) as error:
        raise RendezvousError(
            f"rank {rank} of {size} could not meet the others at {rendezvous}: {error}; start all ranks with one"
            " --tp-rendezvous, an address of rank 0's machine that the others reach"
        ) from error


def _connect(rendezvous: str, rank: int, size: int, patience: timedelta, gpu: torch.device | None) -> DistributedGroup:
    directory = _directory(rendezvous)
    store, address = _met_here(directory, size) if directory else _met_at(rendezvous, rank, size, patience)
    store.set_timeout(patience)
    control = GlooLink(rank, size, _gloo(c10d.PrefixStore("host", store), rank, size, address, patience))
    host: HostLink = control
    if directory:
        host = SharedMemory.joined(directory, rank, size, lambda: control.exchange(0))
        host.set_patience(patience.total_seconds())
        # No rank needs the directory any more.
        control.exchange(0)
    on_cpu = DistributedGroup(rank, size, control, host)
    if gpu is None:
        return on_cpu
    try:
        device = NcclLink(rank, size, _nccl(c10d.PrefixStore("device", store), rank, size, patience, gpu))
    except BaseException:
        on_cpu.close()
        raise
    return DistributedGroup(rank, size, control, host, device)


def _met_here(directory: Path, size: int) -> tuple[c10d.Store, str]:
    """Returns the store through which the ranks find each other, and the address to listen on."""
    return c10d.FileStore(str(directory / "store"), size), _LOOPBACK


def _met_at(rendezvous: str, rank: int, size: int, patience: timedelta) -> tuple[c10d.Store, str]:
    host, port = _host_and_port(rendezvous)
    store, address = _tcp_store(host, port, rank, size, patience), _own_address_towards(host, port)
    if not ipaddress.ip_address(address).is_loopback:
        logger.warning("ranks send each other unencrypted, unauthenticated data at %s: only they may reach it", address)
    return store, address


def _directory(rendezvous: str) -> Path | None:
    return Path(rendezvous.removeprefix(LOCAL_SCHEME)) if rendezvous.startswith(LOCAL_SCHEME) else None


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _tcp_store(host: str, port: int, rank: int, size: int, patience: timedelta) -> c10d.Store:
    if rank:
        return c10d.TCPStore(host, port, size, is_master=False, timeout=patience, wait_for_workers=False)
    # By default the store listens on all of the machine's addresses.
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    return c10d.TCPStore(
        str(address[0]), port, size, is_master=True, timeout=patience, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _own_address_towards(host: str, port: int) -> str:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Nothing is sent: it only chooses the address that would send.
        probe.connect(address)
        return str(probe.getsockname()[0])


def _gloo(store: c10d.Store, rank: int, size: int, address: str, patience: timedelta) -> Backend:
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = patience
    backend: Backend = gloo(store, rank, size, options)
    return backend


def _nccl(store: c10d.Store, rank: int, size: int, patience: timedelta, gpu: torch.device) -> Backend:
    """Connects the ranks' GPUs now, and not with the first sum: a rank whose GPU cannot be reached is found out here.

    A sum that takes longer than `patience` ends the process: so NCCL's watchdog in torch does by default, since nothing
    else can be done about a kernel that waits on a GPU for one that is gone.
    """
    if not distributed.is_nccl_available():
        raise RuntimeError("this torch has no NCCL, which ranks on GPUs need")
    if gpu.index is None:
        gpu = torch.device(gpu.type, torch.cuda.current_device())
    # NCCL takes the current device for what has none of its own.
    torch.cuda.set_device(gpu)
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = patience
    backend: Any = nccl(store, rank, size, options)
    backend.eager_connect_single_device(gpu)
    connected: Backend = backend
    return connected
