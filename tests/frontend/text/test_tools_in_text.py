"""Where a template says nothing of tools, the text of its messages does; nothing is left out silently."""

import json
from pathlib import Path

import pytest

from octavo.frontend.answer_parsers.call_formats import HERMES
from octavo.frontend.answer_parsers.parts import ToolCallDelta, joined
from octavo.frontend.api.tool_calls import make_reader
from octavo.frontend.request.chat import Chat, ChatMessage, Tool, ToolCall
from octavo.frontend.text.chat_template import (
    CALL_BEGINS,
    ChatTemplate,
    ChatTemplateError,
    tools_in_text,
    uses_tools,
    without_system,
)
from octavo.frontend.text.control_tokens import ControlTokens
from octavo.frontend.text.tokenizer_files import TokenizerFiles

SILENT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TELLING = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }};{% endfor %}"
ADD = Tool("add", "two numbers", '{"type":"object"}')
CALL = ToolCall("c1", "add", '{"a": 1}')
TALK = (
    ChatMessage("user", "1 + 1?"),
    ChatMessage("assistant", "Let me see.", tool_calls=(CALL, CALL)),
    ChatMessage("tool", "2", tool_call_id="c1"),
    ChatMessage("tool", "3", tool_call_id="c1"),
)


def rendered(template: str, *messages: ChatMessage, tools: tuple[Tool, ...] = (ADD,)) -> str:
    files = TokenizerFiles(directory="", tokenizer="", chat_template=template, tool_template=template)
    return ChatTemplate(files, ControlTokens([])).render(Chat(messages, tools))


def test_functions_come_before_the_conversation() -> None:
    text = rendered(SILENT, ChatMessage("user", "hello"))
    system, _, user = text.partition("[user]")
    assert system.startswith("[system]")
    assert '{"name":"add","description":"two numbers","parameters":{"type":"object"}}' in system
    assert user == "hello"


def test_a_system_message_stays_the_first() -> None:
    text = rendered(SILENT, ChatMessage("system", "Be kind."), ChatMessage("user", "hello"))
    assert text.startswith("[system]Be kind.\n\n")
    assert text.count("[system]") == 1


def test_a_template_without_system_has_them_in_the_users_first_message() -> None:
    text = rendered(NO_SYSTEM, ChatMessage("user", "hello"))
    assert text.startswith("[user]")
    assert '"name":"add"' in text
    assert text.endswith("\n\nhello")


def test_what_a_template_refuses_of_its_own_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="no system"):
        rendered(NO_SYSTEM, ChatMessage("system", "Be kind."), ChatMessage("user", "hello"), tools=())


def test_calls_and_what_came_of_them_are_text() -> None:
    text = rendered(SILENT, *TALK)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert (
        f"[assistant]Let me see.\n{call}\n{call}[user]<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n"
        in text
    )
    assert "[tool]" not in text


@pytest.mark.parametrize(
    "chat",
    [
        Chat((ChatMessage("user", "x"),), (Tool("add", "", "{"),)),
        Chat((ChatMessage("assistant", "", tool_calls=(ToolCall("c1", "add", "[1]"),)),)),
    ],
)
def test_what_is_no_json_object_is_refused(chat: Chat) -> None:
    with pytest.raises(ChatTemplateError, match="are not a JSON object"):
        rendered(SILENT, *chat.messages, tools=chat.tools)


def test_calls_are_written_as_the_parser_reads_them() -> None:
    messages = tools_in_text(Chat((ChatMessage("assistant", "", tool_calls=(CALL,)),))).messages
    reader = make_reader(HERMES)
    [call] = joined(reader.take("", messages[0].content) + reader.finish())
    assert isinstance(call, ToolCallDelta)
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    assert messages[0].content.startswith(CALL_BEGINS)


def test_a_template_that_tells_of_tools_is_left_to_it() -> None:
    assert rendered(TELLING, *TALK) == "add;user;assistant;tool;tool;"


def test_a_chat_without_tools_is_left_alone() -> None:
    assert rendered(SILENT, ChatMessage("user", "hello"), tools=()) == "[user]hello"
    assert not uses_tools(Chat((ChatMessage("user", "hello"),)))


def test_a_systems_words_alone_become_a_users() -> None:
    assert without_system(Chat((ChatMessage("system", "x"),))).messages == (ChatMessage("user", "x"),)


def test_without_any_template_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat_template"):
        rendered("", ChatMessage("user", "hello"))
