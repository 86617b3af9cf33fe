from octavo.loadgen.servers import WORDS, Asking
from octavo.workload.job import Job

EXTENSIONS = {"ignore_eos", "min_tokens", "use_beam_search", "best_of", "priority", "return_token_ids"}


def test_a_prompt_of_ids_has_the_length_of_the_job() -> None:
    body = Asking(model="m", vocab_size=50).body(Job(0.0, 12, 7), 3)
    assert len(body["prompt"]) == 12
    assert all(0 <= token_id < 50 for token_id in body["prompt"])
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["n"]) == (7, 7, True, 1)


def test_a_text_has_a_word_for_every_token() -> None:
    words = Asking(as_text=True).body(Job(0.0, 12, 7), 3)["prompt"].split(" ")
    assert len(words) == 12
    assert set(words) <= set(WORDS)


def test_jobs_of_one_prefix_begin_alike_and_go_on_differently() -> None:
    jobs = [Job(0.0, 20, 1, prefix=name, prefix_tokens=10) for name in ("a", "a", "b")]
    first, second, other = (Asking().token_ids(job, index) for index, job in enumerate(jobs))
    assert first[:10] == second[:10] != other[:10]
    assert first[10:] != second[10:]


def test_another_seed_makes_other_contents() -> None:
    job = Job(0.0, 20, 1, prefix="a", prefix_tokens=10)
    one, two = (Asking(seed=seed).token_ids(job, 0) for seed in (1, 2))
    assert one[:10] != two[:10]
    assert one[10:] != two[10:]


def test_a_chat_is_one_message_of_the_user() -> None:
    [message] = Asking(chat=True).body(Job(0.0, 5, 7), 0)["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split(" ")) == 5


def test_a_beam_search_has_its_width_and_no_temperature() -> None:
    body = Asking().body(Job(0.0, 5, 7, n=2, beam_width=4), 0)
    assert (body["use_beam_search"], body["best_of"], body["n"]) == (True, 4, 2)
    assert "temperature" not in body


def test_a_higher_priority_is_a_lower_number_over_http() -> None:
    assert Asking().body(Job(0.0, 5, 7, priority=3), 0)["priority"] == -3


def test_openai_gets_only_what_it_knows() -> None:
    job = Job(0.0, 5, 7, n=2, priority=3)
    assert not EXTENSIONS & Asking(extensions=False, counted=True).body(job, 0).keys()
    chat = Asking(chat=True, extensions=False).body(job, 0)
    assert chat["max_completion_tokens"] == 7
    assert "max_tokens" not in chat
    assert {"ignore_eos", "min_tokens", "priority", "return_token_ids"} <= Asking(counted=True).body(job, 0).keys()
