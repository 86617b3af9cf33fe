"""A worker of the fake device whose model says what a script has for its prompt: `octavo worker`'s arguments follow.

OCTAVO_CLIENTS_SCRIPT is a file of JSON, a list of rules. The first whose texts the prompt has all gives the answer.
What the model reads comes from the paged memory, as everything that a fake model reads.
"""

import json
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from octavo.cli.main import main
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake import runner

SCRIPT = "OCTAVO_CLIENTS_SCRIPT"


class Actor:
    """Knows its script."""

    def __init__(self, tokenizer: Tokenizer, rules: Sequence[dict[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._known: dict[bytes, list[int]] = {}

    def answer(self, prompt: "array[int]") -> list[int]:
        """The tokens of the whole answer, without an end."""
        key = prompt.tobytes()
        if key not in self._known:
            text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
            said = next(rule["answer"] for rule in self._rules if all(part in text for part in rule["contains"]))
            self._known[key] = self._tokenizer.encode(said, add_special_tokens=False).ids
        return self._known[key]


class ScriptedVocabulary(runner.FakeVocabulary):
    """The fake model's, but for what it chooses."""

    actor: Actor

    @classmethod
    def read(cls, directory: Path, eos_probability: float = 0.0) -> Self:
        rules = json.loads(Path(os.environ[SCRIPT]).read_text())
        cls.actor = Actor(Tokenizer.from_file(str(directory / "tokenizer.json")), rules)
        return super().read(directory, eos_probability)

    def choose(
        self,
        history: bytes,
        sampling: SamplingParams,
        sequence_index: int,
        num_generated: int,
        mask: bytes | None = None,
    ) -> int:
        tokens = array("i", history)
        answer = self.actor.answer(tokens[: len(tokens) - num_generated])
        return answer[num_generated] if num_generated < len(answer) else self.eos_token_ids[0]


if __name__ == "__main__":
    runner.FakeVocabulary = ScriptedVocabulary  # type: ignore[misc]
    main(["worker", *sys.argv[1:]])
