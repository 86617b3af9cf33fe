"""Counts of tokens, as OpenAI's clients read them."""

from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.events import Event, Piece, Started, Usage


@dataclass
class UsageSum:
    """Of all generations of a call: `ended` ones exactly, the others as far as they have got."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    _so_far: dict[int, int] = field(default_factory=dict)

    def note(self, place: int, event: Event) -> None:
        """Takes in the next event of the call's generation `place`."""
        match event:
            case Piece(token_ids=token_ids):
                self._so_far[place] = self._so_far.get(place, 0) + len(token_ids)
                self.completion_tokens += len(token_ids)
            case Started(prompt_token_ids=prompt):
                self.prompt_tokens += len(prompt)
            case Usage():
                self.completion_tokens += event.completion_tokens - self._so_far.get(place, 0)
                self.cached_tokens += event.cached_prompt_tokens

    def object(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
