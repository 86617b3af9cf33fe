"""The worker's side of the conversation with the scheduler: messages in, answers out, without a socket or a clock."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.codec import decode_from_worker, encode
from octavo.wire.costs import StepCosts
from octavo.wire.steps import (
    BlocksFetched,
    BlocksPulled,
    FromWorker,
    Heartbeat,
    Predecessor,
    PullBlocks,
    SequenceFailure,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimes,
    ToWorker,
    WorkerDismissed,
    WorkerGoodbye,
    WorkerHello,
    WorkerRefused,
    WorkerRole,
    WorkerUnregistered,
    WorkerWelcome,
)
from octavo.worker.block_disk import BlockDisk, overwritten
from octavo.worker.block_pulls import BlockPulls
from octavo.worker.runner import BlockContents, DoneStep, LaunchedStep, Runner, StepOutput
from octavo.worker.sequence_table import SequenceTable, members_of
from octavo.worker.sequences import WorkItem
from octavo.worker.step.failures import is_out_of_memory, release_memory
from octavo.worker.step.plan_checks import PlanError

logger = logging.getLogger(__name__)

_MAX_DETAIL = 4096
_NO_OUTPUT = StepOutput([], [], [], [], StepTimes(0, 0, 0))


class RefusedError(Exception):
    """Raised if the scheduler refuses this worker; its text is the scheduler's reason."""


class SkippedError(Exception):
    """Raised where a plan is over because one before it has failed."""


@dataclass(frozen=True)
class _Launched:
    """A plan under way: its step, the sequences that had `failed` before it was launched, and the `copies` of blocks
    that are to be stored once it is done."""

    plan: StepPlan
    items: list[WorkItem]
    step: LaunchedStep
    failed: dict[int, SequenceFailure]
    copies: BlockContents | None


