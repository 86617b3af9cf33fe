"""Text in, text out: the process that clients speak to. It owns the tokenizer and the journal of running requests."""
