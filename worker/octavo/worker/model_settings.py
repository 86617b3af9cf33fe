"""Holds the settings by which a worker computes a model, each with its option; they are checked once, at start."""

import math
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Literal

from octavo.runtime.models.directory import BUNDLED_MODEL
from octavo.runtime.options.common import DRAFT_MODEL, LOAD_FORMAT, MODEL, MODEL_IMPL, NUMERICS, QUANTIZATION
from octavo.runtime.options.memory import MEMORY
from octavo.runtime.options.option import OneOf, Option, Parsed, Real, Whole
from octavo.wire.steps import MAX_BLOCK_SIZE
from octavo.worker.fake.faults import FakeFault, parse_faults
from octavo.worker.process import available_cores

Device = Literal["cpu", "cuda", "fake"]

MAX_RANKS = 1024
# How a rendezvous begins that is a path on this machine.
LOCAL_SCHEME = "file:"
DEFAULT_BLOCK_SIZE = 16
DEFAULT_FAKE_BLOCKS = 1024
DEFAULT_FAKE_WINDOWS = (0,)
DEFAULT_FAKE_HIT_RATE = 0.8
DTYPES = ("auto", "float32", "bfloat16", "float16")
# The dtypes of keys and values that a device may be asked for; `auto`: the dtype of the computation.
_KV_CACHE_DTYPES = MappingProxyType({"cpu": ("bfloat16", "float32", "int8"), "cuda": ("fp8",)})
KV_CACHE_DTYPES = ("auto", *chain(*_KV_CACHE_DTYPES.values()))

# What a model is to give of texts: as its own files say, tokens, or vectors that are pooled so.
POOLINGS = ("auto", "none", "last", "mean", "cls")
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer")
# The formats of --quantization by which a GPU multiplies as they are.
_GPU_QUANTIZATION = ("q4_0", "q4_1")

_COUNT = Whole(at_least=1)
_MOST_BLOCKS = 2**31 - 1


class ConfigError(ValueError):
    """A setting, or two of them together, that cannot be meant."""


