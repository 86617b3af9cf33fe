"""A conversation as clients send it, free of any door's message types. All of it is plain text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCall:
    """A function that an assistant called; `arguments_json` is the text of a JSON object."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True)
class ChatMessage:
    """`role` must come from a fixed list, for templates build control tokens from it; everything else is plain text.

    `tool_calls` are an assistant's, `tool_call_id` is of a tool's answer.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters_json` is the JSON schema of its arguments, or empty. `strict`:
    arguments that cannot be held to all of it are refused."""

    name: str
    description: str = ""
    parameters_json: str = ""
    strict: bool = False


@dataclass(frozen=True)
class Chat:
    """What a chat template turns into a prompt.

    The prompt ends where the assistant is to begin, with `add_generation_prompt`; or, with `continue_final_message`, in
    the midst of the last message, which then is an assistant's. `template_variables` are further ones of the template.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    template_variables: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def num_bytes(self) -> int:
        """Of all the text that the client has written; a lower bound where variables are other than texts."""
        return sum(len(text.encode("utf-8", "replace")) for text in self._texts())

    def _texts(self) -> Iterator[str]:
        for message in self.messages:
            yield from (message.content, message.name, message.tool_call_id)
            for call in message.tool_calls:
                yield from (call.id, call.name, call.arguments_json)
        for tool in self.tools:
            yield from (tool.name, tool.description, tool.parameters_json)
        yield from map(str, self.template_variables.values())
