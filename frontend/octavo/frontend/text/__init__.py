"""Text to tokens and back: the tokenizer, chat templates, grammars, and the processes that work on clients' texts."""
