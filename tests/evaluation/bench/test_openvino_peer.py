"""The peer finds Octavo's modules in an environment that has only OpenVINO and the standard library."""

import subprocess
import sys
from pathlib import Path

from octavo.bench import systems

PEER = Path(systems.__file__).with_name("openvino_peer.py")
# -I and -S leave the standard library alone, as far as Octavo goes.
SCRIPT = f"import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_path({str(PEER)!r}, run_name='peer')"


def test_the_peer_starts_without_octavo_in_its_environment(tmp_path: Path) -> None:
    for package in ("numpy", "openvino", "openvino_genai"):
        (tmp_path / f"{package}.py").write_text("")
    command = [sys.executable, "-I", "-S", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
