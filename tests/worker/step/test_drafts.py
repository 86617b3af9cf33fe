"""Real models say with drafts, to the last bit of every logprob, what they say without."""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, GPT2Config, LlamaConfig, Qwen3Config

from octavo.runtime.models.grammar import load_vocabulary
from octavo.testbed.models import NO_MOVES, new_sequences, write_tiny_model
from octavo.testbed.tiny_model import END_TOKEN_ID, VOCAB_SIZE, write_byte_model
from octavo.testing.depth import deep
from octavo.testing.native import VARIANTS, loaded, threads
from octavo.testing.oracles.drafted_runs import Asked, DraftedRun, any_draft, compare, random_requests
from octavo.testing.small.constraints import DIGITS, WORDS, compiled
from octavo.wire.sampling import SamplingParams
from octavo.worker.model_settings import ModelSettings
from octavo.worker.sequences import WorkItem
from octavo.worker.step.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("compiled_kernels")
# No size is a multiple of what vectors, panels and threads are cut by, where that can be.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
ODD: dict[str, Any] = {**SIZES, "hidden_size": 78, "intermediate_size": 90}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "odd sizes": LlamaConfig(**ODD, attention_bias=True, mlp_bias=True),
    "windows and soft caps": Gemma2Config(
        **SIZES, sliding_window=20, attn_logit_softcapping=1.0, final_logit_softcapping=3.0
    ),
    "windows": Qwen3Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        eos_token_id=END_TOKEN_ID,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=96, n_layer=2, n_head=6, n_positions=256, bos_token_id=0, eos_token_id=1
    ),
}


@dataclass(frozen=True)
class Case:
    """A model and how it is computed."""

    config: str
    options: dict[str, Any]


