"""Serves the OpenAI API with vLLM's extensions, and the operators' routes, over HTTP."""
