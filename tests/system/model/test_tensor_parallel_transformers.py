"""Models that transformers computes, on a replica of two processes."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from octavo.testbed.models import transformers_greedy
from octavo.testbed.stack import Stack, collect, token_request
from octavo.testbed.tiny_model import END_TOKEN_ID, START_TOKEN_ID, VOCAB_SIZE, write_byte_model
from octavo.testing.small.architecture_trial import write_random_model

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NUM_TOKENS = 20
PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 9 * i)] for i in range(3)]
SETTINGS = {"OCTAVO_DEVICE": "cpu", "OCTAVO_DTYPE": "float32", "OCTAVO_THREADS": "1", "OCTAVO_NUM_BLOCKS": "64"}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": START_TOKEN_ID,
    "eos_token_id": END_TOKEN_ID,
}


@pytest.mark.parametrize(
    ("config_class", "architecture", "sizes"),
    [(OPTConfig, OPTForCausalLM, {"ffn_dim": 96, "word_embed_proj_dim": 64}), (GPT2Config, GPT2LMHeadModel, {})],
    ids=["opt", "gpt2"],
)
@pytest.mark.deep
def test_two_processes_give_the_tokens_of_transformers(
    config_class: Any, architecture: Any, sizes: dict[str, Any], tmp_path: Path
) -> None:
    write_byte_model(tmp_path)
    model = write_random_model(tmp_path, config_class(**SIZES, **sizes), architecture)
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        Stack(tmp_path, Path(directory), SETTINGS) as stack,
    ):
        stack.start("scheduler")
        stack.start("frontend")
        stack.start("worker", "worker-0", arguments=["--tp", "2"])
        stack.wait_ready()
        streams = [stack.stream(token_request(prompt, NUM_TOKENS)) for prompt in PROMPTS]
        tokens = [list(collect([*stream]).token_ids) for stream in streams]
    assert tokens == [transformers_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
