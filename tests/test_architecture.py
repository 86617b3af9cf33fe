"""Who may import whom: by reading every import, and by importing each package with what it must not need blocked."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from octavo.scheduler.kv.memory import KVMemory

ROOT = Path(__file__).parents[1]
IMPORT_ROOTS = ("proto", "kernels", "frontend", "scheduler", "worker", "evaluation")

# Portion of the namespace package -> the import root it lies in, and what of ours or of the heavy kind it may import.
_HEAVY = {"torch", "transformers", "triton", "numpy", "gguf", "safetensors"}
_WATCHED = _HEAVY | {"grpc", "zmq", "tokenizers", "octavo"}
ALLOWED: dict[str, tuple[str, set[str]]] = {
    "octavo.wire": ("proto", set()),
    "octavo.v1": ("proto", {"grpc"}),
    "octavo.runtime": ("proto", {"octavo.wire", "zmq", "grpc"}),
    "octavo.kernels": ("kernels", {"torch", "triton", "numpy"}),
    "octavo.scheduler": ("scheduler", {"octavo.wire", "octavo.v1", "octavo.runtime", "zmq", "grpc"}),
    "octavo.frontend": (
        "frontend",
        {"octavo.wire", "octavo.v1", "octavo.client", "octavo.runtime", "zmq", "grpc", "transformers", "tokenizers"},
    ),
    "octavo.client": ("frontend", {"octavo.v1", "grpc"}),
    "octavo.llm": ("frontend", {"octavo.client", "octavo.cli", "octavo.wire", "octavo.runtime"}),
    # Of the frontend nothing but the flags of a connection to one.
    "octavo.dynamo": (
        "frontend",
        {"octavo.client", "octavo.v1", "octavo.runtime", "octavo.frontend.cli.server_options", "grpc"},
    ),
    "octavo.cli": ("frontend", {"octavo.wire", "octavo.runtime", "grpc"}),
    "octavo.worker": (
        "worker",
        {"octavo.wire", "octavo.runtime", "octavo.kernels", "zmq", "grpc", "tokenizers", *_HEAVY},
    ),
    "octavo.workload": ("evaluation", {"octavo.runtime"}),
    # Of the frontend nothing but the rule by which it chooses among cells.
    "octavo.simulator": (
        "evaluation",
        {
            "octavo.workload",
            "octavo.scheduler",
            "octavo.wire",
            "octavo.runtime",
            "octavo.frontend.scheduler.prefix_router",
        },
    ),
    "octavo.loadgen": (
        "evaluation",
        {"octavo.workload", "octavo.client", "octavo.v1", "octavo.runtime.transport.no_server", "grpc"},
    ),
    # Of the frontend nothing but the tokenizer's files.
    "octavo.quality": (
        "evaluation",
        {
            "octavo.worker",
            "octavo.wire",
            "octavo.runtime",
            "octavo.frontend.text.tokenizer_files",
            "torch",
            "tokenizers",
        },
    ),
    "octavo.paper": (
        "evaluation",
        {"octavo.workload", "octavo.simulator", "octavo.scheduler", "octavo.wire", "octavo.runtime", "numpy"},
    ),
    # They start, watch and measure all of Octavo. Nothing that serves imports them: see above.
    "octavo.testbed": ("evaluation", {"octavo", "grpc", "zmq", *_HEAVY, "tokenizers"}),
    "octavo.bench": ("evaluation", {"octavo", "grpc", "zmq", *_HEAVY, "tokenizers"}),
    "octavo.chaos": ("evaluation", {"octavo", "grpc", "zmq", *_HEAVY, "tokenizers"}),
}
# What no tree outside of tests/ may lean on.
TESTS_ONLY = ("octavo.testing", "tests", "pytest", "hypothesis")

# Folders that decide: others carry their decisions to sockets, clocks and flags.
IMPURE = {"zmq", "grpc", "asyncio", "time", "threading", "logging", "os", "random", "secrets", "socket", "subprocess"}
PURE = ("octavo.scheduler.core", "octavo.scheduler.kv", "octavo.frontend.request")

# Package -> which of its service's folders it may import; what is not named here may import any.
LAYERS: dict[str, set[str]] = {
    "octavo.scheduler.kv": {"core.sequence", "core.config"},
    "octavo.scheduler.core": {"core", "kv"},
    "octavo.scheduler.server": {"core", "kv", "server"},
    "octavo.frontend.request": {"errors", "request"},
    "octavo.frontend.answer_parsers": {"request", "answer_parsers"},
    "octavo.frontend.text": {"errors", "config", "request", "answer_parsers", "text"},
    "octavo.frontend.access": {"errors", "config", "request", "access"},
    "octavo.frontend.scheduler": {"errors", "config", "request", "answer_parsers", "text", "access", "scheduler"},
    "octavo.frontend.stream": {
        *("errors", "config", "request", "answer_parsers", "text", "access", "scheduler", "stream"),
    },
    "octavo.frontend.http": {"errors", "config", "request", "access", "stream", "http"},
    "octavo.frontend.api": {
        *("errors", "config", "request", "text", "access", "scheduler", "stream", "http", "answer_parsers", "api"),
    },
    # Neither API is made of the other.
    "octavo.frontend.openai": {
        *("errors", "config", "request", "text", "access", "stream", "http", "answer_parsers", "api", "openai"),
    },
    "octavo.frontend.anthropic": {
        *("errors", "config", "request", "text", "access", "stream", "http", "answer_parsers", "api", "anthropic"),
    },
    "octavo.frontend.stored": {
        *("errors", "config", "request", "access", "stream", "http", "api", "openai", "stored"),
    },
    "octavo.worker.models": {"models", "loading", "tensor_parallel", "step", "model_settings"},
    "octavo.worker.sampling": {"sampling", "sequences", "step", "process", "gpu.transfer", "gpu.logprobs"},
    "octavo.worker.kv_store": {"kv_store"},
    "octavo.worker.loading": {"loading", "models", "model_settings", "step", "tensor_parallel"},
}
MOST_FILES_IN_A_FOLDER = 20


@cache
def imports(path: Path) -> list[str]:
    """Every module a file imports, also inside functions."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
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


