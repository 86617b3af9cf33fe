"""What steps a runner is given, and which blocks they fill."""

from octavo.bench.floors import StepShape
from octavo.wire.steps import BlockMoves
from octavo.worker.runner import Runner, StepOutput
from octavo.worker.sequences import WorkItem


class ObservedRunner:
    """`runner`, which is left to do the work; `steps` are those since they were last taken away, `blocks` the device
    blocks that any step has written."""

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
        self.steps: list[StepShape] = []
        self.blocks: set[int] = set()

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        if items:
            self.steps.append(step_shape(items))
        for item in items:
            first, end = item.start // self.block_size, -(-(item.start + item.num_tokens) // self.block_size)
            for table in item.sequence.block_tables:
                self.blocks.update(table[first:end])
        return self._runner.execute(moves, items)

    def take_steps(self) -> list[StepShape]:
        steps, self.steps = self.steps, []
        return steps

    @property
    def kv_bytes(self) -> int:
        """Bytes of the blocks written."""
        return len(self.blocks) * self._block_bytes

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of all blocks, on the device and to swap to."""
        return (self.num_blocks + self.num_cpu_blocks) * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token // len(self.kv_groups)


def step_shape(items: list[WorkItem]) -> StepShape:
    """All that choose from the same row share it."""
    return StepShape(sum(item.num_tokens for item in items), sum(1 for item in items if item.choosers))
