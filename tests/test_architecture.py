"""Who may import whom: by reading every import, and by importing each package with what it must not need blocked."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORT_ROOTS = ("proto", "kernels", "frontend", "scheduler", "worker", "evaluation")

# Portion of the namespace package -> the import root it lies in, and what of ours or of the heavy kind it may import.
_HEAVY = {"torch", "transformers", "triton", "numpy", "gguf", "safetensors"}
_WATCHED = _HEAVY | {"grpc", "zmq", "tokenizers", "octavo"}
ALLOWED: dict[str, tuple[str, set[str]]] = {
    "octavo.wire": ("proto", {"zmq"}),
    "octavo.v1": ("proto", {"grpc"}),
    "octavo.runtime.telemetry": ("proto", set()),
    "octavo.kernels": ("kernels", {"torch", "triton", "numpy"}),
    "octavo.scheduler": ("scheduler", {"octavo.wire", "octavo.v1", "octavo.runtime.telemetry", "zmq", "grpc"}),
    "octavo.frontend": (
        "frontend",
        {
            "octavo.wire",
            "octavo.v1",
            "octavo.client",
            "octavo.runtime.telemetry",
            "zmq",
            "grpc",
            "transformers",
            "tokenizers",
        },
    ),
    "octavo.client": ("frontend", {"octavo.v1", "grpc"}),
    "octavo.llm": ("frontend", {"octavo.client", "octavo.cli", "octavo.wire"}),
    "octavo.cli": ("frontend", {"octavo.wire", "octavo.runtime.telemetry", "grpc"}),
    "octavo.worker": (
        "worker",
        {"octavo.wire", "octavo.runtime.telemetry", "octavo.kernels", "zmq", "grpc", "tokenizers", *_HEAVY},
    ),
    "octavo.workload": ("evaluation", set()),
    # Of the frontend nothing but the rule by which it chooses among cells.
    "octavo.simulator": (
        "evaluation",
        {"octavo.workload", "octavo.scheduler", "octavo.wire", "octavo.frontend.scheduler.cell_router"},
    ),
    "octavo.loadgen": ("evaluation", {"octavo.workload", "octavo.client", "octavo.v1", "grpc"}),
    "octavo.paper": (
        "evaluation",
        {"octavo.workload", "octavo.simulator", "octavo.scheduler", "octavo.wire", "numpy"},
    ),
}
# The core decides; only these carry its decisions to sockets, clocks and flags.
SCHEDULER_SHELL = {
    "shell.py",
    "arrivals.py",
    "bell.py",
    "step_feed.py",
    "log_writer.py",
    "admin.py",
    "cli.py",
    "admin_client.py",
    "admin_cli.py",
    "workers_cli.py",
    "top.py",
    "vitals.py",
}
IMPURE = {"zmq", "grpc", "asyncio", "time", "threading", "logging", "os", "random", "secrets", "socket"}


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a module lives"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offences(portion: str, path: Path) -> list[str]:
    allowed = ALLOWED[portion][1] | {portion}
    return [
        name
        for name in imports(path)
        if name.partition(".")[0] in _WATCHED
        and not any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
    ]


def sources(portion: str) -> list[Path]:
    root = ROOT / ALLOWED[portion][0] / Path(*portion.split("."))
    return [path for path in root.rglob("*.py") if "_pb2" not in path.name]


@pytest.mark.parametrize("portion", ALLOWED)
def test_each_part_imports_only_what_it_may(portion: str) -> None:
    assert sources(portion), f"{portion} has no sources"
    found = {str(path.relative_to(ROOT)): names for path in sources(portion) if (names := offences(portion, path))}
    assert found == {}


def test_the_import_rule_finds_planted_violations(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("import torch.nn\ndef f():\n    from octavo.worker import loop\n", encoding="utf-8")
    assert offences("octavo.scheduler", planted) == ["torch.nn", "octavo.worker.loop"]
    assert offences("octavo.kernels", planted) == ["octavo.worker.loop"]


def test_the_schedulers_core_knows_no_socket_no_clock_and_no_thread() -> None:
    core = [path for path in sources("octavo.scheduler") if path.name not in SCHEDULER_SHELL]
    found = {path.name: names for path in core if (names := {n.partition(".")[0] for n in imports(path)} & IMPURE)}
    assert found == {}


def test_every_portion_of_the_namespace_is_covered() -> None:
    packages = {
        f"octavo.{path.name}"
        for root in IMPORT_ROOTS
        for path in (ROOT / root / "octavo").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert packages == set(ALLOWED)


def test_no_import_root_shadows_the_namespace_or_leaks_a_name() -> None:
    for root in IMPORT_ROOTS:
        assert not (ROOT / root / "octavo" / "__init__.py").exists()
        assert not list((ROOT / root).glob("*.py"))


BLOCKED_IMPORT = """
import importlib, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, {package!r} + "."):
    importlib.import_module(module.name)
leaked = sorted(name for name in {blocked!r} if sys.modules.get(name) is not None)
assert not leaked, leaked
"""


@pytest.mark.parametrize(
    ("package", "blocked"),
    [
        ("octavo.scheduler", ["torch", "transformers", "numpy", "tokenizers", "octavo.worker", "octavo.kernels"]),
        ("octavo.frontend", ["torch", "octavo.worker", "octavo.kernels", "octavo.scheduler"]),
        ("octavo.cli", ["torch", "transformers", "octavo.worker", "octavo.kernels", "octavo.scheduler"]),
        ("octavo.wire", ["torch", "transformers", "numpy", "grpc"]),
        ("octavo.kernels", ["transformers", "octavo.worker", "octavo.wire", "octavo.scheduler", "octavo.frontend"]),
    ],
)
def test_each_package_imports_whole_with_what_it_must_not_need_out_of_reach(package: str, blocked: list[str]) -> None:
    script = BLOCKED_IMPORT.format(package=package, blocked=blocked)
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_fake_worker_needs_no_torch() -> None:
    script = BLOCKED_IMPORT.format(package="octavo.wire", blocked=["torch", "transformers", "numpy"])
    script += "import octavo.worker.cli.worker, octavo.worker.fake.runner, octavo.worker.loop"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