class WorkerProtocol:
    """The state of one worker towards one scheduler: connecting (`epoch` is None) or serving.

    Every registration is a new incarnation with an empty sequence table: nobody may rely on what an earlier incarnation
    held. Raises `octavo.wire.codec.WireError` if the runner's figures exceed what the wire can describe.
    """

    def __init__(
        self,
        worker_id: str,
        runner: Runner,
        draw_incarnation: Callable[[], int],
        costs: StepCosts | None = None,
        predecessor: Predecessor | None = None,
        disk: BlockDisk | None = None,
        pulls: BlockPulls | None = None,
        role: WorkerRole = WorkerRole.BOTH,
    ) -> None:
        self._worker_id = worker_id
        self._runner = runner
        self._costs = costs
        self._predecessor = predecessor
        self._disk = disk
        self._pulls = pulls
        self._role = role
        self._draw_incarnation = draw_incarnation
        self._table = SequenceTable(
            vocab_size=runner.model.vocab_size,
            max_model_len=runner.model.max_model_len,
            num_blocks=runner.num_blocks,
            num_cpu_blocks=runner.num_cpu_blocks,
            block_size=runner.block_size,
            kv_groups=runner.kv_groups,
            on_forget=runner.forget,
        )
        self._launched: deque[_Launched] = deque()
        self._answers: deque[StepResult] = deque()
        self.incarnation = self.process = draw_incarnation()
        if pulls is not None:
            pulls.serve_as(self.incarnation)
        self.epoch: int | None = None
        # The loop sets `draining`, so that beats say that this worker is to end; `dismissed` tells that the scheduler
        # has let it go.
        self.draining = False
        self.dismissed = False
        self.last_step_id = 0
        self._failed_step_id = 0
        self.dropped = 0
        # A hello beyond the wire's limits would be dropped unanswered, forever.
        decode_from_worker(encode(self._hello()))

    def beat(self) -> FromWorker:
        """Returns the message of a heartbeat: a hello until the worker is welcomed, then a sign of life."""
        if self.epoch is None:
            return self._hello()
        use = None if self._disk is None else self._disk.use()
        return Heartbeat(self.epoch, self.incarnation, self.last_step_id, self.draining, use)

    def receive(self, message: ToWorker) -> None:
        """Takes one message, and launches it if it is a plan.

        Raises `RefusedError` on a refusal, `DeviceLostError` if the device cannot go on.
        """
        match message:
            case StepPlan():
                self._take(message)
            case PullBlocks():
                self._pull(message)
            case WorkerWelcome(epoch):
                self._welcome(epoch)
            case WorkerUnregistered():
                # While the worker connects, this message answers the last incarnation; the next hello is already on its
                # way.
                if self.epoch is not None:
                    logger.warning("the scheduler does not know this worker; registering anew")
                    self.reset()
            case WorkerDismissed(epoch):
                self.dismissed = self.dismissed or epoch == self.epoch
            case WorkerRefused(detail):
                raise RefusedError(detail)

    @property
    def busy(self) -> bool:
        """Tells whether a plan is still to be answered."""
        return bool(self._answers or self._launched)

    @property
    def num_sequences(self) -> int:
        """Returns the number of sequences held."""
        return len(self._table)

    def ready(self) -> bool:
        """Tells whether `answer` would return without waiting."""
        return bool(self._answers) or (bool(self._launched) and self._launched[0].step.ready())

    def answer(self) -> StepResult:
        """Returns the result of the oldest unanswered plan and waits until it is done. It needs `busy`."""
        if not self._answers:
            self._finish()
        result = self._answers.popleft()
        if self._disk is not None:
            self._disk.step_done(result.step_id)
        return result

    def filenos(self) -> list[int]:
        """Returns descriptors that are readable while `arrivals` has something to do."""
        return [source.fileno() for source in (self._disk, self._pulls) if source is not None]

    def arrivals(self) -> list[BlocksFetched | BlocksPulled]:
        """Takes what the disk and other workers have given since the last call; returns the answers of the steps and
        the pulls that it is all of."""
        fetched = self._disk.fetched() if self._disk is not None else []
        pulled = self._pulls.pulled(self._done_step_id) if self._pulls is not None else []
        if self.epoch is None:
            return []
        ours = self.epoch, self.incarnation
        return [BlocksFetched(*ours, *each) for each in fetched] + [BlocksPulled(*ours, *each) for each in pulled]

    @property
    def _done_step_id(self) -> int:
        """Returns the last step that is done, answered or not, with all before it."""
        under_way = (launched.plan.step_id for launched in self._launched if not launched.step.ready())
        return next(under_way, self.last_step_id + 1) - 1

    def goodbye(self) -> WorkerGoodbye | None:
        """Returns the last message of a registered worker, or None if no scheduler knows this worker."""
        return None if self.epoch is None or self.dismissed else WorkerGoodbye(self.epoch, self.incarnation)

    def reset(self) -> None:
        """Goes back to connecting, as a new incarnation that holds nothing.

        Steps under way end unanswered: the steps of the new incarnation come after them.
        """
        self._launched.clear()
        self._answers.clear()
        if self._disk is not None:
            self._disk.forget()
        self._table.clear()
        self.incarnation = self._draw_incarnation()
        if self._pulls is not None:
            self._pulls.serve_as(self.incarnation)
        self.epoch = None
        self.last_step_id = 0
        self._failed_step_id = 0

    def _hello(self) -> WorkerHello:
        runner = self._runner
        return WorkerHello(
            schema_version=SCHEMA_VERSION,
            worker_id=self._worker_id,
            incarnation=self.incarnation,
            process=self.process,
            model=runner.model,
            device=runner.device,
            world_size=runner.world_size,
            num_blocks=runner.num_blocks,
            num_cpu_blocks=runner.num_cpu_blocks,
            block_size=runner.block_size,
            kv_bytes_per_token=runner.kv_bytes_per_token,
            kv_groups=runner.kv_groups,
            costs=self._costs,
            predecessor=self._predecessor,
            draft_model=runner.draft_model,
            kv_disk=None if self._disk is None else self._disk.description,
            block_server=None if self._pulls is None else self._pulls.description,
            role=self._role,
        )

    def _welcome(self, epoch: int) -> None:
        if self.epoch is None:
            logger.info("registered as incarnation %016x in epoch %016x", self.incarnation, epoch)
            self.epoch = epoch
        elif self.epoch != epoch:
            # Two schedulers have welcomed one incarnation: only a fresh one can belong to just one of them.
            self.reset()

    def _take(self, plan: StepPlan) -> None:
        current = plan.epoch == self.epoch and plan.incarnation == self.incarnation
        if not current or plan.step_id <= self.last_step_id:
            self.dropped += 1
            return
        self.last_step_id = plan.step_id
        # A runner whose steps are done at once thus never meets a pending token.
        while self._launched and self._launched[0].step.ready():
            self._finish()
        clears = self._disk is not None and plan.disk is not None and plan.disk.clear
        if clears or self._skips(plan) or self._table.must_know(plan):
            self._finish_all()
        if self._disk is not None and clears:
            # Whatever becomes of the plan: to forget once more than needed costs nothing that is right.
            self._disk.clear()
        if self._skips(plan):
            self._answers.append(self._skip(plan))
            return
        try:
            self._launch(plan)
        except Exception as error:
            # The plans before it may fail too, and then it was skipped.
            self._finish_all()
            self._answers.append(self._skip(plan) if self._skips(plan) else self._fail(plan, error))

    def _pull(self, wanted: PullBlocks) -> None:
        if (wanted.epoch, wanted.incarnation) != (self.epoch, self.incarnation):
            self.dropped += 1
            return
        targets = [move.target for move in wanted.moves]
        is_sound = len(set(targets)) == len(targets) and max(targets) < self._runner.num_cpu_blocks
        if self._pulls is None:
            logger.warning("dropped pull %d: this worker copies no blocks of others", wanted.pull_id)
        elif is_sound:
            self._pulls.pull(wanted)
        else:
            logger.warning("refused pull %d, which names CPU blocks that are not here, or one twice", wanted.pull_id)
            self._pulls.refuse(wanted)

    def _skips(self, plan: StepPlan) -> bool:
        return plan.answered_step_id < self._failed_step_id

    def _launch(self, plan: StepPlan) -> None:
        items = self._table.apply(plan)
        failed = self._table.failures(plan)
        copies = self._copies(plan)
        launches = plan.moves or items or copies
        settle = partial(self._settle, plan)
        step = self._runner.launch(plan.moves, items, settle) if launches else DoneStep(_NO_OUTPUT)
        self._table.begin(items)
        self._launched.append(_Launched(plan, items, step, failed, copies))

    def _settle(self, plan: StepPlan) -> None:
        """Finishes the steps before `plan`. Raises `SkippedError` if one of them has failed, and `plan` with it."""
        self._finish_all()
        if self._skips(plan):
            raise SkippedError(f"step {plan.step_id} is skipped: step {self._failed_step_id} has failed")

    def _copies(self, plan: StepPlan) -> BlockContents | None:
        """Has the disk begin what the plan has it do: lends it what is to be stored, but for the blocks that the plan
        writes to, which are taken back; returns copies that are still on their way."""
        if self._disk is None:
            if plan.disk is not None:
                raise PlanError("a plan is for a worker with a disk; this one has none")
            return None
        copies = None
        if plan.disk is not None and plan.disk.store:
            contents = self._runner.read_blocks([content.block_id for content in plan.disk.store])
            if contents.here:
                self._disk.store(plan.disk.store, contents)
            else:
                copies = contents
        if self._disk.lends:
            self._disk.take_back(overwritten(plan))
        if plan.disk is not None and plan.disk.fetch:
            # While this and earlier steps compute.
            self._disk.fetch(plan.step_id, plan.disk.fetch)
        return copies

    def _finish_all(self) -> None:
        while self._launched:
            self._finish()

    def _finish(self) -> None:
        """Answers the oldest launched plan; if that fails, answers the plans after it as skipped.

        Those were planned without knowledge of the failure. They are over at once, for nobody uses what they sampled: a
        later plan may start their sequences anew.
        """
        launched = self._launched.popleft()
        try:
            self._answers.append(self._complete(launched, launched.step.output()))
            self._pass_to_disk(launched)
        except Exception as error:
            self._answers.append(self._fail(launched.plan, error))
            self._answers.extend(self._skip(later.plan) for later in self._launched)
            self._launched.clear()

    def _complete(self, launched: _Launched, output: StepOutput) -> StepResult:
        """Makes the result of a step from its `output`. Raises `ValueError` if `output` does not fit the plan."""
        for failure in output.failed:
            logger.warning("sequence %x has failed: %s", failure.sequence_id, failure.detail)
        members = (sequence for item in launched.items for sequence in item.members)
        # Results of a sequence that has failed are worth nothing.
        output = output.without([sequence.failure for sequence in members if sequence.failure])
        self._table.complete(launched.items, output)
        failed = launched.failed | {failure.sequence_id: failure for failure in output.failed}
        reported = [failed[each] for each in members_of(launched.plan) if each in failed] if failed else []
        return _result(launched.plan, StepOutcome.DONE, output, failed=reported)

    def _pass_to_disk(self, launched: _Launched) -> None:
        disk = launched.plan.disk
        if self._disk is None or disk is None:
            return
        if launched.copies is not None:
            self._disk.store(disk.store, launched.copies)

    def _fail(self, plan: StepPlan, error: Exception) -> StepResult:
        """Answers a failed `plan`. The scheduler recomputes its sequences; the worker and its other sequences live
        on."""
        logger.error("step %d failed", plan.step_id, exc_info=error)
        self._failed_step_id = plan.step_id
        self._discard(plan)
        outcome = StepOutcome.FAILED
        if is_out_of_memory(error):
            outcome = StepOutcome.OUT_OF_MEMORY
            release_memory(error)
        return _result(plan, outcome, detail=f"{type(error).__name__}: {error}"[:_MAX_DETAIL])

    def _discard(self, plan: StepPlan) -> None:
        self._table.discard(plan)
        if self._disk is not None:
            self._disk.step_failed(plan.step_id)

    def _skip(self, plan: StepPlan) -> StepResult:
        self._discard(plan)
        return _result(plan, StepOutcome.SKIPPED, detail=f"step {self._failed_step_id} had failed")


def _result(
    plan: StepPlan,
    outcome: StepOutcome,
    output: StepOutput = _NO_OUTPUT,
    *,
    failed: Iterable[SequenceFailure] = (),
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
        output.further,
        output.proposed,
        output.pooled,
    )
