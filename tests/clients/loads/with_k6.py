"""k6 with the script beside this file: gRPC by reflection, streams of several users at once."""

import json
import subprocess
import tempfile
from pathlib import Path

from ..checks import Service, main, one_line

_SCRIPT = Path(__file__).with_suffix(".js")
_CHECKS = {"models", "refusal", "stream with each of its events"}


def streams_by_reflection(service: Service) -> str:
    with tempfile.TemporaryDirectory() as directory:
        summary = Path(directory) / "summary.json"
        command = [service.executable("k6"), "run", "--quiet", "--no-usage-report", "--summary-export", str(summary)]
        process = subprocess.run([*command, str(_SCRIPT)], capture_output=True, text=True, timeout=300, check=False)
        assert process.returncode == 0, one_line(process.stderr + process.stdout)
        checks = json.loads(summary.read_text())["root_group"]["checks"]
    assert set(checks) == _CHECKS, checks
    assert all(found["passes"] == 12 and not found["fails"] for found in checks.values()), checks
    return ", ".join(f"{name}: {found['passes']}" for name, found in checks.items())


if __name__ == "__main__":
    main(streams_by_reflection)
