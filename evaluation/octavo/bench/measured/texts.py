"""English prompts of any length, for experiments where what a model makes of a text matters."""

from collections.abc import Sequence

from tokenizers import Tokenizer

_PARAGRAPHS = (
    "Explain how a lighthouse keeper of two hundred years ago spent an ordinary winter night, and what could go wrong.",
    "List five things that a family should take along on a three-day walk through hills without shops or roads.",
    "Describe the way bread rises, and why a cold kitchen makes a baker wait longer than a warm one does.",
    "Write a short letter to a neighbour whose dog barks every morning, polite but clear about what you would like.",
    "What is the difference between weather and climate? Give an example that a child of ten would understand.",
    "Summarise the following: the bridge was closed in spring, because a crack had been found in one of its pillars. "
    "Engineers worked through the summer, and the first train crossed it again in October, a month before the date "
    "that had been promised. The town paid a third of the bill, the railway the rest.",
    "Tell me the steps for planting an apple tree: when to dig, how deep, and how much water it needs at first.",
    "Compare a bicycle and a bus as ways to get to work in a small city. Think of cost, time, rain and health.",
    "A tank holds forty litres and loses three every hour. How long does it take until less than ten litres are left?",
    "Give advice to someone who must speak in front of a large audience for the first time and cannot sleep.",
    "The museum opens at nine. On Mondays only the garden can be visited, and children pay nothing. Rewrite this as a "
    "notice for the door, in at most three lines.",
    "How do sailors find their way at night when no land is in sight? Mention stars, clocks and charts.",
    "Turn this into a question: the library will lend each reader no more than six books at a time.",
    "Why do leaves change colour in autumn? Answer in one paragraph, without words that only a botanist would know.",
    "Continue the story: when the last ferry had left, she saw that the island was not as empty as she had been told.",
    "Name the parts of a clock that is driven by a weight, and say in one sentence what each of them is there for.",
)


def prompts(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of a text for each length, cut to that. Each begins with another paragraph, as long as there are."""
    return [_prompt(tokenizer, index, length) for index, length in enumerate(lengths)]


def _prompt(tokenizer: Tokenizer, index: int, length: int) -> list[int]:
    first = index % len(_PARAGRAPHS)
    text = "\n\n".join((*_PARAGRAPHS[first:], *_PARAGRAPHS[:first]))
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    # What is longer than all of the text goes on with its beginning.
    return (token_ids * -(-length // len(token_ids)))[:length]
