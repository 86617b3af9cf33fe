"""The acceptance of drafts: which rows of a step count once all have chosen, and the tokens that they report."""

from collections.abc import Container, Mapping

from octavo.wire.sampling import Logprobs
from octavo.wire.steps import FurtherTokens, SampledToken
from octavo.worker.sequences import Chooser


def accepted(choosers: list[Chooser], token_ids: list[int], possible: Container[int]) -> list[int]:
    """Returns the rows whose choices count: those that could choose before anything was drafted, and after each of them
    those before which every row of the sequence has chosen the next token of its draft.

    `token_ids` holds the choice of each row, which is void unless the row is in `possible`. The rows of a sequence come
    one after the other.
    """
    rows: list[int] = []
    for row, chooser in enumerate(choosers):
        num_drafted = chooser.num_drafted
        is_drawn = not num_drafted or (rows[-1:] == [row - 1] and token_ids[row - 1] == chooser.draft[num_drafted - 1])
        if is_drawn and row in possible:
            rows.append(row)
    return rows


def reports(
    choosers: list[Chooser], rows: list[int], token_ids: list[int], logprobs: Mapping[int, Logprobs]
) -> tuple[list[SampledToken], list[FurtherTokens]]:
    """Returns what the accepted `rows` chose: the first token of each sequence, and the further ones of some.

    `logprobs` holds those of the rows that want them.
    """
    sampled: list[SampledToken] = []
    further: dict[int, FurtherTokens] = {}
    for row in rows:
        sequence_id, token_id = choosers[row].sequence_id, token_ids[row]
        if not choosers[row].num_drafted:
            sampled.append(SampledToken(sequence_id, token_id, logprobs.get(row)))
            continue
        tokens = further.setdefault(sequence_id, FurtherTokens(sequence_id, [], []))
        tokens.token_ids.append(token_id)
        if row in logprobs:
            tokens.logprobs.append(logprobs[row])
    return sampled, list(further.values())
