"""How the cost of sharing a model is told, on a model that takes no time."""

from pathlib import Path

from octavo.bench.whole.tensor_parallel import TimedRanks, measure
from octavo.testing.cluster import write_fake_model
from octavo.worker.fake.runner import FakeRunner


def test_each_kind_of_step_has_its_times_and_their_ratio(tmp_path: Path) -> None:
    runner = FakeRunner(write_fake_model(tmp_path), block_size=16, num_blocks=64)
    lines = list(measure([TimedRanks(runner, 1), TimedRanks(runner, 1)], (1, 2), rounds=2))
    kinds = ["decode, batch 1", "decode, batch 2", "prefill, 512 tokens"]
    assert [line[:22].strip() for line in lines] == [kind for kind in kinds for _ in range(3)]
    assert all("sampling" in line for line in lines if "times as long" not in line)
    assert all("times as long as one" in line for line in lines[2::3])
