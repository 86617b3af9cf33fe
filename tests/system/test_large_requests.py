"""One client's largest messages do not keep the others waiting."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.stack import GENERATION_SERVICE, Stack, token_request
from octavo.v1 import generation_pb2 as pb

pytestmark = pytest.mark.system

SERVING = health_pb2.HealthCheckResponse.SERVING


def refusal_of(stack: Stack, request: pb.GenerateRequest) -> str:
    with pytest.raises(grpc.RpcError) as error:
        stack.generate(request)
    return reason_of(error.value)


def test_health_is_answered_while_half_a_million_messages_are_refused(new_stack: Callable[..., Stack]) -> None:
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user")] * 500_000))
    stack = new_stack().start_all()
    health, answered = health_pb2_grpc.HealthStub(stack.channel), 0
    asked = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
    with ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(refusal_of, stack, request)
        while not refusal.done():
            assert health.Check(asked, timeout=60).status == SERVING
            answered += 1
    assert refusal.result() == "BAD_PARAMETER"
    # That no part of it is looked at, tests/frontend counts.
    assert answered > 0
    assert len(stack.generate(token_request([1, 2, 3], 4)).token_ids) == 4
