"""Whatever a body holds: it is read, or refused with an answer; never anything else."""

import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.api.body import Reading, read_fields
from octavo.frontend.api.sampling import sampling_of, seconds
from octavo.frontend.errors import ServiceError
from octavo.frontend.openai.completions import read_prompts
from octavo.frontend.openai.messages import chat_of, tools_of
from octavo.frontend.openai.schemas import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, ChatBody, CompletionBody
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.request.validation import check_form

WORDS = ["text", "json_object", "json_schema", "schema", "type", "function", "user", "assistant", "role", "content"]
NUMBERS = st.integers() | st.floats() | st.sampled_from([-(2**63) - 1, 2**63, 2**64, 1e308, -1])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(WORDS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner),
    max_leaves=12,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": VALUES},
    optional={"tool_calls": VALUES, "name": VALUES, "refusal": VALUES},
)


class NoTemplate:
    """Stands for the tokenizer of a model whose template reads no variables."""

    def template_variables(self, with_tools: bool) -> frozenset[str]:
        return frozenset()


NO_TEMPLATE: Any = NoTemplate()


def bodies(kind: Any, **required: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """JSON with some of the fields of a body, each of any value."""
    names = [name for name in kind.__struct_encode_fields__ if name not in required]
    others = st.dictionaries(st.sampled_from([*names, "unheard_of"]), VALUES, max_size=3)
    return st.builds(lambda must, may: json.dumps({**may, **must}).encode(), st.fixed_dictionaries(required), others)


@settings(max_examples=150)
@given(bodies(CompletionBody, prompt=VALUES | st.text(min_size=1)))
def test_completions(body: bytes) -> None:
    with contextlib.suppress(ServiceError):
        fields, _ = read_fields(body, CompletionBody, COMPLETION_UNSUPPORTED)
        seconds("timeout", fields.timeout)
        for prompt in read_prompts(fields.prompt, 4096):
            check_form(
                GenerationRequest(prompt=prompt, max_new_tokens=fields.max_tokens, **sampling_of(fields, Reading()))
            )


@settings(max_examples=150)
@given(bodies(ChatBody, messages=st.lists(MESSAGES, min_size=1, max_size=3) | VALUES))
def test_chats(body: bytes) -> None:
    with contextlib.suppress(ServiceError):
        fields, _ = read_fields(body, ChatBody, CHAT_UNSUPPORTED)
        chat = chat_of(fields, tools_of(fields, []), NO_TEMPLATE, [])
        check_form(GenerationRequest(prompt=chat, **sampling_of(fields, Reading())))


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 60))
def test_bytes_in_the_midst_of_a_body(rubbish: bytes, place: int) -> None:
    good = b'{"prompt": ["hello"], "n": 2, "stop": ["x"], "user": {"a": [1, 2]}}'
    with contextlib.suppress(ServiceError):
        fields, _ = read_fields(good[:place] + rubbish + good[place:], CompletionBody, COMPLETION_UNSUPPORTED)
        read_prompts(fields.prompt, 4096)
