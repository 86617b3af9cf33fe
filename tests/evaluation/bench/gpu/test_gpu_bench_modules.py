"""A case says what it cannot do without: where that is missing it is skipped with a line, and raises nothing."""

import subprocess
import sys

import pytest

from octavo.bench.gpu.served.carried import NAMES
from octavo.bench.gpu.steps import LOCAL_MODULES, SERVICE_MODULES

# How what is carried to a machine with a GPU is imported; what else it has comes with torch and transformers.
_IMPORTED = {
    "gguf": "gguf",
    "googleapis-common-protos": "google.rpc",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "grpcio-status": "grpc_status",
    "llguidance": "llguidance",
    "msgspec": "msgspec",
    "protobuf": "google.protobuf",
    "pytest-asyncio": "pytest_asyncio",
    "python-json-logger": "pythonjsonlogger",
    "pyzmq": "zmq",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
}
_LOCAL = ("octavo.bench.gpu.decoding", "octavo.testbed.models", "octavo.worker.gpu.executor")
_SERVICE = (
    "octavo.bench.gpu.served.service",
    "octavo.scheduler.cli.serve",
    "octavo.frontend.cli.frontend",
    "octavo.worker.cli.worker",
)
_SERVING = (
    "octavo.scheduler.server.loop",
    "octavo.frontend.server",
    "octavo.worker.loop",
    "octavo.worker.step.model_runner",
)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("starting", "named"),
    [(_LOCAL, LOCAL_MODULES), ((*_SERVICE, *_SERVING), SERVICE_MODULES)],
    ids=["in this process", "through all processes"],
)
def test_a_case_names_all_that_it_imports_of_what_a_gpus_machine_lacks(
    starting: tuple[str, ...], named: tuple[str, ...]
) -> None:
    code = f"import sys, importlib; [importlib.import_module(name) for name in {starting}]; print(*sys.modules)"
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    carried = {module for module in _IMPORTED.values() if module in imported}
    assert carried
    assert carried <= set(named)


def test_every_carried_package_has_a_module() -> None:
    assert set(_IMPORTED) == set(NAMES)
