"""The link's rules, one message at a time: when to say hello, renew, submit again, and when not to."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from octavo.frontend.errors import (
    AlreadyExists,
    Broken,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Reason,
    ServiceError,
    Unavailable,
)
from octavo.frontend.request import events
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.session import SchedulerSession
from octavo.wire import history
from octavo.wire.requests import (
    MAX_PREFIXES,
    Abort,
    Delta,
    Deltas,
    EndSequence,
    FinishReason,
    FromFrontend,
    FrontendHello,
    FrontendWelcome,
    GeneratedSequence,
    Lease,
    Notice,
    NoticeKind,
    Notices,
    PinPrefixes,
    PinRefused,
    Prefix,
    PrefixesChanged,
    Refused,
    Rejected,
    RejectReason,
    Renew,
    Renewed,
    ServiceStatus,
    StatusChanged,
    Submit,
    Unregistered,
)
from octavo.wire.sampling import SamplingParams

EPOCH = 5
STATUS = ServiceStatus(replicas=1, model=None, capacity_tokens=10, max_parallel=8)
SAMPLING = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=7, max_tokens=6, stop_token_ids=[])


@dataclass(eq=False)
class Asked:
    """A request as a session knows it, and all that it was told."""

    journal: Journal
    failure: ServiceError | None = None
    has_news: bool = False
    notices: list[events.RequestNotice] = field(default_factory=list)

    def notify(self) -> None:
        self.has_news = True

    def tell(self, notice: events.RequestNotice) -> None:
        self.notices.append(notice)

    def fail(self, failure: ServiceError) -> None:
        self.failure = self.failure or failure


@pytest.fixture
def session() -> SchedulerSession:
    session = SchedulerSession(frontend_id=1, model_fingerprint="model", now=0.0)
    session.receive(FrontendWelcome(epoch=EPOCH, status=STATUS), 0.0)
    session.receive(renewed(), 0.0)
    return session


def live(session: SchedulerSession, request_id: str = "r", **sampling: Any) -> Asked:
    request = Asked(Journal(request_id, [1], msgspec.structs.replace(SAMPLING, **sampling), 0.0))
    session.submit(request, 0.0)
    return request


def renewed(*unknown: str, attempt: int = 1, epoch: int = EPOCH) -> Renewed:
    return Renewed(epoch=epoch, unknown=[Lease(request_id, attempt) for request_id in unknown], status=STATUS)


def deltas(
    start: int, tokens: list[int], *, attempt: int = 1, epoch: int = EPOCH, index: int = 0, ends: bool = False
) -> Deltas:
    delta = Delta(
        request_id="r",
        attempt=attempt,
        sequence_index=index,
        start_index=start,
        previous_hash=history.EMPTY,
        token_ids=tokens,
        finish_reason=FinishReason.STOP if ends else None,
        preemptions=0,
        swaps=0,
        cached_prompt_tokens=0,
    )
    return Deltas(epoch=epoch, deltas=[delta])


def submissions(messages: list[FromFrontend]) -> list[tuple[str, int, list[int]]]:
    requests = [message.request for message in messages if isinstance(message, Submit)]
    return [(r.request_id, r.attempt, r.generated[0].token_ids if r.generated else []) for r in requests]


def test_hello_until_welcomed_then_renewals() -> None:
    session = SchedulerSession(frontend_id=1, model_fingerprint="model", now=0.0)
    assert [type(m) for m in session.tick()] == [FrontendHello]
    assert [type(m) for m in session.tick()] == [FrontendHello]
    assert [type(m) for m in session.receive(FrontendWelcome(epoch=EPOCH, status=STATUS), 0.0)] == [Renew]
    assert [type(m) for m in session.tick()] == [Renew]


def test_a_request_made_before_the_welcome_is_found_missing_and_submitted() -> None:
    session = SchedulerSession(frontend_id=1, model_fingerprint="model", now=0.0)
    request = Asked(Journal("r", [1], SAMPLING, 0.0))
    assert session.submit(request, 0.0) == []
    [renewal] = session.receive(FrontendWelcome(epoch=EPOCH, status=STATUS), 0.0)
    assert isinstance(renewal, Renew)
    assert [lease.request_id for lease in renewal.live] == ["r"]
    assert submissions(session.receive(renewed("r"), 0.0)) == [("r", 2, [])]


def test_what_a_renewal_finds_missing_goes_on_from_the_journal(session: SchedulerSession) -> None:
    live(session)
    session.receive(deltas(0, [10, 11]), 1.0)
    session.tick()
    assert submissions(session.receive(renewed("r"), 2.0)) == [("r", 2, [10, 11])]


def test_an_id_used_again_gets_no_answer_of_its_former_request(session: SchedulerSession) -> None:
    session.release(live(session))
    request = live(session)
    assert session.receive(deltas(0, [10], attempt=1), 1.0) == []
    session.receive(Rejected(EPOCH, "r", 1, RejectReason.STEP_FAILED, "why"), 1.0)
    assert session.receive(renewed("r", attempt=1), 1.0) == []
    assert (request.journal.sequences[0].token_ids, request.failure) == ([], None)
    session.receive(deltas(0, [11], attempt=2), 1.0)
    assert request.journal.sequences[0].token_ids == [11]


def test_attempts_rise_over_all_requests(session: SchedulerSession) -> None:
    requests = [live(session, "a"), live(session, "b")]
    session.receive(renewed("a", attempt=1), 1.0)
    assert [request.journal.attempt for request in requests] == [3, 2]


def test_submissions_say_whether_they_are_the_first_and_for_which_model(session: SchedulerSession) -> None:
    request = Asked(Journal("r", [1], SAMPLING, 0.0))
    messages = [*session.submit(request, 0.0), *session.receive(renewed("r"), 1.0)]
    submitted = [message.request for message in messages if isinstance(message, Submit)]
    assert [(r.resubmitted, r.model_fingerprint) for r in submitted] == [(False, "model"), (True, "model")]


def test_a_submission_that_could_not_leave_does_not_count_as_one(session: SchedulerSession) -> None:
    session.disconnected()
    live(session)
    session.receive(FrontendWelcome(epoch=EPOCH, status=STATUS), 0.0)
    [message] = session.receive(renewed("r"), 1.0)
    assert isinstance(message, Submit)
    assert not message.request.resubmitted


def test_an_answer_about_what_has_ended_or_was_never_asked_is_ignored(session: SchedulerSession) -> None:
    live(session)
    assert session.receive(renewed("ended"), 1.0) == []
    assert session.receive(renewed("r", attempt=2), 1.0) == []


def test_two_answers_to_the_same_loss_submit_once(session: SchedulerSession) -> None:
    live(session)
    session.tick()
    session.tick()
    assert len(submissions(session.receive(renewed("r"), 1.0))) == 1
    assert submissions(session.receive(renewed("r"), 1.0)) == []


def test_a_new_epoch_renews_everything(session: SchedulerSession) -> None:
    live(session)
    assert [type(m) for m in session.receive(Unregistered(epoch=6), 1.0)] == [FrontendHello]
    [renewal] = session.receive(FrontendWelcome(epoch=6, status=STATUS), 1.0)
    assert isinstance(renewal, Renew)
    assert (renewal.epoch, [lease.request_id for lease in renewal.live]) == (6, ["r"])


def test_messages_of_another_epoch_are_dropped(session: SchedulerSession) -> None:
    request = live(session)
    assert session.receive(deltas(0, [10], epoch=4), 1.0) == []
    assert request.journal.sequences[0].token_ids == []
    assert session.last_heard == 0.0


def test_a_gap_is_repaired_by_submitting_again(session: SchedulerSession) -> None:
    live(session)
    assert submissions(session.receive(deltas(3, [10]), 1.0)) == [("r", 2, [])]
    assert session.receive(deltas(0, [10], attempt=1), 1.0) == []


def test_unanswered_renewals_end_in_a_hello(session: SchedulerSession) -> None:
    kinds = [type(message) for _ in range(4) for message in session.tick()]
    assert kinds == [Renew, Renew, Renew, FrontendHello]
    assert session.epoch is None


def test_who_has_yet_to_read_tokens_before_the_answer_takes_no_registration_for_lost(session: SchedulerSession) -> None:
    kinds = []
    for _ in range(4):
        kinds += [type(message) for message in session.tick()]
        session.receive(Deltas(EPOCH, []), 1.0)
    assert kinds == [Renew] * 4
    assert session.epoch == EPOCH


def test_a_repeated_welcome_changes_nothing(session: SchedulerSession) -> None:
    live(session)
    session.tick()
    assert session.receive(FrontendWelcome(epoch=EPOCH, status=STATUS), 1.0) == []
    assert submissions(session.receive(renewed("r"), 1.0)) == [("r", 2, [])]


def test_a_complete_request_is_neither_renewed_nor_aborted(session: SchedulerSession) -> None:
    request = live(session)
    session.receive(deltas(0, [1, 2, 3, 4, 5, 6]), 1.0)
    [renewal] = session.tick()
    assert isinstance(renewal, Renew)
    assert renewal.live == []
    assert session.release(request) == []


def test_a_release_in_the_middle_aborts(session: SchedulerSession) -> None:
    request = live(session)
    assert session.release(request) == [Abort(epoch=EPOCH, request_ids=["r"])]
    assert session.live == {}


def test_status_is_kept(session: SchedulerSession) -> None:
    status = ServiceStatus(replicas=3, model=None, capacity_tokens=30, max_parallel=8)
    session.receive(StatusChanged(epoch=EPOCH, status=status), 1.0)
    assert session.status == status


def test_a_refusal_is_kept_for_the_process_to_end(session: SchedulerSession) -> None:
    session.receive(Refused(detail="schema 1, not 2"), 1.0)
    assert session.refused == "schema 1, not 2"


@pytest.mark.parametrize(
    ("said", "reason", "kind"),
    [
        (RejectReason.DUPLICATE_ID, Reason.DUPLICATE_ID, AlreadyExists),
        (RejectReason.NEVER_FITS_KV, Reason.NEVER_FITS_KV, InvalidRequest),
        (RejectReason.PROMPT_TOO_LONG, Reason.PROMPT_TOO_LONG, InvalidRequest),
        (RejectReason.BAD_TOKEN_ID, Reason.BAD_PARAMETER, InvalidRequest),
        (RejectReason.EMPTY_PROMPT, Reason.BAD_PARAMETER, InvalidRequest),
        (RejectReason.TOO_MANY_SEQUENCES, Reason.BAD_PARAMETER, InvalidRequest),
        (RejectReason.BAD_GRAMMAR, Reason.BAD_CONSTRAINT, InvalidRequest),
        (RejectReason.NO_TOKEN_LEFT, Reason.NO_TOKEN_LEFT, InvalidRequest),
        (RejectReason.MODEL_MISMATCH, Reason.MODEL_MISMATCH, Unavailable),
        (RejectReason.QUEUE_FULL, Reason.QUEUE_FULL, Overloaded),
        (RejectReason.OUT_OF_MEMORY, Reason.OUT_OF_MEMORY, Overloaded),
        (RejectReason.QUEUE_TIMEOUT, Reason.QUEUE_TIMEOUT, DeadlineExceeded),
        (RejectReason.STEP_FAILED, Reason.STEP_FAILED, Broken),
        (RejectReason.NOT_FINITE, Reason.LOGITS_NOT_FINITE, Broken),
        (RejectReason.QUARANTINED, Reason.QUARANTINED, Broken),
        (RejectReason.ALREADY_COMPLETE, Reason.STREAM_BROKEN, Broken),
    ],
)
def test_every_rejection_has_its_error(
    session: SchedulerSession, said: RejectReason, reason: Reason, kind: type[ServiceError]
) -> None:
    request = live(session)
    session.receive(Rejected(epoch=EPOCH, request_id="r", attempt=1, reason=said, detail="why"), 1.0)
    assert request.failure is not None
    assert (type(request.failure), request.failure.reason) == (kind, reason)
    assert str(request.failure).startswith("why")


def test_what_was_rejected_is_neither_renewed_nor_aborted(session: SchedulerSession) -> None:
    rejected = live(session)
    session.receive(Rejected(EPOCH, "r", 1, RejectReason.QUEUE_FULL, ""), 1.0)
    [renewal] = session.tick()
    assert isinstance(renewal, Renew)
    assert renewal.live == []
    following = live(session)
    assert session.release(rejected) == []
    assert session.live == {"r": following}


def test_the_rejection_of_an_earlier_attempt_is_ignored(session: SchedulerSession) -> None:
    request = live(session)
    request.journal.start_attempt(2)
    reason = RejectReason.STEP_FAILED
    session.receive(Rejected(epoch=EPOCH, request_id="r", attempt=1, reason=reason, detail="why"), 1.0)
    assert request.failure is None


def test_notices_go_to_the_request_that_they_are_about_as_long_as_it_runs(session: SchedulerSession) -> None:
    request = live(session)
    kinds = [NoticeKind.QUEUED, NoticeKind.PREEMPTED, NoticeKind.WORKER_LOST]
    told = [Notice("r", 1, kinds[0], 2), Notice("r", 0, kinds[1], 1), Notice("other", 1, kinds[2], 1)]
    assert session.receive(Notices(EPOCH, told), 0.0) == []
    assert request.notices == [events.RequestNotice(NoticeKind.QUEUED, 2)]
    session.receive(deltas(0, [1, 2, 3, 4, 5, 6]), 0.0)
    session.receive(Notices(EPOCH, told), 0.0)
    assert request.notices == [events.RequestNotice(NoticeKind.QUEUED, 2)]


def test_no_rejection_is_without_an_error(session: SchedulerSession) -> None:
    for number, reason in enumerate(RejectReason):
        request = live(session, f"r{number}")
        session.receive(Rejected(EPOCH, f"r{number}", request.journal.attempt, reason, "why"), 1.0)
        assert request.failure is not None, reason


def test_tokens_without_the_logprobs_asked_for_end_the_request(session: SchedulerSession) -> None:
    request = live(session, logprobs=0)
    assert session.receive(deltas(0, [10]), 1.0) == []
    assert isinstance(request.failure, Broken)


def test_a_sequence_that_ends_here_is_told_while_others_run(session: SchedulerSession) -> None:
    request = live(session, num_sequences=2)
    session.receive(deltas(0, [10]), 1.0)
    assert session.end_sequence(request, 0) == [EndSequence(EPOCH, "r", 1, 0)]
    assert session.end_sequence(request, 0) == []
    assert session.end_sequence(request, 1) == []
    assert session.release(request) == [Abort(EPOCH, ["r"])]


def test_a_sequence_that_has_ended_there_is_not_ended_again(session: SchedulerSession) -> None:
    request = live(session, num_sequences=2)
    session.receive(deltas(0, [10], ends=True), 1.0)
    assert session.end_sequence(request, 0) == []


def test_a_request_goes_on_when_some_of_its_sequences_have_ended(session: SchedulerSession) -> None:
    request = live(session, num_sequences=3)
    session.receive(deltas(0, [10], ends=True), 1.0)
    session.receive(deltas(0, [11], index=1), 1.0)
    session.receive(deltas(0, [12, 13], index=2), 1.0)
    session.end_sequence(request, 1)
    [message] = session.receive(renewed("r"), 2.0)
    assert isinstance(message, Submit)
    assert message.request.generated == [
        GeneratedSequence([10], finished=True),
        GeneratedSequence([11], finished=True),
        GeneratedSequence([12, 13], finished=False),
    ]


def test_an_end_that_could_not_be_told_comes_with_the_next_submission(session: SchedulerSession) -> None:
    request = live(session, num_sequences=2)
    session.receive(deltas(0, [10]), 1.0)
    session.disconnected()
    assert session.end_sequence(request, 0) == []
    session.receive(FrontendWelcome(epoch=6, status=STATUS), 2.0)
    [message] = session.receive(renewed("r", epoch=6), 2.0)
    assert isinstance(message, Submit)
    assert [sequence.finished for sequence in message.request.generated] == [True, False]


def test_a_request_whose_sequences_have_all_ended_is_let_go(session: SchedulerSession) -> None:
    request = live(session, num_sequences=2)
    session.receive(deltas(0, [10]), 1.0)
    session.end_sequence(request, 0)
    session.receive(deltas(0, [11], index=1, ends=True), 1.0)
    [renewal] = session.tick()
    assert isinstance(renewal, Renew)
    assert renewal.live == []
    assert session.release(request) == []


def pins(messages: list[FromFrontend]) -> dict[str, list[int]]:
    return {p.name: p.token_ids for m in messages if isinstance(m, PinPrefixes) for p in m.prefixes}


def welcome(session: SchedulerSession, epoch: int) -> dict[str, list[int]]:
    session.disconnected()
    return pins(session.receive(FrontendWelcome(epoch, STATUS), 0.0))


@pytest.fixture
def pinning() -> SchedulerSession:
    return SchedulerSession(frontend_id=1, model_fingerprint="model", now=0.0, own_prefixes={"own": [1, 2]})


def test_a_new_scheduler_gets_all_prefixes_before_the_requests(pinning: SchedulerSession) -> None:
    first = pinning.receive(FrontendWelcome(EPOCH, STATUS), 0.0)
    assert [type(message) for message in first] == [PinPrefixes, Renew]
    pinning.receive(PrefixesChanged(EPOCH, [Prefix("own", [1, 2]), Prefix("learned", [3])]), 0.0)
    assert welcome(pinning, 6) == {"own": [1, 2], "learned": [3]}


def test_prefixes_are_not_lost_with_a_scheduler_that_did_not_get_to_pin_them(pinning: SchedulerSession) -> None:
    welcome(pinning, EPOCH)
    pinning.receive(PrefixesChanged(EPOCH, [Prefix("learned", [3])]), 0.0)
    welcome(pinning, 6)
    pinning.receive(PrefixesChanged(6, []), 0.0)
    assert pinning.prefixes.known == {"own": [1, 2], "learned": [3]}
    assert welcome(pinning, 7) == {"own": [1, 2], "learned": [3]}


def test_the_same_scheduler_is_not_told_again_what_it_pinned(pinning: SchedulerSession) -> None:
    assert welcome(pinning, EPOCH) == {"own": [1, 2]}
    assert welcome(pinning, EPOCH) == {"own": [1, 2]}
    pinning.receive(PrefixesChanged(EPOCH, [Prefix("own", [1, 2])]), 0.0)
    assert welcome(pinning, EPOCH) == {}


def test_what_is_unpinned_is_forgotten_but_for_what_the_file_says(pinning: SchedulerSession) -> None:
    welcome(pinning, EPOCH)
    pinning.receive(PrefixesChanged(EPOCH, [Prefix("own", [1, 2]), Prefix("learned", [3])]), 0.0)
    pinning.receive(PrefixesChanged(EPOCH, []), 0.0)
    assert pinning.prefixes.known == {}
    assert welcome(pinning, 6) == {"own": [1, 2]}


def test_a_prefix_that_is_refused_is_not_known(pinning: SchedulerSession, caplog: pytest.LogCaptureFixture) -> None:
    welcome(pinning, EPOCH)
    pinning.receive(PinRefused(EPOCH, "own", "no room"), 0.0)
    assert pinning.prefixes.known == {}
    assert "'own' is not pinned: no room" in caplog.text


def test_the_schedulers_word_on_a_prefix_counts(pinning: SchedulerSession) -> None:
    welcome(pinning, EPOCH)
    assert not pinning.prefixes.reported
    pinning.receive(PrefixesChanged(EPOCH, [Prefix("own", [9])]), 0.0)
    assert pinning.prefixes.known == {"own": [9]}
    assert pinning.prefixes.reported


def test_a_list_of_prefixes_counts_only_once_it_answers_what_was_asked(pinning: SchedulerSession) -> None:
    pinning.hello()
    pinning.receive(FrontendWelcome(EPOCH, STATUS), 0.0)
    pinning.receive(PrefixesChanged(EPOCH, []), 0.0)
    assert [type(message) for message in pinning.ask_prefixes()] == [FrontendHello]
    # It was on its way already.
    pinning.receive(PrefixesChanged(EPOCH, [Prefix("early", [1])]), 0.0)
    assert not pinning.prefixes.reported
    assert pinning.receive(FrontendWelcome(EPOCH, STATUS), 0.0) == []
    pinning.receive(PrefixesChanged(EPOCH, [Prefix("early", [1]), Prefix("late", [2])]), 0.0)
    assert pinning.prefixes.reported
    assert "late" in pinning.prefixes.known


def test_further_answers_to_one_question_answer_no_later_one(pinning: SchedulerSession) -> None:
    pinning.hello()
    # Nothing has come for a while, and then both hellos are answered.
    pinning.tick()
    for _ in range(2):
        pinning.receive(FrontendWelcome(EPOCH, STATUS), 0.0)
        pinning.receive(PrefixesChanged(EPOCH, []), 0.0)
    pinning.ask_prefixes()
    pinning.receive(PrefixesChanged(EPOCH, [Prefix("early", [1])]), 0.0)
    assert not pinning.prefixes.reported
    assert FrontendHello in [type(message) for message in pinning.tick()]


def test_what_was_asked_in_vain_is_asked_again(pinning: SchedulerSession) -> None:
    pinning.hello()
    pinning.receive(FrontendWelcome(EPOCH, STATUS), 0.0)
    pinning.receive(PrefixesChanged(EPOCH, []), 0.0)
    assert [type(message) for message in pinning.tick()] == [Renew]
    pinning.ask_prefixes()
    assert [type(message) for message in pinning.tick()] == [Renew, FrontendHello]
    pinning.receive(FrontendWelcome(EPOCH, STATUS), 0.0)
    pinning.receive(PrefixesChanged(EPOCH, []), 0.0)
    assert pinning.prefixes.reported


def test_nobody_is_asked_while_there_is_no_scheduler(pinning: SchedulerSession) -> None:
    assert pinning.ask_prefixes() == []


def test_more_prefixes_than_a_message_holds() -> None:
    own = {f"own-{i}": [1] for i in range(MAX_PREFIXES)}
    session = SchedulerSession(frontend_id=1, model_fingerprint="model", now=0.0, own_prefixes=own)
    session.receive(FrontendWelcome(EPOCH, STATUS), 0.0)
    session.receive(PrefixesChanged(EPOCH, [Prefix("learned", [3])]), 0.0)
    session.disconnected()
    messages = session.receive(FrontendWelcome(6, STATUS), 0.0)
    assert [len(message.prefixes) for message in messages if isinstance(message, PinPrefixes)] == [MAX_PREFIXES, 1]
    assert pins(messages) == own | {"learned": [3]}


def test_requests_of_the_same_id_are_two_to_the_scheduler(session: SchedulerSession) -> None:
    first, second, third = live(session), live(session), live(session, "r#2")
    assert [request.journal.request_id for request in (first, second, third)] == ["r", "r", "r#2"]
    assert sorted(session.live) == ["r", "r#2", "r#2#2"]
    session.receive(deltas(0, [7]), 1.0)
    assert [request.journal.sequences[0].token_ids for request in (first, second, third)] == [[7], [], []]
    [abort] = session.release(second)
    assert isinstance(abort, Abort)
    assert abort.request_ids == ["r#2"]
    [renewal] = session.tick()
    assert isinstance(renewal, Renew)
    assert [lease.request_id for lease in renewal.live] == ["r", "r#2#2"]
