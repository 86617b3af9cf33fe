"""Implements the commands `octavo frontend`, `generate`, `chat` and `health`."""
