"""Reads octavo.v1 messages from clients: bounds repeated fields, refuses unknown fields, converts to inner types."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.frontend.errors import Reason, Unsupported, bad_parameter
from octavo.frontend.request.chat import (
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MAX_VARIABLES_BYTES,
    Chat,
    ChatMessage,
    Tool,
    ToolCall,
    check_bytes,
)
from octavo.frontend.request.pooling import PoolingRequest, check_dimensions, check_inputs
from octavo.frontend.request.request import (
    FIELDS,
    MAX_CHOICES,
    Constraint,
    ConstraintKind,
    GenerationRequest,
    Prediction,
    Prompt,
)
from octavo.frontend.request.validation import check_count, check_prediction_size, check_room
from octavo.frontend.stream.generation import Generation
from octavo.frontend.stream.preparation import check_task
from octavo.v1 import generation_pb2 as pb
from octavo.wire.pooling import PoolingTask
from octavo.wire.sampling import BeamSearch, EarlyStopping

MAX_ABORTED_IDS: Final = 4096


def check_generate(message: pb.GenerateRequest, max_model_len: int) -> None:
    """Raises `InvalidRequest` for token ids that leave no room for an answer, or too many entries of another field."""
    check_room(len(message.token_ids.ids), max_model_len)
    check_prediction_size(message.prediction.token_ids.ids, max_model_len)
    check_chat(message.chat)
    check_count("constraint.choice", message.constraint.choice.choices, MAX_CHOICES)
    check_counts(message.sampling, _SAME)
    check_counts(message.stopping, _SAME)


def check_counts(message: Message, names: Mapping[str, str]) -> None:
    """Raises `InvalidRequest` for too many entries of a field. `names` are as for `values_of`."""
    for field, value in message.ListFields():
        if field.is_repeated and field.name in names and (most := FIELDS[names[field.name]].most):
            check_count(field.name, value, most)


def check_chat(chat: pb.ChatPrompt) -> None:
    """Raises `InvalidRequest` for too many messages, tools or calls of these."""
    check_count("chat.messages", chat.messages, MAX_MESSAGES)
    check_count("chat.tools", chat.tools, MAX_TOOLS)
    for message in chat.messages:
        check_count("chat.messages.tool_calls", message.tool_calls, MAX_TOOL_CALLS)


def check_detokenize(message: pb.DetokenizeRequest, max_model_len: int) -> None:
    """Raises `InvalidRequest` for more ids than a context holds."""
    check_count("ids", message.ids, max_model_len)


def check_abort(message: pb.AbortRequest) -> None:
    """Raises `InvalidRequest` for too many ids."""
    check_count("request_ids", message.request_ids, MAX_ABORTED_IDS)


# Looking for the name of a field costs a walk, which is for mistakes, not for megabytes.
_MAX_NAMED_BYTES: Final = 4096


def refuse_unknown_fields(message: Message) -> None:
    """Raises `Unsupported`, naming the first unknown field of `message` or of a message in it."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    unknown_bytes = message.ByteSize() - known.ByteSize()
    if unknown_bytes > _MAX_NAMED_BYTES:
        raise Unsupported(
            Reason.UNSUPPORTED_FIELD, f"{unknown_bytes} bytes of fields are not known to this server; leave them out"
        )
    if unknown_bytes:
        raise _first_unknown(message)


def _first_unknown(message: Message) -> Unsupported:
    part, unknown = next((part, unknown) for part in _parts(message) if len(unknown := UnknownFieldSet(part)))
    number, name = unknown[0].field_number, part.DESCRIPTOR.full_name
    return Unsupported(
        Reason.UNSUPPORTED_FIELD,
        f"field {number} of {name} is not known to this server; leave it out",
        field_number=number,
        message_type=name,
    )


def _parts(message: Message) -> Iterator[Message]:
    """Yields `message` and all messages inside of it."""
    yield message
    for descriptor, value in message.ListFields():
        inner = descriptor.message_type
        # A map's entry with an unknown field is unknown itself, and octavo.v1 has no maps to messages.
        if inner is not None and not inner.GetOptions().map_entry:
            for part in value if descriptor.is_repeated else (value,):
                yield from _parts(part)


_EARLY_STOPPING: Final[dict[int, EarlyStopping]] = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.OFF,
    pb.EARLY_STOPPING_ON: EarlyStopping.ON,
    pb.EARLY_STOPPING_OFF: EarlyStopping.OFF,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
# The fields that octavo.v1 and requests call by the same name.
_SAME: Final = {name: name for name in FIELDS}


def read_request(message: pb.GenerateRequest, metadata: Mapping[str, str]) -> GenerationRequest:
    """Returns the message as a request. Fields that the message leaves out get their defaults.

    `metadata` is the call's, by names in lower case. Raises `InvalidRequest` where the message has no prompt, an
    unknown value of an enum, or text that is no JSON.
    """
    sampling, scheduling = message.sampling, message.scheduling
    parts = (sampling, message.stopping, message.response, scheduling, message.cache)
    return GenerationRequest(
        prompt=_prompt(message),
        request_id=message.request_id or metadata.get("x-request-id", ""),
        model=message.model,
        **{name: value for part in parts for name, value in values_of(part, _SAME)},
        beam=_beam(sampling.beam_search) if sampling.HasField("beam_search") else None,
        constraint=_constraint(message.constraint) if message.HasField("constraint") else None,
        max_queue_s=_seconds(scheduling, "max_queue_time"),
        detach_grace_s=_seconds(scheduling, "detach_grace") or 0.0,
        prediction=_prediction(message.prediction) if message.HasField("prediction") else "",
        traceparent=metadata.get("traceparent", ""),
    )


