"""Counts the tokens of a call."""

from dataclasses import dataclass, field

from octavo.frontend.request.events import Event, RequestStarted, RequestUsage, TextDelta


@dataclass
class UsageSum:
    """Sums the tokens of a call's generations: of ended ones exactly, of the others as far as they have got."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_predictions: int = 0
    rejected_predictions: int = 0
    reasoning_tokens: int = 0
    _so_far: dict[int, int] = field(default_factory=dict)

    def note(self, place: int, event: Event) -> None:
        """Takes in the next event of the call's generation `place`."""
        match event:
            case TextDelta(token_ids=token_ids):
                self._so_far[place] = self._so_far.get(place, 0) + len(token_ids)
                self.completion_tokens += len(token_ids)
            case RequestStarted(prompt_token_ids=prompt):
                self.prompt_tokens += len(prompt)
            case RequestUsage():
                self.completion_tokens += event.completion_tokens - self._so_far.get(place, 0)
                self.cached_tokens += event.cached_prompt_tokens
                self.accepted_predictions += event.accepted_predictions
                self.rejected_predictions += event.rejected_predictions
                self.reasoning_tokens += event.reasoning_tokens
