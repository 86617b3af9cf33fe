"""What steps a runner is given."""

from collections.abc import Iterable

from octavo.bench.floors import StepShape
from octavo.wire.steps import BlockMoves
from octavo.worker.runner import LaunchedStep, Runner, StepOutput
from octavo.worker.sequences import WorkItem


class ObservedRunner:
    """`runner`, which is left to do the work; `steps` are those since they were last taken away."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.model = runner.model
        self.device = runner.device
        self.kernels = runner.kernels
        self.num_blocks = runner.num_blocks
        self.num_cpu_blocks = runner.num_cpu_blocks
        self.block_size = runner.block_size
        self.kv_bytes_per_token = runner.kv_bytes_per_token
        self.kv_groups = runner.kv_groups
        self.world_size = runner.world_size
        self.steps: list[StepShape] = []

    def launch(self, moves: BlockMoves, items: list[WorkItem]) -> LaunchedStep:
        if items:
            self.steps.append(step_shape(items))
        return self._runner.launch(moves, items)

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        return self.launch(moves, items).output()

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._runner.forget(sequence_ids)

    def take_steps(self) -> list[StepShape]:
        steps, self.steps = self.steps, []
        return steps

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks on the device. Its memory is had when the runner is made."""
        return self.num_blocks * self.block_size * self.kv_bytes_per_token // len(self.kv_groups)


def step_shape(items: list[WorkItem]) -> StepShape:
    """All that choose from the same row share it."""
    return StepShape(sum(item.num_tokens for item in items), sum(1 for item in items if item.choosers))
