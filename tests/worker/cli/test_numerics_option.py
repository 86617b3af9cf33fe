"""`octavo worker --numerics`, from the command line to the runner."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from transformers import LlamaConfig

from octavo.testbed.models import write_tiny_model
from octavo.testing.native import loaded
from octavo.worker.cli import worker as cli
from octavo.worker.runner import Runner


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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    loaded()
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    write_tiny_model(tmp_path / "model", config)
    return tmp_path / "model"


def start_worker(model: Path, *arguments: str) -> Result:
    settings = ["--model", str(model), "--num-blocks", "8", "--threads", "1", "--health-address", "127.0.0.1:0"]
    return CliRunner().invoke(cli.worker, [*settings, *arguments])


@pytest.mark.parametrize(
    ("arguments", "computed"),
    [([], "(bfloat16, 64"), (["--dtype", "float32"], "(float32, 64"), (["--numerics", "exact"], "(float32, exact, 64")],
)
def test_the_line_at_start_says_how_the_model_is_computed(
    model: Path, served: Served, arguments: list[str], computed: str
) -> None:
    result = start_worker(model, *arguments)
    assert result.exit_code == 0, result.output
    assert f"model model {computed} positions) on cpu" in result.output
    (runner,) = served.runners
    assert runner.model.dtype == ("float32" if arguments else "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--dtype", "bfloat16"], "Error: --numerics exact computes in float32 on a CPU; leave --dtype bfloat16 out\n"),
        (["--block-size", "8"], "Error: --numerics exact needs Octavo's own kernels for the whole model: "),
        (["--model-impl", "transformers"], "Error: --numerics exact needs a model that Octavo computes itself; "),
    ],
)
def test_what_cannot_be_exact_ends_with_status_2_and_one_line(model: Path, arguments: list[str], why: str) -> None:
    result = start_worker(model, "--numerics", "exact", *arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines(keepends=True)[-1].startswith(why)


def test_another_mode_is_refused(model: Path) -> None:
    result = start_worker(model, "--numerics", "rough")
    assert result.exit_code == 2
    assert "'rough' is not one of 'default', 'exact'" in result.stderr
