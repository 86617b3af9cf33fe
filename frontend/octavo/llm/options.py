"""What an `LLM` is told, as what the commands are told: their environment variables and flags."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

# vLLM's further names.
_DTYPES: Final = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """None leaves a choice to the process that it is about; `octavo worker --help` and `octavo scheduler --help` say
    more. Names are vLLM's where they mean the same; those that can have only one value are there for scripts that give
    it. `swap_space` is in GiB, `kv_cache_memory` in bytes or as text such as "2GiB". `seed` is what the seeds of
    requests without one are drawn from; None: they differ from run to run."""

    model: str
    num_workers: int = 1
    device: str | None = None
    dtype: str | None = None
    seed: int | None = 0
    max_model_len: int | None = None
    load_format: str | None = None
    model_impl: str | None = None
    numerics: str | None = None
    threads: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory: int | str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool = False
    generation_config: Literal["auto", "vllm"] = "auto"
    ready_timeout: float = 600.0
    tokenizer: str | None = None
    quantization: None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` for what this engine does not have."""
        for name, (only, why) in _ONLY.items():
            if getattr(self, name) != only and not (name == "tokenizer" and self.tokenizer == self.model):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it can only be {only!r}: {why}")

    def arguments(self) -> list[str]:
        """Of `octavo serve`."""
        return ["--workers", str(self.num_workers), "--ready-timeout", str(self.ready_timeout)]

    def environment(self) -> dict[str, str]:
        """Of all processes."""
        given = {name: value for name in _VARIABLES if (value := getattr(self, name)) is not None}
        return {_VARIABLES[name]: _WORDS.get(name, str)(value) for name, value in given.items()}


def read_options(model: str, options: Mapping[str, Any]) -> EngineOptions:
    """Raises `TypeError` for an option that there is not, and `ValueError` for a value that cannot be had."""
    known = {field.name for field in fields(EngineOptions)} - {"model"}
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"LLM has no option {unknown[0]!r}; it has: {', '.join(sorted(known))}")
    return EngineOptions(model=model, **options)


_ONLY: Final[dict[str, tuple[object, str]]] = {
    "tokenizer": (None, "the model's directory has it"),
    "quantization": (None, "weights are computed with as they are"),
    "tensor_parallel_size": (1, "a model is on one device; num_workers runs several copies of it"),
    "pipeline_parallel_size": (1, "a model is on one device; num_workers runs several copies of it"),
    "trust_remote_code": (False, "code that comes with a model is never run"),
}
_VARIABLES: Final = {
    "device": "OCTAVO_DEVICE",
    "dtype": "OCTAVO_DTYPE",
    "max_model_len": "OCTAVO_MAX_MODEL_LEN",
    "load_format": "OCTAVO_LOAD_FORMAT",
    "model_impl": "OCTAVO_MODEL_IMPL",
    "numerics": "OCTAVO_NUMERICS",
    "threads": "OCTAVO_THREADS",
    "gpu_memory_utilization": "OCTAVO_GPU_MEMORY_UTILIZATION",
    "kv_cache_memory": "OCTAVO_KV_CACHE_MEMORY",
    "kv_cache_dtype": "OCTAVO_KV_CACHE_DTYPE",
    "block_size": "OCTAVO_BLOCK_SIZE",
    "num_gpu_blocks_override": "OCTAVO_NUM_BLOCKS",
    "swap_space": "OCTAVO_SWAP_MEMORY",
    "max_num_seqs": "OCTAVO_MAX_NUM_SEQS",
    "max_num_batched_tokens": "OCTAVO_MAX_NUM_BATCHED_TOKENS",
    "enable_prefix_caching": "OCTAVO_PREFIX_CACHE",
    "enforce_eager": "OCTAVO_CUDA_GRAPHS",
    "generation_config": "OCTAVO_GENERATION_CONFIG",
    "model": "OCTAVO_MODEL",
}
_WORDS: Final[dict[str, Callable[[Any], str]]] = {
    "dtype": lambda name: _DTYPES.get(name, name),
    "swap_space": lambda gib: str(round(gib * 2**30)),
    "enable_prefix_caching": lambda on: str(on).lower(),
    "enforce_eager": lambda eager: str(not eager).lower(),
    "generation_config": lambda source: {"vllm": "none"}.get(source, source),
}
