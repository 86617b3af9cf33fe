"""Decides who may call, and how much: API keys, admission, connections, TLS."""
