"""Finds reasoning and calls of functions in an answer's text while it arrives: a small parser for each format."""
