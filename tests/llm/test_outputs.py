"""Answers in vLLM's form."""

from octavo.client import Candidate, Completion, Result, TokenLogprobs, Usage
from octavo.llm.outputs import CompletionOutput, Logprob, RequestOutput, request_output

USAGE = Usage(9, 3, 2, 1, 0, 0, 0.5, 0.5)
TOKEN = TokenLogprobs(5, -1.0, 3, (Candidate(7, -0.25, b"a"), Candidate(8, -0.5, b"\xff")), b"b")


def test_logprobs_are_by_token_id_and_hold_the_chosen_one() -> None:
    completion = Completion(0, "b", [5], "stop", "END", (TOKEN,), -1.0)
    result = Result("hi", "r", "m", 4, [completion], USAGE, (TOKEN,))
    by_id = {5: Logprob(-1.0, 3, "b"), 7: Logprob(-0.25, 1, "a"), 8: Logprob(-0.5, 2, "\ufffd")}
    assert request_output(result, "hi", [1, 2]) == RequestOutput(
        "r", "hi", [1, 2], [CompletionOutput(0, "b", [5], -1.0, [by_id], "stop", "END")], 1, 4, [None, by_id]
    )


def test_what_was_not_asked_for_is_none() -> None:
    result = Result("hi", "r", "m", 4, [Completion(0, "b", [5], "length")], USAGE)
    output = request_output(result, None, [1])
    assert (output.prompt, output.prompt_logprobs, output.outputs[0].logprobs) == (None, None, None)
