"""aiperf: a short run over chats and one over completions, without an error."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..checks import Service, main

_REQUESTS = 24


def run(service: Service, kind: str) -> dict[str, Any]:
    """The figures of a run. Raises `RuntimeError` with what aiperf said."""
    with tempfile.TemporaryDirectory() as directory:
        command = [service.executable("aiperf"), "profile", "--model", service.model, "--url", f"http://{service.http}"]
        command += ["--endpoint-type", kind, "--streaming", "--api-key", service.key, "--ui-type", "none"]
        command += ["--tokenizer", service.model_directory, "--request-count", str(_REQUESTS), "--concurrency", "6"]
        command += ["--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "12", "--random-seed", "1"]
        command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", directory]
        # Few processes, and patience with them, for a machine of few cores.
        command += ["--workers-max", "2", "--record-processors", "1", "--no-server-metrics", "--no-gpu-telemetry"]
        patience = {"AIPERF_SERVICE_HEARTBEAT_MISSED_THRESHOLD": "30"}
        process = subprocess.run(
            command, env={**os.environ, **patience}, capture_output=True, text=True, timeout=600, check=False
        )
        reports = list(Path(directory).rglob("profile_export_aiperf.json"))
        if process.returncode or not reports:
            raise RuntimeError(f"exit status {process.returncode}: {(process.stdout + process.stderr)[-600:]}")
        found: dict[str, Any] = json.loads(reports[0].read_text())
        return found


def check(service: Service, kind: str) -> str:
    found = run(service, kind)
    assert not found.get("error_summary"), found["error_summary"]
    assert found["request_count"]["avg"] == _REQUESTS
    first, rate = found["time_to_first_token"]["p50"], found["output_token_throughput"]["avg"]
    return f"{_REQUESTS} requests, TTFT p50 {first:.0f} ms, {rate:.0f} tokens/s"


def chats(service: Service) -> str:
    return check(service, "chat")


def completions(service: Service) -> str:
    return check(service, "completions")


if __name__ == "__main__":
    main(chats, completions)
