"""Reads the answers of Generate calls."""

from collections.abc import AsyncIterable
from typing import Any

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from octavo.v1 import generation_pb2 as pb


async def collect(call: AsyncIterable[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    """Collects all events of a call."""
    return [response async for response in call]


def text_of(responses: list[pb.GenerateResponse]) -> str:
    """Joins the deltas' text."""
    return "".join(response.delta.text for response in responses)


def ids_of(responses: list[pb.GenerateResponse]) -> list[int]:
    """Joins the deltas' token ids."""
    return [token_id for response in responses for token_id in response.delta.token_ids]


def finished_of(responses: list[pb.GenerateResponse]) -> pb.Finished:
    """Returns the only `finished` event."""
    [finished] = all_finished(responses)
    return finished


def all_finished(responses: list[pb.GenerateResponse]) -> list[pb.Finished]:
    """Returns the `finished` events, in order."""
    return [response.finished for response in responses if response.WhichOneof("event") == "finished"]


def of_sequence(index: int, responses: list[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    """Selects the deltas and the `finished` event of one sequence."""
    return [r for r in responses if r.WhichOneof("event") in ("delta", "finished") and _index(r) == index]


def _index(response: pb.GenerateResponse) -> int:
    return response.delta.index if response.WhichOneof("event") == "delta" else response.finished.index


def reason_of(error: grpc.RpcError) -> str:
    """Returns the stable reason in an error's details, checked to be in our domain."""
    info = _detail(error, error_details_pb2.ErrorInfo())
    assert info is not None
    assert info.domain == "octavo"
    return str(info.reason)


def retry_delay_of(error: grpc.RpcError) -> float | None:
    """Seconds after which the error invites another try, if it does."""
    info = _detail(error, error_details_pb2.RetryInfo())
    return None if info is None else info.retry_delay.ToNanoseconds() / 1e9


def _detail(error: grpc.RpcError, empty: Any) -> Any:
    call: Any = error
    for detail in rpc_status.from_call(call).details:
        if detail.Unpack(empty):
            return empty
    return None
