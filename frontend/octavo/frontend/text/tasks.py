"""Declares the tasks and answers of a text process, and performs tasks.

Messages are msgpack behind their length.
"""

import functools
from pathlib import Path
from typing import Final

import msgspec
from llguidance import LLTokenizer

from octavo.frontend.errors import InvalidRequest, Reason, bad_parameter
from octavo.frontend.request.chat import Chat
from octavo.frontend.request.infill import Infill
from octavo.frontend.request.request import Constraint
from octavo.frontend.text.chat_template import ChatTemplateError
from octavo.frontend.text.grammars import bare_grammar, grammar_of, load_vocabulary
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.frontend.text.tokenizer_files import TokenizerFiles
from octavo.runtime.models.directory import ModelDirectoryError

# Bytes of the length before each message.
PREFIX_BYTES: Final = 4


class TextSetup(msgspec.Struct, frozen=True):
    """Is sent once, before any task; the answer is an empty message.

    A task that takes longer than `timeout_s` seconds ends the process, unless the frontend has ended it by then.
    """

    files: TokenizerFiles
    timeout_s: float


class EncodeText(msgspec.Struct, frozen=True, tag=True):
    """Asks for the token ids of a text. A text that `continues` another gets no BOS and the like."""

    text: str
    continues: bool


class EncodeWhole(msgspec.Struct, frozen=True, tag=True):
    """Asks for the token ids of a text, or of the pair that it makes with a `second`, of which an output is asked for.
    `longest`: it is cut to as many tokens, None: not at all. If it `continues` another, it gets no BOS and the like."""

    text: str
    second: str | None
    longest: int | None
    continues: bool = False


class EncodeChat(msgspec.Struct, frozen=True, tag=True):
    """Asks for the token ids of a chat."""

    chat: Chat


class LoadVocabulary(msgspec.Struct, frozen=True, tag=True):
    """Asks a process to load what grammars need of the tokenizer, which no client's text makes slow."""


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Asks for the grammar of a constraint, or of any answer where that is None.

    `around` is a grammar of what comes before the answer, or empty.
    """

    constraint: Constraint | None
    around: str = ""


class EncodeInfill(msgspec.Struct, frozen=True, tag=True):
    """Asks for the token ids of a gap to fill."""

    infill: Infill


Task = EncodeText | EncodeWhole | EncodeChat | EncodeInfill | LoadVocabulary | Compile

# Seconds in which a process loads the vocabulary or ends: those of 262,144 tokens take two, on a busy machine many.
VOCABULARY_S: Final = 60.0


class TokenIds(msgspec.Struct, frozen=True, tag=True):
    """Answers all tasks that ask for token ids. The second text of a pair begins at `pair_start`; that is 0 if there is
    none, or the model does not tell them apart."""

    token_ids: list[int]
    pair_start: int = 0


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Answers `LoadVocabulary`."""


class Grammar(msgspec.Struct, frozen=True, tag=True):
    """Answers `Compile` with a grammar of llguidance."""

    text: str


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Answers a task in which the client made a mistake; becomes an `InvalidRequest`."""

    reason: Reason
    message: str
    metadata: dict[str, str]


class TaskFault(msgspec.Struct, frozen=True, tag=True):
    """Answers a task on which the server failed. `kind` is the exception's class; its text may quote the client."""

    kind: str


Answer = TokenIds | Loaded | Grammar | Refusal | TaskFault


def perform(tokenizer: ModelTokenizer, task: Task) -> Answer:
    """Performs one task; an exception becomes a `Refusal` or a `TaskFault`."""
    try:
        return _perform(tokenizer, task)
    except ChatTemplateError as error:
        return _refusal(bad_parameter("chat.messages", "not what the model's chat template takes", str(error)))
    except InvalidRequest as error:
        return _refusal(error)
    except MemoryError:
        return _refusal(bad_parameter("prompt", "of a kind that takes too much memory", "simplify or shorten it"))
    except ModelDirectoryError:
        # The error's words are for the operator.
        rule = "this model's tokenizer does not allow it; leave it out"
        return _refusal(bad_parameter("constraint", "asked for", rule))
    except Exception as error:
        return TaskFault(type(error).__name__)


def _perform(tokenizer: ModelTokenizer, task: Task) -> Answer:
    match task:
        case EncodeText(text, continues):
            return TokenIds(tokenizer.encode(text, continues=continues))
        case EncodeWhole(text, second, longest, continues):
            return TokenIds(*tokenizer.encode_whole(text, second, longest, continues=continues))
        case EncodeChat(chat):
            return TokenIds(tokenizer.encode_chat(chat))
        case EncodeInfill(infill):
            return TokenIds(tokenizer.encode_infill(infill))
        case LoadVocabulary():
            _vocabulary(tokenizer.files.directory)
            return Loaded()
        case Compile(constraint, around):
            vocabulary = _vocabulary(tokenizer.files.directory)
            if constraint is None:
                return Grammar(bare_grammar(around, vocabulary))
            return Grammar(grammar_of(constraint, vocabulary, around))


@functools.lru_cache(maxsize=1)
def _vocabulary(directory: str) -> LLTokenizer:
    return load_vocabulary(Path(directory))


def _refusal(error: InvalidRequest) -> Refusal:
    return Refusal(error.reason, str(error), error.metadata)
