"""Turns text into tokens and back: tokenizer, chat templates, grammars, and processes that work on clients' texts."""
