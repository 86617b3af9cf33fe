"""Serves /v1/files and /v1/batches, OpenAI's routes for calls that are answered in the background."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from octavo.frontend.access.access import tenant_from_headers
from octavo.frontend.api.body import read_call, unknown_fields_header
from octavo.frontend.api.endpoint import Api, caller_of, route
from octavo.frontend.api.schemas import BodyStruct
from octavo.frontend.batch.files import INPUT, FileRecord, too_large
from octavo.frontend.batch.lines import ENDPOINTS, encode
from octavo.frontend.batch.records import BatchRecord
from octavo.frontend.batch.service import BatchService
from octavo.frontend.batch.upload import read_form
from octavo.frontend.errors import NotFound, Reason, Unavailable, bad_parameter

T = TypeVar("T")
_log = logging.getLogger(__name__)

_WINDOW: Final = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S: Final = 30 * 86400
_FORM_FIELDS: Final = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
_MAX_FORM: Final = 64 << 10

_Label = Annotated[str, Meta(max_length=512)]


class ExpiresAfter(BodyStruct, frozen=True, kw_only=True):
    """Says for how many seconds files are kept once they are made."""

    seconds: int
    anchor: str = "created_at"


class BatchBody(BodyStruct, frozen=True, kw_only=True):
    """Holds the body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[str, _Label], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


def routes(api: Api, service: BatchService | None) -> list[Route]:
    """Returns the routes of files and batches; where there is no `service`, they say so."""
    table: dict[tuple[str, str], Callable[[BatchService, Api, Request], Any]] = {
        ("POST", "/v1/files"): upload_file,
        ("GET", "/v1/files"): list_files,
        ("GET", "/v1/files/{id}"): get_file,
        ("DELETE", "/v1/files/{id}"): delete_file,
        ("GET", "/v1/files/{id}/content"): get_content,
        ("POST", "/v1/batches"): create_batch,
        ("GET", "/v1/batches"): list_batches,
        ("GET", "/v1/batches/{id}"): get_batch,
        ("POST", "/v1/batches/{id}/cancel"): cancel_batch,
    }

    def handler(serve: Callable[[BatchService, Api, Request], Any]) -> Any:
        async def answer(api: Api, request: Request) -> Response:
            if service is None:
                raise NotFound(
                    Reason.ROUTE_NOT_FOUND,
                    "this frontend keeps no files and batches; its operator can start it with --batch-directory",
                )
            found: Response = await serve(service, api, request)
            return found

        return answer

    return [route(api, path, handler(serve), method) for (method, path), serve in table.items()]


async def upload_file(service: BatchService, api: Api, request: Request) -> Response:
    """Takes in a file of calls. Raises `InvalidRequest`, `Unavailable` where the disk fails."""
    bounds = service.files.bounds
    # The rest of the form is small.
    if int(request.headers.get("content-length", 0)) > bounds.max_bytes + _MAX_FORM:
        raise too_large(bounds.max_bytes)
    upload = await _on_disk(service.files.begin, _tenant(request))
    try:
        filename, values = await read_form(request, partial(_on_disk, upload.write))
        created_at = service.clock()
        expires_at = created_at + _expiry_s(values, bounds.expiry_s)
        record = await _on_disk(upload.finish, filename, created_at, expires_at)
    except BaseException:
        await asyncio.to_thread(upload.abandon)
        raise
    return _json(record.shown(), unknown_fields_header(sorted(values.keys() - _FORM_FIELDS)))


async def list_files(service: BatchService, api: Api, request: Request) -> Response:
    """Lists the caller's files, the newest first. Raises `InvalidRequest`."""
    found = await _on_disk(service.files.all_of, _tenant(request))
    if purpose := request.query_params.get("purpose"):
        found = [record for record in found if record.purpose == purpose]
    return _page(request, found, most=10_000, usual=10_000)


async def get_file(service: BatchService, api: Api, request: Request) -> Response:
    """Tells what is known of a file. Raises `NotFound`."""
    record = await _on_disk(service.files.get, _tenant(request), request.path_params["id"])
    return _json(record.shown())


async def get_content(service: BatchService, api: Api, request: Request) -> Response:
    """Sends a file. Raises `NotFound`."""
    _, path = await _on_disk(service.files.content, _tenant(request), request.path_params["id"])
    return FileResponse(path, media_type="application/octet-stream", headers={"cache-control": "no-store"})


async def delete_file(service: BatchService, api: Api, request: Request) -> Response:
    """Removes a file; batches that were made of it go on. Raises `NotFound`."""
    file_id = request.path_params["id"]
    await _on_disk(service.files.delete, _tenant(request), file_id)
    return _json({"id": file_id, "object": "file", "deleted": True})


async def create_batch(service: BatchService, api: Api, request: Request) -> Response:
    """Begins a batch of the calls in a file. Raises `InvalidRequest`, `NotFound`, `Overloaded`."""
    body, unknown = await read_call(request, BatchBody, {}, api.generation.beginnings)
    if body.endpoint not in ENDPOINTS:
        raise bad_parameter("endpoint", repr(body.endpoint[:128]), f"it must be one of {', '.join(ENDPOINTS)}")
    window_s = _window_s(body.completion_window)
    tenant = _tenant(request)
    file, path = await _on_disk(service.files.content, tenant, body.input_file_id)
    if file.purpose != INPUT:
        raise bad_parameter(
            "input_file_id", repr(file.id), f"that file's purpose is {file.purpose}; it must be {INPUT}"
        )
    expiry_s = service.files.bounds.expiry_s
    if asked := body.output_expires_after:
        expiry_s = _checked_expiry("output_expires_after", asked.anchor, asked.seconds, expiry_s)
    now = service.clock()
    record = await _on_disk(
        service.records.create,
        tenant,
        path,
        trusted=caller_of(request).trusted,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window_s,
        files_expire_after_s=expiry_s,
        metadata=body.metadata,
    )
    service.runner.look()
    return _json(record.shown(), unknown_fields_header(unknown))