def values_of(message: Message, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a message that are set, as fields of a `GenerationRequest`.

    `names` are the names there of the message's own; fields without one are left out.
    """
    for field, value in message.ListFields():
        # A negative zero is not set where zero stands for "left out", though it is sent.
        if (name := names.get(field.name)) and (value or field.has_presence):
            # The only messages are the entries of maps.
            yield name, value if not field.is_repeated else dict(value) if field.message_type else tuple(value)


def read_chat(message: pb.ChatPrompt) -> Chat:
    """Returns the conversation. Raises `InvalidRequest` for template variables that are no JSON object."""
    return Chat(
        messages=tuple(map(_chat_message, message.messages)),
        tools=tuple(Tool(tool.name, tool.description, tool.parameters_json) for tool in message.tools),
        template_variables=_variables(message.template_variables_json),
        add_generation_prompt=(
            message.add_generation_prompt
            if message.HasField("add_generation_prompt")
            else not message.continue_final_message
        ),
        continue_final_message=message.continue_final_message,
    )


def default_true(options: pb.ResponseOptions, name: str) -> bool:
    """Returns an optional switch of `options`: True unless it is turned off."""
    return bool(getattr(options, name)) if options.HasField(name) else True


def check_options(options: pb.ResponseOptions, request: GenerationRequest) -> None:
    """Raises `InvalidRequest` where `options`, sent to attach to `request`, would need another answer to it."""
    for name, asked in values_of(options, _SAME):
        if asked != (has := getattr(request, name)):
            raise bad_parameter(
                f"response.{name}", asked, f"the request has {has}; leave it out, or set it to the same"
            )


def _optional(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _seconds(message: Message, field: str) -> float | None:
    duration = _optional(message, field)
    return None if duration is None else duration.seconds + duration.nanos / 1e9


def _beam(message: pb.BeamSearch) -> BeamSearch:
    length_penalty = _optional(message, "length_penalty")
    if message.early_stopping not in _EARLY_STOPPING:
        raise bad_parameter("early_stopping", message.early_stopping, "it must be a value of the enum EarlyStopping")
    return BeamSearch(
        width=message.beam_width,
        length_penalty=1.0 if length_penalty is None else length_penalty,
        early_stopping=_EARLY_STOPPING[message.early_stopping],
    )


def _prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return array("I", message.token_ids.ids)
        case "chat":
            return read_chat(message.chat)
    raise bad_parameter("prompt", "missing", "one of text, token_ids and chat must be set")


def _prediction(message: pb.Prediction) -> Prediction:
    match message.WhichOneof("content"):
        case "text":
            return message.text
        case "token_ids":
            return array("I", message.token_ids.ids)
    raise bad_parameter("prediction", "empty", "one of text and token_ids must be set")


def _constraint(message: pb.OutputConstraint) -> Constraint:
    match message.WhichOneof("constraint"):
        case "json_object" if message.json_object:
            return Constraint(ConstraintKind.JSON_OBJECT)
        case "json_object":
            raise bad_parameter("constraint.json_object", "false", "it must be true; or leave out the constraint")
        case "choice":
            return Constraint(ConstraintKind.CHOICE, choices=tuple(message.choice.choices))
        case str() as kind:
            return Constraint(ConstraintKind(kind), getattr(message, kind))
    raise bad_parameter("constraint", "empty", "one of json_object, json_schema, regex, choice and grammar must be set")


def _chat_message(message: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments_json) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _variables(text: str) -> dict[str, object]:
    if not text:
        return {}
    check_bytes("chat.template_variables_json", text, MAX_VARIABLES_BYTES)
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_parameter("chat.template_variables_json", "no JSON object", f"it must be one: {error}") from error


def read_embed(
    message: pb.EmbedRequest, generation: Generation, tenant: str, metadata: Mapping[str, str]
) -> list[PoolingRequest]:
    """Returns a request for each text of a call. Raises `InvalidRequest`."""
    check_inputs("inputs", len(message.inputs))
    pooling = generation.pooling_model
    task = PoolingTask.EMBED if pooling is None else pooling.task
    if pooling is None and generation.served_model_len:
        check_task(None, task, generation.model_name)
    if message.HasField("dimensions"):
        if task is not PoolingTask.EMBED:
            raise bad_parameter("dimensions", message.dimensions, "scores of classes cannot be cut; leave it out")
        check_dimensions(message.dimensions, None if pooling is None else pooling.num_outputs)
    prompt = ""
    if task is PoolingTask.EMBED:
        name = message.prompt_name if message.HasField("prompt_name") else None
        prompt = generation.pooling_defaults.prompt(name)
    common: dict[str, Any] = {
        "task": task,
        "truncate_to": (message.truncate_to or generation.max_model_len) if message.HasField("truncate_to") else None,
        "add_special_tokens": message.add_special_tokens if message.HasField("add_special_tokens") else True,
        "model": message.model,
        "tenant": tenant,
        "priority": message.priority,
        "max_queue_s": (
            message.max_queue_time.ToTimedelta().total_seconds() if message.HasField("max_queue_time") else None
        ),
        "traceparent": metadata.get("traceparent", ""),
    }
    return [_pooling_request(each, prompt, common) for each in message.inputs]


def _pooling_request(message: pb.EmbedInput, prompt: str, common: dict[str, Any]) -> PoolingRequest:
    match message.WhichOneof("input"):
        case "token_ids":
            return PoolingRequest(prompt=list(message.token_ids.ids), **common)
        case "pair":
            if not message.pair.second:
                raise bad_parameter("pair.second", "empty", "there must be at least one token in each text")
            return PoolingRequest(prompt=message.pair.first, pair=message.pair.second, **common)
    return PoolingRequest(prompt=message.text and prompt + message.text, **common)
