"""lm-eval's local-completions: loglikelihoods of a small task of our own, beside those of transformers in float32.

The harness asks /v1/completions for prompts with echo and logprobs, as strings and as token ids.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks import Service, main, one_line

_TOLERANCE = 1e-3
_ITEMS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome", " a kind of cheese"], "label": 0},
    {"question": "Two plus two is", "choices": [" four", " seven", " blue, mostly"], "label": 0},
    {"question": "Grass is usually", "choices": [" square", " green", " made of glass"], "label": 1},
    {"question": "Zum Frühstück gibt es", "choices": [" Käse und Brötchen", " 日本語", " 🙂"], "label": 0},
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " None", " 'a'"], "label": 0},
]
_TASK = """\
task: octavo_items
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - metric: acc
"""


def evaluated(service: Service, directory: Path, *, as_ids: bool) -> list[tuple[str, str, float, bool]]:
    """Context, continuation, its logprob and whether greedy sampling gives it, as the harness has found them."""
    items = directory / "items.jsonl"
    items.write_text("\n".join(map(json.dumps, _ITEMS)) + "\n")
    (directory / "octavo_items.yaml").write_text(_TASK.format(items=items))
    url = f"{service.base_url}/completions"
    settings = f"model={service.model},base_url={url},tokenizer={service.model_directory},num_concurrent=2"
    settings += f",max_retries=1,tokenized_requests={as_ids},tokenizer_backend=huggingface,max_length=2048"
    command = [service.executable("lm-eval"), "--model", "local-completions", "--model_args", settings]
    command += ["--tasks", "octavo_items", "--include_path", str(directory), "--log_samples", "--output_path"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(directory / "home")}
    process = subprocess.run(
        [*command, str(directory / "out")],
        env={**os.environ, **offline, "OPENAI_API_KEY": service.key},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    logs = list((directory / "out").rglob("samples_*.jsonl"))
    if process.returncode or not logs:
        raise RuntimeError(one_line(process.stderr[-300:]))
    found = []
    for line in logs[0].read_text().splitlines():
        sample = json.loads(line)
        for arguments, (answer,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            logprob, greedy = answer
            found.append((arguments["arg_0"], arguments["arg_1"], float(logprob), str(greedy) == "True"))
    return found


def computed(service: Service, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    """The same by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(service.model_directory)
    model = AutoModelForCausalLM.from_pretrained(service.model_directory, dtype=torch.float32)
    found = []
    for context, continuation in pairs:
        ids = tokenizer.encode(context + continuation)
        length = len(tokenizer.encode(context))
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        said = torch.tensor(ids[length:])
        before = logprobs[length - 1 : -1]
        logprob = before.gather(1, said[:, None]).sum().item()
        found.append((logprob, bool((before.argmax(-1) == said).all())))
    return found


def compare(service: Service, *, as_ids: bool) -> str:
    with tempfile.TemporaryDirectory() as directory:
        found = evaluated(service, Path(directory), as_ids=as_ids)
    assert len(found) == sum(len(item["choices"]) for item in _ITEMS)
    wanted = computed(service, [(context, continuation) for context, continuation, _, _ in found])
    furthest = max(abs(mine[2] - theirs[0]) for mine, theirs in zip(found, wanted, strict=True))
    assert furthest <= _TOLERANCE, f"{furthest:.2g} apart: {found} and {wanted}"
    assert [mine[3] for mine in found] == [theirs[1] for theirs in wanted]
    return f"{len(found)} loglikelihoods, at most {furthest:.1e} apart"


def texts(service: Service) -> str:
    return compare(service, as_ids=False)


def token_ids(service: Service) -> str:
    return compare(service, as_ids=True)


if __name__ == "__main__":
    main(texts, token_ids)