CASES = {
    "fp32, exact": Case("odd sizes", {"numerics": "exact"}),
    "fp32": Case("odd sizes", {"dtype": "float32"}),
    "bf16": Case("odd sizes", {"dtype": "bfloat16"}),
    "bf16 over 8-bit keys and values": Case("odd sizes", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "q8_0": Case("llama", {"quantization": "q8_0"}),
    "q8_0 over 8-bit keys and values": Case("llama", {"quantization": "q8_0", "kv_cache_dtype": "int8"}),
    "q4_0": Case("llama", {"quantization": "q4_0"}),
    "windows and soft caps, fp32": Case("windows and soft caps", {"numerics": "exact"}),
    "windows and soft caps, bf16": Case("windows and soft caps", {"dtype": "bfloat16"}),
    "windows, bf16": Case("windows", {"dtype": "bfloat16"}),
    "by transformers, fp32": Case("llama", {"dtype": "float32", "model_impl": "transformers"}),
    "by transformers, bf16": Case("llama", {"dtype": "bfloat16", "model_impl": "transformers"}),
    "gpt2, fp32": Case("gpt2", {"dtype": "float32"}),
    "gpt2, bf16": Case("gpt2", {"dtype": "bfloat16"}),
}
# The rest differs from these in what the deep run tries.
SHALLOW = ("fp32", "bf16", "q8_0 over 8-bit keys and values", "windows and soft caps, bf16", "by transformers, fp32")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each with weights once somebody asks for it."""
    return {name: tmp_path_factory.mktemp("model") for name in CONFIGS}


def make_runner(directories: dict[str, Path], case: Case) -> ModelRunner:
    directory = directories[case.config]
    if not (directory / "model.safetensors").exists():
        write_byte_model(directory, 256)
        write_tiny_model(directory, CONFIGS[case.config])
    return ModelRunner(directory, ModelSettings(**{"num_blocks": 512, "threads": 1} | case.options))


def requests(runner: ModelRunner, directory: Path, seed: int, count: int) -> list[Asked]:
    vocabulary = load_vocabulary(directory)
    texts = [compiled(each, vocabulary) for each in (DIGITS, WORDS)]
    return random_requests(Random(seed), count, VOCAB_SIZE, longest_prompt=70, most_tokens=24, grammars=texts)


@pytest.mark.parametrize(
    "name", [name if name in SHALLOW else pytest.param(name, marks=pytest.mark.deep) for name in CASES]
)
@pytest.mark.parametrize("seed", [0, *deep(*range(1, 12))])
def test_drafts_of_any_quality_change_no_bit(directories: dict[str, Path], name: str, seed: int) -> None:
    """Batches, chunks and blocks are others with drafts than without."""
    case = CASES[name]
    runner = make_runner(directories, case)
    with threads(1 + seed % 3):
        drafted = compare(runner, requests(runner, directories[case.config], seed, 10), seed)
    assert 0 < drafted.num_accepted < drafted.num_drafted


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["fp32", "bf16", *deep("q8_0 over 8-bit keys and values", "windows, bf16")])
def test_every_instruction_set_keeps_the_rows_of_a_draft_apart(
    directories: dict[str, Path], name: str, variant: str
) -> None:
    library = loaded()
    if library.functions.octavo_choose(variant.encode()) is None:
        pytest.skip(f"this CPU does not run {variant}")
    try:
        runner = make_runner(directories, CASES[name])
        compare(runner, requests(runner, directories[CASES[name].config], 5, 6), 5)
    finally:
        library.functions.octavo_choose(library.variant.encode())


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}])
def test_a_guess_that_overflows_changes_nothing(
    directories: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """The keys and values of one token are not finite. It stands in drafts, and never in an answer."""
    make_runner(directories, Case("llama", {}))
    for file in directories["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    poison = 200
    tensors["model.embed_tokens.weight"][poison] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = ModelRunner(tmp_path, ModelSettings(num_blocks=64, threads=1, **{"dtype": "float32"} | options))
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=4, banned_token_ids=[poison], logprobs=2)
    asked = [Asked([seed, 7, 8, 9], params) for seed in range(6)]
    plain = DraftedRun(runner, asked, Random(1)).run()
    random = Random(2)
    right = any_draft(plain, random, VOCAB_SIZE)

    def with_poison(place: tuple[int, int], generated: list[int]) -> list[int]:
        draft = right(place, generated)
        return [*draft[: random.randint(0, len(draft))], poison, poison]

    drafted = DraftedRun(runner, asked, random, with_poison)
    assert drafted.run() == plain
    assert drafted.num_accepted > 0


def test_attention_that_lets_one_row_spoil_another_checks_no_draft(directories: dict[str, Path]) -> None:
    """Torch's multiplies what a row may not see by zero, which makes NaN of NaN."""
    runner = make_runner(directories, Case("llama", {"dtype": "float32", "block_size": 8}))
    assert not runner.attention.masks_unwritten
    asked = [Asked([1, 2, 3], SamplingParams(max_tokens=9))]
    plain = DraftedRun(runner, asked, Random(0)).run()
    drafted = DraftedRun(runner, asked, Random(0), lambda place, told: plain[place].token_ids[len(told) :])
    assert drafted.run() == plain
    assert (drafted.num_drafted > 0, drafted.num_accepted) == (True, 0)


def test_a_prompt_and_a_draft_are_one_item(directories: dict[str, Path]) -> None:
    """A whole answer comes with the prompt's own step, and its prompt's logprobs too."""
    runner = make_runner(directories, CASES["bf16"])
    params = SamplingParams(max_tokens=12, logprobs=1, prompt_logprobs=1)
    asked = [Asked(list(range(40)), params)]
    plain = DraftedRun(runner, asked, Random(3)).run()[0, 0]
    [sequence] = new_sequences(runner, [asked[0].prompt], 12, params)
    output = runner.execute(NO_MOVES, [WorkItem(sequence, 0, 51, (sequence,), plain.token_ids[:11])])
    [first], [more], [prompt] = output.sampled, output.further, output.prompt_logprobs
    assert [first.token_id, *more.token_ids] == plain.token_ids
    assert [first.logprobs, *more.logprobs] == plain.logprobs
    assert prompt.logprobs == plain.prompt_logprobs
