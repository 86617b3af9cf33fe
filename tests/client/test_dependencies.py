"""The client is for any program: it must not drag the server's packages in."""

import subprocess
import sys

BLOCKED = [
    "click",
    "google.rpc",
    "grpc_status",
    "httpx",
    "msgspec",
    "numpy",
    "octavo.cli",
    "octavo.frontend",
    "octavo.wire",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "zmq",
]


def test_the_client_needs_grpc_and_protobuf_alone() -> None:
    script = f"import sys\nfor name in {BLOCKED!r}:\n    sys.modules[name] = None\nimport octavo.client\n"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_the_offline_api_needs_nothing_heavy_in_its_own_process() -> None:
    heavy = "{'transformers', 'tokenizers', 'torch', 'octavo.frontend'} & set(sys.modules)"
    script = f"import sys, octavo.llm; sys.exit(repr({heavy}) if {heavy} else 0)"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)
