"""Answers batches of prompts offline: reads prompts in the forms that vLLM takes, and runs many at once."""

import importlib.util
import random
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from octavo.client import Chat, Client, OctavoError, Prompt, RequestOptions, Tool, UnavailableError
from octavo.client import SamplingParams as ClientParams
from octavo.llm.engine import Engine, read_options
from octavo.llm.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput, request_output
from octavo.llm.params import BeamSearchParams, SamplingParams, seeded

# A text, token ids, or a mapping with one of both as `prompt` or `prompt_token_ids`.
PromptLike = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_KEYS: Final = ("prompt", "prompt_token_ids")


def read_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """Returns one prompt or several as a list. Raises `ValueError` for a value that is no prompt."""
    if _is_one(prompts):
        return [_read(prompts)]
    return [_read(prompt) for prompt in prompts]


def read_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Returns one conversation or several as a list."""
    if not messages or isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Reads functions in the form of OpenAI's API. Raises `ValueError` for a tool that is no function."""
    functions = [tool.get("function") for tool in tools]
    if not all(isinstance(function, Mapping) and "name" in function for function in functions):
        raise ValueError("every tool must be a mapping like {'type': 'function', 'function': {'name': ...}}")
    return [Tool(f["name"], f.get("description") or "", f.get("parameters")) for f in functions if f]


def text_of(prompt: Prompt) -> str | None:
    """Returns a prompt that is text; None for any other."""
    return prompt if isinstance(prompt, str) else None


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or bool(len(prompts) and isinstance(prompts[0], int))


def _read(prompt: Any) -> Prompt:
    if isinstance(prompt, str | Chat):
        return prompt
    if isinstance(prompt, Mapping):
        if unknown := sorted(prompt.keys() - set(_KEYS)):
            raise ValueError(f"a prompt has no {unknown[0]!r}; give it as {' or '.join(_KEYS)}")
        # Token ids win, for they were made of the text.
        return _read(prompt.get("prompt_token_ids") or prompt.get("prompt"))
    if isinstance(prompt, Sequence) and all(isinstance(token_id, int) for token_id in prompt):
        return list(prompt)
    raise ValueError(f"a prompt is a text, token ids, or a mapping with one of both, and not {type(prompt).__name__}")


T = TypeVar("T")
R = TypeVar("R")

# Calls beyond this wait here instead of in the engine, whose queue is for requests that it is about to begin.
MAX_AT_ONCE: Final = 256
# Seconds that an engine which no longer answers is given to end.
_ENDING_S: Final = 5.0


def run_all(
    call: Callable[[T], R], items: Sequence[T], *, shows_progress: bool, give_up: Callable[[], object]
) -> list[R]:
    """Runs `call` for all items at once, and returns its results in the order of the items.

    The first error (Ctrl-C too) ends all calls and is raised; `give_up` is called then, and must end the calls that
    run. The progress bar needs tqdm.
    """
    if not items:
        return []
    with ThreadPoolExecutor(min(len(items), MAX_AT_ONCE)) as pool, _progress(len(items), shows_progress) as advance:

        def run(item: T) -> R:
            result = call(item)
            advance()
            return result

        futures = [pool.submit(run, item) for item in items]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            give_up()
            raise


@contextmanager
def _progress(total: int, shows: bool) -> Iterator[Callable[[], object]]:
    """Shows a progress bar, if tqdm is installed; yields the function to call when an item is done."""
    if not shows or importlib.util.find_spec("tqdm") is None:
        yield lambda: None
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=total, desc="Prompts", unit="prompt") as bar:

        def advance() -> None:
            with lock:
                bar.update()

        yield advance


@dataclass(frozen=True)
class _Task:
    """Holds a prompt with its parameters and its request's id."""

    prompt: Prompt
    params: ClientParams
    request_id: str


class LLM:
    """Runs a model in processes that belong to this process alone. Any number of threads may use an object at once.

    The processes end with `close`, with the object, with the `with` block, and with this process, however it ends.
    `options` are the fields of `EngineOptions`. Raises `TypeError` for an unknown option, `ValueError` for a value that
    cannot be had, and `EngineError` if the processes do not start.
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
        # Nothing is lost on the way to a process of this machine, so the server need keep no stream.
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
        """Returns the answers to all prompts, in their order; parameters are for all, or one for each.

        Raises `OctavoError` for the first prompt that cannot be answered, `ValueError` for a value that is no prompt,
        and `EngineError` if the processes have ended.
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
        """Returns the assistant's next message in one conversation, or in several. Raises as `generate` does."""
        chats = [
            Chat(conversation, read_tools(tools), chat_template_kwargs, add_generation_prompt, continue_final_message)
            for conversation in read_conversations(messages)
        ]
        return self._run(self._answer, self._tasks(chats, sampling_params), use_tqdm)

    def beam_search(
        self, prompts: PromptLike | Sequence[PromptLike], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """Returns the sequences with the highest scores after each prompt. Raises as `generate` does."""
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
        except OctavoError as error:
            # One process of an engine that ends may be gone before all are.
            self._engine.check(_ENDING_S if isinstance(error, UnavailableError) else 0.0)
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
        """Returns the ids of a prompt, by a call of their own, for the answer does not hold them."""
        return self._client.tokenize(prompt) if isinstance(prompt, str | Chat) else list(prompt)
