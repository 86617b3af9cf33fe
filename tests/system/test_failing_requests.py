"""A request that the model answers with NaN: its client is told, the others notice nothing."""

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.stack import Stack, token_request
from octavo.testbed.tiny_model import write_byte_model

pytestmark = pytest.mark.system

# The embedding of this token is NaN.
BROKEN_TOKEN = 255
# They share their first block with the broken one.
BEGINNING = [(7 * i) % 250 for i in range(20)]
PROMPTS = [[*BEGINNING, *range(i, i + 5)] for i in range(4)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    directory = tmp_path_factory.mktemp("models") / "broken-model"
    write_byte_model(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
    torch.manual_seed(0)
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(LlamaConfig(**config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN_TOKEN] = torch.nan
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def stack(broken_model: Path) -> Iterator[Stack]:
    environment = {"OCTAVO_DTYPE": "float32", "OCTAVO_THREADS": "1", "OCTAVO_NUM_BLOCKS": "256"}
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        Stack(broken_model, Path(directory), environment) as stack,
    ):
        yield stack.start_all()


def test_nan_ends_one_request_with_a_status_and_no_other(stack: Stack) -> None:
    good = [token_request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    expected = [generation.token_ids for generation in stack.generate_all(good)]
    broken = token_request([*BEGINNING, BROKEN_TOKEN, 9, 9], NUM_TOKENS)
    with ThreadPoolExecutor(len(good) + 2) as pool:
        served = [pool.submit(stack.generate, request) for request in good]
        failing = [pool.submit(stack.generate, broken) for _ in range(2)]
        assert [each.result().token_ids for each in served] == expected
        errors = [each.exception() for each in failing]
    for error in errors:
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert reason_of(error) == "LOGITS_NOT_FINITE"
        assert "--dtype float32" in (error.details() or "")
    stack.wait_idle()
    stack.assert_alive()
    assert stack.generate(good[0]).token_ids == expected[0]
