"""The offline API: batches of prompts in, answers out."""

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from octavo.client import Chat, Client, OctavoError, Prompt, RequestOptions
from octavo.client import SamplingParams as ClientParams
from octavo.llm.batch import run_all
from octavo.llm.engine import Engine
from octavo.llm.options import read_options
from octavo.llm.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput, request_output
from octavo.llm.params import BeamSearchParams, SamplingParams, seeded
from octavo.llm.prompts import Messages, PromptLike, read_conversations, read_prompts, read_tools, text_of

R = TypeVar("R")


@dataclass(frozen=True)
class _Task:
    """A prompt on its way."""

    prompt: Prompt
    params: ClientParams
    request_id: str


class LLM:
    """A model and the processes that compute it, for this process alone: they end with `close`, with the object, with
    the `with` block, and with the process, however it ends. Any number of threads may use it at once.

    `options` are the fields of `EngineOptions`. Raises `TypeError` for another, `ValueError` for a value that cannot be
    had, and `EngineError` if the processes do not start.
    """

    def __init__(self, model: str, **options: Any) -> None:
        read = read_options(model, options)
        self._random = random.Random(read.seed)
        self._engine = Engine(read.arguments(), read.environment())
        try:
            self._engine.wait_ready(read.ready_timeout)
        except BaseException:
            self._engine.close()
            raise
        # Nothing is lost on the way to a process of our own, so nothing need be kept for it.
        self._client = Client(self._engine.address, detach_grace=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; what they compute is lost."""
        self._client.close()
        self._engine.close()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ClientParams | Sequence[ClientParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The answers to all prompts, in their order; parameters are for all, or one for each.

        Raises `OctavoError` for the first that cannot be answered, `ValueError` for what is no prompt, and
        `EngineError` if the processes have ended.
        """
        return self._run(self._answer, self._tasks(read_prompts(prompts), sampling_params), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ClientParams | Sequence[ClientParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """What the assistant says next in one conversation, or in each of several. Raises what `generate` does."""
        chats = [
            Chat(conversation, read_tools(tools), chat_template_kwargs, add_generation_prompt, continue_final_message)
            for conversation in read_conversations(messages)
        ]
        return self._run(self._answer, self._tasks(chats, sampling_params), use_tqdm)

    def beam_search(
        self, prompts: PromptLike | Sequence[PromptLike], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences after each prompt. Raises what `generate` does."""
        return self._run(self._search, self._tasks(read_prompts(prompts), params.sampling()), use_tqdm)

    def _tasks(self, prompts: Sequence[Prompt], params: ClientParams | Sequence[ClientParams] | None) -> list[_Task]:
        if params is None:
            params = SamplingParams()
        each = [params] * len(prompts) if isinstance(params, ClientParams) else params
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(each)} sampling_params; give one, or as many")
        return [
            _Task(prompt, own, uuid.uuid4().hex)
            for prompt, own in zip(prompts, seeded(each, self._random), strict=True)
        ]

    def _run(self, call: Callable[[_Task], R], tasks: Sequence[_Task], use_tqdm: bool) -> list[R]:
        self._engine.check()

        def give_up() -> None:
            self._client.abort(*(task.request_id for task in tasks))

        try:
            return run_all(call, tasks, shows_progress=use_tqdm, give_up=give_up)
        except OctavoError:
            self._engine.check()
            raise

    def _answer(self, task: _Task) -> RequestOutput:
        prompt, token_ids = task.prompt, self._token_ids(task.prompt)
        result = self._client.generate(token_ids, task.params, RequestOptions(request_id=task.request_id))
        text = self._client.detokenize(token_ids) if isinstance(prompt, Chat) else text_of(prompt)
        return request_output(result, text, token_ids)

    def _search(self, task: _Task) -> BeamSearchOutput:
        token_ids = self._token_ids(task.prompt)
        result = self._client.generate(token_ids, task.params, RequestOptions(request_id=task.request_id))
        return BeamSearchOutput(
            [
                BeamSearchSequence(
                    tokens=(tokens := [*token_ids, *completion.token_ids]),
                    cum_logprob=completion.cumulative_logprob or 0.0,
                    text=self._client.detokenize(tokens, skip_special_tokens=True),
                    finish_reason=completion.finish_reason,
                )
                for completion in result.completions
            ]
        )

    def _token_ids(self, prompt: Prompt) -> list[int]:
        """Made apart from the answer, which does not tell them."""
        return self._client.tokenize(prompt) if isinstance(prompt, str | Chat) else list(prompt)
