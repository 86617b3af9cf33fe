"""evalscope: loads of chats and of completions without a failure, and an evaluation of a small data set of our own."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..checks import Service, main, one_line

_REQUESTS = 12
_OUTPUT_TOKENS = 12
_ITEMS = """id,question,A,B,C,D,answer
1,The capital of France is,Paris,Rome,Oslo,Bern,A
2,Two plus two is,one,four,nine,ten,B
3,Grass is usually,square,blue,green,glass,C
"""


def run(service: Service, directory: str, *arguments: str) -> None:
    """Raises `RuntimeError` with what evalscope said."""
    alone = {"HF_HUB_OFFLINE": "1", "HF_HOME": directory, "MODELSCOPE_CACHE": directory}
    process = subprocess.run(
        [service.executable("evalscope"), *arguments, "--model", service.model, "--api-key", service.key],
        cwd=directory,
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(one_line(f"exit status {process.returncode}: {(process.stdout + process.stderr)[-300:]}"))


def load(service: Service, route: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        asked = ["--api", "openai", "--url", f"{service.base_url}/{route}", "--stream", "--dataset", "random"]
        asked += ["--tokenizer-path", service.model_directory, "--parallel", "4", "--number", str(_REQUESTS)]
        asked += ["--min-prompt-length", "40", "--max-prompt-length", "60", "--prefix-length", "0"]
        asked += ["--min-tokens", str(_OUTPUT_TOKENS), "--max-tokens", str(_OUTPUT_TOKENS)]
        run(service, directory, "perf", *asked, "--outputs-dir", directory, "--name", "run")
        [summary] = Path(directory).rglob("benchmark_summary.json")
        found: dict[str, Any] = json.loads(summary.read_text())
    assert found["Total Requests"] == found["Success Requests"] == found["Stream Requests"] == _REQUESTS, found
    assert found["Failed Requests"] == 0, found
    assert found["Avg Output Tokens"] == _OUTPUT_TOKENS, found
    assert found["Avg Input Tokens"] >= 40, found
    return f"{_REQUESTS} of {_REQUESTS} requests, TTFT {found['Avg TTFT (ms)']:.0f} ms on average"


def chats(service: Service) -> str:
    return load(service, "chat/completions")


def completions(service: Service) -> str:
    return load(service, "completions")


def evaluation(service: Service) -> str:
    with tempfile.TemporaryDirectory() as directory:
        items = Path(directory) / "items" / "cities_val.csv"
        items.parent.mkdir()
        items.write_text(_ITEMS)
        place = {"general_mcq": {"local_path": str(items.parent), "subset_list": ["cities"]}}
        asked = ["--api-url", service.base_url, "--eval-type", "openai_api", "--datasets", "general_mcq"]
        asked += ["--dataset-args", json.dumps(place), "--work-dir", directory, "--no-timestamp"]
        settings = json.dumps({"temperature": 0, "max_tokens": 24})
        run(service, directory, "eval", *asked, "--generation-config", settings)
        [report] = (Path(directory) / "reports" / service.model).glob("*.json")
        [metric] = json.loads(report.read_text())["metrics"]
        [predictions] = (Path(directory) / "predictions" / service.model).glob("*.jsonl")
        samples = [json.loads(line)["model_output"] for line in predictions.read_text().splitlines()]
    assert metric["num"] == len(samples) == 3
    for sample in samples:
        assert sample["choices"][0]["message"]["content"]
        usage = sample["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    return f"{metric['num']} samples, accuracy {metric['score']}"


if __name__ == "__main__":
    main(chats, completions, evaluation)
