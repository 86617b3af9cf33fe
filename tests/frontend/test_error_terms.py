"""The one table of errors: every reason is in it, and all agree with it that raise errors or read them."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest

from octavo import client
from octavo.client.errors import OctavoError, to_error
from octavo.frontend import errors
from octavo.frontend.errors import TABLE, TERMS, Reason, ServiceError
from octavo.frontend.grpc.errors import code_of, to_status
from octavo.frontend.http.errors import error_object, error_response

ROOT = Path(__file__).parents[2]
KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ServiceError)]
# What a client's program catches for each class of the server's.
CAUGHT: dict[type[ServiceError], type[OctavoError]] = {
    errors.InvalidRequest: client.RequestError,
    errors.Unsupported: client.RequestError,
    errors.OutOfRange: client.RequestError,
    errors.AlreadyExists: client.RequestError,
    errors.Unauthenticated: client.AuthenticationError,
    errors.Forbidden: client.AuthenticationError,
    errors.NotFound: client.NotFoundError,
    errors.Overloaded: client.OverloadedError,
    errors.Unavailable: client.UnavailableError,
    errors.DeadlineExceeded: client.DeadlineError,
    errors.Aborted: client.AbortedError,
    errors.Broken: client.ServerError,
}


def raised(path: Path) -> list[tuple[str, str]]:
    """The class and the reason of every error that a module makes."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    return [
        (call.func.id, call.args[0].attr)
        for call in calls
        if isinstance(call.func, ast.Name)
        and isinstance(call.args[0], ast.Attribute)
        and isinstance(call.args[0].value, ast.Name)
        and call.args[0].value.id == "Reason"
    ]


def test_every_reason_and_every_class_has_its_place() -> None:
    assert sorted(reason for reasons in TABLE.values() for reason in reasons) == sorted(Reason)
    assert {terms.kind for terms in TABLE} == {*KINDS} - {ServiceError} == {*CAUGHT}


def test_every_error_is_of_the_class_that_its_reason_has_in_the_table() -> None:
    found = [each for path in (ROOT / "frontend/octavo/frontend").rglob("*.py") for each in raised(path)]
    assert len(found) > 60
    names = {kind.__name__ for kind in KINDS}
    wrong = [(kind, reason) for kind, reason in found if kind in names and kind != TERMS[Reason[reason]].kind.__name__]
    assert wrong == []


@pytest.mark.parametrize("reason", Reason)
def test_an_error_reaches_every_client_in_the_tables_terms(reason: Reason) -> None:
    terms = TERMS[reason]
    error = terms.kind(reason, "why", figure=5)
    assert code_of(error) is grpc.StatusCode[terms.code]
    answer = error_response(error, scope_of("/v1/completions"))
    assert answer.status_code == terms.status
    assert (error_object(error)["type"], error_object(error)["code"]) == (terms.openai_type, reason.lower())
    assert answer.headers.get("retry-after") == (None if terms.retry_after_s is None else "1")

    told = error_response(error, scope_of("/v1/messages"))
    assert told.status_code == (terms.anthropic_status or terms.status)
    assert msgspec.json.decode(told.body) == {
        "type": "error",
        "error": {"type": terms.anthropic_type, "message": "why"},
        "request_id": "its id",
    }
    assert told.headers.get("retry-after") == answer.headers.get("retry-after")

    made = to_error(failed_call(error))
    # gRPC itself refuses a message that is too large, as if there were no room, and says no reason.
    assert type(made) is (client.OverloadedError if reason is Reason.TOO_LARGE else CAUGHT[terms.kind])
    assert (made.reason, made.retry_after_s, made.metadata) == (reason, terms.retry_after_s, {"figure": "5"})


def scope_of(path: str) -> dict[str, Any]:
    """What a server knows of a call."""
    return {"type": "http", "path": path, "headers": [], "state": {"request_id": "its id"}}


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (Reason.BAD_PARAMETER, 400, "invalid_request_error"),
        (Reason.UNSUPPORTED_FIELD, 400, "invalid_request_error"),
        (Reason.UNAUTHENTICATED, 401, "authentication_error"),
        (Reason.CROSS_SITE, 403, "permission_error"),
        (Reason.MODEL_NOT_FOUND, 404, "not_found_error"),
        (Reason.DUPLICATE_ID, 409, "conflict_error"),
        (Reason.TOO_LARGE, 413, "request_too_large"),
        (Reason.TENANT_QUOTA, 429, "rate_limit_error"),
        (Reason.INTERNAL, 500, "api_error"),
        (Reason.DEADLINE, 504, "timeout_error"),
        (Reason.QUEUE_FULL, 529, "overloaded_error"),
    ],
)
def test_anthropics_clients_are_told_in_their_apis_words(reason: Reason, status: int, kind: str) -> None:
    told = error_response(TERMS[reason].kind(reason, "why"), scope_of("/v1/messages/count_tokens"))
    assert (told.status_code, msgspec.json.decode(told.body)["error"]["type"]) == (status, kind)


def failed_call(error: ServiceError) -> Any:
    """What grpc raises in a client for the error."""
    status = to_status(error)
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    call = SimpleNamespace(
        code=lambda: code_of(error), details=lambda: status.message, trailing_metadata=lambda: trailers
    )
    raised = grpc.RpcError()
    vars(raised).update(vars(call))
    return raised