async def list_batches(service: BatchService, api: Api, request: Request) -> Response:
    """Lists the caller's batches, the newest first. Raises `InvalidRequest`."""
    found = await _on_disk(_all_batches, service, _tenant(request))
    return _page(request, found, most=100, usual=20)


async def get_batch(service: BatchService, api: Api, request: Request) -> Response:
    """Tells how far a batch is. Raises `NotFound`."""
    record = await _on_disk(_batch, service, _tenant(request), request.path_params["id"])
    return _json(record.shown())


async def cancel_batch(service: BatchService, api: Api, request: Request) -> Response:
    """Ends a batch: what is answered by then is kept. Raises `NotFound`; `InvalidRequest` for one that is over."""
    record = await _on_disk(_batch, service, _tenant(request), request.path_params["id"])
    if record.is_over:
        raise bad_parameter("batch", record.status, "only one that is under way can be cancelled")
    await _on_disk(service.records.ask_to_cancel, record)
    service.runner.look()
    record = await _on_disk(_batch, service, record.tenant, record.id)
    return _json(record.shown())


def _all_batches(service: BatchService, tenant: str) -> list[BatchRecord]:
    return [_now(service, record) for record in service.records.all_of(tenant)]


def _batch(service: BatchService, tenant: str, batch_id: str) -> BatchRecord:
    return _now(service, service.records.get(tenant, batch_id))


def _now(service: BatchService, record: BatchRecord) -> BatchRecord:
    """Returns a batch as it is now: with what this frontend has done of it, and with the word that is to end it."""
    record = service.runner.current(record)
    if record.status in ("validating", "in_progress") and (asked_at := service.records.cancelled_at(record)):
        return record.at("cancelling", asked_at)
    return record


def _window_s(window: str) -> int:
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        rule = "it must be a number with s, m, h or d, as 24h, and at most 30d"
        raise bad_parameter("completion_window", repr(window[:32]), rule)
    return seconds


def _expiry_s(values: Mapping[str, str], most_s: int) -> int:
    """Returns for how many seconds an uploaded file is kept. Raises `InvalidRequest`."""
    if "purpose" not in values:
        raise bad_parameter("purpose", "missing", f"it must be {INPUT}")
    if values["purpose"] != INPUT:
        raise bad_parameter("purpose", repr(values["purpose"][:64]), f"it must be {INPUT}: files are for batches alone")
    seconds = values.get("expires_after[seconds]")
    if seconds is None:
        return most_s
    if not re.fullmatch(r"[0-9]{1,12}", seconds):
        raise bad_parameter("expires_after[seconds]", repr(seconds[:32]), "it must be a whole number")
    return _checked_expiry("expires_after", values.get("expires_after[anchor]", "created_at"), int(seconds), most_s)


def _checked_expiry(field: str, anchor: str, seconds: int, most_s: int) -> int:
    if anchor != "created_at":
        raise bad_parameter(f"{field}.anchor", repr(anchor[:32]), "it must be created_at")
    if not 1 <= seconds <= most_s:
        raise bad_parameter(f"{field}.seconds", seconds, f"it must be between 1 and {most_s}: no file is kept longer")
    return seconds


def _page(request: Request, found: Sequence[FileRecord | BatchRecord], *, most: int, usual: int) -> Response:
    """Returns a part of a list, by OpenAI's parameters. Raises `InvalidRequest`."""
    parameters = request.query_params
    if unknown := parameters.keys() - {"purpose", "limit", "after", "order"}:
        raise bad_parameter(min(unknown)[:64], "not known here", "use limit, after, order or purpose")
    limit = parameters.get("limit", str(usual))
    if not re.fullmatch(r"[0-9]{1,6}", limit) or not 1 <= int(limit) <= most:
        raise bad_parameter("limit", repr(limit[:32]), f"it must be between 1 and {most}")
    order = parameters.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_parameter("order", repr(order[:32]), "it must be asc or desc")
    listed = list(found) if order == "desc" else list(reversed(found))
    if after := parameters.get("after"):
        ids = [record.id for record in listed]
        if after not in ids:
            raise bad_parameter("after", repr(after[:64]), "it must be the id of an item of this list")
        listed = listed[ids.index(after) + 1 :]
    shown = [record.shown() for record in listed[: int(limit)]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return _json({"object": "list", "data": shown, **ends, "has_more": len(listed) > int(limit)})


def _tenant(request: Request) -> str:
    return tenant_from_headers(request.headers, caller_of(request))


async def _on_disk(work: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Returns what `work` does in a thread. Raises `Unavailable` where the disk fails."""
    try:
        return await asyncio.to_thread(partial(work, *arguments, **named))
    except OSError as error:
        _log.error("files and batches cannot be kept or read: %s", error)
        raise Unavailable(
            Reason.STORAGE_FAILED, f"the server's disk fails: {error.strerror}; try again later"
        ) from error


def _json(content: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    told = {"cache-control": "no-store", **(headers or {})}
    return Response(encode(content), media_type="application/json", headers=told)
