from typing import Any

import pytest

from octavo.workload.job import Job


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"arrival_s": -1.0}, "0 or later"),
        ({"arrival_s": float("nan")}, "0 or later"),
        ({"prompt_tokens": 0}, "at least 1 token"),
        ({"output_tokens": 0}, "at least 1 token"),
        ({"prompt_tokens": 2**20, "output_tokens": 1}, "at most 1048576"),
        ({"n": 0}, "n = 0"),
        ({"n": 3, "beam_width": 2}, "at most the beams"),
        ({"prefix": "few shots", "prefix_tokens": 11}, "from 0 to the prompt's 10"),
        ({"prefix_tokens": 5}, "both a name and a length"),
        ({"prefix": "few shots"}, "both a name and a length"),
    ],
)
def test_a_job_that_cannot_be_is_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Job(**{"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 5} | changed)


def test_sequences_side_by_side_are_samples_or_beams() -> None:
    assert Job(0.0, 10, 5, n=3).parallel == 3
    assert Job(0.0, 10, 5, n=1, beam_width=4).parallel == 4
