"""From logits to tokens: processors, grammars, draws, logprobs."""
