"""No serving code unpickles, evaluates or loads what could carry code; no default hides behind the wall clock."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for root in ("proto", "kernels", "frontend", "scheduler", "worker")
    for path in (ROOT / root).rglob("*.py")
    if "_pb2" not in path.name
]
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "torch.load", "time.time"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module and node.module.partition(".")[0] in FORBIDDEN_MODULES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in FORBIDDEN_CALLS else []
            found += [k.arg for k in node.keywords if k.arg == "trust_remote_code" and ast.unparse(k.value) != "False"]
    return found


def test_no_serving_code_can_run_what_it_is_sent() -> None:
    assert {str(path): bad for path in SOURCES if (bad := offences(path.read_text(encoding="utf-8")))} == {}


def test_the_rule_finds_planted_violations() -> None:
    planted = """
import pickle
from dill import load
torch.load('f')
s.recv_pyobj()
f(trust_remote_code=True)
time.time()
"""
    assert set(offences(planted)) == {
        "pickle",
        "dill",
        "torch.load",
        "s.recv_pyobj",
        "trust_remote_code",
        "time.time",
    }
