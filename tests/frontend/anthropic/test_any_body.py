"""Whatever a body of Anthropic's API holds: it is read, or refused with an answer; never anything else."""

import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.anthropic.conversation import chat_of, tool_choice_of, tools_of
from octavo.frontend.anthropic.schemas import COUNT_UNSUPPORTED, MESSAGES_UNSUPPORTED, CountTokensBody, MessagesBody
from octavo.frontend.api.body import Reading, read_fields
from octavo.frontend.api.sampling import sampling_of
from octavo.frontend.errors import ServiceError
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.request.validation import check_form

WORDS = ["text", "thinking", "tool_use", "tool_result", "document", "image", "type", "content", "input", "source"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner),
    max_leaves=12,
)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS)},
    optional={
        "text": st.text(max_size=8),
        "thinking": st.text(max_size=8),
        "id": st.text(max_size=4),
        "name": st.sampled_from(["f", "", "a b"]),
        "input": VALUES | st.just({}),
        "tool_use_id": st.text(max_size=4),
        "content": VALUES | st.lists(st.just({"type": "text", "text": "x"})),
        "is_error": st.booleans(),
        "source": VALUES | st.just({"type": "text", "data": "x"}),
        "cache_control": VALUES | st.just({"type": "ephemeral", "ttl": "1h"}),
    },
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            "content": st.text(max_size=8) | st.lists(BLOCKS, max_size=3) | VALUES,
        }
    ),
    max_size=4,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["f", "g", ""])},
        optional={"type": VALUES, "description": VALUES, "input_schema": VALUES | st.just({}), "strict": VALUES},
    ),
    max_size=3,
)


class Template:
    """Stands for the tokenizer of a model whose template reads some variables."""

    def template_variables(self, with_tools: bool) -> frozenset[str]:
        return frozenset({"enable_thinking", "reasoning_effort"})


TEMPLATE: Any = Template()
FIELDS = {"messages": MESSAGES | VALUES}
OTHERS = {
    "system": VALUES | st.lists(BLOCKS, max_size=2),
    "tools": TOOLS | VALUES,
    "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none", "x"])}) | VALUES,
    "thinking": VALUES,
    "output_config": VALUES,
    "cache_control": VALUES,
    "unheard_of": VALUES,
}


@settings(max_examples=200)
@given(
    st.fixed_dictionaries({**FIELDS, "max_tokens": st.integers(0, 4)}, optional={**OTHERS, "stop_sequences": VALUES})
)
def test_messages(body: dict[str, Any]) -> None:
    with contextlib.suppress(ServiceError):
        fields, ignored = read_fields(json.dumps(body).encode(), MessagesBody, MESSAGES_UNSUPPORTED)
        tools = tools_of(fields, ignored)
        tool_choice_of(fields.tool_choice, tools)
        chat = chat_of(fields, tools, TEMPLATE, ignored)
        check_form(GenerationRequest(prompt=chat, **sampling_of(fields, Reading())))


@settings(max_examples=100)
@given(st.fixed_dictionaries(FIELDS, optional=OTHERS))
def test_prompts_to_be_counted(body: dict[str, Any]) -> None:
    with contextlib.suppress(ServiceError):
        fields, ignored = read_fields(json.dumps(body).encode(), CountTokensBody, COUNT_UNSUPPORTED)
        chat_of(fields, tools_of(fields, ignored), TEMPLATE, ignored)
