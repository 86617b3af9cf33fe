"""No serving code unpickles, evaluates or loads what could carry code; no default hides behind the wall clock.

One command, which serves nothing, reads pickled weights: by torch's reader of plain tensors.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for root in ("proto", "kernels", "frontend", "scheduler", "worker", "evaluation")
    for path in (ROOT / root).rglob("*.py")
    # What measures, breaks and watches Octavo serves nobody.
    if "_pb2" not in path.name and not {"bench", "chaos", "testbed"} & set(path.relative_to(ROOT / root).parts)
]
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "torch.load", "time.time"}
LAST_WORDS = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}


CONVERTER = "convert_weights"


def keywords(call: ast.Call) -> set[tuple[str | None, str]]:
    return {(keyword.arg, ast.unparse(keyword.value)) for keyword in call.keywords}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module and node.module.partition(".")[0] in FORBIDDEN_MODULES else []
        elif isinstance(node, ast.Call):
            verb = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = ast.unparse(node.func) if verb in LAST_WORDS else ""
            if name == "torch.load" and ("weights_only", "True") in keywords(node):
                continue
            found += [name] if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in FORBIDDEN_CALLS else []
            found += [k.arg for k in node.keywords if k.arg == "trust_remote_code" and ast.unparse(k.value) != "False"]
    return found


def test_no_serving_code_can_run_what_it_is_sent() -> None:
    assert {str(path): bad for path in SOURCES if (bad := offences(path.read_text(encoding="utf-8")))} == {}


def test_only_the_command_that_converts_reads_pickled_weights() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in SOURCES}
    assert {stem for stem, text in texts.items() if "torch.load(" in text} == {CONVERTER}
    assert {stem for stem, text in texts.items() if f"import {CONVERTER}" in text} == set()
    assert {stem for stem, text in texts.items() if f"loading.{CONVERTER}" in text} == {"prepare"}


def test_the_rule_finds_planted_violations() -> None:
    planted = """
import pickle
from dill import load
torch.load('f')
torch.load('f', weights_only=False)
torch.load('f', weights_only=True)
s.recv_pyobj()
f(trust_remote_code=True)
time.time()
"""
    assert sorted(offences(planted)) == [
        "dill",
        "pickle",
        "s.recv_pyobj",
        "time.time",
        "torch.load",
        "torch.load",
        "trust_remote_code",
    ]
