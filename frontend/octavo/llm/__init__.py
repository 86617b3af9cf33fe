"""Whole batches of prompts without a server: `LLM` starts Octavo's processes, asks them, and ends them.

from octavo.llm import LLM, SamplingParams

llm = LLM(model="smollm2-135m-instruct")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0.8)):
    print(output.prompt, output.outputs[0].text)
"""

from octavo.llm.engine import EngineError, EngineOptions
from octavo.llm.llm import LLM
from octavo.llm.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from octavo.llm.params import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineError",
    "EngineOptions",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]
