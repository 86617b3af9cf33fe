"""Holds what every process reads of a GGUF file: its header, and the model directory that follows from it."""
