"""The sampler, which turns logits into tokens: processors, grammars, draws, logprobs."""
