"""What experiments on the real engine are made of, on replicas that compute nothing."""

import json
from pathlib import Path

import pytest
import torch

from octavo.bench.measured.ablations import RINGS, Ring
from octavo.bench.measured.beams import BlockCount, prompts
from octavo.bench.measured.experiment import Findings, Machine
from octavo.bench.measured.kernel import SMOLLM, HeadShape
from octavo.bench.measured.live import Live, scaled, summed_up
from octavo.loadgen.servers import Record
from octavo.loadgen.session import LoadRun
from octavo.scheduler.core.config import Preemption, SchedulerConfig
from octavo.testbed.tiny_model import write_byte_model
from octavo.worker.fake.runner import FakeRunner
from octavo.workload.job import Job
from octavo.workload.synthetic import AtOnce, Poisson, Workload


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    return directory


def runner(model: Path, num_blocks: int = 64) -> FakeRunner:
    return FakeRunner(model, block_size=16, num_blocks=num_blocks, num_cpu_blocks=num_blocks)


# -- live -------------------------------------------------------------------------------------------------------------


def test_every_job_is_served_whole_and_not_before_it_comes(model: Path) -> None:
    jobs = Workload(scaled("alpaca", 0.3), Poisson(200.0), num_requests=8, n=2).jobs(seed=0)
    run = Live(runner(model)).serve_drawn(jobs, seed=0)
    for record in run.records:
        assert record.num_tokens == 2 * record.job.output_tokens
        assert record.job.arrival_s <= (record.first_token_s or 0.0) <= (record.finished_s or 0.0) <= run.seconds
    assert summed_up(run).finished == 8


@pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
def test_preemptions_are_counted_by_request_and_are_of_the_kind_asked_for(model: Path, preemption: Preemption) -> None:
    live = Live(runner(model, num_blocks=8), SchedulerConfig(max_steps_in_flight=1, preemption=preemption))
    run = live.serve_drawn([Job(0.0, 30, 60), Job(0.0, 30, 60)], seed=0)
    assert summed_up(run).preemptions == live.engine.core.preemptions == 1
    assert live.engine.core.swaps == (preemption is Preemption.SWAP)


def test_a_pinned_prefix_is_found_by_all_though_nothing_else_is_cached(model: Path) -> None:
    live = Live(runner(model), SchedulerConfig(max_steps_in_flight=1, prefix_caching=False))
    jobs = Workload(scaled("alpaca", 0.3), AtOnce(), num_requests=3, prefix_tokens=40).jobs(seed=0)
    prefix = list(range(40))
    live.pin("prefix", prefix)
    run = live.serve(jobs, [prefix + [50 + i] * (job.prompt_tokens - 40) for i, job in enumerate(jobs)])
    assert [record.cached_tokens for record in run.records] == [40, 40, 40]


def test_a_request_that_got_too_little_spoils_the_figures() -> None:
    record = Record(Job(0.0, 5, 10), first_token_s=1.0, finished_s=2.0, num_tokens=9)
    with pytest.raises(RuntimeError, match="9 tokens"):
        summed_up(LoadRun([record], seconds=2.0))


# -- loads ------------------------------------------------------------------------------------------------------------


def test_a_scaled_dataset_is_shorter_in_all_its_lengths() -> None:
    dataset = scaled("sharegpt", 0.25)
    assert (dataset.inputs.mean, dataset.outputs.mean) == (161.31 / 4, 337.99 / 4)
    assert dataset.max_total == 512
    with pytest.raises(ValueError, match="chatbot"):
        scaled("chatbot", 0.5)


def test_prompts_are_of_the_lengths_asked_for_and_begin_apart() -> None:
    class Bytes:
        def encode(self, text: str, add_special_tokens: bool) -> "Bytes":
            assert not add_special_tokens
            self.ids = list(text.encode())
            return self

    texts = [bytes(each) for each in prompts(Bytes(), [7, 40, 5000])]  # type: ignore[arg-type]
    assert [len(text) for text in texts] == [7, 40, 5000]
    assert len({text[:7] for text in texts}) == 3


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: ring.variants[0].ablation)
def test_loads_of_ablations_fit_all_their_pools_and_preempt_where_that_is_compared(model: Path, ring: Ring) -> None:
    preemptions = 0
    for size in {16, *(variant.block_size for variant in ring.variants)}:
        num_blocks = ring.load.slots // size
        live = Live(FakeRunner(model, block_size=size, num_blocks=num_blocks))
        preemptions += summed_up(live.serve_drawn(ring.load.jobs(), seed=0)).preemptions
    if ring.variants[0].ablation == "preemption":
        assert preemptions > 0


# -- beams ------------------------------------------------------------------------------------------------------------


def test_shared_blocks_are_saved_and_others_are_not(model: Path) -> None:
    saved = {}
    for n in (1, 4):
        live, count = Live(runner(model), SchedulerConfig(max_steps_in_flight=1)), BlockCount()
        # The prompt fills 4 blocks; each sample has a fifth of its own from its second token on.
        live.serve_drawn([Job(0.0, 64, 10, n=n)], 0, lambda live=live, count=count: count.add(live.engine.replica))  # type: ignore[misc]
        saved[n] = count.saved
    assert saved[1] == 0.0
    assert 0.5 < saved[4] < 0.75
    assert saved[4] == pytest.approx(1 - 8 / 20, abs=0.03)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_a_figure_is_a_table_and_a_file_that_names_no_host(tmp_path: Path) -> None:
    machine = Machine.here(threads=2)
    rows: list[dict[str, str | int | float | None]] = [
        {"setting": "swap", "time_ms": 12345.6, "ratio_x": 1.2345},
        {"setting": "recompute", "time_ms": None, "ratio_x": 1},
    ]
    figure = Findings("some", "A title", machine, {"rate": 0.5}, ["A note."], rows)
    figure.write(tmp_path / "paper")
    title, settings, head, first, second, note = figure.to_text().splitlines()
    assert (title, settings, note) == ("A title", "rate 0.5", "A note.")
    assert head.split() == ["setting", "time_ms", "ratio_x"]
    assert first.split() == ["swap", "12346", "1.23"]
    assert second.split() == ["recompute", "-", "1"]
    found = json.loads((tmp_path / "paper" / "measured_some.json").read_bytes())
    assert found["rows"] == rows
    assert set(found["machine"]) == {"cpu", "cores", "memory_gib", "threads", "kernels", "torch", "python"}
    assert found["machine"]["torch"] == torch.__version__


def test_bytes_of_a_token_are_keys_and_values_of_one_layer() -> None:
    assert SMOLLM.bytes_per_token == 2 * 3 * 64 * 2
    assert HeadShape("any", 4, 4, 32).bytes_per_token == 2 * 4 * 32 * 2
