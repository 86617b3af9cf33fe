"""Defines the public API: protocol buffers and their generated code."""
