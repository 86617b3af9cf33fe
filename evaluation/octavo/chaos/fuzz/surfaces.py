"""Lists what can be attacked, and the attacks."""

from typing import Final

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto import vllm_engine_pb2  # type: ignore[import-untyped]

from octavo.chaos.fuzz.false_scheduler import false_scheduler
from octavo.chaos.fuzz.grpc_calls import Services
from octavo.chaos.fuzz.http_calls import http, metrics_of
from octavo.chaos.fuzz.soak import soak
from octavo.chaos.fuzz.strangers import false_frontend, false_worker, unknown_peers
from octavo.chaos.fuzz.target import Attack
from octavo.testbed.stack import token_request
from octavo.v1 import admin_pb2, generation_pb2

ENVIRONMENT: Final = {
    "OCTAVO_DEVICE": "fake",
    "OCTAVO_NUM_BLOCKS": "512",
    "OCTAVO_FAKE_STEP_MS": "1",
    "OCTAVO_MAX_DETACH_GRACE": "1",
    "OCTAVO_MAX_REQUEST_TIME": "10",
    "OCTAVO_METRICS_LISTEN": "127.0.0.1:0",
}

_CHAT: Final = generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="hello")])
_GENERATION: Final = Services(
    "frontend.sock",
    [
        generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    ],
    {
        "Generate": [
            token_request([1, 2, 3], 3),
            token_request([1], 5, request_id="a"),
            generation_pb2.GenerateRequest(chat=_CHAT, stopping={"max_new_tokens": 4}),
            generation_pb2.GenerateRequest(text="x", constraint={"regex": "[ab]+"}, stopping={"max_new_tokens": 4}),
            generation_pb2.GenerateRequest(
                text="x",
                sampling={"beam_search": {"beam_width": 3}, "num_sequences": 2},
                stopping={"max_new_tokens": 4},
            ),
        ],
        "Attach": [generation_pb2.AttachRequest(request_id="a", after_event_offset=1)],
        "Abort": [generation_pb2.AbortRequest(request_ids=["a", "b"])],
        "Tokenize": [generation_pb2.TokenizeRequest(text="hello"), generation_pb2.TokenizeRequest(chat=_CHAT)],
        "Detokenize": [generation_pb2.DetokenizeRequest(ids=[1, 2, 3])],
    },
)
_ENGINE: Final = Services(
    "frontend.sock",
    [vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]],
    {
        "Generate": [
            vllm_engine_pb2.GenerateRequest(
                request_id="e",
                tokenized={"input_ids": [1, 2, 3]},
                sampling_params={"max_tokens": 3, "temperature": 0.5},
                stream=True,
            )
        ],
        "Abort": [vllm_engine_pb2.AbortRequest(request_ids=["e"])],
    },
)
_ADMIN: Final = Services(
    "admin.sock",
    [admin_pb2.DESCRIPTOR.services_by_name["AdminService"], health_pb2.DESCRIPTOR.services_by_name["Health"]],
    {
        "PinPrefix": [admin_pb2.PinPrefixRequest(name="p", token_ids=[1, 2])],
        "UnpinPrefix": [admin_pb2.UnpinPrefixRequest(name="p")],
        "ExplainRequest": [admin_pb2.ExplainRequestRequest(request_id="a")],
    },
)

SURFACES: Final[dict[str, dict[str, Attack]]] = {
    "grpc": {"GenerationService": Attack(_GENERATION)},
    "engine": {"VllmEngine": Attack(_ENGINE)},
    "http": {"every route": Attack(http)},
    "zmq": {
        "unknown peers": Attack(unknown_peers),
        "a false frontend": Attack(false_frontend),
        "a false worker": Attack(false_worker, lies=True),
        "a false scheduler": Attack(false_scheduler, lies=True),
    },
    "admin": {"AdminService": Attack(_ADMIN)},
    "soak": {"good clients and bad ones": Attack(soak)},
    "metrics": {
        "of the scheduler": Attack(metrics_of("scheduler")),
        "of the worker": Attack(metrics_of("worker-0")),
    },
}
