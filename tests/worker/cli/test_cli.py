"""What is wrong with a worker's start is said in one line, with the exit status that belongs to it."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from octavo.runtime.models.directory import fingerprint
from octavo.testbed.tiny_model import write_byte_model
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMoves
from octavo.worker.cli import worker as cli
from octavo.worker.fake.runner import FakeRunner
from octavo.worker.make_runner import describe
from octavo.worker.runner import Runner
from octavo.worker.sequences import WorkerSequence, WorkItem


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        for variable in [key for key in os.environ if key.startswith("OCTAVO_")]:
            monkeypatch.delenv(variable)
        monkeypatch.setenv("OCTAVO_RUNTIME_DIR", name)
        write_byte_model(Path(name) / "model")
        yield Path(name)


def start_worker(*arguments: str) -> Result:
    return CliRunner().invoke(cli.worker, ["--device", "fake", *arguments])


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["--model", "/nowhere/at/all"], 2, "no model directory at /nowhere/at/all"),
        (["--model", "/nowhere/model.gguf"], 2, "cannot read /nowhere/model.gguf: No such file"),
        (["--worker-endpoint", "tcp://192.0.2.1:7000"], 1, "leaves this machine in the clear"),
        (["--health-address", "unix:/proc/nowhere/health.sock"], 1, "cannot make a socket"),
    ],
    ids=["model", "GGUF", "endpoint", "health"],
)
def test_a_worker_that_cannot_start_says_why_in_one_line(
    directory: Path, arguments: list[str], status: int, why: str
) -> None:
    result = start_worker("--model", str(directory / "model"), *arguments)
    assert result.exit_code == status
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ")
    assert why in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_machine_too_small_for_the_model_is_one_line_too(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("octavo.worker.fake.runner.FakeRunner", too_large)
    result = start_worker("--model", str(directory / "model"))
    assert (result.exit_code, result.stderr) == (1, "Error: MemoryError\n")


def test_a_gpu_without_memory_for_the_model_is_told_with_what_to_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    monkeypatch.setattr("octavo.worker.step.model_runner.ModelRunner", too_large)
    result = start_worker("--device", "cuda", "--model", str(directory / "model"))
    assert result.exit_code == 1
    assert "lower --max-num-batched-tokens, or serve a smaller model; torch says: CUDA out of memory" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_or_its_driver_is_told_in_one_line(directory: Path) -> None:
    result = start_worker("--device", "cuda", "--model", str(directory / "model"))
    assert result.exit_code == 2
    assert "finds no CUDA device" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--block-size", "257"], "'--block-size'"),
        (["--kv-cache-memory", "2 pounds"], "no amount of memory"),
        (["--swap-memory", "2 pounds"], "no amount of memory"),
        (["--swap-memory", "1GiB"], "give the number of blocks"),
        (["--num-cpu-blocks", "-1"], "'--num-cpu-blocks'"),
        (["--fake-windows", "0,many"], "no list of windows"),
        (["--fake-fault", "explode=5"], "no fault"),
        (["--device", "abacus"], "'--device'"),
        (["--dtype", "float7"], "'float7' is not one of 'auto', 'float32', 'bfloat16', 'float16'"),
        (["--quantization", "q3_k"], "'q3_k' is not one of 'none', 'q8_0'"),
        (["--load-format", "pickle"], "'pickle' is not one of 'auto', 'safetensors', 'dummy'"),
        (["--threads", "1000000"], "1000000 threads are asked for and this process may use"),
        (["--worker-id", "a/b"], "worker id 'a/b'"),
        (["--kv-cache-memory", "1GiB"], "give the number of blocks"),
        (["--device", "cpu", "--fake-step-ms", "3"], "mean nothing on cpu"),
    ],
)
def test_bad_usage_ends_with_status_2(directory: Path, arguments: list[str], why: str) -> None:
    result = start_worker("--model", str(directory / "model"), *arguments)
    assert result.exit_code == 2
    assert why in result.stderr


def test_what_was_loaded_is_described_on_one_line(directory: Path) -> None:
    runner = FakeRunner(directory / "model", block_size=16, num_blocks=1 << 18, num_cpu_blocks=1 << 17, windows=(0, 64))
    assert describe(runner) == (
        "model model (fake, 2048 positions) on fake: 262144 blocks (0.02 GiB) and 131072 CPU blocks (0.01 GiB)"
        " of 16 tokens, 8 KV bytes per token (int32); kernels: fake"
    )
    runner.model = msgspec.structs.replace(runner.model, quantization="q4_0")
    assert describe(runner).startswith("model model (q4_0, fake, 2048 positions) on fake")


@dataclass
class Served:
    """What a command line makes of a runner, without serving it."""

    runners: list[Runner] = field(default_factory=list)

    def __call__(self, runner: Runner, **_: object) -> None:
        self.runners.append(runner)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()
    monkeypatch.setattr(cli, "serve", served)
    return served


@pytest.mark.parametrize(
    ("arguments", "num_cpu_blocks", "windows"),
    [
        ([], 256, [0]),
        (["--num-blocks", "40"], 10, [0]),
        (["--num-blocks", "40", "--num-cpu-blocks", "0"], 0, [0]),
        (["--num-cpu-blocks", "7", "--swap-memory", "1GiB", "--fake-windows", "0,32"], 7, [0, 32]),
    ],
)
def test_memory_to_swap_to_and_windows_reach_the_runner(
    directory: Path, served: Served, arguments: list[str], num_cpu_blocks: int, windows: list[int]
) -> None:
    result = start_worker("--model", str(directory / "model"), *arguments)
    assert result.exit_code == 0, result.output
    (runner,) = served.runners
    assert runner.num_cpu_blocks == num_cpu_blocks
    assert [group.window for group in runner.kv_groups] == windows


def test_faults_reach_the_fake_device(directory: Path, served: Served) -> None:
    result = start_worker("--model", str(directory / "model"), "--fake-fault", "oom=5")
    assert result.exit_code == 0, result.output
    (runner,) = served.runners
    sequence = WorkerSequence(1, 0, SamplingParams(max_tokens=1), 1, [5], 0, [[0]])
    with pytest.raises(MemoryError):
        runner.execute(BlockMoves(), [WorkItem(sequence, 0, 1, (sequence,))])


def test_random_weights_are_another_model_to_those_around(directory: Path, served: Served) -> None:
    for load_format in ("auto", "dummy"):
        result = start_worker("--model", str(directory / "model"), "--load-format", load_format)
        assert result.exit_code == 0, result.output
    read, random = (runner.model.fingerprint for runner in served.runners)
    assert (read, random) == (fingerprint(directory / "model"), fingerprint(directory / "model", "dummy"))


def test_an_exact_number_of_blocks_may_be_less_than_the_context_takes(
    directory: Path, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    result = start_worker("--model", str(directory / "model"), "--num-blocks", "64")
    assert result.exit_code == 0, result.output
    assert "requests as long as the context will be refused" in caplog.text
    assert "--max-model-len 1024" in caplog.text


def test_flags_can_be_given_by_the_environment(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MODEL", "/named/by/the/environment")
    result = start_worker()
    assert "no model directory at /named/by/the/environment" in result.stderr


def test_every_flag_has_an_environment_variable_and_a_help_text() -> None:
    for option in cli.worker.params:
        assert isinstance(option.envvar, str), option.name
        assert option.envvar.startswith("OCTAVO_"), option.name
        assert getattr(option, "help", None), option.name
