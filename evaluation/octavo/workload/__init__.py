"""Describes requests as experiments see them: when they come, how long they are, what they share. No text, no
tokenizer."""
