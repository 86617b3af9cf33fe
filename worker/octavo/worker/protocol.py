"""The worker's side of the conversation with the scheduler: message in, answer out. No socket, no clock."""

import logging
from collections.abc import Callable, Sequence

from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.codec import decode_from_worker, encode
from octavo.wire.steps import (
    FromWorker,
    Heartbeat,
    SequenceFailure,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimes,
    ToWorker,
    WorkerGoodbye,
    WorkerHello,
    WorkerRefused,
    WorkerUnregistered,
    WorkerWelcome,
)
from octavo.worker.runner import Runner, StepOutput
from octavo.worker.sequence_table import SequenceTable

logger = logging.getLogger(__name__)

_MAX_DETAIL = 4096
_NO_OUTPUT = StepOutput([], [], [], [], StepTimes(0, 0, 0))


class RefusedError(Exception):
    """The scheduler will not have this worker; its text says why."""


class WorkerProtocol:
    """One worker towards one scheduler at a time: connecting (`epoch` is None) or serving.

    Every registration is a new incarnation with an empty table: what an earlier one held, nobody may rely on. Raises
    `octavo.wire.codec.WireError` if the runner is more than the wire can describe.
    """

    def __init__(self, worker_id: str, runner: Runner, draw_incarnation: Callable[[], int]) -> None:
        self._worker_id = worker_id
        self._runner = runner
        self._draw_incarnation = draw_incarnation
        self._table = SequenceTable(
            vocab_size=runner.model.vocab_size,
            max_model_len=runner.model.max_model_len,
            num_blocks=runner.num_blocks,
            num_cpu_blocks=runner.num_cpu_blocks,
            block_size=runner.block_size,
            kv_groups=runner.kv_groups,
        )
        self.incarnation = draw_incarnation()
        self.epoch: int | None = None
        self.last_step_id = 0
        self._failed_step_id = 0
        self.dropped = 0
        # A hello beyond the wire's limits would be dropped unanswered, forever.
        decode_from_worker(encode(self._hello()))

    def beat(self) -> FromWorker:
        """What the worker says of its own accord at every beat: hello until it is welcomed, then that it lives."""
        if self.epoch is None:
            return self._hello()
        return Heartbeat(self.epoch, self.incarnation, self.last_step_id)

    def receive(self, message: ToWorker) -> StepResult | None:
        """Takes one message; a plan is computed before this returns. Raises `RefusedError` on a refusal."""
        match message:
            case StepPlan():
                return self._answer(message)
            case WorkerWelcome(epoch):
                self._welcome(epoch)
            case WorkerUnregistered():
                # While connecting it answers what the last incarnation said; the next hello is already on its way.
                if self.epoch is not None:
                    logger.warning("the scheduler does not know this worker; registering anew")
                    self.reset()
            case WorkerRefused(detail):
                raise RefusedError(detail)
        return None

    def goodbye(self) -> WorkerGoodbye | None:
        """The last message of a registered worker; None if nobody would understand it."""
        return None if self.epoch is None else WorkerGoodbye(self.epoch, self.incarnation)

    def reset(self) -> None:
        """Back to connecting, as a new incarnation that holds nothing."""
        self._table.clear()
        self.incarnation = self._draw_incarnation()
        self.epoch = None
        self.last_step_id = 0
        self._failed_step_id = 0

    def _hello(self) -> WorkerHello:
        runner = self._runner
        return WorkerHello(
            schema_version=SCHEMA_VERSION,
            worker_id=self._worker_id,
            incarnation=self.incarnation,
            model=runner.model,
            device=runner.device,
            rank=0,
            world_size=1,
            num_blocks=runner.num_blocks,
            num_cpu_blocks=runner.num_cpu_blocks,
            block_size=runner.block_size,
            kv_bytes_per_token=runner.kv_bytes_per_token,
            kv_groups=runner.kv_groups,
        )

    def _welcome(self, epoch: int) -> None:
        if self.epoch is None:
            logger.info("registered as incarnation %016x in epoch %016x", self.incarnation, epoch)
            self.epoch = epoch
        elif self.epoch != epoch:
            # Two schedulers have welcomed one incarnation: only a fresh one can belong to just one of them.
            self.reset()

    def _answer(self, plan: StepPlan) -> StepResult | None:
        current = plan.epoch == self.epoch and plan.incarnation == self.incarnation
        if not current or plan.step_id <= self.last_step_id:
            self.dropped += 1
            return None
        self.last_step_id = plan.step_id
        if plan.answered_step_id < self._failed_step_id:
            self._table.discard(plan)
            return _result(plan, StepOutcome.SKIPPED, detail=f"step {self._failed_step_id} had failed")
        try:
            return self._run(plan)
        except Exception as error:
            # Whatever it was, the scheduler recomputes the sequences; the worker and its other sequences live on.
            logger.exception("step %d failed", plan.step_id)
            self._failed_step_id = plan.step_id
            self._table.discard(plan)
            return _result(plan, StepOutcome.FAILED, detail=f"{type(error).__name__}: {error}"[:_MAX_DETAIL])

    def _run(self, plan: StepPlan) -> StepResult:
        items = self._table.apply(plan)
        output = self._runner.execute(plan.moves, items) if plan.moves or items else _NO_OUTPUT
        self._table.complete(items, output.sampled, output.candidates, output.failed)
        failed = self._table.failures(plan)
        for failure in output.failed:
            logger.warning("sequence %x has failed: %s", failure.sequence_id, failure.detail)
        return _result(plan, StepOutcome.DONE, output, failed=failed)


def _result(
    plan: StepPlan,
    outcome: StepOutcome,
    output: StepOutput = _NO_OUTPUT,
    *,
    failed: Sequence[SequenceFailure] = (),
    detail: str = "",
) -> StepResult:
    return StepResult(
        plan.epoch,
        plan.incarnation,
        plan.step_id,
        outcome,
        output.sampled,
        output.candidates,
        output.prompt_logprobs,
        list(failed),
        output.times,
        detail,
    )
