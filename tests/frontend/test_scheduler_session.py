"""The link's rules, one message at a time: when to say hello, renew, submit again, and when not to."""

import pytest

from octavo.frontend.errors import AlreadyExists, Broken, InvalidRequest, Overloaded, ServiceError, Unavailable
from octavo.frontend.journal import Journal
from octavo.frontend.reader import Reader
from octavo.frontend.scheduler_session import LiveRequest, SchedulerSession
from octavo.wire import history
from octavo.wire.requests import (
    Abort,
    Delta,
    Deltas,
    FromFrontend,
    FrontendHello,
    FrontendWelcome,
    Lease,
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
STATUS = ServiceStatus(replicas=1, model=None, capacity_tokens=10)
SAMPLING = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=7, max_tokens=6, stop_token_ids=[])


@pytest.fixture
def session() -> SchedulerSession:
    session = SchedulerSession(frontend_id=1, model_fingerprint="model", now=0.0)
    session.receive(FrontendWelcome(epoch=EPOCH, status=STATUS), 0.0)
    session.receive(renewed(), 0.0)
    return session


def live(session: SchedulerSession, request_id: str = "r") -> LiveRequest:
    request = LiveRequest(Journal(request_id, [1], SAMPLING, 0.0), Reader())
    session.submit(request, 0.0)
    return request


def renewed(*unknown: str, attempt: int = 1, epoch: int = EPOCH) -> Renewed:
    return Renewed(epoch=epoch, unknown=[Lease(request_id, attempt) for request_id in unknown], status=STATUS)


def deltas(start: int, tokens: list[int], *, attempt: int = 1, epoch: int = EPOCH) -> Deltas:
    delta = Delta(
        request_id="r",
        attempt=attempt,
        sequence_index=0,
        start_index=start,
        previous_hash=history.EMPTY,
        token_ids=tokens,
        finish_reason=None,
        preemptions=0,
        cached_prompt_tokens=0,
    )
    return Deltas(epoch=epoch, deltas=[delta])


def submissions(messages: list[FromFrontend]) -> list[tuple[str, int, list[int]]]:
    requests = [message.request for message in messages if isinstance(message, Submit)]
    return [(request.request_id, request.attempt, request.generated_token_ids) for request in requests]


def test_hello_until_welcomed_then_renewals() -> None:
    session = SchedulerSession(frontend_id=1, model_fingerprint="model", now=0.0)
    assert [type(m) for m in session.tick()] == [FrontendHello]
    assert [type(m) for m in session.tick()] == [FrontendHello]
    assert [type(m) for m in session.receive(FrontendWelcome(epoch=EPOCH, status=STATUS), 0.0)] == [Renew]
    assert [type(m) for m in session.tick()] == [Renew]


def test_a_request_made_before_the_welcome_is_found_missing_and_submitted() -> None:
    session = SchedulerSession(frontend_id=1, model_fingerprint="model", now=0.0)
    request = LiveRequest(Journal("r", [1], SAMPLING, 0.0), Reader())
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
    assert (request.journal.generated_token_ids, request.reader.failure) == ([], None)
    session.receive(deltas(0, [11], attempt=2), 1.0)
    assert request.journal.generated_token_ids == [11]


def test_attempts_rise_over_all_requests(session: SchedulerSession) -> None:
    requests = [live(session, "a"), live(session, "b")]
    session.receive(renewed("a", attempt=1), 1.0)
    assert [request.journal.attempt for request in requests] == [3, 2]


def test_submissions_say_whether_they_are_the_first_and_for_which_model(session: SchedulerSession) -> None:
    request = LiveRequest(Journal("r", [1], SAMPLING, 0.0), Reader())
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
    assert request.journal.generated_token_ids == []
    assert session.last_heard == 0.0


def test_a_gap_is_repaired_by_submitting_again(session: SchedulerSession) -> None:
    live(session)
    assert submissions(session.receive(deltas(3, [10]), 1.0)) == [("r", 2, [])]
    assert session.receive(deltas(0, [10], attempt=1), 1.0) == []


def test_unanswered_renewals_end_in_a_hello(session: SchedulerSession) -> None:
    kinds = [type(message) for _ in range(4) for message in session.tick()]
    assert kinds == [Renew, Renew, Renew, FrontendHello]
    assert session.epoch is None


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
    status = ServiceStatus(replicas=3, model=None, capacity_tokens=30)
    session.receive(StatusChanged(epoch=EPOCH, status=status), 1.0)
    assert session.status == status


def test_a_refusal_is_kept_for_the_process_to_end(session: SchedulerSession) -> None:
    session.receive(Refused(detail="schema 1, not 2"), 1.0)
    assert session.refused == "schema 1, not 2"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (RejectReason.DUPLICATE_ID, AlreadyExists),
        (RejectReason.NEVER_FITS_KV, InvalidRequest),
        (RejectReason.PROMPT_TOO_LONG, InvalidRequest),
        (RejectReason.BAD_TOKEN_ID, InvalidRequest),
        (RejectReason.EMPTY_PROMPT, InvalidRequest),
        (RejectReason.MODEL_MISMATCH, Unavailable),
        (RejectReason.QUEUE_FULL, Overloaded),
        (RejectReason.STEP_FAILED, Broken),
        (RejectReason.ALREADY_COMPLETE, Broken),
    ],
)
def test_every_rejection_has_its_error(
    session: SchedulerSession, reason: RejectReason, kind: type[ServiceError]
) -> None:
    request = live(session)
    session.receive(Rejected(epoch=EPOCH, request_id="r", attempt=1, reason=reason, detail="why"), 1.0)
    assert type(request.reader.failure) is kind
    assert str(request.reader.failure).startswith("why")


def test_the_rejection_of_an_earlier_attempt_is_ignored(session: SchedulerSession) -> None:
    request = live(session)
    request.journal.start_attempt(2)
    reason = RejectReason.STEP_FAILED
    session.receive(Rejected(epoch=EPOCH, request_id="r", attempt=1, reason=reason, detail="why"), 1.0)
    assert request.reader.failure is None
