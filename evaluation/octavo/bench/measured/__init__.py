"""Repeats the paper's experiments with the real engine on a CPU, and measures what each of the design's choices is
worth."""
