"""The offline API with its own processes, on the fake device."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.client import RequestError
from octavo.llm import LLM, BeamSearchParams, EngineError, SamplingParams
from octavo.testbed.tiny_model import write_byte_model

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "byte-model"
    write_byte_model(directory)
    return str(directory)


@pytest.fixture(scope="module", autouse=True)
def one_text_process() -> Iterator[None]:
    """Every further one takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_TEXT_PROCESSES", "1")
        yield


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model=model, device="fake", max_model_len=512) as llm:
        yield llm


def engine_processes() -> set[int]:
    """Those of all engines that this process has started, as far as they live."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            environment = (status.parent / "environ").read_bytes()
            if f"OCTAVO_SUPERVISOR_PID={os.getpid()}\0".encode() in environment and "Z (z" not in status.read_text():
                found.add(int(status.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.02)


def test_prompts_are_answered_in_their_order(llm: LLM) -> None:
    prompts = [f"prompt number {number}" for number in range(40)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished and len(output.outputs[0].token_ids) == 5 for output in outputs)
    alone = llm.generate(prompts[17], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert alone[0].outputs[0].token_ids == outputs[17].outputs[0].token_ids


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    [text] = llm.generate("hello", SamplingParams(max_tokens=3))
    [ids] = llm.generate({"prompt_token_ids": text.prompt_token_ids}, SamplingParams(max_tokens=3))
    assert (ids.prompt, ids.prompt_token_ids) == (None, text.prompt_token_ids)
    assert ids.outputs[0].token_ids == text.outputs[0].token_ids


def test_every_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    lengths = [1, 4, 2]
    outputs = llm.generate(["a", "b", "c"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)


def test_several_answers_and_their_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=4, logprobs=2, ignore_eos=True)
    [output] = llm.generate("hello", params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    for answer in output.outputs:
        assert answer.logprobs is not None
        assert all(token_id in place for token_id, place in zip(answer.token_ids, answer.logprobs, strict=True))
        chosen = [place[token_id].logprob for token_id, place in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(chosen))


def test_chat_uses_the_models_template(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "goodbye")]
    outputs = llm.chat(conversations, SamplingParams(max_tokens=3))
    assert [output.prompt for output in outputs] == [
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("hello", "goodbye")
    ]
    [alone] = llm.chat(conversations[0], SamplingParams(max_tokens=3))
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_beam_search_gives_the_likeliest_sequences_with_their_prompts(llm: LLM) -> None:
    [output] = llm.beam_search(["hello"], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    assert len(output.sequences) == 3
    scores = [sequence.cum_logprob for sequence in output.sequences]
    assert scores == sorted(scores, reverse=True)
    assert all(sequence.text.startswith("hello") and len(sequence.tokens) == 9 for sequence in output.sequences)


def test_one_bad_prompt_ends_the_batch_and_not_the_engine(llm: LLM) -> None:
    with pytest.raises(RequestError, match="context"):
        llm.generate(["fine", "x" * 600, "fine"], SamplingParams(max_tokens=400, ignore_eos=True))
    assert llm.generate("fine", SamplingParams(max_tokens=1))


async def test_it_works_where_an_event_loop_runs(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    assert llm.generate("hello", SamplingParams(max_tokens=1))


def test_an_engine_outlives_the_thread_that_made_it_and_ends_with_its_object(model: str) -> None:
    before = engine_processes()
    made: list[LLM] = []
    thread = threading.Thread(target=lambda: made.append(LLM(model=model, device="fake")))
    thread.start()
    thread.join()
    assert engine_processes() > before
    assert made[0].generate("hello", SamplingParams(max_tokens=1))
    made.clear()
    gc.collect()
    wait_until(lambda: engine_processes() == before)


def test_an_engine_that_was_killed_says_so(model: str) -> None:
    before = engine_processes()
    with LLM(model=model, device="fake") as llm:
        for pid in engine_processes() - before:
            # Some end with the one that has started them.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: engine_processes() == before)
        with pytest.raises(EngineError, match="the engine has ended with exit status -9"):
            llm.generate("hello", SamplingParams(max_tokens=1))


def test_settings_that_cannot_work_are_told_with_the_reason(model: str) -> None:
    before = engine_processes()
    with pytest.raises(EngineError, match="Invalid value for '--dtype'"):
        LLM(model=model, device="fake", dtype="int3")
    wait_until(lambda: engine_processes() == before)


def test_the_script_of_the_field_runs_with_another_import(model: str) -> None:
    script = textwrap.dedent(
        """
        import sys
        from octavo.llm import LLM, SamplingParams

        if __name__ == "__main__":
            prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
            sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
            llm = LLM(model=sys.argv[1])
            outputs = llm.generate(prompts, sampling_params)
            for output in outputs:
                prompt = output.prompt
                generated_text = output.outputs[0].text
                print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
        """
    )
    environment = {**os.environ, "OCTAVO_DEVICE": "fake"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, model],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert [line.split(", Generated text: ")[0] for line in run.stdout.splitlines()] == [
        "Prompt: 'Hello, my name is'",
        "Prompt: 'The capital of France is'",
        "Prompt: 'The future of AI is'",
    ]
    assert "3/3" in run.stderr
