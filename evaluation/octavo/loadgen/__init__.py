"""Generates open-loop load on servers of language models: `octavo bench serve`."""
