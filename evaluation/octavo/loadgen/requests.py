"""Makes requests for jobs: contents of prompts, and bodies of OpenAI's API."""

from dataclasses import dataclass
from typing import Any, Final

from octavo.workload.job import Job, prompt_token_ids

# Each is one token of most vocabularies, with the space before it.
_TEXT: Final = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my "
    "now over such our man me even most made after also did many off before must well back through years much "
    "where your way down should because long each just state those people too mr how little good world make "
    "very year still see own work men day get here old life both between being under three never know same "
    "last another while us might great go come since against right came take used himself few house use place "
    "during high without again home around small however found part school thought went say general once upon "
    "war every left country number public water less far put think head city"
)
WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True)
class Asking:
    """Makes requests. Token ids are drawn below `vocab_size`, contents by `seed`. Without `extensions` a body holds
    nothing that OpenAI's own API does not have; `counted` asks for the ids of the tokens in every chunk."""

    model: str = ""
    chat: bool = False
    as_text: bool = False
    vocab_size: int = 256
    seed: int = 0
    temperature: float = 1.0
    extensions: bool = True
    counted: bool = False

    def token_ids(self, job: Job, index: int) -> list[int]:
        """Returns the token ids of the prompt of job number `index`."""
        return prompt_token_ids(job, index, self.vocab_size, self.seed)

    def text(self, job: Job, index: int) -> str:
        """Returns a word for every token of the prompt."""
        return " ".join(WORDS[i] for i in prompt_token_ids(job, index, len(WORDS), self.seed))

    def prompt(self, job: Job, index: int) -> str | list[int]:
        """Returns the prompt in the form that the server takes."""
        return self.text(job, index) if self.as_text else self.token_ids(job, index)

    def body(self, job: Job, index: int) -> dict[str, Any]:
        """Returns the body for POST /v1/completions, or /v1/chat/completions."""
        body: dict[str, Any] = {
            "model": self.model,
            # OpenAI's newer models know the other name only, and other servers may know the older one only.
            "max_completion_tokens" if self.chat and not self.extensions else "max_tokens": job.output_tokens,
            "n": job.n,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.text(job, index)}]
        else:
            body["prompt"] = self.prompt(job, index)
        if not job.beam_width:
            body["temperature"] = self.temperature
        return body | self._extensions(job) if self.extensions else body

    def _extensions(self, job: Job) -> dict[str, Any]:
        fields: dict[str, Any] = {"ignore_eos": True, "min_tokens": job.output_tokens}
        if job.beam_width:
            fields |= {"use_beam_search": True, "best_of": job.beam_width}
        if job.priority:
            # There, lower is earlier.
            fields["priority"] = -job.priority
        if self.counted:
            fields["return_token_ids"] = True
        return fields
