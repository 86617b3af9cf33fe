"""Tokenizing, chat templates and grammars, off the event loop and under a time limit."""

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from octavo.frontend.chat import Chat
from octavo.frontend.constraint import Constraint
from octavo.frontend.errors import Reason, Unsupported, bad_parameter
from octavo.frontend.request import Prompt
from octavo.frontend.tokenizer import ChatTemplateError, ModelTokenizer


class TextPool:
    """Whatever a client's text may make slow. Belongs to one event loop."""

    def __init__(self, tokenizer: ModelTokenizer, processes: int, timeout_s: float) -> None:
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="text")

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt's token ids. Raises `InvalidRequest` for a chat that the model's template does not take, and for
        a text that takes too long."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, _encode, self._tokenizer, prompt, not add_special_tokens)
        except ChatTemplateError as error:
            raise bad_parameter("chat.messages", "not what the model's chat template takes", str(error)) from error

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of the ids."""
        decode = functools.partial(self._tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._threads, decode)

    async def compile(self, constraint: Constraint) -> str:
        """The constraint as a grammar of llguidance, which a worker compiles without fail. Raises `InvalidRequest` for
        one that is wrong, too large, or takes too long."""
        raise Unsupported(Reason.UNSUPPORTED_FIELD, "constraint is not known to this server; leave it out")

    def close(self) -> None:
        """Ends what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _encode(tokenizer: ModelTokenizer, prompt: Prompt, continues: bool) -> list[int]:
    match prompt:
        case str():
            return tokenizer.encode(prompt, continues=continues)
        case Chat():
            return tokenizer.encode_chat(prompt)
    return prompt
