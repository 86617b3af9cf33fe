"""What an LLM is told, in the commands' words."""

import pytest

from octavo.llm.engine import read_options


def test_options_become_environment_variables() -> None:
    options = read_options(
        "some-model",
        {
            "num_workers": 2,
            "dtype": "half",
            "max_model_len": 64,
            "swap_space": 0.5,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "generation_config": "vllm",
            "num_gpu_blocks_override": 9,
            "kv_cache_memory": "2GiB",
        },
    )
    assert options.arguments()[:2] == ["--workers", "2"]
    assert options.environment() == {
        "OCTAVO_MODEL": "some-model",
        "OCTAVO_DTYPE": "float16",
        "OCTAVO_MAX_MODEL_LEN": "64",
        "OCTAVO_SWAP_MEMORY": str(1 << 29),
        "OCTAVO_PREFIX_CACHE": "false",
        "OCTAVO_CUDA_GRAPHS": "false",
        "OCTAVO_GENERATION_CONFIG": "none",
        "OCTAVO_NUM_BLOCKS": "9",
        "OCTAVO_KV_CACHE_MEMORY": "2GiB",
    }


def test_what_is_not_given_is_left_to_the_processes() -> None:
    assert read_options("m", {}).environment() == {
        "OCTAVO_MODEL": "m",
        "OCTAVO_CUDA_GRAPHS": "true",
        "OCTAVO_GENERATION_CONFIG": "auto",
    }


def test_workers_options_are_taken_under_their_own_names() -> None:
    given = {"swap_memory": "1GiB", "num_blocks": 7, "cuda_graphs": False, "block_size": 32, "threads": 2}
    assert read_options("m", given).environment() == {
        "OCTAVO_MODEL": "m",
        "OCTAVO_SWAP_MEMORY": "1GiB",
        "OCTAVO_NUM_BLOCKS": "7",
        "OCTAVO_CUDA_GRAPHS": "false",
        "OCTAVO_BLOCK_SIZE": "32",
        "OCTAVO_THREADS": "2",
        "OCTAVO_GENERATION_CONFIG": "auto",
    }


@pytest.mark.parametrize(
    ("name", "value", "own", "other"),
    [
        ("swap_space", 0.0, "swap_memory", 1),
        ("num_gpu_blocks_override", 3, "num_blocks", 3),
        ("enforce_eager", True, "cuda_graphs", True),
    ],
)
def test_one_option_under_two_names_is_refused(name: str, value: object, own: str, other: object) -> None:
    with pytest.raises(ValueError, match=f"{name} and {own} are names of one option"):
        read_options("m", {name: value, own: other})


def test_an_option_that_there_is_not_is_named() -> None:
    with pytest.raises(TypeError, match="LLM has no option 'max_modellen'; it has: attention_backend"):
        read_options("m", {"max_modellen": 5})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("trust_remote_code", True),
        ("tokenizer", "other"),
        ("quantization", "awq"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_reason(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}, but it can only be .*: "):
        read_options("m", {name: value})


def test_the_only_values_there_are_may_be_given() -> None:
    given = {"tensor_parallel_size": 1, "trust_remote_code": False, "tokenizer": "m", "quantization": None}
    assert read_options("m", given).environment() == read_options("m", {}).environment()
