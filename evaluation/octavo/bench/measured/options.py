"""What a run of the experiments is asked for."""

from dataclasses import dataclass
from pathlib import Path

from octavo.bench.measured.machine import Machine
from octavo.worker.step.model_runner import ModelRunner

DEFAULT_BLOCK_SIZE = 16
_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_QUICK_BLOCK_SIZES = (8, 16, 32)


@dataclass(frozen=True)
class Options:
    """`quick`: so little that it shows that everything runs, and measures nothing."""

    model: Path
    dtype: str
    threads: int
    quick: bool

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return _QUICK_BLOCK_SIZES if self.quick else _BLOCK_SIZES

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def machine(self) -> Machine:
        return Machine.here(self.threads)

    def rounds(self, usual: int) -> int:
        return 1 if self.quick else usual

    def runner(self, block_size: int, slots: int, cpu_slots: int = 0) -> ModelRunner:
        """The model with a pool of `slots` tokens, in blocks."""
        return ModelRunner(
            self.model,
            dtype=self.dtype,
            threads=self.threads,
            block_size=block_size,
            num_blocks=slots // block_size,
            num_cpu_blocks=cpu_slots // block_size,
        )