def parse_windows(text: str) -> tuple[int, ...]:
    """Returns the windows of KV groups that `0,128` lists, in tokens. Raises `ConfigError` on anything else."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"{text!r} is no list of windows; write numbers of tokens like 0,128 (0: no window)")
    return tuple(map(int, parts))


def parse_kv_layout(text: str) -> int:
    """Returns the number of layers that lie together, 0 for `all`. Raises `ConfigError` on anything else."""
    if text == "all":
        return 0
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{text!r} is no layout of KV blocks; write all, or a number of layers")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Says which model a worker computes, where, and with how much memory for its KV blocks.

    `kv_cache_memory` and `swap_memory` (in CPU memory) are in bytes; `num_blocks` and `num_cpu_blocks` win over them.
    `kv_layout` layers lie together, 0 for all.
    `gpu_memory_utilization`, `max_num_batched_tokens`, `max_num_seqs` and `cuda_graphs` are a GPU's, and so is
    `graph_batch`, the largest decode step that is captured as a CUDA graph, and `graph_tokens`, the largest step with
    tokens of prompts: they are no options. Nor is `dequantized`, by
    which what is quantised is computed as numbers of the dtype. `fake_windows` are those of the fake device's KV
    groups, 0 for none; `fake_faults` what its prompts bring about. `tp` ranks share the
    model: all on this machine, started by the first, or each started with its `tp_rank` and one `tp_rendezvous` of
    them all. Raises `ConfigError` on what cannot be.
    """

    model: Annotated[str, MODEL] = BUNDLED_MODEL
    load_format: Annotated[str, LOAD_FORMAT] = "auto"
    model_impl: Annotated[str, MODEL_IMPL] = "auto"
    device: Annotated[
        Device,
        Option(
            "--device", "Where to compute. `fake` computes no model: it hashes tokens, to test everything around one."
        ),
    ] = "cpu"
    dtype: Annotated[
        str,
        Option("--dtype", "Type of the computation, and of the KV cache unless that has its own.", OneOf(DTYPES)),
    ] = "auto"
    quantization: Annotated[str, QUANTIZATION] = "none"
    dequantized: bool = False
    draft_model: Annotated[str | None, DRAFT_MODEL] = None
    kv_cache_dtype: Annotated[
        str,
        Option(
            "--kv-cache-dtype",
            "Another type for the KV cache: int8 on a CPU and fp8 (e4m3) on a GPU hold about twice as many tokens as"
            " bfloat16; bfloat16 and float32, on a CPU, are apart from the computation's.",
            OneOf(KV_CACHE_DTYPES),
        ),
    ] = "auto"
    numerics: Annotated[str, NUMERICS] = "default"
    pooling: Annotated[
        str,
        Option(
            "--pooling",
            "What the model makes of a text: what its own files say (auto), the tokens that follow (none), or a vector"
            " of its tokens' states: the last, their mean, or the first (cls).",
            OneOf(POOLINGS),
        ),
    ] = "auto"
    block_size: Annotated[int, Option("--block-size", "Tokens in a KV block.", Whole(1, MAX_BLOCK_SIZE))] = (
        DEFAULT_BLOCK_SIZE
    )
    kv_layout: Annotated[
        int,
        Option(
            "--kv-layout",
            "Layers whose keys and values lie side by side in a KV block: all, so that a block moves as one piece, or"
            " so many, in memory apart from that of the other layers. No result depends on it.",
            Parsed(parse_kv_layout, "all|LAYERS"),
            default="all",
        ),
    ] = 0
    kv_cache_memory: Annotated[
        int | None,
        Option(
            "--kv-cache-memory",
            "Memory for KV blocks: bytes, or with KiB, MiB or GiB. [default: the device decides]",
            MEMORY,
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        Option(
            "--num-blocks",
            f"Exact number of KV blocks; wins over --kv-cache-memory. [default: {DEFAULT_FAKE_BLOCKS} on fake]",
            Whole(1, _MOST_BLOCKS),
        ),
    ] = None
    swap_memory: Annotated[
        int | None,
        Option(
            "--swap-memory",
            "CPU memory for KV blocks of swapped requests, and else for what the prefix cache has no room for on the"
            " device; like --kv-cache-memory; 0: none. [default: a quarter as many blocks]",
            MEMORY,
        ),
    ] = None
    num_cpu_blocks: Annotated[
        int | None,
        Option(
            "--num-cpu-blocks",
            "Exact number of blocks in CPU memory; wins over --swap-memory.",
            Whole(0, _MOST_BLOCKS),
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option("--max-model-len", "Longest sequence, in tokens, where less than the model's.", _COUNT),
    ] = None
    threads: Annotated[int | None, Option("--threads", "CPU threads. [default: the device decides]", _COUNT)] = None
    tp: Annotated[
        int,
        Option(
            "--tp",
            "Ranks that share the model (tensor parallel): processes on this machine, one GPU each if on GPUs. Memory"
            " is that of all together, --threads those of each.",
            Whole(1, MAX_RANKS),
        ),
    ] = 1
    tp_rank: Annotated[
        int | None,
        Option(
            "--tp-rank",
            "Which of the ranks this one is, where they run on several machines. [default: 0, which starts the others]",
            Whole(0, MAX_RANKS - 1),
        ),
    ] = None
    tp_rendezvous: Annotated[
        str | None,
        Option(
            "--tp-rendezvous",
            "Where ranks on several machines meet: a free port at rank 0's address. What they send each other is not"
            " encrypted: only they may reach it.",
            Parsed(str, "HOST:PORT"),
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Option(
            "--gpu-memory-utilization",
            "Share of a GPU's memory that may be used, by all processes on it together; what weights and steps leave"
            " of it is for KV blocks.",
            Real(above=0, at_most=1),
        ),
    ] = 0.9
    max_num_batched_tokens: Annotated[
        int,
        Option(
            "--max-num-batched-tokens",
            "Tokens of the largest step that room is left for on a GPU; give it as the scheduler's.",
            _COUNT,
        ),
    ] = 8192
    max_num_seqs: Annotated[
        int,
        Option(
            "--max-num-seqs",
            "Sequences that a GPU's tables have room for from the start; give it as the scheduler's.",
            _COUNT,
        ),
    ] = 256
    attention_backend: Annotated[
        str,
        Option(
            "--attention-backend",
            "What computes the attention of prompts on a GPU: FlashInfer where it is installed and takes the model"
            " (auto), only that (flashinfer), or Octavo's own kernels (triton), which compute all else.",
            OneOf(ATTENTION_BACKENDS),
        ),
    ] = "auto"
    cuda_graphs: Annotated[
        bool,
        Option(
            "--cuda-graphs/--no-cuda-graphs",
            "Capture decode steps on a GPU: a start some seconds longer, and steps without launches.",
        ),
    ] = True
    graph_batch: int = 256
    graph_tokens: int = 768
    fake_step_ms: Annotated[
        float,
        Option(
            "--fake-step-ms",
            "How long each step of the fake device takes, at least.",
            Real(at_least=0, at_most=60_000),
        ),
    ] = 0.0
    fake_eos_probability: Annotated[
        float,
        Option("--fake-eos-probability", "How often the fake device chooses EOS.", Real(at_least=0, at_most=1)),
    ] = 0.0
    fake_windows: Annotated[
        tuple[int, ...],
        Option(
            "--fake-windows",
            "The windows of the fake device's KV groups; 0 sees all tokens.",
            Parsed(parse_windows, "TOKENS,..."),
            default="0",
        ),
    ] = DEFAULT_FAKE_WINDOWS
    fake_draft_hit_rate: Annotated[
        float,
        Option(
            "--fake-draft-hit-rate",
            "How often the fake device's draft model, if it has one, guesses right.",
            Real(at_least=0, at_most=1),
        ),
    ] = DEFAULT_FAKE_HIT_RATE
    fake_faults: Annotated[
        tuple[FakeFault, ...],
        Option(
            "--fake-fault",
            "What prompts bring about on the fake device (octavo.worker.fake.faults).",
            Parsed(parse_faults, "KIND=TOKENS,..."),
            default="",
            hidden=True,
        ),
    ] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(f"block size {self.block_size} is not in 1 to {MAX_BLOCK_SIZE}")
        self._check_least(1, "kv_cache_memory", "num_blocks", "max_model_len", "threads")
        self._check_least(0, "swap_memory", "num_cpu_blocks", "kv_layout")
        if self.threads is not None and self.threads > (cores := available_cores()):
            raise ConfigError(
                f"{self.threads} threads are asked for and this process may use {cores} cores, where more threads only"
                f" wait for each other; give --threads {cores} at most"
            )
        self._check_kv_cache_dtype()
        self._check_quantization()
        if self.attention_backend != "auto" and self.device != "cuda":
            raise ConfigError(
                f"--attention-backend {self.attention_backend} is for --device cuda; drop it on {self.device}"
            )
        self._check_fake()
        self._check_ranks()
        self._check_draft_model()

    @property
    def exact(self) -> bool:
        """Tells whether a request's tokens must never depend on what runs beside it."""
        return self.numerics == "exact"

    @property
    def ranks_here(self) -> int:
        """Counts the ranks of the replica that run on this machine, this one included."""
        apart = self.tp_rendezvous is not None and not self.is_local_follower
        return 1 if apart else self.tp

    def own_device(self, rank: int) -> str:
        """Returns the device of `rank`: ranks on one machine take one GPU each."""
        apart = self.device == "cuda" and self.ranks_here > 1
        return f"cuda:{rank}" if apart else self.device

    @property
    def is_local_follower(self) -> bool:
        """Tells whether the first rank has started this one, and speaks for it."""
        return bool(self.tp_rank) and (self.tp_rendezvous or "").startswith(LOCAL_SCHEME)

    def _check_quantization(self) -> None:
        if self.device == "cpu" or self.quantization == "none":
            return
        if self.device != "cuda":
            raise ConfigError(f"--quantization {self.quantization} is for cpu and cuda; drop it on {self.device}")
        if self.quantization not in _GPU_QUANTIZATION:
            raise ConfigError(
                f"--quantization {self.quantization} is for --device cpu; on cuda it takes"
                f" {', '.join(_GPU_QUANTIZATION)}"
            )

    def _check_kv_cache_dtype(self) -> None:
        here = ("auto", *_KV_CACHE_DTYPES.get(self.device, ()))
        if self.kv_cache_dtype in KV_CACHE_DTYPES and self.kv_cache_dtype not in here:
            [device] = (device for device, dtypes in _KV_CACHE_DTYPES.items() if self.kv_cache_dtype in dtypes)
            raise ConfigError(
                f"a KV cache of {self.kv_cache_dtype} is for --device {device}; on {self.device}, --kv-cache-dtype"
                f" takes {', '.join(here)}"
            )

    def _check_ranks(self) -> None:
        if not 1 <= self.tp <= MAX_RANKS:
            raise ConfigError(f"a replica of {self.tp} ranks is asked for; --tp takes 1 to {MAX_RANKS}")
        if (self.tp_rank is None) != (self.tp_rendezvous is None):
            raise ConfigError("--tp-rank and --tp-rendezvous go together; without both, all ranks run on this machine")
        if self.tp_rank is not None and not 0 <= self.tp_rank < self.tp:
            raise ConfigError(f"rank {self.tp_rank} of {self.tp} is asked for; --tp {self.tp} has 0 to {self.tp - 1}")
        if self.tp_rendezvous is not None:
            self._check_rendezvous(self.tp_rendezvous)
        if self.tp == 1:
            return
        if self.device == "fake":
            raise ConfigError("the fake device computes no model that ranks could share; drop --tp, or --device fake")
        if self.threads and self.threads > 1 and self.threads * self.ranks_here > (cores := available_cores()):
            raise ConfigError(
                f"{self.ranks_here} ranks of {self.threads} threads each are asked for and this process may use {cores}"
                " cores, where more threads only wait for each other; give fewer --threads"
            )

    def _check_draft_model(self) -> None:
        if self.draft_model is None:
            return
        if self.device == "cuda":
            raise ConfigError(
                "a draft model goes on from tokens that are known, and steps on a GPU are queued before theirs are;"
                " drop --draft-model, or --device cuda"
            )
        if self.tp > 1:
            raise ConfigError("a draft model is not shared by ranks yet; drop --draft-model, or --tp")

    def _check_rendezvous(self, rendezvous: str) -> None:
        if self.tp == 1:
            raise ConfigError("--tp-rank and --tp-rendezvous are for several ranks; give --tp too")
        host, _, port = rendezvous.rpartition(":")
        if not rendezvous.startswith(LOCAL_SCHEME) and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ConfigError(f"--tp-rendezvous {rendezvous!r} is no address; write host:port")

    def _check_least(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")

    @property
    def _has_fake_settings(self) -> bool:
        windows = self.fake_windows != DEFAULT_FAKE_WINDOWS
        guesses = self.fake_draft_hit_rate != DEFAULT_FAKE_HIT_RATE
        return bool(windows or self.fake_step_ms or self.fake_eos_probability or self.fake_faults or guesses)

    def _check_fake(self) -> None:
        if self.device == "fake":
            if self.kv_layout:
                raise ConfigError("the fake device has no layers that could lie apart; drop --kv-layout")
            sized = self.kv_cache_memory is not None and self.num_blocks is None
            if sized or (self.swap_memory is not None and self.num_cpu_blocks is None):
                raise ConfigError("the fake device has no KV memory to size; give the number of blocks instead")
        elif self._has_fake_settings:
            raise ConfigError(f"settings of the fake device mean nothing on {self.device}; drop them or use fake")
        rates = (self.fake_eos_probability, self.fake_draft_hit_rate)
        if not 0 <= self.fake_step_ms < math.inf or not all(0 <= rate <= 1 for rate in rates):
            raise ConfigError("a fake step takes 0 ms or more, and a probability lies in 0 to 1")
        if not self.fake_windows or min(self.fake_windows) < 0:
            raise ConfigError("the fake device needs one KV group or more, each with a window of 0 tokens or more")
