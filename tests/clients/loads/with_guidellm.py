"""guidellm: short runs over chats, completions and Responses, of which every request succeeds with the tokens asked."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..checks import Service, main, one_line

_REQUESTS = 12
_OUTPUT_TOKENS = 12


def run(service: Service, route: str) -> dict[str, Any]:
    """What is measured. Raises `RuntimeError` with what guidellm said."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        place = f"target=http://{service.http},model={service.model},api_key={service.key},request_format={route}"
        command = [service.executable("guidellm"), "run", "--disable-console", "--backend", f"kind=openai_http,{place}"]
        command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={_REQUESTS}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={service.model_directory}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={_OUTPUT_TOKENS}"]
        process = subprocess.run(
            [*command, "--output", f"kind=json,path={report}"],
            cwd=directory,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": directory},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if process.returncode or not report.exists():
            raise RuntimeError(
                one_line(f"exit status {process.returncode}: {(process.stdout + process.stderr)[-300:]}")
            )
        [found] = json.loads(report.read_text())["benchmarks"]
        measured: dict[str, Any] = found["metrics"]
        return measured


def check(service: Service, route: str) -> str:
    found = run(service, route)
    totals = found["request_totals"]
    assert totals == {"successful": _REQUESTS, "errored": 0, "incomplete": 0, "total": _REQUESTS}, totals
    tokens = found["output_token_count"]["successful"]
    # It asks for no less and no more, and counts what the usage says.
    assert (tokens["min"], tokens["max"]) == (_OUTPUT_TOKENS, _OUTPUT_TOKENS), tokens
    pieces = found["request_streaming_iterations_count"]["successful"]["min"]
    assert pieces > 2
    first = found["time_to_first_token_ms"]["successful"]["median"]
    return f"{_REQUESTS} of {_REQUESTS} requests, TTFT p50 {first:.0f} ms, {pieces:.0f} pieces or more each"


def chats(service: Service) -> str:
    return check(service, "/v1/chat/completions")


def completions(service: Service) -> str:
    return check(service, "/v1/completions")


def responses(service: Service) -> str:
    return check(service, "/v1/responses")


if __name__ == "__main__":
    main(chats, completions, responses)
