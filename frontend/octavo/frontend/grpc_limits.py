"""How often a field may be repeated: asked of the message itself, before anything walks over it.

A message of 4 MB can repeat one millions of times, and a walk over them would stop the event loop for everybody.
"""

from typing import Final

from octavo.frontend.chat_form import MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS
from octavo.frontend.validation import MAX_CHOICES, MAX_STOP_STRINGS, check_count, check_room
from octavo.v1 import generation_pb2 as pb
from octavo.wire.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

MAX_ABORTED_IDS: Final = 4096


def check_generate(message: pb.GenerateRequest, max_model_len: int) -> None:
    """Raises `InvalidRequest` for more token ids than leave room for an answer, or too much of anything else."""
    check_room(len(message.token_ids.ids), max_model_len)
    check_chat(message.chat)
    check_count("constraint.choice", message.constraint.choice.choices, MAX_CHOICES)
    check_count("logit_bias", message.sampling.logit_bias, MAX_LOGIT_BIAS)
    check_count("allowed_token_ids", message.sampling.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
    check_count("banned_token_ids", message.sampling.banned_token_ids, MAX_ALLOWED_TOKEN_IDS)
    check_count("stop_strings", message.stopping.stop_strings, MAX_STOP_STRINGS)
    check_count("stop_token_ids", message.stopping.stop_token_ids, MAX_STOP_TOKEN_IDS)


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