def modules_in(package: str) -> list[Path]:
    return sorted((ROOT / package.split(".")[1] / Path(*package.split("."))).rglob("*.py"))


def upward(package: str, path: Path) -> list[str]:
    """What a file imports of its own service that lies in no folder its package may import."""
    service = ".".join(package.split(".")[:2])
    own = package.removeprefix(f"{service}.")
    allowed = LAYERS[package] | {own}
    inside = [name.removeprefix(f"{service}.") for name in imports(path) if name.startswith(f"{service}.")]
    return [name for name in inside if not any(name == one or name.startswith(f"{one}.") for one in allowed)]


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


@pytest.mark.parametrize("package", PURE)
def test_what_decides_knows_no_socket_no_clock_and_no_thread(package: str) -> None:
    files = modules_in(package)
    assert files, f"{package} has no sources"
    found = {path.name: names for path in files if (names := {n.partition(".")[0] for n in imports(path)} & IMPURE)}
    assert found == {}


@pytest.mark.parametrize("package", LAYERS)
def test_no_folder_imports_upwards(package: str) -> None:
    files = modules_in(package)
    assert files, f"{package} has no sources"
    found = {path.name: names for path in files if (names := upward(package, path))}
    assert found == {}


def test_the_rule_of_folders_finds_planted_violations(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "from octavo.scheduler.core import replica\nfrom octavo.scheduler.core.sequence import Sequence\n"
        "from octavo.scheduler.kv.blocks import BlockPool\n",
        encoding="utf-8",
    )
    assert upward("octavo.scheduler.kv", planted) == ["core.replica"]
    assert upward("octavo.scheduler.core", planted) == []


# What the scheduler's core and server may import of the memory's package; one name chooses what production serves from.
MEMORY_INTERFACE = {"octavo.scheduler.kv.memory", "octavo.scheduler.kv.manager.paged_memory"}


def memory_internals(path: Path) -> list[str]:
    """What a file imports of the memory of replicas beside its interface."""
    inside = [name for name in imports(path) if name.startswith("octavo.scheduler.kv.")]
    return [name for name in inside if name not in MEMORY_INTERFACE and name.rpartition(".")[0] not in MEMORY_INTERFACE]


def asked_of_memory(path: Path) -> set[str]:
    """The attributes that a file names of a replica's memory, `kv` or `something.kv`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", None) == "kv" or getattr(node.value, "attr", None) == "kv")
    }


def test_the_core_knows_memory_by_its_interface_alone() -> None:
    """mypy sees that the core asks nothing else of a `KVMemory`; this sees that it asks all of it, and no more."""
    files = modules_in("octavo.scheduler.core")
    assert {path.name: names for path in files if (names := memory_internals(path))} == {}
    members = {name for name in {*vars(KVMemory), *KVMemory.__annotations__} if not name.startswith("_")}
    asked = set[str]().union(*(asked_of_memory(path) for path in [*files, *modules_in("octavo.scheduler.server")]))
    assert asked == members


def test_the_rule_of_memory_finds_planted_violations(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "from octavo.scheduler.kv.memory import KVMemory\nfrom octavo.scheduler.kv.manager import KVCacheManager\n"
        "from octavo.scheduler.kv import swap\ndef f(kv, replica):\n    kv.grow(replica.kv.blocks.pool)\n",
        encoding="utf-8",
    )
    assert memory_internals(planted) == ["octavo.scheduler.kv.manager.KVCacheManager", "octavo.scheduler.kv.swap"]
    assert asked_of_memory(planted) == {"grow", "blocks"}


def test_nothing_outside_the_tests_leans_on_them() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for portion in ALLOWED
        for path in sources(portion)
        for name in imports(path)
        if any(name == each or name.startswith(f"{each}.") for each in TESTS_ONLY)
    ]
    assert found == []


def test_no_folder_is_a_heap() -> None:
    counts = Counter(
        path.parent.relative_to(ROOT)
        for root in (*IMPORT_ROOTS, "tests")
        for path in (ROOT / root).rglob("*.py")
        if "_pb2" not in path.name and "build" not in path.parts
    )
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES_IN_A_FOLDER} == {}


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
        # The build hook is run by its path, and not by its name.
        assert {path.name for path in (ROOT / root).glob("*.py")} <= {"hatch_build.py"}


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
        ("octavo.worker.kv_store", ["torch", "transformers", "numpy", "asyncio", "octavo.kernels", "zmq", "grpc"]),
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
