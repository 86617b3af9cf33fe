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


def test_an_option_that_there_is_not_is_named() -> None:
    with pytest.raises(TypeError, match="LLM has no option 'max_modellen'; it has: block_size"):
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
